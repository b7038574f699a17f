#include "shard/gradient_reducer.h"

#include <torch/csrc/autograd/engine.h>

#include "failure_points.h"
#include "launch/who.h"
#include "shard/bucket.h"
#include "shard/stand_in.h"

namespace shardstep {
namespace {

// All elements of a gradient in the parameter's memory order.
at::Tensor flat_gradient(const at::Tensor& param) {
  const auto& gradient = param.grad();
  const auto dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  return flat_view(in_order_of(param, dense.detach()));
}

}  // namespace

// Two optimizers would each take the other's stand-in for a gradient.
void GradientReducer::check_alone(const WatchedParam& param) {
  const int hooks = param.hook->count();
  TORCH_CHECK_VALUE(
      hooks == 1, "shardstep: expected one optimizer of stage 2 for each parameter, got ", hooks,
      " for parameter ", param.reduced.index, "; delete the other first, or use stage 1");
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
  auto& bucket = *buckets_.emplace_back(std::make_unique<WatchedBucket>());
  options.numel.assign(world_size_, 0);
  for (auto& param : params) {
    auto& watched = bucket.params.emplace_back();
    watched.stand_in = make_stand_in(param.param, param.index);
    watched.bucket = &bucket;
    for (const auto& slice : param.slices) {
      if (slice.rank == rank_) {
        watched.own = slice.elements;
        watched.own_offset = options.numel[rank_];
      }
      options.numel[slice.rank] += slice.elements.size();
    }
    const auto size = static_cast<size_t>(param.index) + 1;
    used_here_.resize(std::max(used_here_.size(), size));
    used_.resize(used_here_.size());
    forgotten_here_.resize(used_here_.size());
    watched_.resize(used_here_.size());
    watched.reduced = std::move(param);
  }
  for (auto& param : bucket.params) watched_[param.reduced.index] = &param;
  bucket.gradient = bucket.params.front().reduced.param.options().requires_grad(false);
  bucket.sum_dtype = options.tensor.dtype().toScalarType();
  bucket.like.resize(world_size_);
  for (const auto& param : bucket.params) {
    for (const auto& slice : param.reduced.slices) {
      if (slice.elements.empty()) continue;
      bucket.like[slice.rank].push_back(
          at::empty({slice.elements.size()}, bucket.gradient.device(at::kMeta)));
    }
  }
  bucket.reduction = exchange_.make_reduction(options);
  follow_params();
}

void GradientReducer::forget_buckets_from(size_t first) {
  for (size_t b = first; b < buckets_.size(); ++b) {
    for (auto& param : buckets_[b]->params) {
      unwatch(param);
      std::erase(watched_, &param);
    }
  }
  if (first < buckets_.size()) buckets_.resize(first);
  std::erase(watched_, nullptr);
  used_here_.resize(watched_.size());
  used_.resize(watched_.size());
  forgotten_here_.resize(watched_.size());
}

void GradientReducer::set_stand_in(int64_t param, at::Tensor stand_in) {
  auto& watched = *watched_[param];
  auto& gradient = watched.reduced.param.mutable_grad();
  if (gradient.is_same(watched.stand_in)) gradient = stand_in;
  watched.stand_in = std::move(stand_in);
}

void GradientReducer::follow_params() {
  for (auto* param : watched_) {
    if (!param) continue;  // its bucket has not been added yet
    param->trainable = param->reduced.param.requires_grad();
    if (param->trainable && !param->hook) watch(*param);
  }
}

// Buckets and their parameters do not move.
void GradientReducer::watch(WatchedParam& param) {
  param.hook = std::make_unique<GradientHook>(
      param.reduced.param, [this, &param] { before_gradient(param); },
      [this, &param] { on_gradient(param); });
}

void GradientReducer::unwatch(WatchedParam& param) {
  auto& gradient = param.reduced.param.mutable_grad();
  if (gradient.is_same(param.stand_in)) gradient.reset();
  param.hook.reset();
}

// Autograd stores a gradient where there is none, but would add to the stand-in.
void GradientReducer::before_gradient(WatchedParam& param) {
  const std::lock_guard lock(mutex_);
  auto& gradient = param.reduced.param.mutable_grad();
  if (param.changed_beside_sum()) used_here_[param.reduced.index] |= kChanged;
  if (!gradient.defined()) param.set_aside = false;  // it was dropped, and the sum with it
  if (!gradient.is_same(param.stand_in)) return;
  gradient.reset();
  param.set_aside = true;
  param.arriving = true;
}

void GradientReducer::on_gradient(WatchedParam& param) {
  const std::lock_guard lock(mutex_);
  param.arriving = false;
  auto& gradient = param.reduced.param.mutable_grad();
  if (param.set_aside && !gradient.defined()) gradient = param.stand_in;  // no gradient arrived
  param.note_gradient();
  if (!sync_) return;
  auto& bucket = *param.bucket;
  // A bucket that is already under way belongs to a backward pass that threw.
  if (in_round_ && bucket.posted) post_missing();
  if (!in_round_) {
    begin_round();
    has_contributed_ = true;
    // Inside another backward pass (reentrant checkpointing), the end of this one means nothing;
    // the outer one ends the round if it has gradients of its own, else end_round() does.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this, alive = std::weak_ptr<int>(alive_)] {
          if (alive.expired()) return;
          const std::lock_guard lock(mutex_);
          if (in_round_ && !torch::autograd::get_current_node()) post_missing();
        });
  }
  if (param.ready) return;
  param.ready = true;
  SHARDSTEP_FAILURE_POINT("gradient: arrived");
  if (--bucket.waiting_for == 0) post_ready(bucket);
  take_ready_sums();
}

