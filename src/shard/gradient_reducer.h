#pragma once

// Stage 2: gradients are added up over the ranks while the backward pass goes on. As soon as the
// gradients of a bucket are there, each owner gets its part of their sum, and they are gone. Knows
// nothing of optimizers.
// A round is one backward pass with synchronization; every rank makes equally many between two
// steps, one at least. Thread safety: backward passes and calls from one thread at a time.

#include <ATen/ATen.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/exchange.h"
#include "shard/partition.h"
#include "shardstep/export.h"

namespace torch::autograd {
struct Node;
}

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

class SHARDSTEP_API GradientReducer {
 public:
  // `before_round` is called when the first gradient of a round has come. REQUIRES: more than one
  // rank; `exchange` outlives the reducer.
  GradientReducer(Exchange& exchange, int rank, int world_size, std::function<void()> before_round);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Watches the gradients of a bucket's parameters from here on. Collective.
  void add_bucket(std::vector<ReducedParam> params, ReductionOptions options);

  // Forgets the buckets from number `first` on. REQUIRES: no rounds since they were added.
  void forget_buckets_from(size_t first);

  // Parameters that were unfrozen get watched, frozen ones are not waited for. Collective: call it
  // between backward passes.
  void follow_params();

  // While off, gradients add up in the parameters' `.grad`; the next round takes them along.
  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }

  // Ends the rounds since the last step. Afterwards sum() and used() may be asked. Calls
  // `before_sums` when this rank has posted everything. Says whether there was anything to end.
  // Collective.
  bool finish(const std::function<void()>& before_sums);

  // From the next round on, squares are added up with the gradients.
  void want_squares() { want_squares_ = true; }
  // The squares of all sums of this rank, added up; nothing if that takes another pass over them.
  // REQUIRES: finish(), and sums that nobody has changed since.
  std::optional<double> squares() const;

  // The average over the ranks of what this rank owns of a bucket, slices side by side; in rank
  // order. REQUIRES: finish().
  const at::Tensor& sum(size_t bucket) const { return buckets_[bucket]->sum; }
  // Whether some rank had a gradient for the parameter. REQUIRES: finish().
  bool used(int64_t param) const { return used_[param]; }

  // Forgets what was added up: after a step, and for zero_grad(). A backward pass that threw half
  // way is made up for with zeros, so that the other ranks find what they wait for.
  void reset();

 private:
  struct Watched {
    ReducedParam reduced;
    bool trainable = false;
    bool ready = false;  // in this round
    c10::intrusive_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook = 0;
  };
  struct Bucket {
    std::vector<Watched> params;
    std::unique_ptr<Reduction> reduction;
    at::TensorOptions tensor;  // dtype and device of what is added up
    size_t waiting_for = 0;    // parameters whose gradients this round lacks
    bool posted = false;       // in this round
    int rounds = 0;            // since the last step
    at::Tensor sum;
    bool sum_is_lent = false;       // by the reduction
    std::optional<double> squares;  // of the sum

    bool has_trainable() const;
    void give_back();
  };

  void watch(Bucket& bucket, Watched& param);
  void unwatch(Watched& param);
  void on_gradient(Bucket& bucket, Watched& param);
  void begin_round();
  void end_round();
  void post_ready(Bucket& bucket);
  void post(Bucket& bucket);
  void take_sums();
  void take_sum(Bucket& bucket);

  std::mutex mutex_;  // gradients on several devices come from several threads
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  Exchange& exchange_;
  int rank_;
  int world_size_;
  std::function<void()> before_round_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::deque<Bucket*> under_way_;
  bool sync_ = true;
  bool want_squares_ = false;
  bool in_round_ = false;
  bool finished_ = false;
  std::vector<uint8_t> used_here_;  // by parameter, since the last step
  std::vector<uint8_t> used_;       // on any rank
};

}  // namespace shardstep
