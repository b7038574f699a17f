#include "shard/shard_engine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/agreement.h"
#include "comm/make_exchange.h"
#include "comm/pending_works.h"
#include "failure_points.h"
#include "launch/who.h"

namespace shardstep {
namespace {

void check_param(const at::Tensor& param, const std::string& label) {
  TORCH_CHECK_VALUE(param.defined(), "shardstep: expected parameter ", label,
                    " to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(param.layout() == at::kStrided, "shardstep: expected parameter ", label,
                    " to be dense, got layout ", param.layout());
  TORCH_CHECK_VALUE(is_dense(param), "shardstep: expected parameter ", label,
                    " to fill memory without gaps or overlap, got sizes ", param.sizes(),
                    " and strides ", param.strides());
}

// Two tensors over the same memory would be updated twice and torn apart by flat storage.
void check_no_overlap(const std::vector<at::Tensor>& params) {
  struct Extent {
    const char* begin;
    const char* end;
    size_t index;
  };
  std::vector<Extent> extents;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto* begin = static_cast<const char*>(params[i].const_data_ptr());
    if (params[i].numel() > 0) extents.push_back({begin, begin + params[i].nbytes(), i});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    TORCH_CHECK_VALUE(!params[extents[i - 1].index].is_same(params[extents[i].index]),
                      "shardstep: expected every parameter once, got one as parameters ",
                      extents[i - 1].index, " and ", extents[i].index);
    TORCH_CHECK_VALUE(extents[i - 1].end <= extents[i].begin || extents[i].begin == nullptr,
                      "shardstep: expected parameters with memory of their own, got parameters ",
                      extents[i - 1].index, " and ", extents[i].index,
                      " that share some; to tie weights, use one tensor in both places");
  }
}

void check_one_dtype(const std::vector<at::Tensor>& params) {
  for (const auto& param : params) {
    TORCH_CHECK_VALUE(
        param.scalar_type() == params.front().scalar_type(),
        "shardstep: expected parameters of one dtype when sharding by parameter, got ",
        params.front().scalar_type(), " and ", param.scalar_type(),
        "; sharding by element takes any mix");
  }
}

// One exchange moves all parameters, and the local optimizer's kernels run where they are.
void check_devices(const std::vector<at::Tensor>& params, const ProcessGroupPtr& group) {
  const auto type = params.front().device().type();
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].device().type() == type,
                      "shardstep: expected parameters on devices of one type, got parameter 0 on ",
                      params.front().device(), " and parameter ", i, " on ", params[i].device(),
                      "; move the model to one type of device, or use an optimizer for each type");
  }
  if (group->getSize() == 1) return;
  const auto types = group->getDeviceTypes();
  std::string known;
  for (const auto& device : types) known += (known.empty() ? "" : ", ") + c10::str(device.type());
  TORCH_CHECK_VALUE(
      std::any_of(types.begin(), types.end(),
                  [&](const at::Device& device) { return device.type() == type; }),
      "shardstep: expected a process group with a backend for the parameters' device, ", type,
      ", got one for ", known);
}

at::Device first_device(const std::vector<EngineGroup>& groups) {
  for (const auto& group : groups) {
    if (!group.params.empty()) return group.params.front().device();
  }
  return at::kCPU;
}

// What ranks compare of a cost, in words. Throws ValueError for one that cannot be divided.
std::string describe_cost(std::optional<double> cost, size_t param, const ProcessGroupPtr& group) {
  if (!cost) return "";
  TORCH_CHECK_VALUE(std::isfinite(*cost) && *cost >= 0,
                    "shardstep: expected the cost of parameter ", param,
                    " to be a finite number of 0 or more, got ", *cost, detail::who(group));
  return c10::str(", cost ", *cost);
}

// By parameter, in place and without masters, any change of a parameter can be followed, as the
// plain optimizer would.
detail::FixedLayout fixed_layout(const EngineOptions& options, Sharding sharding) {
  const bool by_element = sharding == Sharding::kElement;
  return {.dtype_and_shape = by_element || options.stage2 || options.master_dtype ||
                             options.storage == BucketStorage::kFlat,
          .memory_order = by_element || options.master_dtype};
}

}  // namespace

ShardEngine::ShardEngine(ProcessGroupPtr group, EngineOptions options)
    : group_(std::move(group)),
      options_(options),
      partition_(options.sharding, group_->getSize(),
                 detail::bucket_cap_bytes(options, group_->getSize())),
      agreement_(group_),
      outcome_(group_) {
  detail::check_options(options_, group_);
  if (share_parameters()) options_.storage = BucketStorage::kFlat;
}

