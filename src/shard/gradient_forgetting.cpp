// GradientReducer's forgetting: what is zeroed, dropped or shown between rounds, and how ranks that
// made different rounds come to the same sums.

#include <c10/util/hash.h>

#include <algorithm>

#include "shard/gradient_reducer.h"

namespace shardstep {
namespace {

int64_t first_with(const std::vector<uint8_t>& flags, uint8_t flag) {
  const auto found = std::find_if(flags.begin(), flags.end(), [&](uint8_t f) { return f & flag; });
  return found == flags.end() ? -1 : found - flags.begin();
}

}  // namespace

int64_t GradientReducer::forgotten_rounds() const {
  const bool any_wanted =
      std::any_of(watched_.begin(), watched_.end(),
                  [](const WatchedParam* param) { return param->sum_is_wanted(); });
  return any_wanted ? forgotten_rounds_ : rounds_;
}

// Whether this rank knows of no gradients, while others may have some. Python may have an alias of
// the stand-in in `.grad`, and takes it back before a step.
bool GradientReducer::has_nothing() const {
  if (has_sums()) return false;
  if (!made_round_) return true;
  return !settled_ && all_forgotten() &&
         std::none_of(watched_.begin(), watched_.end(), [](const WatchedParam* param) {
           return param->reduced.param.grad().defined();
         });
}

std::vector<BucketPosts> GradientReducer::posts() const {
  const bool all = all_forgotten();
  std::vector<BucketPosts> posts;
  for (const auto& bucket : buckets_) {
    posts.push_back(bucket->posts);
    if (all) posts.back().forgotten = bucket->posts.made;
  }
  return posts;
}

// All so far.
void GradientReducer::forget_rounds() {
  forgotten_rounds_ = rounds_;
  for (auto& bucket : buckets_) bucket->posts.forgotten = bucket->posts.made;
  forgotten_parts_ = 0;
  has_contributed_ = false;
  begins_anew_ = true;
}

void GradientReducer::forget_unwanted() {
  forgotten_parts_ = forgotten_parts_when_behind();
  for (auto& bucket : buckets_) bucket->keep_what_is_wanted();
  for (const auto* param : watched_) {
    if (!param->sum_is_wanted()) used_here_[param->reduced.index] = 0;
  }
  if (all_forgotten()) forget_rounds();
}

// A parameter that takes no part in rounds, being frozen or new, has nothing to forget.
uint64_t GradientReducer::forgotten_parts_when_behind() const {
  uint64_t parts = forgotten_parts();
  if (all_forgotten()) return parts;
  for (const auto* param : watched_) {
    const auto& [index, tensor, slices] = param->reduced;
    if (!tensor.requires_grad() || !param->bucket->has_new_posts()) continue;
    if (!param->sum_is_wanted()) parts = c10::get_hash(parts, index, rounds_);
  }
  return parts;
}

void GradientReducer::post_until(WatchedBucket& bucket, int64_t posts) {
  while (bucket.posts.made < posts) {
    if (is_under_way(bucket)) take_sum(bucket);
    bucket.keep_sum();
    post(bucket);
  }
}

void GradientReducer::forget_up_to(int64_t forgotten_rounds,
                                   const std::vector<BucketPosts>& posts) {
  const std::lock_guard lock(mutex_);
  if (this->forgotten_rounds() >= forgotten_rounds) return;
  std::fill(used_here_.begin(), used_here_.end(), 0);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = *buckets_[b];
    post_until(bucket, posts[b].forgotten);
    for (auto& param : bucket.params) {
      // A post beyond those is the one of zeros that this rank has just made in its step().
      bucket.posts.made > posts[b].forgotten ? bucket.zero(param) : zero(param);
    }
    bucket.posts.forgotten = posts[b].forgotten;
  }
  forgotten_rounds_ = forgotten_rounds;
}

