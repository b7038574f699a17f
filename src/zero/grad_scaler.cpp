#include "shardstep/grad_scaler.h"

#include <ATen/ATen.h>

#include <cmath>

#include "launch/who.h"

namespace shardstep {

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(options.init_scale()) {
  if (!options_.enabled()) return;
  TORCH_CHECK_VALUE(options_.growth_factor() > 1,
                    "shardstep: expected a growth_factor above 1, got ", options_.growth_factor());
  TORCH_CHECK_VALUE(options_.backoff_factor() < 1,
                    "shardstep: expected a backoff_factor below 1, got ",
                    options_.backoff_factor());
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return options_.enabled() ? loss * scale_ : loss;
}

void GradScaler::unscale_(ZeroRedundancyOptimizer& optimizer) {
  if (!options_.enabled()) return;
  auto& [stage, finite] = optimizers_[&optimizer];
  TORCH_CHECK(stage == Stage::kReady, "shardstep: expected unscale_() once, before step(), since ",
              "the last update(), got it ",
              stage == Stage::kUnscaled ? "a second time" : "after step()",
              detail::who(optimizer.process_group()));
  finite = optimizer.scale_gradients_(1 / scale_);
  stage = Stage::kUnscaled;
}

bool GradScaler::step(ZeroRedundancyOptimizer& optimizer) {
  if (!options_.enabled()) {
    optimizer.step();
    return true;
  }
  auto& state = optimizers_[&optimizer];
  TORCH_CHECK(state.stage != Stage::kStepped,
              "shardstep: expected step() once since the last update(), got it a second time",
              detail::who(optimizer.process_group()));
  if (state.stage == Stage::kReady) unscale_(optimizer);
  if (state.finite) optimizer.step();
  state.stage = Stage::kStepped;
  return state.finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled()) return;
  if (new_scale) {
    scale_ = *new_scale;
  } else {
    TORCH_CHECK(!optimizers_.empty(),
                "shardstep: expected unscale_() or step() before update(), got neither");
    bool finite = true;
    for (const auto& [optimizer, state] : optimizers_) finite = finite && state.finite;
    if (!finite) {
      scale_ *= options_.backoff_factor();
      growth_tracker_ = 0;
    } else if (++growth_tracker_ == options_.growth_interval()) {
      // In float32, as Python's: a scale that would overflow stays.
      const auto grown = static_cast<float>(scale_ * options_.growth_factor());
      if (std::isfinite(grown)) scale_ = grown;
      growth_tracker_ = 0;
    }
  }
  optimizers_.clear();
}

NamedValues GradScaler::state_dict() const {
  NamedValues state;
  if (!options_.enabled()) return state;
  state.insert("scale", scale_);
  state.insert("growth_factor", options_.growth_factor());
  state.insert("backoff_factor", options_.backoff_factor());
  state.insert("growth_interval", options_.growth_interval());
  state.insert("_growth_tracker", growth_tracker_);
  return state;
}

void GradScaler::load_state_dict(const NamedValues& state) {
  if (!options_.enabled()) return;
  const auto read = [&](const char* key) {
    const auto* value = state.find(key);
    TORCH_CHECK_VALUE(value && (value->isDouble() || value->isInt()),
                      "shardstep: expected a GradScaler's state with a number '", key,
                      "'; was it saved by one that was enabled?");
    return value->toScalar();
  };
  const double scale = read("scale").toDouble();
  auto options = options_;
  options.growth_factor(read("growth_factor").toDouble())
      .backoff_factor(read("backoff_factor").toDouble())
      .growth_interval(read("growth_interval").toLong());
  growth_tracker_ = read("_growth_tracker").toLong();
  scale_ = scale;
  options_ = options;
}

}  // namespace shardstep
