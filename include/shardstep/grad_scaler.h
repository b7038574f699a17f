#pragma once

// Scales losses so that float16 gradients do not underflow, as Python's torch.amp.GradScaler does.
// In each iteration, call scale, backward, unscale_ (only to clip), step and update. A step whose
// gradients are not finite is skipped, on every rank or on none, and the scale shrinks; after
// `growth_interval` steps in a row that were not skipped, it grows.
// Collective: unscale_ and step, in stage 2 and with reduce_to_owners_hook. An optimizer with
// overlap_with_ddp is refused: it updates before gradients are unscaled.
// Thread safety: one thread at a time.

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <optional>

#include "shardstep/export.h"
#include "shardstep/state_dict.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {

struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536;
  TORCH_ARG(double, growth_factor) = 2;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  TORCH_ARG(bool, enabled) = true;
};

class SHARDSTEP_API GradScaler {
 public:
  // Throws ValueError unless growth_factor > 1 > backoff_factor.
  explicit GradScaler(const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;
  // Divides the optimizer's gradients by the scale, once before a step.
  void unscale_(ZeroRedundancyOptimizer& optimizer);
  // Unscales unless that was done, then steps if all gradients are finite. Returns whether it
  // stepped.
  bool step(ZeroRedundancyOptimizer& optimizer);
  // Adjusts the scale. Call it once per iteration, after the steps of all optimizers. A given scale
  // replaces the current one.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const { return options_.enabled() ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled(); }

  // Python's keys; nothing if the scaler is not enabled.
  NamedValues state_dict() const;
  void load_state_dict(const NamedValues& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kReady;
    bool finite = true;
  };

  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;  // steps in a row that were not skipped
  std::map<const void*, PerOptimizer> optimizers_;
};

}  // namespace shardstep
