#pragma once

// Moves parts between the ranks of a group; knows nothing of what the bytes mean.
// Every call is collective. Ranks make the same calls for each tag in the same order; calls with
// different tags may come in any order where any_order() says so, else in one order on all ranks.
//
//                          native              pairwise       shared memory
//   sums are taken         as the backend does in rank order  in rank order
//   all_gather             returns at once     at once        when all have read the last one
//                                                             with this tag
//   reduce_scatter, post   returns at once     at once        at once
//   make_reduction         returns at once     at once        at once
//   all_gather_and_wait,   block until everything has arrived, a rank is known to be gone or has
//   Pending::wait, finish  given up, or the group's timeout has passed
//
// A sum in rank order has the same bits on every run. Native also takes it in rank order where
// gradients travel in a narrower dtype. Thread safety: one thread at a time per exchange.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/message_tag.h"
#include "comm/parts.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep {

// Communication under way. It keeps the tensors alive; dropping it does not wait.
class SHARDSTEP_API Pending {
 public:
  virtual ~Pending() = default;
  // Returns when everything has arrived; throws, naming what it waited for, when the transport
  // fails or the group's timeout passes. Call it once.
  virtual void wait() = 0;
};

// What this rank has moved so far.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

struct ReductionOptions {
  std::vector<int64_t> numel;  // how many elements each rank owns
  at::TensorOptions tensor;    // dtype and device of what is added up
  // What is added up is first rounded to this dtype, and travels so. Ranks round what they own too:
  // a sum does not depend on who owns it.
  std::optional<at::ScalarType> wire = std::nullopt;
  MessageTag tag = MessageTag::bucket(0);
  double divisor = 1;
};

// Adding up the same parts again and again, while something else is computed.
class SHARDSTEP_API Reduction {
 public:
  virtual ~Reduction() = default;
  // Starts a round: parts[r] goes to rank r. They are dropped as soon as they are not needed.
  // `squares` asks for squares(). REQUIRES: the last round was released.
  virtual void post(Parts parts, bool squares) = 0;
  // Whether finish() would return at once; waits for that, but not longer than `patience`.
  virtual bool ready(std::chrono::milliseconds patience) = 0;
  // The sum of what this rank owns over all ranks, divided; parts side by side in one 1-D tensor,
  // which is lent until release().
  virtual at::Tensor finish() = 0;
  // The squares of that sum's elements, added up; nothing if that takes another pass over them.
  virtual std::optional<double> squares() const { return std::nullopt; }
  // Gives the sum back, which the next round overwrites. REQUIRES: finish() was called.
  virtual void release() = 0;
};

class SHARDSTEP_API Exchange {
 public:
  // `channel` keeps the messages of exchanges that share a group apart; the ranks agree on it.
  Exchange(ProcessGroupPtr group, int64_t channel);
  virtual ~Exchange() = default;

  // parts[r] of rank r reach every rank.
  virtual std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) = 0;

  // The same for bucket after bucket, and waits. All ranks give the same number of buckets.
  virtual void all_gather_and_wait(const std::vector<Parts>& buckets);

  // parts[r] of all ranks are added up on rank r, in its parts[r], and divided by `divisor`.
  // REQUIRES: parts of one dtype.
  virtual std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                                  double divisor = 1) = 0;

  // Ranks make their reductions in the same order; rounds of different ones may come in any.
  // Collective.
  virtual std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) = 0;

  // Whether all ranks can have one copy of a tensor.
  virtual bool shares_memory() const { return false; }
  // A tensor in memory that every rank has. REQUIRES: shares_memory(). Collective.
  virtual at::Tensor make_shared(int64_t numel, const at::TensorOptions& options);

  // `own` of every rank reaches rank `to`, in into[r]. REQUIRES: `into` fits on `to`; it is not
  // looked at elsewhere, nor is into[to].
  std::unique_ptr<Pending> gather(const std::vector<at::Tensor>& own, const Parts& into, int to,
                                  MessageTag tag);

  // Tensors of rank `from` reach rank `to`; other ranks pass.
  std::unique_ptr<Pending> transfer(const std::vector<at::Tensor>& tensors, int from, int to,
                                    MessageTag tag);

  // Tells the other ranks that this one will not do its part, and why: whatever they wait for ends
  // in an error that says so. The exchange is of no use afterwards. Through shared memory they hear
  // at once; otherwise nobody is told, and their waits end at the group's timeout.
  virtual void give_up(const std::string& message) {}

  virtual const char* name() const = 0;
  // Whether calls with different tags may come in another order on another rank.
  virtual bool any_order() const = 0;
  const Traffic& traffic() const { return traffic_; }

 protected:
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  // As c10d wants it.
  int message_tag(MessageTag tag) const;

  ProcessGroupPtr group_;
  Traffic traffic_;

 private:
  int64_t channel_;
};

}  // namespace shardstep
