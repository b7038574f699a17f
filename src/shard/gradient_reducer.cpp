#include "shard/gradient_reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "launch/who.h"
#include "shard/bucket.h"

namespace shardstep {
namespace {

// What is said of a parameter's gradients since the last step.
constexpr uint8_t kUsed = 1;
constexpr uint8_t kUnfit = 2;  // one was not of the parameter that was added

// All elements of a gradient in the parameter's memory order.
at::Tensor flat_gradient(const at::Tensor& param) {
  const auto& gradient = param.grad();
  const auto dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  return flat_view(in_order_of(param, dense.detach()));
}

}  // namespace

bool GradientReducer::Bucket::has_trainable() const {
  return std::any_of(params.begin(), params.end(), [](const Watched& p) { return p.trainable; });
}

void GradientReducer::Bucket::give_back() {
  reduction->release();
  sum_is_lent = false;
}

GradientReducer::GradientReducer(Exchange& exchange, int rank, int world_size,
                                 std::function<void()> before_round)
    : exchange_(exchange),
      rank_(rank),
      world_size_(world_size),
      before_round_(std::move(before_round)) {}

GradientReducer::~GradientReducer() {
  for (auto& bucket : buckets_) {
    for (auto& param : bucket->params) unwatch(param);
  }
}

void GradientReducer::add_bucket(std::vector<ReducedParam> params, ReductionOptions options) {
  auto& bucket = *buckets_.emplace_back(std::make_unique<Bucket>());
  for (auto& param : params) {
    const auto size = static_cast<size_t>(param.index) + 1;
    used_here_.resize(std::max(used_here_.size(), size));
    bucket.params.emplace_back().reduced = std::move(param);
  }
  options.numel.assign(world_size_, 0);
  for (const auto& param : bucket.params) {
    for (const auto& slice : param.reduced.slices) {
      options.numel[slice.rank] += slice.elements.size();
    }
  }
  bucket.tensor = options.tensor;
  bucket.reduction = exchange_.make_reduction(options);
  follow_params();
}

void GradientReducer::forget_buckets_from(size_t first) {
  for (size_t b = first; b < buckets_.size(); ++b) {
    for (auto& param : buckets_[b]->params) unwatch(param);
  }
  if (first < buckets_.size()) buckets_.resize(first);
}

void GradientReducer::follow_params() {
  for (auto& bucket : buckets_) {
    for (auto& param : bucket->params) {
      param.trainable = param.reduced.param.requires_grad();
      if (param.trainable && !param.accumulator) watch(*bucket, param);
    }
  }
}

void GradientReducer::watch(Bucket& bucket, Watched& param) {
  param.accumulator = torch::autograd::impl::grad_accumulator(param.reduced.param);
  // Buckets and their parameters stay where they are: addresses hold.
  param.hook =
      param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, &bucket, &param](const torch::autograd::variable_list& outputs,
                                  const torch::autograd::variable_list&) {
            on_gradient(bucket, param);
            return outputs;
          }));
}

void GradientReducer::unwatch(Watched& param) {
  if (param.accumulator) param.accumulator->del_post_hook(param.hook);
}

void GradientReducer::on_gradient(Bucket& bucket, Watched& param) {
  const std::lock_guard lock(mutex_);
  if (!sync_) return;
  // A bucket that is on its way already belongs to a backward pass that threw.
  if (in_round_ && bucket.posted) end_round();
  if (!in_round_) begin_round();
  if (param.ready) return;
  param.ready = true;
  if (--bucket.waiting_for == 0) post_ready(bucket);
  take_sums();
}

// Those that are there. Nothing is waited for: another rank may use other parameters, and post
// these only when its backward pass ends.
void GradientReducer::take_sums() {
  for (size_t i = 0; i < under_way_.size();) {
    if (under_way_[i]->reduction->ready(std::chrono::milliseconds(0))) {
      take_sum(*under_way_[i]);
    } else {
      ++i;
    }
  }
}

void GradientReducer::begin_round() {
  before_round_();
  // Else a rank might wait for another to read what the one before it posted.
  while (!under_way_.empty()) take_sum(*under_way_.front());
  for (auto& bucket : buckets_) {
    if (bucket->sum_is_lent) {
      bucket->sum = bucket->sum.clone();
      bucket->give_back();
    }
    bucket->posted = false;
    bucket->waiting_for = 0;
    for (auto& param : bucket->params) {
      param.ready = false;
      if (param.trainable) ++bucket->waiting_for;
    }
  }
  in_round_ = true;
  finished_ = false;
  // Inside the backward pass of another (reentrant checkpointing) the end of this one means
  // nothing; the outer one ends the round if it has gradients of its own, else finish() does.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, alive = std::weak_ptr<int>(alive_)] {
        if (alive.expired()) return;
        const std::lock_guard lock(mutex_);
        if (in_round_ && !torch::autograd::get_current_node()) end_round();
      });
}