// Nothing is waited for: another rank may use other parameters, and post these only when its
// backward pass ends.
void GradientReducer::take_ready_sums() {
  for (size_t i = 0; i < under_way_.size();) {
    if (under_way_[i]->reduction->ready(std::chrono::milliseconds(0))) {
      take_sum(*under_way_[i]);
    } else {
      ++i;
    }
  }
}

void GradientReducer::begin_round() {
  follow_params();
  for (const auto* param : watched_) {
    if (!param->trainable) continue;
    check_not_under_ddp(param->reduced.param, param->reduced.index);
    check_alone(*param);
  }
  before_round_();
  take_trainable_sums();  // else a rank might wait for another to read what the one before posted
  forget_unwanted();
  if (std::exchange(begins_anew_, false)) {
    for (const auto* param : watched_) {
      const auto index = param->reduced.index;
      const bool nobody_used = knows_used_ && !used_here_[index];
      forgotten_here_[index] = nobody_used || !param->sum_is_wanted();
    }
  }
  knows_used_ = false;
  for (auto& bucket : buckets_) {
    bucket->posted = false;
    bucket->waiting_for = 0;
    for (auto& param : bucket->params) {
      param.ready = false;
      if (param.trainable) ++bucket->waiting_for;
    }
  }
  in_round_ = true;
  made_round_ = true;
  settled_ = false;
  ++rounds_;
  expect_next();
}

// Prepares for the next few buckets: each takes memory for what arrives.
void GradientReducer::expect_next() {
  constexpr int kAhead = 3;
  int ahead = 0;
  for (auto next = buckets_.rbegin(); next != buckets_.rend() && ahead < kAhead; ++next) {
    auto& bucket = **next;
    if (bucket.posted || bucket.like[rank_].empty() || !bucket.has_trainable()) continue;
    if (!std::exchange(bucket.expected, true)) bucket.reduction->expect(bucket.like);
    ++ahead;
  }
}

void GradientReducer::make_round() {
  const std::lock_guard lock(mutex_);
  begin_round();
  post_missing();
}

void GradientReducer::end_round() {
  const std::lock_guard lock(mutex_);
  if (in_round_) post_missing();
}

// The gradients of the last layers come first.
void GradientReducer::post_missing() {
  for (auto bucket = buckets_.rbegin(); bucket != buckets_.rend(); ++bucket) {
    if (!(*bucket)->posted && (*bucket)->has_trainable()) post(**bucket);
  }
  in_round_ = false;
}

void GradientReducer::post_ready(WatchedBucket& bucket) {
  if (exchange_.any_order()) return post(bucket);
  for (auto next = buckets_.rbegin(); next != buckets_.rend(); ++next) {
    if ((*next)->posted || !(*next)->has_trainable()) continue;
    if ((*next)->waiting_for > 0) return;
    post(**next);
  }
}

void GradientReducer::post(WatchedBucket& bucket) {
  std::optional<PhaseTimer> timer;
  if (times_) timer.emplace(*times_, StepPhase::kPost);
  at::NoGradGuard no_grad;
  Parts parts(world_size_);
  for (auto& param : bucket.params) {
    const auto& reduced = param.reduced;
    auto& gradient = reduced.param.mutable_grad();
    at::Tensor flat;
    if (gradient.defined() && !gradient.is_same(param.stand_in)) {
      if (param.changed_beside_sum()) used_here_[reduced.index] |= kChanged;
      const bool fits = reduced.param.scalar_type() == bucket.gradient.dtype() &&
                        reduced.param.device() == bucket.gradient.device() &&
                        reduced.param.numel() == reduced.numel();
      used_here_[reduced.index] |= fits ? kUsed : kUnfit;
      if (fits) flat = flat_gradient(reduced.param).to(bucket.gradient.dtype());
      has_contributed_ = true;
    }
    for (const auto& slice : reduced.slices) {
      const auto& elements = slice.elements;
      if (elements.empty()) continue;
      auto& part = parts[slice.rank].emplace_back();
      if (!flat.defined()) {
        part = at::zeros({elements.size()}, bucket.gradient);
      } else {
        const bool is_whole = elements.size() == flat.numel();
        part = is_whole ? flat : flat.narrow(0, elements.begin, elements.size());
      }
    }
    if (param.trainable || gradient.defined()) gradient = param.stand_in;
    param.set_aside = param.sum_is_zero = false;
  }
  SHARDSTEP_FAILURE_POINT("gradients: complete");
  if (in_round_) expect_next();
  bucket.expected = false;
  bucket.reduction->post(std::move(parts), want_squares_);
  SHARDSTEP_FAILURE_POINT("gradients: posted");
  bucket.posted = true;
  ++bucket.posts.made;
  under_way_.push_back(&bucket);
}

