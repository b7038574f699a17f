#pragma once

// Stage 2: sums gradients over the ranks during the backward pass. As soon as the gradients of a
// bucket are ready, each owner gets its part of their sum; they are freed, and a stand-in without
// memory takes their place in `.grad`. The sum is kept as long as `.grad` is the stand-in, or what
// backward put in its place. Knows nothing about optimizers.
// A round is one backward pass with synchronization. A rank that made fewer rounds than others
// catches up, with zeros, before anybody looks at the sums.
// Thread safety: backward passes and calls from one thread at a time.

#include <ATen/ATen.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/exchange.h"
#include "shard/phase_times.h"
#include "shard/watched_bucket.h"
#include "shardstep/export.h"

namespace shardstep {

class SHARDSTEP_API GradientReducer {
 public:
  // `before_round` is called when the first gradient of a round is ready. REQUIRES: more than one
  // rank; `exchange` outlives the reducer.
  GradientReducer(Exchange& exchange, int rank, int world_size, std::function<void()> before_round);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Counts posts and sums from here on. REQUIRES: it outlives the reducer.
  void set_phase_times(PhaseTimes* times) { times_ = times; }
  // Bytes of the sums that are kept at the moment.
  int64_t sum_bytes() const;

  // Watches the gradients of a bucket's parameters from here on. They are posted in the parameters'
  // dtype, and summed in that of the options. REQUIRES: parameters of one dtype. Collective.
  void add_bucket(std::vector<ReducedParam> params, ReductionOptions options);

  // Forgets the buckets from number `first` on. REQUIRES: no rounds since they were added.
  void forget_buckets_from(size_t first);

  // What `.grad` shows while the gradient is divided among the ranks.
  void set_stand_in(int64_t param, at::Tensor stand_in);

  // Watches parameters that were unfrozen, and stops waiting for frozen ones. Call it between
  // backward passes. Collective.
  void follow_params();

  // If false, gradients accumulate in the parameters' `.grad`, and the next round includes them.
  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }

  // Whether there was a round since the last step or reset().
  bool made_round() const { return made_round_; }
  // How many rounds there were, ever.
  int64_t rounds() const { return rounds_; }
  // How many of them are forgotten for all parameters: what came before the last zero_grad().
  int64_t forgotten_rounds() const;
  bool all_forgotten() const { return forgotten_rounds() == rounds_; }
  // By bucket: how often this rank has posted it, and how many of these are forgotten. Frozen
  // buckets and those that are yet to be added take no part in a round.
  std::vector<BucketPosts> posts() const;
  // Which rounds since settle() are forgotten for some parameters only: a digest, 0 if there are
  // none. That of a rank which will catch up includes what it forgets by doing so.
  uint64_t forgotten_parts() const { return all_forgotten() ? 0 : forgotten_parts_; }
  uint64_t forgotten_parts_when_behind() const;
  // Whether this rank has added gradients since settle() that it has not forgotten.
  bool has_contributed() const { return has_contributed_; }
  // A round to which this rank contributes what is in `.grad`, if anything. Collective.
  void make_round();
  // Sends zeros for what is missing from a round.
  void end_round();
  // Forgets the first rounds and posts, and posts zeros for those of them that this rank did not
  // make. REQUIRES: !has_contributed() if these are more than forgotten_rounds(). Collective.
  void forget_up_to(int64_t forgotten_rounds, const std::vector<BucketPosts>& posts);
  // Posts zeros until there were as many rounds and posts of each bucket. Collective.
  void catch_up(int64_t rounds, const std::vector<BucketPosts>& posts);

  // By parameter: flags that describe this rank's gradients of it.
  std::vector<uint8_t> flags() const;
  // Adds a rank's flags to those of others. A rank that follows the leader has nothing of what the
  // leader has forgotten; `leader` is null for others.
  static void merge_flags(std::vector<uint8_t>& merged, const uint8_t* flags,
                          const uint8_t* leader);
  // Drops the gradients that the leader, with these flags, has dropped. If `forget`, also what was
  // summed before the rounds since settle(), as far as the leader has forgotten it. REQUIRES:
  // !has_contributed() if `forget`.
  void follow(const uint8_t* leader, bool forget);
  // Whether all gradients that were ever added here are forgotten.
  bool has_only_zeros() const;
  // Sets the sum so far to zero, and not what is on its way.
  void zero_sum(int64_t param);
  // How many rounds there were when settle() was last called; the same on every rank.
  int64_t settled_rounds() const { return settled_rounds_; }
  // A parameter that a gradient did not fit, or whose gradient of passes without synchronization
  // somebody changed beside a sum, by the flags of all ranks; -1 if there is none.
  static int64_t first_unfit(const std::vector<uint8_t>& used);
  static int64_t first_changed(const std::vector<uint8_t>& used);
  // Takes the sums. `used` combines the flags of all ranks; `.grad` of a parameter that no rank
  // used becomes undefined again. REQUIRES: all gradients fit. Collective.
  void settle(std::vector<uint8_t> used);
  // Whether it has been called since the last round.
  bool settled() const { return settled_; }

