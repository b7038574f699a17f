// ShardEngine's steps: gradients in, the local optimizer's update, parameters out.

#include <algorithm>
#include <utility>

#include "failure_points.h"
#include "launch/who.h"
#include "shard/shard_engine.h"

namespace shardstep {

// Parameters may have got other memory, or been frozen or unfrozen, since the last step.
void ShardEngine::follow_params() {
  bool flipped = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    flipped = flipped || trainable_[i] != params_[i].requires_grad();
    trainable_[i] = params_[i].requires_grad();
  }
  if (flipped) {
    TORCH_WARN("shardstep: requires_grad of a parameter changed; the buckets are built again",
               detail::who(group_));
  }
  std::vector<bool> moved;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    moved.push_back(buckets_[b].refresh());
    std::vector<bool> active;
    for (const auto& param : buckets_[b].params()) {
      // A frozen parameter that still has a gradient is updated, as in any optimizer.
      active.push_back(param.requires_grad() || param.grad().defined());
    }
    if (moved[b] || active != active_[b]) {
      parts_[b] = buckets_[b].parts(active);
      active_[b] = std::move(active);
    }
  }
  for (auto& group : local_) {
    for (auto& local : group) {
      if (!aliased(local.index)) continue;
      const bool has_moved = moved[places_[local.index].bucket];
      if (wide_.has(local.index)) {
        wide_.follow(local.index, has_moved);
      } else if (has_moved) {
        local.tensor.set_data(local_view(local.index, local.elements));
      }
      if (flipped) local.tensor.set_requires_grad(trainable_[local.index]);
    }
  }
}

void ShardEngine::set_gradient(LocalParam& local, const at::Tensor& gradient) {
  auto& own = local.tensor.mutable_grad();
  own = gradient;
  if (!gradient.defined()) return;
  const bool dense = gradient.layout() == at::kStrided;
  if (sharding(local.index) == Sharding::kElement) {
    TORCH_CHECK_VALUE(dense, "shardstep: expected a dense gradient for parameter ",
                      agreement_.label(local.index), ", got ", gradient.layout(),
                      "; sharding by parameter takes it", detail::who(group_));
    own = flat_view(in_order_of(params_[local.index], gradient))
              .narrow(0, local.elements.begin, local.elements.size());
  }
  if (!wide_.has(local.index)) return;
  at::NoGradGuard no_grad;
  if (dense && sharding(local.index) == Sharding::kParameter) own = in_order_of(local.tensor, own);
  own = own.to(local.tensor.scalar_type());
}

void ShardEngine::before_closure() {
  phase_ = Phase::kOutside;
  wide_.round();  // the optimizer may evaluate the closure several times
}

// Otherwise zero_grad would not free them.
void ShardEngine::drop_gradients() {
  for (auto& group : local_) {
    for (auto& local : group) {
      if (aliased(local.index)) local.tensor.mutable_grad().reset();
    }
  }
}

void ShardEngine::set_whole_gradients() {
  for (auto& group : local_) {
    for (auto& local : group) {
      if (aliased(local.index)) set_gradient(local, params_[local.index].grad());
    }
  }
}

// The sums have the parameters' memory order.
void ShardEngine::set_reduced_gradients() {
  for (auto& group : local_) {
    for (auto& [index, elements, tensor] : group) {
      const auto own = reducer_->own(index);
      tensor.mutable_grad() =
          own.defined() ? own.as_strided(tensor.sizes(), tensor.strides()) : at::Tensor();
    }
  }
}

void ShardEngine::set_sync(bool sync) {
  check_stage_2("no_sync");
  if (reducer_) reducer_->set_sync(sync);
}

void ShardEngine::drop_sums() {
  drop_gradients();
  if (gradients_) gradients_->drop_all();
}

void ShardEngine::check_stage_2(const char* what) const {
  TORCH_CHECK_VALUE(options_.stage2, "shardstep: expected stage 2 for ", what,
                    "; in stage 1 gradients are whole, use torch's own", detail::who(group_));
}

std::vector<at::Tensor> ShardEngine::whole_gradients() {
  TORCH_INTERNAL_ASSERT(!exchange_);
  compare();
  std::vector<at::Tensor> gradients;
  for (const auto& param : params_) {
    if (param.grad().defined()) gradients.push_back(param.grad());
  }
  return gradients;
}

void ShardEngine::append_parts(int64_t param, const at::Tensor& tensor, Parts& parts) const {
  const auto flat = flat_view(tensor);
  for (const auto& slice : partition_.slices(param)) {
    if (slice.elements.empty()) continue;
    parts[slice.rank].push_back(flat.narrow(0, slice.elements.begin, slice.elements.size()));
  }
}

std::unique_ptr<Pending> ShardEngine::reduce_to_owners(const std::vector<ParamGradient>& gradients,
                                                       int tag) {
  if (!exchange_) return nullptr;
  at::NoGradGuard no_grad;
  Parts parts(world_size());
  for (const auto& [index, gradient] : gradients) {
    TORCH_INTERNAL_ASSERT(in_order_of(params_[index], gradient).is_same(gradient));
    append_parts(index, gradient, parts);
  }
  return exchange_->reduce_scatter(parts, {MessageKind::kReduceToOwners, tag}, world_size());
}

void ShardEngine::compare() {
  wait();
  if (gradients_) {
    gradients_->before_step();
  } else if (exchange_) {
    agreement_.compare(control(), params_);
  } else {
    agreement_.check_here(params_);
  }
}

