#pragma once

// Messages over c10d that are under way. Small tensors travel together: a message costs as much as
// copying some hundred KiB, and a model may have thousands of parameters.

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "comm/exchange.h"

namespace shardstep::detail {

// As the peer of a collective.
constexpr int kAllRanks = -1;

// c10d works, each with a description for errors and what to do when it has arrived, and what to do
// when all have.
class PendingWorks : public Pending {
 public:
  explicit PendingWorks(const ProcessGroupPtr& group)
      : rank_(group->getRank()), world_size_(group->getSize()), group_(group) {}

  void add(c10::intrusive_ptr<c10d::Work> work, const char* verb, int peer,
           std::function<void()> arrived = {}) {
    works_.push_back({std::move(work), verb, peer, std::move(arrived)});
  }
  // Keeps tensors alive that the works only point to.
  void keep(std::vector<at::Tensor> tensors) {
    kept_.insert(kept_.end(), tensors.begin(), tensors.end());
  }
  // What to do when all works have arrived, in this order.
  void then(std::function<void()> finish) { finish_.push_back(std::move(finish)); }

  void wait() override;
  // The rank for whose message wait(), in another thread, waits; -1 outside of it.
  int awaited_rank() const { return awaited_rank_; }
  // Makes wait(), in another thread, throw. What has not arrived will not.
  void abort();

 private:
  struct Item {
    c10::intrusive_ptr<c10d::Work> work;
    const char* verb;
    int peer;
    std::function<void()> arrived;
  };
  int rank_;
  int world_size_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;  // this may outlive it in a Worker's thread
  std::mutex mutex_;  // held while works are aborted, and while they are released
  std::vector<Item> works_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> awaited_rank_{-1};
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