  const ReducedParam& reduced(int64_t param) const { return watched_[param]->reduced; }
  at::ScalarType sum_dtype(int64_t param) const { return watched_[param]->bucket->sum_dtype; }
  // Whether any rank has a gradient. REQUIRES: settled().
  bool has_gradient(int64_t param) const;
  // Whether any parameter's sum is still needed.
  bool has_sums() const;
  // The average over the ranks of what this rank owns of a parameter, in memory order; undefined if
  // there is no gradient or this rank owns nothing of it. REQUIRES: settled().
  at::Tensor own(int64_t param) const;
  // A trainable parameter whose `.grad` was replaced since the round; -1 if there is none.
  int64_t replaced() const;

  // From the next round on, also sums squares.
  void want_squares() { want_squares_ = true; }
  // The sum of the squares of all sums of this rank; unset if that would take another pass.
  // REQUIRES: settled(), and sums that have not changed since.
  std::optional<double> squares() const;

  // If this rank has made no round, or none that it has not forgotten, sets stand-ins for all
  // gradients, so that code that looks for gradients finds those of other ranks.
  void show_stand_ins();
  // Copies the sums whose memory the other ranks need for their next round.
  void keep_sums();
  // The gradient stays, and is zero. Waits for nobody.
  void zero(int64_t param);
  void zero_all();
  // Keeps the sums; the next step needs a round of its own.
  void next_step();
  // Forgets the sums. Completes the round of a backward pass that threw with zeros, so that the
  // other ranks get what they wait for. Waits for nobody: another rank may have had no batch, or
  // have thrown before its first gradient.
  void reset();

 private:
  // Flags that describe a parameter's gradients.
  static constexpr uint8_t kUsed = 1;
  static constexpr uint8_t kUnfit = 2;      // one did not fit the parameter that was added
  static constexpr uint8_t kForgotten = 4;  // what was summed before the rounds since settle()
  static constexpr uint8_t kDropped = 8;    // there is none, as far as `.grad` says
  static constexpr uint8_t kChanged = 16;   // WatchedParam::changed_beside_sum

  static void check_alone(const WatchedParam& param);
  void watch(WatchedParam& param);
  void unwatch(WatchedParam& param);
  void before_gradient(WatchedParam& param);
  void on_gradient(WatchedParam& param);
  void begin_round();
  void post_missing();
  void expect_next();
  void post_ready(WatchedBucket& bucket);
  void post(WatchedBucket& bucket);
  void take_ready_sums();
  void take_sums();
  void take_trainable_sums();
  void take_sum(WatchedBucket& bucket);
  bool is_under_way(const WatchedBucket& bucket) const;
  void zero(WatchedParam& param);
  bool has_nothing() const;
  void forget_unwanted();
  void forget_rounds();
  void post_until(WatchedBucket& bucket, int64_t posts);

  std::mutex mutex_;  // several devices have several threads for gradients
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  Exchange& exchange_;
  int rank_;
  int world_size_;
  std::function<void()> before_round_;
  PhaseTimes* times_ = nullptr;
  std::vector<std::unique_ptr<WatchedBucket>> buckets_;
  std::vector<WatchedParam*> watched_;  // by parameter
  std::deque<WatchedBucket*> under_way_;
  bool sync_ = true;
  bool want_squares_ = false;
  bool in_round_ = false;
  bool made_round_ = false;
  bool settled_ = false;
  bool has_contributed_ = false;
  bool knows_used_ = true;   // used_here_ is what any rank used
  bool begins_anew_ = true;  // the next round: it is the first since settle(), or all are forgotten
  int64_t settled_rounds_ = 0;
  int64_t rounds_ = 0;
  int64_t forgotten_rounds_ = 0;
  uint64_t forgotten_parts_ = 0;
  // By parameter: what this rank used since settle(), and what any rank had used before.
  std::vector<uint8_t> used_here_;
  // By parameter: whether what was summed before the rounds since settle() is forgotten.
  std::vector<bool> forgotten_here_;
  std::vector<uint8_t> used_;  // on any rank
};

}  // namespace shardstep
