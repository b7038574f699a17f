#pragma once

// Messages over c10d that are under way. Small tensors travel together: a message costs as much as
// copying some hundred KiB, and a model may have thousands of parameters.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/connection_watch.h"
#include "comm/exchange.h"

namespace shardstep::detail {

// As the peer of a collective.
constexpr int kAllRanks = -1;

// c10d works, each with a description for errors and what to do when it has arrived, and what to do
// when all have.
class PendingWorks : public Pending {
 public:
  // `watch` ends waits for ranks that are gone. Null: the works are collectives, or of a backend
  // that ends them itself.
  explicit PendingWorks(const ProcessGroupPtr& group,
                        std::shared_ptr<ConnectionWatch> watch = nullptr)
      : rank_(group->getRank()),
        world_size_(group->getSize()),
        group_(group),
        watch_(std::move(watch)) {}
  ~PendingWorks() override;

  void add(c10::intrusive_ptr<c10d::Work> work, const char* verb, int peer,
           std::function<void()> arrived = {}, bool receives = false) {
    works_.push_back({std::move(work), verb, peer, std::move(arrived), receives});
  }
  // Only those whose messages it waits for must be there; other ranks may have done their part, and
  // left.
  void need_only_the_awaited() { needs_every_rank_ = false; }
  // Keeps tensors alive that the works only point to.
  void keep(std::vector<at::Tensor> tensors) {
    kept_.insert(kept_.end(), tensors.begin(), tensors.end());
  }
  // What to do when all works have arrived, in this order.
  void then(std::function<void()> finish) { finish_.push_back(std::move(finish)); }

  void wait() override;
  // The rank for whose message wait(), in another thread, waits; -1 outside of it.
  int awaited_rank() const { return awaited_rank_; }
  // Whether what it waits for cannot come if any rank is gone; for other threads too. A message to
  // a rank can: the sender may be the last to hear that it has arrived.
  bool needs_every_rank() const { return needs_every_rank_ && receives_; }
  // How many works have arrived; for other threads too.
  int64_t arrived() const { return arrived_; }
  // Makes wait(), in another thread, throw. What has not arrived will not.
  void abort() { end_wait(End::kAborted); }
  // The same, because a rank is gone that it needs.
  void lose() { end_wait(End::kLost); }

 private:
  struct Item {
    c10::intrusive_ptr<c10d::Work> work;
    const char* verb;
    int peer;
    std::function<void()> arrived;
    bool receives;
  };
  enum class End { kNone, kAborted, kLost };

  void wait_for(c10d::Work& work);
  void end_wait(End why);

  int rank_;
  int world_size_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;  // this may outlive it in a Worker's thread
  std::mutex mutex_;  // held while works are aborted, and while they are released
  std::vector<Item> works_;
  std::shared_ptr<ConnectionWatch> watch_;
  std::atomic<End> end_{End::kNone};
  std::atomic<int64_t> arrived_{0};
  std::atomic<int> awaited_rank_{-1};
  std::atomic<bool> receives_{false};  // from the awaited rank
  bool needs_every_rank_ = true;
  std::vector<at::Tensor> kept_;
  std::vector<std::function<void()>> finish_;
};

int64_t bytes_of(const std::vector<at::Tensor>& tensors);

int64_t numel_of(const std::vector<at::Tensor>& tensors);

// Tensors like `parts`, in `memory`, in their order. REQUIRES: `memory` has room for all.
std::vector<at::Tensor> side_by_side(const std::vector<at::Tensor>& parts,
                                     const at::Tensor& memory);
// The same, but those that travel together come first, so that a message needs no copy.
std::vector<at::Tensor> side_by_side_for_messages(const std::vector<at::Tensor>& parts,
                                                  const at::Tensor& memory);

// What travels for these tensors: a tensor per message. Copies small ones, unless they are side by
// side.
std::vector<at::Tensor> as_messages(const std::vector<at::Tensor>& tensors);

// Starts messages for all tensors, which are contiguous. Both sides pass the same sizes.
Sent send(const ProcessGroupPtr& group, PendingWorks& pending,
          const std::vector<at::Tensor>& tensors, int to, int tag);
Sent send_messages(const ProcessGroupPtr& group, PendingWorks& pending,
                   const std::vector<at::Tensor>& messages, int to, int tag);
// Returns the number of bytes.
int64_t receive(const ProcessGroupPtr& group, PendingWorks& pending,
                const std::vector<at::Tensor>& tensors, int from, int tag);

}  // namespace shardstep::detail