int64_t ShardEngine::kind_of(const at::Tensor& param, Sharding sharding) {
  // Frozen parameters are kept apart, so that the trainable ones are cut evenly.
  const auto key = c10::str(param.scalar_type(), param.device(), param.requires_grad(),
                            sharding == Sharding::kElement);
  const auto found = std::find(kinds_.begin(), kinds_.end(), key);
  if (found == kinds_.end()) {
    kinds_.push_back(key);
    return static_cast<int64_t>(kinds_.size()) - 1;
  }
  return found - kinds_.begin();
}

// A text of what must be the same on all ranks about groups.
std::vector<std::string> ShardEngine::describe_groups(
    const std::vector<EngineGroup>& groups) const {
  std::vector<at::Tensor> all = params_;
  std::vector<std::string> lines{detail::describe(options_)};
  for (size_t g = 0; g < groups.size(); ++g) {
    const size_t index = group_count() + g;
    const bool by_element = groups[g].sharding.value_or(options_.sharding) == Sharding::kElement;
    lines.push_back(c10::str("group ", index, by_element ? " by element" : " by parameter",
                             ", pool ", groups[g].cost_pool, ": ", groups[g].description));
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const auto& param = groups[g].params[i];
      check_param(param, detail::param_label(all.size(), groups[g].name(i)));
      if (options_.stage2 && world_size() > 1) {
        check_not_under_ddp(param, static_cast<int64_t>(all.size()));
      }
      lines.push_back(c10::str("parameter ", detail::param_label(i, groups[g].name(i)),
                               " of group ", index, ": ", detail::describe_param(param),
                               describe_cost(groups[g].cost(i), all.size(), group_)));
      all.push_back(param);
    }
  }
  TORCH_CHECK_VALUE(!all.empty(), "shardstep: expected parameters to optimize, got none");
  check_devices(all, group_);
  if (options_.sharding == Sharding::kParameter) check_one_dtype(all);
  check_no_overlap(all);
  return lines;
}

void ShardEngine::add_groups(const std::vector<EngineGroup>& groups,
                             const std::exception_ptr& error, const std::function<void()>& use) {
  auto failure = error;
  std::vector<std::string> lines;
  try {
    if (!failure) lines = describe_groups(groups);
  } catch (...) {
    failure = std::current_exception();
  }
  wait();
  const auto control = control_group();  // as long as not all ranks have another
  const int64_t channel = detail::agree(control, lines, failure);
  const Partition before = partition_;
  try {
    adopt(groups, channel);
    if (use) use();
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    // Also because shared memory can be opened only while its creator exists.
    detail::tell_every_rank(control, failure);
  } catch (...) {
    forget_since(before);
    if (exchange_) exchange_->start_anew();
    detail::tell_every_rank(control, nullptr);  // that they may use the exchange again
    throw;
  }
}

void ShardEngine::adopt(const std::vector<EngineGroup>& groups, int64_t channel) {
  const size_t known = params_.size();
  if (known == 0) {
    partition_ = Partition(options_.sharding, world_size(),
                           detail::bucket_cap_bytes(options_, world_size(), first_device(groups)));
  }
  std::vector<std::vector<ParamSpec>> specs;
  for (const auto& group : groups) {
    auto& spec = specs.emplace_back();
    const auto sharding = group.sharding.value_or(options_.sharding);
    for (size_t i = 0; i < group.params.size(); ++i) {
      const auto& param = group.params[i];
      // In stage 1, by parameter, the partition is torch's.
      const bool apart = options_.stage2 && !param.requires_grad();
      spec.push_back({.numel = param.numel(),
                      .element_size = param.element_size(),
                      .kind = kind_of(param, sharding),
                      .pool = 2 * group.cost_pool + apart,
                      .cost = group.cost(i),
                      .sharding = sharding});
      params_.push_back(param);
      trainable_.push_back(param.requires_grad());
      agreement_.add(param, group.name(i), fixed_layout(options_, sharding));
    }
  }
  connect(channel);
  SHARDSTEP_FAILURE_POINT("construction: connected");
  partition_.add_groups(specs);
  const size_t first = buckets_.size();
  if (options_.stage2 && exchange_) broadcast_params(known);
  build_new_buckets();
  if (options_.stage2 && exchange_) reduce_new_buckets(first);
  for (size_t group = local_.size(); group < group_count(); ++group) add_local_params(group);
}

