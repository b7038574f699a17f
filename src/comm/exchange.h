#pragma once

// Moves parts between the ranks of a group; knows nothing of what the bytes mean. Sums are taken in
// rank order where the exchange is ours (pairwise), so they are the same on every run.
// Every call is collective and returns at once; `Pending::wait` finishes it. Ranks make the same
// calls for each tag in the same order; calls with different tags may come in any order if the
// exchange says so.
// Thread safety: one thread at a time per exchange.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/parts.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"
#include "shardstep/sharding.h"

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
  int tag = 0;
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
  // Lets other ranks start the next round. REQUIRES: finish() was called.
  virtual void release() = 0;
};

class SHARDSTEP_API Exchange {
 public:
  // `channel` keeps the messages of exchanges that share a group apart; the ranks agree on it.
  Exchange(ProcessGroupPtr group, int64_t channel);
  virtual ~Exchange() = default;

  // parts[r] of rank r reach every rank.
  virtual std::unique_ptr<Pending> all_gather(const Parts& parts, int tag) = 0;

  // The same for bucket after bucket, and waits; bucket b has tag b. All ranks give the same
  // number.
  virtual void all_gather_and_wait(const std::vector<Parts>& buckets);

  // parts[r] of all ranks are added up on rank r, in its parts[r], and divided by `divisor`.
  // REQUIRES: parts of one dtype.
  virtual std::unique_ptr<Pending> reduce_scatter(const Parts& parts, int tag,
                                                  double divisor = 1) = 0;

  // Ranks make their reductions in the same order; rounds of different ones may come in any.
  // Collective.
  virtual std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) = 0;

  // A tensor in memory that every rank has; undefined if ranks do not share any. Collective.
  virtual at::Tensor make_shared(int64_t, const at::TensorOptions&) { return {}; }

  // `own` of every rank reaches rank `to`, in into[r]. REQUIRES: `into` fits on `to`; it is not
  // looked at elsewhere, nor is into[to].
  std::unique_ptr<Pending> gather(const std::vector<at::Tensor>& own, const Parts& into, int to,
                                  int tag);

  // Tensors of rank `from` reach rank `to`; other ranks pass.
  std::unique_ptr<Pending> transfer(const std::vector<at::Tensor>& tensors, int from, int to,
                                    int tag);

  virtual const char* name() const = 0;
  // Whether calls with different tags may come in another order on another rank.
  virtual bool any_order() const = 0;
  const Traffic& traffic() const { return traffic_; }

 protected:
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  int message_tag(int tag) const;

  ProcessGroupPtr group_;
  Traffic traffic_;

 private:
  int64_t channel_;
};

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::kAuto;
  at::Device device = at::kCPU;
  int64_t channel = 0;
};

// REQUIRES: the group has more than one rank. Collective.
SHARDSTEP_API std::unique_ptr<Exchange> make_exchange(const ProcessGroupPtr& group,
                                                      const ExchangeOptions& options);

}  // namespace shardstep