void ShardEngine::take_gradients() {
  follow_params();
  if (reducer_) {
    set_reduced_gradients();
  } else {
    set_whole_gradients();
  }
  wide_.begin_update();
}

void ShardEngine::before_step() {
  phase_ = Phase::kComparing;
  SHARDSTEP_FAILURE_POINT("step: begins");
  // All ranks are in step() then: none still reads parameters that change here.
  {
    const PhaseTimer timer(*phase_times_, StepPhase::kCompare);
    compare();
  }
  SHARDSTEP_FAILURE_POINT("step: compared");
  phase_ = Phase::kUpdating;
  take_gradients();
}

void ShardEngine::fail_step(const std::exception_ptr& error) {
  const auto phase = std::exchange(phase_, Phase::kOutside);
  // Whatever the comparison throws, it throws on every rank.
  if (!exchange_ || phase == Phase::kComparing) return;
  try {
    if (phase == Phase::kUpdating) {
      send_params(error);
      wait();  // nobody else will, after the error, before parameters are read
    } else {
      agreement_.fail(error);
      compare();
    }
  } catch (const std::exception&) {
    // The caller throws the first error.
  }
}

void ShardEngine::after_step() { send_params(nullptr); }

void ShardEngine::send_params(const std::exception_ptr& error) {
  phase_ = Phase::kOutside;
  wide_.round();
  drop_gradients();
  if (gradients_) gradients_->after_step();
  if (!exchange_) return;
  const PhaseTimer timer(*phase_times_, StepPhase::kGather);
  at::NoGradGuard no_grad;
  SHARDSTEP_FAILURE_POINT("step: updated");
  const auto& outcome = outcome_.of_this_rank(control_device(), error);
  std::vector<const Parts*> parts;
  for (const auto& bucket : parts_) parts.push_back(&bucket);
  if (share_parameters()) {
    exchange_->all_gather_between_hosts(parts);
    exchange_->all_gather(outcome, ControlMessage::kStepOutcome)->wait();
  } else if (options_.stage2 && options_.stage2->overlap_forward) {
    arriving_outcome_ = control().all_gather(outcome, ControlMessage::kStepOutcome);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      arriving_[b] =
          exchange_->all_gather(parts_[b], {MessageKind::kArriving, static_cast<int64_t>(b)});
    }
    return;
  } else {
    const auto arriving =
        control_ ? control_->all_gather(outcome, ControlMessage::kStepOutcome) : nullptr;
    if (!arriving) parts.push_back(&outcome);
    exchange_->all_gather_and_wait(parts);
    if (arriving) arriving->wait();
    for (size_t b = 0; b < buckets_.size(); ++b) has_arrived(b);
  }
  SHARDSTEP_FAILURE_POINT("step: sent");
  outcome_.check();
}

at::Device ShardEngine::control_device() const { return detail::control_device(control_group()); }

void ShardEngine::hear_outcome() {
  const auto pending = std::move(arriving_outcome_);
  if (!pending) return;
  pending->wait();
  outcome_.check();
}

void ShardEngine::wait(const std::vector<int64_t>& params) {
  const bool waits = std::any_of(params.begin(), params.end(), [&](int64_t param) {
    return arriving_[places_[param].bucket] != nullptr;
  });
  if (!waits && !arriving_outcome_) return;
  const PhaseTimer timer(*phase_times_, StepPhase::kArrive);
  hear_outcome();
  for (int64_t param : params) await_bucket(places_[param].bucket);
}

void ShardEngine::await_bucket(size_t bucket) {
  const auto pending = std::move(arriving_[bucket]);
  if (!pending) return;
  pending->wait();
  has_arrived(bucket);
}

void ShardEngine::has_arrived(size_t bucket) {
  for (const auto& slot : buckets_[bucket].layout().slots) wide_.param_arrived(slot.param);
}

void ShardEngine::wait() {
  const bool waits = std::any_of(arriving_.begin(), arriving_.end(),
                                 [](const auto& bucket) { return bucket != nullptr; });
  if (!waits && !arriving_outcome_) return;
  const PhaseTimer timer(*phase_times_, StepPhase::kArrive);
  hear_outcome();
  for (size_t b = 0; b < buckets_.size(); ++b) await_bucket(b);
}

void ShardEngine::before_partial_step(const std::vector<ParamGradient>& gradients) {
  TORCH_INTERNAL_ASSERT(options_.overlap);
  agreement_.check_here(params_);
  follow_params();
  for (const auto& [index, gradient] : gradients) {
    if (const auto place = local_places_[index]) {
      set_gradient(local_[place->group][place->position], gradient);
    }
  }
  wide_.begin_update();
}

std::unique_ptr<Pending> ShardEngine::after_partial_step(
    const std::vector<ParamGradient>& gradients, int tag) {
  wide_.round();
  drop_gradients();
  if (!exchange_) return nullptr;
  at::NoGradGuard no_grad;
  Parts parts(world_size());
  for (const auto& [index, gradient] : gradients) append_parts(index, params_[index], parts);
  SHARDSTEP_FAILURE_POINT("overlap: updated");
  return exchange_->all_gather(parts, {MessageKind::kPartialStep, tag});
}

void ShardEngine::end_partial_steps(const std::exception_ptr& error) {
  if (!exchange_) return;
  hear_outcome();
  SHARDSTEP_FAILURE_POINT("overlap: ends");
  const auto& outcome = outcome_.of_this_rank(control_device(), error, agreement_.summary(params_));
  arriving_outcome_ = control().all_gather(outcome, ControlMessage::kStepOutcome);
}

}  // namespace shardstep
