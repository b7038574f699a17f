#pragma once

// Stage 2: calls back when the backward pass brings a parameter's gradient, for as long as it
// exists. Thread safety: created and destroyed between backward passes; the callbacks run in
// autograd's threads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "shardstep/export.h"
#include "torch_versions.h"

namespace shardstep {

// Throws if DistributedDataParallel, torch's or ours, averages the parameter's gradient.
SHARDSTEP_API void check_not_under_ddp(const at::Tensor& param, int64_t index);

class GradientHook {
 public:
  // `before` runs before the gradient is stored or added, `after` afterwards.
  GradientHook(const at::Tensor& param, std::function<void()> before, std::function<void()> after);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  // How many of these the parameter has.
  int count() const;

 private:
  detail::GradAccumulatorPtr accumulator_;  // autograd alone would drop it between passes
  const void* before_;
  uintptr_t after_;
};

}  // namespace shardstep
