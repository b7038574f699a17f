#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <vector>

namespace gpt {

// Call step() before each update: the learning rate rises over the first twentieth of the steps,
// then falls to a tenth.
class WarmUpAndDecay : public torch::optim::LRScheduler {
 public:
  WarmUpAndDecay(torch::optim::Optimizer& optimizer, int64_t steps)
      : LRScheduler(optimizer), peaks_(get_current_lrs()), steps_(static_cast<double>(steps)) {}

  // Resumes after `done` steps.
  void resume(int64_t done) { step_count_ = static_cast<unsigned>(done); }

 private:
  std::vector<double> get_lrs() override {
    const double done = step_count_ / steps_;
    const double factor = std::min((step_count_ + 1) / (0.05 * steps_), 1 - 0.9 * done);
    auto lrs = peaks_;
    for (auto& lr : lrs) lr *= factor;
    return lrs;
  }

  std::vector<double> peaks_;
  double steps_;
};

}  // namespace gpt