void ShardEngine::forget_since(const Partition& before) {
  const size_t params = before.param_count(), buckets = before.buckets().size();
  if (options_.storage == BucketStorage::kFlat) {
    for (size_t i = params; i < params_.size(); ++i) {
      params_[i].set_data(params_[i].detach().clone());
    }
  }
  if (reducer_) reducer_->forget_buckets_from(buckets);
  const auto shorten = [](auto& items, size_t size) {
    if (items.size() > size)
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(size), items.end());
  };
  shorten(params_, params);
  shorten(trainable_, params);
  shorten(places_, params);
  shorten(local_places_, params);
  shorten(masters_, params);
  shorten(buckets_, buckets);
  shorten(active_, buckets);
  shorten(parts_, buckets);
  shorten(arriving_, buckets);
  shorten(local_, before.group_count());
  agreement_.forget_from(params);
  partition_ = before;
}

void ShardEngine::connect(int64_t channel) {
  if (exchange_ || world_size() == 1) return;
  auto exchange = make_exchange(group_, {.kind = options_.exchange,
                                         .device = params_.front().device(),
                                         .channel = channel,
                                         .share_tensors = share_parameters()});
  TORCH_CHECK_VALUE(!share_parameters() || exchange->shares_memory(),
                    "shardstep: expected ranks that share memory with share_parameters, got "
                    "exchange \"",
                    exchange->name(), "\"", detail::who(group_));
  if (!params_.front().is_cpu()) control_ = make_control_exchange(group_, channel);
  exchange_ = std::move(exchange);
}

void ShardEngine::build_new_buckets() {
  places_.resize(params_.size());
  for (size_t bucket = buckets_.size(); bucket < partition_.buckets().size(); ++bucket) {
    const auto& layout = partition_.buckets()[bucket];
    std::vector<at::Tensor> params;
    for (const auto& slot : layout.slots) {
      places_[slot.param] = {bucket, params.size()};
      params.push_back(params_[slot.param]);
    }
    // Every rank writes the same values into shared memory.
    at::Tensor shared;
    if (share_parameters() && exchange_) {
      shared =
          exchange_->make_shared(layout.numel(), params.front().options().requires_grad(false));
    }
    buckets_.emplace_back(layout, std::move(params), options_.storage, shared);
    active_.emplace_back();
    parts_.emplace_back();
    arriving_.emplace_back();
  }
}

// From here on parameters are the same on all ranks.
void ShardEngine::broadcast_params(size_t first) {
  for (size_t i = first; i < params_.size(); ++i) {
    std::vector<at::Tensor> whole{flat_view(params_[i])};
    if (whole.front().numel() == 0) continue;
    detail::PendingWorks pending(group_);
    pending.add(group_->broadcast(whole, {}), "waiting for", 0);
    pending.wait();
  }
}

void ShardEngine::reduce_new_buckets(size_t first) {
  if (!reducer_) {
    // A rank that has not read a bucket yet would keep others from publishing its next update.
    reducer_ = std::make_unique<GradientReducer>(*exchange_, rank(), world_size(), [this] {
      wait();
      if (announce_ && !exchange_->any_order()) announce_();
    });
    reducer_->set_phase_times(phase_times_.get());
    gradients_ =
        std::make_unique<ShardedGradients>(control(), *exchange_, *reducer_, agreement_, params_);
  }
  for (size_t b = first; b < buckets_.size(); ++b) {
    std::vector<ReducedParam> params;
    for (size_t slot = 0; slot < buckets_[b].params().size(); ++slot) {
      const int64_t index = buckets_[b].layout().slots[slot].param;
      params.push_back({index, params_[index], partition_.slices(index)});
    }
    const auto& first_param = buckets_[b].params().front();
    auto tensor = first_param.options().requires_grad(false);
    std::optional<at::ScalarType> posted;
    if (has_master(params.front().index)) {
      tensor = tensor.dtype(options_.master_dtype);
      posted = first_param.scalar_type();
    }
    reducer_->add_bucket(std::move(params),
                         {.numel = {},
                          .tensor = tensor,
                          .posted = posted,
                          .wire = detail::wire_of(first_param.scalar_type(), options_),
                          .tag = {MessageKind::kGradients, static_cast<int64_t>(b)},
                          .divisor = static_cast<double>(world_size())});
  }
}

at::Tensor ShardEngine::local_view(int64_t param, Range elements) const {
  if (sharding(param) == Sharding::kParameter) return params_[param].detach();
  const auto [bucket, slot] = places_[param];
  return buckets_[bucket].view(slot, elements);
}