// The last layers' gradients come first.
void GradientReducer::end_round() {
  for (auto bucket = buckets_.rbegin(); bucket != buckets_.rend(); ++bucket) {
    if (!(*bucket)->posted && (*bucket)->has_trainable()) post(**bucket);
  }
  in_round_ = false;
}

void GradientReducer::post_ready(Bucket& bucket) {
  if (exchange_.any_order()) return post(bucket);
  for (auto next = buckets_.rbegin(); next != buckets_.rend(); ++next) {
    if ((*next)->posted || !(*next)->has_trainable()) continue;
    if ((*next)->waiting_for > 0) return;
    post(**next);
  }
}

void GradientReducer::post(Bucket& bucket) {
  at::NoGradGuard no_grad;
  Parts parts(world_size_);
  for (auto& [reduced, trainable, ready, accumulator, hook] : bucket.params) {
    at::Tensor flat;
    if (reduced.param.grad().defined()) {
      const bool fits = reduced.param.scalar_type() == bucket.tensor.dtype() &&
                        reduced.param.device() == bucket.tensor.device() &&
                        reduced.param.numel() == reduced.numel();
      used_here_[reduced.index] |= fits ? kUsed : kUnfit;
      if (fits) flat = flat_gradient(reduced.param).to(bucket.tensor.dtype());
    }
    for (const auto& [param, rank, elements, in_bucket, offset] : reduced.slices) {
      if (elements.empty()) continue;
      parts[rank].push_back(flat.defined() ? flat.narrow(0, elements.begin, elements.size())
                                           : at::zeros({elements.size()}, bucket.tensor));
    }
    reduced.param.mutable_grad().reset();
  }
  bucket.reduction->post(std::move(parts), want_squares_);
  bucket.posted = true;
  ++bucket.rounds;
  under_way_.push_back(&bucket);
}

void GradientReducer::take_sum(Bucket& bucket) {
  at::NoGradGuard no_grad;
  std::erase(under_way_, &bucket);
  auto sum = bucket.reduction->finish();
  bucket.sum_is_lent = true;
  if (bucket.sum.defined()) {
    bucket.sum.add_(sum);
    bucket.squares.reset();
    bucket.give_back();
  } else {
    bucket.sum = std::move(sum);
    bucket.squares = bucket.reduction->squares();
  }
}

std::optional<double> GradientReducer::squares() const {
  double total = 0;
  for (const auto& bucket : buckets_) {
    if (!bucket->sum.defined()) continue;
    if (!bucket->squares) return std::nullopt;
    total += *bucket->squares;
  }
  return total;
}

bool GradientReducer::finish(const std::function<void()>& before_sums) {
  const std::lock_guard lock(mutex_);
  if (finished_) return false;
  follow_params();
  if (in_round_) end_round();
  for (auto bucket = buckets_.rbegin(); bucket != buckets_.rend(); ++bucket) {
    if ((*bucket)->rounds == 0 && (*bucket)->has_trainable()) post(**bucket);
  }
  before_sums();
  Parts flags(world_size_);
  for (auto& part : flags) {
    part = {at::empty({static_cast<int64_t>(used_here_.size())}, at::kByte)};
  }
  std::copy(used_here_.begin(), used_here_.end(), flags[rank_][0].data_ptr<uint8_t>());
  exchange_.all_gather(flags, ControlMessage::kUsedParams)->wait();
  used_.assign(used_here_.size(), 0);
  for (const auto& part : flags) {
    const auto* flag = part[0].const_data_ptr<uint8_t>();
    for (size_t i = 0; i < used_.size(); ++i) used_[i] |= flag[i];
  }
  for (size_t i = 0; i < used_.size(); ++i) {
    TORCH_CHECK_VALUE(!(used_[i] & kUnfit), "shardstep: expected the gradient of parameter ", i,
                      " to have the dtype, device and size of the parameter that the optimizer was "
                      "given, got another in a backward pass; make a new optimizer after changing "
                      "the model",
                      detail::who(rank_, world_size_));
  }
  while (!under_way_.empty()) take_sum(*under_way_.front());
  finished_ = true;
  return true;
}

void GradientReducer::reset() {
  const std::lock_guard lock(mutex_);
  if (in_round_) end_round();
  while (!under_way_.empty()) take_sum(*under_way_.front());
  for (auto& bucket : buckets_) {
    bucket->sum.reset();
    if (bucket->sum_is_lent) bucket->give_back();
    bucket->rounds = 0;
  }
  std::fill(used_here_.begin(), used_here_.end(), 0);
  finished_ = false;
}

}  // namespace shardstep
