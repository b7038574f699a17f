#include "shard/watched_bucket.h"

#include <algorithm>

#include "shard/bucket.h"

namespace shardstep {

bool WatchedParam::sum_is_wanted() const {
  const auto& gradient = reduced.param.grad();
  return gradient.is_same(stand_in) || (set_aside && (arriving || gradient.defined()));
}

bool WatchedParam::changed_beside_sum() const {
  const auto& gradient = reduced.param.grad();
  const bool has_sum = set_aside && !sum_is_zero && bucket->posts.made > bucket->posts.forgotten;
  if (!has_sum || !gradient.defined() || gradient.is_same(stand_in)) return false;
  return left != gradient.unsafeGetTensorImpl() || left_version != version_of(gradient);
}

void WatchedParam::note_gradient() {
  const auto& gradient = reduced.param.grad();
  left = gradient.unsafeGetTensorImpl();
  left_version = gradient.defined() ? version_of(gradient) : std::nullopt;
}

bool WatchedBucket::has_trainable() const {
  return std::any_of(params.begin(), params.end(),
                     [](const WatchedParam& p) { return p.trainable; });
}

bool WatchedBucket::has_new_posts() const {
  return posts.made > std::max(posts.forgotten, settled_posts);
}

void WatchedBucket::keep_sum() {
  if (sum_is_lent) sum = sum.clone();
  sum_is_lent = false;
}

void WatchedBucket::forget() {
  sum.reset();
  squares.reset();
  sum_is_lent = false;
}

void WatchedBucket::keep_what_is_wanted() {
  if (!sum.defined()) return;
  const auto wanted = [](const WatchedParam& param) { return param.sum_is_wanted(); };
  if (std::none_of(params.begin(), params.end(), wanted)) return forget();
  keep_sum();
  for (auto& param : params) {
    if (!wanted(param)) zero(param);
  }
}

void WatchedBucket::zero(const WatchedParam& param) {
  if (!param.own || !sum.defined()) return;
  at::NoGradGuard no_grad;
  sum.narrow(0, param.own_offset, param.own->size()).zero_();
  squares.reset();
}

bool WatchedBucket::zero_stale(const at::Tensor& sum) {
  bool any = false;
  for (auto& param : params) {
    if (!std::exchange(param.stale, false)) continue;
    any = true;
    if (param.own) sum.narrow(0, param.own_offset, param.own->size()).zero_();
  }
  return any;
}

}  // namespace shardstep