void ShardEngine::add_local_params(size_t group) {
  auto& local = local_.emplace_back();
  local_places_.resize(params_.size());
  masters_.resize(params_.size());
  for (const auto& slice : partition_.owned(rank(), group)) {
    auto tensor = params_[slice.param];
    if (aliased(slice.param)) {
      tensor = local_view(slice.param, slice.elements);
      if (has_master(slice.param)) tensor = masters_[slice.param].emplace(tensor).tensor();
      tensor.set_requires_grad(params_[slice.param].requires_grad());
    }
    local_places_[slice.param] = {group, local.size()};
    local.push_back({slice.param, slice.elements, tensor});
  }
}

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
      if (auto& master = masters_[local.index]) {
        master->follow(params_[local.index], local_view(local.index, local.elements), has_moved);
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
  if (!masters_[local.index]) return;
  at::NoGradGuard no_grad;
  if (dense && sharding(local.index) == Sharding::kParameter) own = in_order_of(local.tensor, own);
  own = own.to(local.tensor.scalar_type());
}

void ShardEngine::round_masters() {
  for (auto& group : local_) {
    for (auto& local : group) {
      auto& master = masters_[local.index];
      if (!master || !local.tensor.grad().defined()) continue;
      master->round_into(params_[local.index], local_view(local.index, local.elements));
    }
  }
}

at::Tensor ShardEngine::saved_master(int64_t param) const {
  const auto& master = masters_[param];
  return master && master->is_wider() ? master->tensor().detach() : at::Tensor();
}

void ShardEngine::load_masters(const std::map<int64_t, at::Tensor>& masters) {
  bool missing = false;
  for (const auto& group : local_) {
    for (const auto& [index, elements, tensor] : group) {
      auto& master = masters_[index];
      if (!master) continue;
      const auto found = masters.find(index);
      const bool given = found != masters.end() && found->second.defined();
      missing = missing || (found != masters.end() && !given);
      given ? master->load(found->second) : master->reset(local_view(index, elements));
    }
  }
  if (missing) {
    TORCH_WARN("shardstep: the loaded state has no float32 masters (", kMasterKey,
               "); they start from the parameters", detail::who(group_));
  }
}

bool ShardEngine::can_widen(int64_t param) const {
  const auto dtype = params_[param].scalar_type();
  return dtype == at::kFloat || dtype == at::kDouble;
}

void ShardEngine::widen_params(const std::map<int64_t, at::Tensor>& masters) {
  for (const auto& [index, master] : masters) {
    if (can_widen(index)) widen_from_master(params_[index], master);
  }
}

void ShardEngine::widen_own_params(const std::map<int64_t, at::Tensor>& masters) {
  for (const auto& group : local_) {
    for (const auto& [index, elements, tensor] : group) {
      const auto found = masters.find(index);
      if (found == masters.end() || !found->second.defined() || !can_widen(index)) continue;
      widen_from_master(local_view(index, elements), found->second);
    }
  }
  if (!exchange_) return;
  std::vector<Parts> parts;
  for (const auto& bucket : buckets_) {
    parts.push_back(bucket.parts(std::vector<bool>(bucket.params().size(), true)));
  }
  std::vector<const Parts*> buckets;
  for (const auto& bucket : parts) buckets.push_back(&bucket);
  if (!share_parameters()) return exchange_->all_gather_and_wait(buckets);
  exchange_->all_gather_between_hosts(buckets);
  detail::tell_every_rank(group_, nullptr);  // so that all have written
}

void ShardEngine::before_closure() {
  phase_ = Phase::kOutside;
  round_masters();  // the optimizer may evaluate the closure several times
}

// Otherwise zero_grad would not free them.
void ShardEngine::drop_gradients() {
  for (auto& group : local_) {
    for (auto& local : group) {
      if (aliased(local.index)) local.tensor.mutable_grad().reset();
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

void ShardEngine::show_gradients() {
  if (!reducer_) return;
  if (!reducer_->made_round() && !reducer_->has_sums()) reducer_->show_stand_ins();
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
    return;
  }
  for (auto& group : local_) {
    for (auto& local : group) {
      if (aliased(local.index)) set_gradient(local, params_[local.index].grad());
    }
  }
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
  round_masters();
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
  for (int64_t param : params) {
    if (const auto pending = std::move(arriving_[places_[param].bucket])) pending->wait();
  }
}

void ShardEngine::wait() {
  const bool waits = std::any_of(arriving_.begin(), arriving_.end(),
                                 [](const auto& bucket) { return bucket != nullptr; });
  if (!waits && !arriving_outcome_) return;
  const PhaseTimer timer(*phase_times_, StepPhase::kArrive);
  hear_outcome();
  for (auto& bucket : arriving_) {
    if (const auto pending = std::move(bucket)) pending->wait();
  }
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
}

std::unique_ptr<Pending> ShardEngine::after_partial_step(
    const std::vector<ParamGradient>& gradients, int tag) {
  round_masters();
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
