#pragma once

// Messages over c10d that are under way.

#include <functional>
#include <vector>

#include "comm/exchange.h"

namespace shardstep::detail {

// c10d works, each with what to say when it fails, and what to do when all have arrived.
class PendingWorks : public Pending {
 public:
  explicit PendingWorks(const ProcessGroupPtr& group)
      : rank_(group->getRank()), world_size_(group->getSize()) {}

  void add(c10::intrusive_ptr<c10d::Work> work, const char* verb, int peer) {
    works_.push_back({std::move(work), verb, peer});
  }
  // Holds on to tensors that the works only point at.
  void keep(std::vector<at::Tensor> tensors) {
    kept_.insert(kept_.end(), tensors.begin(), tensors.end());
  }
  void then(std::function<void()> finish) { finish_ = std::move(finish); }

  void wait() override;

 private:
  struct Item {
    c10::intrusive_ptr<c10d::Work> work;
    const char* verb;
    int peer;
  };
  int rank_;
  int world_size_;
  std::vector<Item> works_;
  std::vector<at::Tensor> kept_;
  std::function<void()> finish_;
};

int64_t bytes_of(const std::vector<at::Tensor>& tensors);

// Starts messages for all tensors; says how many bytes that makes.
int64_t send(const ProcessGroupPtr& group, PendingWorks& pending,
             const std::vector<at::Tensor>& tensors, int to, int tag);
int64_t receive(const ProcessGroupPtr& group, PendingWorks& pending,
                const std::vector<at::Tensor>& tensors, int from, int tag);

}  // namespace shardstep::detail
