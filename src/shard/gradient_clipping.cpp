#include "shard/gradient_clipping.h"

#include <cmath>
#include <numeric>

#include "launch/who.h"

namespace shardstep {
namespace {

std::vector<int64_t> all_params(const ShardEngine& engine) {
  std::vector<int64_t> params(engine.param_count());
  std::iota(params.begin(), params.end(), 0);
  return params;
}

double total_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const auto& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    // A norm of narrow numbers may be too large for their type.
    const auto dtype = is_narrow(gradient.scalar_type()) ? std::optional(at::kFloat) : std::nullopt;
    norms.push_back(at::linalg_vector_norm(gradient, norm_type, std::nullopt, false, dtype).cpu());
  }
  return norms.empty() ? 0 : at::linalg_vector_norm(at::stack(norms), norm_type).item<double>();
}

}  // namespace

double clip_grad_norm(ShardEngine& engine, double max_norm, double norm_type,
                      bool error_if_nonfinite) {
  engine.check_stage_2("clip_grad_norm_");
  at::NoGradGuard no_grad;
  auto* const sharded = engine.gradients();
  const auto whole = sharded ? std::vector<at::Tensor>() : engine.whole_gradients();
  const double total = sharded ? sharded->total_norm(norm_type) : total_norm(whole, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total),
              "shardstep: expected gradients with a finite norm, got ", total,
              detail::who(engine.process_group()));
  const double factor = max_norm / (total + 1e-6);
  if (factor >= 1) return total;
  if (sharded) sharded->scale(all_params(engine), factor);
  for (at::Tensor gradient : whole) gradient.mul_(factor);
  return total;
}

void clip_grad_value(ShardEngine& engine, double clip_value) {
  engine.check_stage_2("clip_grad_value_");
  at::NoGradGuard no_grad;
  if (auto* const sharded = engine.gradients()) {
    sharded->settle_together();
    return sharded->clamp(all_params(engine), -clip_value, clip_value);
  }
  for (at::Tensor gradient : engine.whole_gradients()) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace shardstep
