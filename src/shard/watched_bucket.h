#pragma once

// Stage 2: a bucket of parameters whose gradients are summed over the ranks, and the sum of what
// this rank owns of them. While a gradient is divided among the ranks, a stand-in without memory is
// in `.grad`; the sum is wanted as long as it is there, or what a backward pass put in its place.
// GradientReducer decides what happens when. Thread safety: none. Nothing here communicates.

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <vector>

#include "comm/exchange.h"
#include "shard/gradient_hook.h"
#include "shard/partition.h"

namespace shardstep {

// A parameter in a bucket, and who owns which elements of it, in order of rank.
struct ReducedParam {
  int64_t index = 0;  // across groups
  at::Tensor param;
  std::vector<Slice> slices;

  int64_t numel() const {
    int64_t numel = 0;
    for (const auto& slice : slices) numel += slice.elements.size();
    return numel;
  }
};

// How often a rank has posted a bucket, and how many of these posts are forgotten.
struct BucketPosts {
  int64_t made = 0;
  int64_t forgotten = 0;
};

struct WatchedBucket;

struct WatchedParam {
  ReducedParam reduced;
  std::optional<Range> own;  // the elements that this rank owns
  int64_t own_offset = 0;    // in the bucket's sum
  WatchedBucket* bucket = nullptr;
  at::Tensor stand_in;
  std::unique_ptr<GradientHook> hook;  // once it was trainable
  bool trainable = false;
  bool ready = false;  // in this round
  // The backward pass has removed the stand-in to put a gradient there; the sum is needed as long
  // as that gradient exists.
  bool set_aside = false;
  bool arriving = false;     // the gradient
  bool stale = false;        // what is on its way is forgotten already
  bool sum_is_zero = false;  // here; what others have posted since would not be
  // The gradient as the last backward pass left it.
  const void* left = nullptr;
  std::optional<int64_t> left_version;

  bool sum_is_wanted() const;
  // Whether somebody has changed the gradient of passes without synchronization while a sum is kept
  // beside it, which should have changed too.
  bool changed_beside_sum() const;
  void note_gradient();
};

struct WatchedBucket {
  std::vector<WatchedParam> params;  // they do not move
  std::unique_ptr<Reduction> reduction;
  at::TensorOptions gradient;  // dtype and device of what is posted
  Parts like;                  // what is posted, on the meta device
  bool expected = false;       // by the reduction, in this round
  at::ScalarType sum_dtype = at::kFloat;
  size_t waiting_for = 0;  // parameters whose gradients are missing in this round
  bool posted = false;     // in this round
  BucketPosts posts;
  int64_t settled_posts = 0;  // how many there were when the sums were last settled
  at::Tensor sum;
  bool sum_is_lent = false;       // by the reduction
  std::optional<double> squares;  // of the sum

  bool has_trainable() const;
  bool has_new_posts() const;  // that were neither settled nor forgotten
  void keep_sum();
  void forget();
  // The next round overwrites what was lent.
  void keep_what_is_wanted();
  void zero(const WatchedParam& param);
  // Whether there was anything to zero in a sum that has just come.
  bool zero_stale(const at::Tensor& sum);
};

}  // namespace shardstep