// Of a bucket that was frozen since, a rank without a batch may have to post its part yet.
void GradientReducer::take_trainable_sums() {
  for (auto& bucket : buckets_) {
    if (bucket->has_trainable() && is_under_way(*bucket)) take_sum(*bucket);
  }
}

void GradientReducer::take_sums() {
  while (!under_way_.empty()) take_sum(*under_way_.front());
}

void GradientReducer::take_sum(WatchedBucket& bucket) {
  std::optional<PhaseTimer> timer;
  if (times_) timer.emplace(*times_, StepPhase::kReduce);
  at::NoGradGuard no_grad;
  std::erase(under_way_, &bucket);
  auto sum = bucket.reduction->finish();
  SHARDSTEP_FAILURE_POINT("gradients: summed");
  const bool was_stale = bucket.zero_stale(sum);
  if (bucket.sum.defined()) {
    bucket.sum.add_(sum);
    bucket.squares.reset();
  } else {
    bucket.sum = std::move(sum);
    bucket.sum_is_lent = true;
    bucket.squares = was_stale ? std::nullopt : bucket.reduction->squares();
  }
}

void GradientReducer::settle(std::vector<uint8_t> used) {
  const std::lock_guard lock(mutex_);
  take_sums();
  for (auto& flags : used) flags &= kUsed;
  used_ = used_here_ = std::move(used);
  knows_used_ = begins_anew_ = true;
  std::fill(forgotten_here_.begin(), forgotten_here_.end(), false);
  settled_rounds_ = rounds_;
  for (auto& bucket : buckets_) bucket->settled_posts = bucket->posts.made;
  for (auto* param : watched_) {
    auto& gradient = param->reduced.param.mutable_grad();
    if (!used_[param->reduced.index] && gradient.is_same(param->stand_in)) gradient.reset();
  }
  settled_ = true;
  forgotten_parts_ = 0;
  has_contributed_ = false;
}

bool GradientReducer::has_gradient(int64_t param) const {
  return used_[param] && watched_[param]->sum_is_wanted();
}

bool GradientReducer::has_sums() const {
  return std::any_of(watched_.begin(), watched_.end(), [](const WatchedParam* param) {
    return param->bucket->sum.defined() && param->sum_is_wanted();
  });
}

at::Tensor GradientReducer::own(int64_t param) const {
  const auto& watched = *watched_[param];
  const auto& sum = watched.bucket->sum;
  if (!watched.own || !sum.defined() || !has_gradient(param)) return {};
  return sum.narrow(0, watched.own_offset, watched.own->size());
}

int64_t GradientReducer::replaced() const {
  for (const auto* param : watched_) {
    const auto& gradient = param->reduced.param.grad();
    if (gradient.defined() && !param->sum_is_wanted()) return param->reduced.index;
  }
  return -1;
}

int64_t GradientReducer::sum_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    if (bucket->sum.defined()) bytes += static_cast<int64_t>(bucket->sum.nbytes());
  }
  return bytes;
}

std::optional<double> GradientReducer::squares() const {
  double total = 0;
  for (const auto& bucket : buckets_) {
    if (!bucket->sum.defined()) continue;
    if (!bucket->squares) return std::nullopt;
    total += *bucket->squares;
    for (const auto& param : bucket->params) {  // the squares include sums that are not needed
      if (used_[param.reduced.index] && !param.sum_is_wanted()) return std::nullopt;
    }
  }
  return total;
}

void GradientReducer::keep_sums() {
  const std::lock_guard lock(mutex_);
  take_sums();
  for (auto& bucket : buckets_) bucket->keep_sum();
}

bool GradientReducer::is_under_way(const WatchedBucket& bucket) const {
  return std::find(under_way_.begin(), under_way_.end(), &bucket) != under_way_.end();
}

void GradientReducer::next_step() { made_round_ = false; }

}  // namespace shardstep
