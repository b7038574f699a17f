#pragma once

// Sums parts over the ranks of several hosts. The ranks of a host sum in shared memory, in rank
// order; the host's sums of what other hosts own go to the owners, each through the rank that runs
// the errand; an owner adds the hosts' sums in order of the hosts' lowest ranks, and divides.
//
// What happens in which thread: messages start, and host sums are taken, in calls of this rank's
// thread, or of its attendant (attended_sums.h) while that is elsewhere. Another thread waits for
// the sums of other hosts and adds them, since Gloo does not report what has arrived. A call waits
// only in finish().

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "comm/errands.h"
#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"
#include "comm/scratch.h"
#include "comm/shared/piece_sums.h"
#include "comm/worker.h"

namespace shardstep::detail {

// The sum of a bucket, from this rank's side.
class HostSum {
 public:
  double squares() const { return total_->squares; }

 private:
  friend class HostSums;
  // Written by the thread that adds the hosts' sums.
  struct Total {
    std::atomic<bool> done{false};
    double squares = 0;
    std::exception_ptr error;
  };
  struct Spoken {
    int owner = 0;
    at::Tensor memory;             // to give back
    std::vector<at::Tensor> sums;  // the host's, side by side in it
  };
  // The messages of another host, and the sums that they hold: the same, unless in blocks.
  struct Received {
    at::Tensor sums;  // undefined for this host
    std::vector<at::Tensor> memory;
    struct InBlocks {
      at::Tensor message;
      std::vector<at::Tensor> into;
    };
    std::vector<InBlocks> in_blocks;
  };

  int tag_ = 0;  // c10d's
  SumOptions options_;
  std::vector<at::Tensor> into_;  // the host's sum of what this rank owns, then everyone's
  int64_t own_numel_ = 0;
  std::shared_ptr<PieceSum> on_host_;
  std::vector<Spoken> to_send_;
  std::shared_ptr<PendingWorks> arriving_;  // other hosts' sums
  std::vector<Received> received_;          // by host
  std::shared_ptr<Total> total_ = std::make_shared<Total>();
};

class HostSums {
 public:
  HostSums(std::shared_ptr<SharedMemory> shared, ProcessGroupPtr group,
           std::shared_ptr<ConnectionWatch> watch, std::shared_ptr<MessageCount> messages);

  struct Setting {
    MessageTag tag;
    int message_tag = 0;                                 // c10d's
    std::optional<at::ScalarType> dtype = std::nullopt;  // of sums; unset: that of the parts
  };
  // Starts to sum parts[r] of all ranks on rank r, in `into`, which has a tensor for each of this
  // rank's own and may be the same. REQUIRES: parts of one dtype; the last sum with this tag is
  // finished.
  std::shared_ptr<HostSum> start(const Setting& setting, const Parts& parts,
                                 const std::vector<at::Tensor>& into, const SumOptions& options);
  // Starts to receive what other hosts will send for the next sum of parts like these, with the
  // same arguments (Reduction::expect).
  void expect(const Setting& setting, const Parts& like, const std::vector<at::Tensor>& into,
              const SumOptions& options);
  // Whether it is done by `end`.
  bool done_by(const HostSum& sum, std::chrono::steady_clock::time_point end);
  void finish(const HostSum& sum);
  // Does what other ranks have made possible while this one is elsewhere. Returns whether there is
  // more to come. Never waits.
  bool attend();

 private:
  void progress();
  at::ScalarType sum_dtype(size_t host, at::ScalarType posted, const Setting& setting) const;
  std::shared_ptr<HostSum> begin(const Setting& setting, const Parts& parts,
                                 const std::vector<at::Tensor>& into, const SumOptions& options);
  void receive_sums(HostSum& sum, const Setting& setting, const Parts& parts,
                    at::ScalarType posted);
  Parts parts_on_host(const Parts& parts, const std::vector<Errand>& errands) const;
  void send_spoken(HostSum& sum);
  static double add_hosts(const std::vector<HostSum::Received>& received,
                          const std::vector<at::Tensor>& into, SumOptions options);
  void add_later(const HostSum& sum);
  bool is_done(const HostSum& sum);

  ProcessGroupPtr group_;
  std::shared_ptr<ConnectionWatch> watch_;
  std::shared_ptr<SharedMemory> shared_;
  std::shared_ptr<MessageCount> messages_;
  PieceSums on_host_;
  std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
  std::map<int, std::shared_ptr<HostSum>> expected_;  // by c10d's tag
  std::deque<std::shared_ptr<HostSum>> under_way_;    // on this host
  Worker adding_, sending_;
};

}  // namespace shardstep::detail