void GradientReducer::catch_up(int64_t rounds, const std::vector<BucketPosts>& posts) {
  const std::lock_guard lock(mutex_);
  if (rounds_ < rounds) {  // as a round of its own would
    take_trainable_sums();
    forget_unwanted();
  }
  for (size_t b = 0; b < buckets_.size(); ++b) post_until(*buckets_[b], posts[b].made);
  if (rounds_ == rounds) return;
  rounds_ = rounds;
  made_round_ = true;
  settled_ = false;
}

std::vector<uint8_t> GradientReducer::flags() const {
  auto flags = used_here_;
  for (const auto* param : watched_) {
    const auto index = param->reduced.index;
    if (forgotten_here_[index]) flags[index] |= kForgotten;
    if (!param->sum_is_wanted()) flags[index] = (flags[index] & ~kUsed) | kDropped;
  }
  return flags;
}

void GradientReducer::merge_flags(std::vector<uint8_t>& merged, const uint8_t* flags,
                                  const uint8_t* leader) {
  for (size_t i = 0; i < merged.size(); ++i) {
    if (!leader || !(leader[i] & kForgotten)) merged[i] |= flags[i];
  }
}

void GradientReducer::follow(const uint8_t* leader, bool forget) {
  const std::lock_guard lock(mutex_);
  for (auto* param : watched_) {
    const auto index = param->reduced.index;
    if (forget && (leader[index] & kForgotten)) {
      param->bucket->zero(*param);
      used_here_[index] = 0;
    }
    if ((leader[index] & kDropped) && param->sum_is_wanted()) {
      param->reduced.param.mutable_grad().reset();
      param->set_aside = false;
    }
  }
}

bool GradientReducer::has_only_zeros() const {
  return !has_contributed_ && forgotten_rounds() >= settled_rounds_;
}

void GradientReducer::zero_sum(int64_t param) {
  const std::lock_guard lock(mutex_);
  watched_[param]->bucket->zero(*watched_[param]);
}

int64_t GradientReducer::first_unfit(const std::vector<uint8_t>& used) {
  return first_with(used, kUnfit);
}

int64_t GradientReducer::first_changed(const std::vector<uint8_t>& used) {
  return first_with(used, kChanged);
}

void GradientReducer::show_stand_ins() {
  if (!has_nothing()) return;
  const std::lock_guard lock(mutex_);
  if (in_round_) post_missing();
  forget_unwanted();  // a stand-in says that the sum is wanted
  for (auto* param : watched_) {
    auto& gradient = param->reduced.param.mutable_grad();
    const bool is_trainable = param->reduced.param.requires_grad();
    if (!is_trainable || gradient.defined()) continue;
    if (!param->hook) watch(*param);  // it was frozen so far; its hook removes the stand-in
    gradient = param->stand_in;
    zero(*param);
  }
}

void GradientReducer::zero(WatchedParam& param) {
  param.stale = is_under_way(*param.bucket);
  param.bucket->zero(param);
  param.sum_is_zero = true;
}

void GradientReducer::zero(int64_t param) {
  const std::lock_guard lock(mutex_);
  if (in_round_) post_missing();
  zero(*watched_[param]);
}

void GradientReducer::zero_all() {
  const std::lock_guard lock(mutex_);
  if (in_round_) post_missing();
  for (auto* param : watched_) zero(*param);
  forget_rounds();
}

void GradientReducer::reset() {
  const std::lock_guard lock(mutex_);
  if (in_round_) post_missing();
  for (auto* param : watched_) {
    auto& gradient = param->reduced.param.mutable_grad();
    if (param->sum_is_wanted()) gradient.reset();
    param->set_aside = param->arriving = false;
  }
  for (auto& bucket : buckets_) bucket->forget();
  for (auto* param : watched_) zero(*param);  // what is on its way
  std::fill(used_here_.begin(), used_here_.end(), 0);
  knows_used_ = true;
  forget_rounds();
  made_round_ = false;
  settled_ = false;
}

}  // namespace shardstep
