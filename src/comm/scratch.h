#pragma once

// Reused memory to send from and receive into: glibc returns large blocks to the kernel when they
// are freed, and then every page of a new one faults. Thread-safe.

#include <ATen/ATen.h>

#include <mutex>
#include <vector>

namespace shardstep::detail {

class Scratch {
 public:
  // At least `numel` elements.
  at::Tensor take(int64_t numel, const at::TensorOptions& options) {
    const std::lock_guard lock(mutex_);
    auto best = spare_.end();
    for (auto one = spare_.begin(); one != spare_.end(); ++one) {
      const bool fits = one->numel() >= numel && one->device() == options.device() &&
                        one->dtype() == options.dtype();
      if (fits && (best == spare_.end() || one->numel() < best->numel())) best = one;
    }
    if (best == spare_.end()) return at::empty({numel}, options);
    auto taken = std::move(*best);
    spare_.erase(best);
    return taken;
  }
  void give_back(std::vector<at::Tensor> tensors) {
    const std::lock_guard lock(mutex_);
    for (auto& tensor : tensors) spare_.push_back(std::move(tensor));
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> spare_;
};

}  // namespace shardstep::detail
