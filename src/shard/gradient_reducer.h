#pragma once

// Stage 2: gradients are added up over the ranks while the backward pass goes on. As soon as the
// gradients of a bucket are there, each owner gets its part of their sum; they are freed, and a
// stand-in without memory takes their place in `.grad`. Who replaces or removes the stand-in says
// what becomes of the sum: it lives as long as the stand-in, or what backward put in its place.
// Knows nothing of optimizers.
// A round is one backward pass with synchronization; every rank makes equally many between two
// steps. Thread safety: backward passes and calls from one thread at a time.

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

// Throws if DistributedDataParallel, torch's or ours, averages the parameter's gradient.
SHARDSTEP_API void check_not_under_ddp(const at::Tensor& param, int64_t index);

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

  // What `.grad` shows while the gradient is divided among the ranks.
  void set_stand_in(int64_t param, at::Tensor stand_in);

  // Parameters that were unfrozen get watched, frozen ones are not waited for. Collective: call it
  // between backward passes.
  void follow_params();

  // While off, gradients add up in the parameters' `.grad`; the next round takes them along.
  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }

  // Whether there was a round since the last step or reset().
  bool made_round() const { return made_round_; }
  // How many rounds there were, ever.
  int64_t rounds() const { return rounds_; }
  // A round to which this rank adds what is in `.grad`, if anything. Collective.
  void make_round();
  // What is lacking of a round goes out as zeros.
  void end_round();

  // By parameter: what is to be said of this rank's gradients of it.
  const std::vector<uint8_t>& used_here() const { return used_here_; }
  // Takes the sums. `used` is what all ranks said together; `.grad` of a parameter that nobody used
  // is undefined again. Throws if a gradient did not fit its parameter, on every rank. Collective.
  void settle(std::vector<uint8_t> used);
  // Whether it has been called since the last round.
  bool settled() const { return settled_; }

  const ReducedParam& reduced(int64_t param) const { return watched_[param]->reduced; }
  // Whether there is a gradient, on whichever rank. REQUIRES: settled().
  bool has_gradient(int64_t param) const;
  // Whether any parameter's sum is still wanted.
  bool has_sums() const;
  // The average over the ranks of what this rank owns of a parameter, in memory order; undefined if
  // there is no gradient or this rank owns nothing of it. REQUIRES: settled().
  at::Tensor own(int64_t param) const;
  // A trainable parameter whose `.grad` somebody has replaced since the round; -1 if there is none.
  int64_t replaced() const;

  // From the next round on, squares are added up with the gradients.
  void want_squares() { want_squares_ = true; }
  // The squares of all sums of this rank, added up; nothing if that takes another pass over them.
  // REQUIRES: settled(), and sums that nobody has changed since.
  std::optional<double> squares() const;

  // Stand-ins for all gradients of a rank that has made no round, so that code that looks for
  // gradients finds them.
  void show_stand_ins();
  // Keeps copies of sums whose memory the others need for their next round.
  void give_back_sums();
  // The gradient stays, and is zero.
  void zero(int64_t param);
  // The sums live on; the next step wants a round of its own.
  void next_step();
  // Forgets what was added up. A backward pass that threw half way is made up for with zeros, so
  // that the other ranks find what they wait for.
  void reset();

 private:
  struct Bucket;
  struct Watched {
    ReducedParam reduced;
    std::optional<Range> own;  // the elements that this rank owns
    int64_t own_offset = 0;    // in the bucket's sum
    Bucket* bucket = nullptr;
    at::Tensor stand_in;
    bool trainable = false;
    bool ready = false;  // in this round
    // The backward pass has taken the stand-in away to put a gradient there; the sum is still
    // wanted as long as that gradient is.
    bool set_aside = false;
    bool arriving = false;  // the gradient
    c10::intrusive_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook = 0;
    const void* pre_hook = nullptr;

    bool sum_is_wanted() const;
  };
  struct Bucket {
    std::vector<Watched> params;
    std::unique_ptr<Reduction> reduction;
    at::TensorOptions tensor;  // dtype and device of what is added up
    size_t waiting_for = 0;    // parameters whose gradients this round lacks
    bool posted = false;       // in this round
    at::Tensor sum;
    bool sum_is_lent = false;       // by the reduction
    std::optional<double> squares;  // of the sum

    bool has_trainable() const;
    void give_back();
    void copy_and_give_back();
    void forget();
    void keep_what_is_wanted();
  };
  friend struct GradientHooks;

  void watch(Watched& param);
  void unwatch(Watched& param);
  void before_gradient(Watched& param);
  void on_gradient(Watched& param);
  void begin_round();
  void post_missing();
  void post_ready(Bucket& bucket);
  void post(Bucket& bucket);
  void take_ready_sums();
  void take_sums();
  void take_sum(Bucket& bucket);

  std::mutex mutex_;  // gradients on several devices come from several threads
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  Exchange& exchange_;
  int rank_;
  int world_size_;
  std::function<void()> before_round_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Watched*> watched_;  // by parameter
  std::deque<Bucket*> under_way_;
  bool sync_ = true;
  bool want_squares_ = false;
  bool in_round_ = false;
  bool made_round_ = false;
  bool settled_ = false;
  int64_t rounds_ = 0;
  std::vector<uint8_t> used_here_;  // by parameter
  std::vector<uint8_t> used_;       // on any rank
};

}  // namespace shardstep
