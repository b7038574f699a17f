#pragma once

// Moves parts between the ranks of a group, without knowing what the bytes mean.
// Every call is collective. Ranks make the same calls for each tag in the same order; calls with
// different tags may come in any order if any_order(), else in the same order on all ranks.
//
//                          native              pairwise       shared memory, hierarchical
//   sums are taken         as the backend does in rank order  in rank order; per host, then over
//                                                             hosts in order of lowest rank
//   all_gather             returns at once     at once        when all ranks of the host have read
//                                                             the last one with this tag
//   reduce_scatter, post   returns at once     at once        at once
//   make_reduction         returns at once     at once        at once
//   all_gather_and_wait,   block until everything has arrived, a rank is known to have died or has
//   Pending::wait, finish  given up, or the group's timeout has passed
//
// All but native's sums have the same bits on every run. Native also sums in rank order where
// gradients are sent in a narrower dtype. Thread safety: one thread at a time per exchange.

#include <atomic>
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
namespace detail {
class ConnectionWatch;
}

// Communication under way. It keeps the tensors alive; destroying it does not wait.
class SHARDSTEP_API Pending {
 public:
  virtual ~Pending() = default;
  // Returns when everything has arrived; throws, naming what it waited for, when the transport
  // fails or the group's timeout passes. Call it once.
  virtual void wait() = 0;
};

// Messages to other ranks.
struct Sent {
  int64_t bytes = 0;
  int64_t messages = 0;
};

// What this rank has moved so far, by link: messages of the process group, and memory that the
// ranks of a host share.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t messages_sent = 0;  // not counting what a backend's collectives send
  int64_t bytes_shared = 0;   // copied into shared memory for the other ranks to read
};

// Counts messages, from any thread.
class MessageCount {
 public:
  void add_sent(const Sent& sent) {
    bytes_sent_ += sent.bytes;
    messages_sent_ += sent.messages;
  }
  void add_received(int64_t bytes) { bytes_received_ += bytes; }
  Traffic traffic() const {
    return {.bytes_sent = bytes_sent_,
            .bytes_received = bytes_received_,
            .messages_sent = messages_sent_};
  }

 private:
  std::atomic<int64_t> bytes_sent_{0}, bytes_received_{0}, messages_sent_{0};
};

struct ReductionOptions {
  std::vector<int64_t> numel;  // how many elements each rank owns
  at::TensorOptions tensor;    // dtype and device of the sum
  // The dtype of what is posted. Unset: the sum's.
  std::optional<at::ScalarType> posted = std::nullopt;
  // What is summed is first rounded to this dtype, unless it has it already, and sent in it; kChar
  // stands for 8-bit blocks (gradient_blocks.h). Ranks round what they own too, so that a sum does
  // not depend on who owns it. Unset: sent as it is. The hierarchical exchange sums what is posted
  // as it is inside a host, and rounds the hosts' sums.
  std::optional<at::ScalarType> wire = std::nullopt;
  MessageTag tag = MessageTag::bucket(0);
  double divisor = 1;
};

// Sums the same parts repeatedly, while something else is computed.
class SHARDSTEP_API Reduction {
 public:
  virtual ~Reduction() = default;
  // What other ranks send for the next round may come from now on. Over Gloo a rank hears that it
  // may send behind whatever is on the way to it, so that a link would carry one direction only
  // until a large message has arrived. `like`: parts of the dtype and sizes of the next post(), on
  // the meta device. Optional. REQUIRES: the next round will be posted.
  virtual void expect(const Parts& like) {}
  // Starts a round: parts[r] goes to rank r. They are released as soon as they are not needed.
  // `squares` requests squares(). REQUIRES: finish() ended the last round.
  virtual void post(Parts parts, bool squares) = 0;
  // Whether finish() would return at once; waits for that for at most `patience`.
  virtual bool ready(std::chrono::milliseconds patience) = 0;
  // The sum over all ranks of what this rank owns, divided: its parts side by side in one 1-D
  // tensor, which the next round overwrites.
  virtual at::Tensor finish() = 0;
  // The sum of the squares of that sum's elements; unset if that would take another pass.
  virtual std::optional<double> squares() const { return std::nullopt; }
};

class SHARDSTEP_API Exchange {
 public:
  // `channel`, the same on all ranks, separates the messages of exchanges that share a group.
  Exchange(ProcessGroupPtr group, int64_t channel);
  virtual ~Exchange() = default;

  // Copies parts[r] from rank r to every rank.
  virtual std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) = 0;

  // The same for several buckets, and waits. All ranks pass the same number of buckets.
  virtual void all_gather_and_wait(const std::vector<const Parts*>& buckets);

  // Sums parts[r] of all ranks on rank r, in its parts[r], and divides by `divisor`.
  // REQUIRES: parts of one dtype.
  virtual std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                                  double divisor = 1) = 0;

  // Ranks make their reductions in the same order; rounds of different reductions may come in any
  // order. Collective.
  virtual std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) = 0;

  // Whether the ranks of a host can share one copy of a tensor.
  virtual bool shares_memory() const { return false; }
  // A tensor in memory that all ranks of a host share. REQUIRES: shares_memory(). Collective.
  virtual at::Tensor make_shared(int64_t numel, const at::TensorOptions& options);
  // Copies parts[r] of such tensors from rank r to the hosts that do not share its memory. When
  // this returns on all ranks of a host, that host has everything.
  virtual void all_gather_between_hosts(const std::vector<const Parts*>& buckets) {}

  // Copies `own` of rank r to into[r] on rank `to`. REQUIRES: `into` fits on `to`; it is ignored on
  // other ranks, and so is into[to].
  std::unique_ptr<Pending> gather(const std::vector<at::Tensor>& own, const Parts& into, int to,
                                  MessageTag tag);

  // Copies tensors from rank `from` to rank `to`; other ranks do nothing.
  std::unique_ptr<Pending> transfer(const std::vector<at::Tensor>& tensors, int from, int to,
                                    MessageTag tag);

  // Tells the other ranks that this one will not do its part, and why: whatever they wait for ends
  // in an error that says so. The exchange is unusable until start_anew(). Ranks that
  // share memory hear of it at once; the waits of others end at the group's timeout.
  virtual void give_up(const std::string& message) {}
  // Forgets that somebody gave up, and what ranks began to share that others did not take.
  // REQUIRES: nothing is under way; every rank calls this, and uses the exchange when all have.
  virtual void start_anew() {}

  virtual const char* name() const = 0;
  // Whether calls with different tags may come in different orders on different ranks.
  virtual bool any_order() const = 0;
  virtual Traffic traffic() const { return messages_->traffic(); }
  const ProcessGroupPtr& process_group() const { return group_; }

 protected:
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  // The tag for c10d.
  int message_tag(MessageTag tag) const;

  ProcessGroupPtr group_;
  std::shared_ptr<detail::ConnectionWatch> watch_;  // of messages; it ends before the group
  // Of gradients and parameters. Shared with threads that may outlive this.
  std::shared_ptr<MessageCount> messages_ = std::make_shared<MessageCount>();

 private:
  int64_t channel_;
};

}  // namespace shardstep
