#include "shard/gradient_clipping.h"

#include <cmath>

#include "comm/agreement.h"
#include "launch/who.h"

namespace shardstep {
namespace {

// Adds up norms to the power of their type, or takes the largest.
class NormSum {
 public:
  explicit NormSum(double norm_type) : norm_type_(norm_type) {}
  void add_norm(double norm) { add(is_largest() ? norm : std::pow(norm, norm_type_)); }
  void add(double term) {
    if (!is_largest()) {
      sum_ += term;
    } else if (std::isnan(term) || term > sum_) {
      sum_ = term;
    }
  }
  double sum() const { return sum_; }
  double norm() const { return is_largest() ? sum_ : std::pow(sum_, 1 / norm_type_); }

 private:
  bool is_largest() const { return std::isinf(norm_type_); }
  double norm_type_;
  double sum_ = 0;
};

double norm_over_ranks(const ProcessGroupPtr& group, double own_sum, double norm_type) {
  NormSum total(norm_type);
  for (double sum : detail::all_gather_number(group, own_sum)) total.add(sum);
  return total.norm();
}

}  // namespace

double clip_grad_norm(ShardEngine& engine, double max_norm, double norm_type,
                      bool error_if_nonfinite) {
  engine.check_stage_2("clip_grad_norm_");
  at::NoGradGuard no_grad;
  const auto [gradients, squares] = engine.owned_gradients(norm_type == 2);
  NormSum own(norm_type);
  if (squares) {
    own.add(*squares);
  } else {
    for (const auto& gradient : gradients) {
      if (gradient.numel() > 0) own.add_norm(at::norm(gradient, norm_type).item<double>());
    }
  }
  const double total = norm_over_ranks(engine.process_group(), own.sum(), norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total),
              "shardstep: expected gradients with a finite norm, got ", total,
              detail::who(engine.process_group()));
  const double factor = max_norm / (total + 1e-6);
  if (!(factor >= 1)) {
    for (at::Tensor gradient : gradients) gradient.mul_(factor);
  }
  return total;
}

void clip_grad_value(ShardEngine& engine, double clip_value) {
  engine.check_stage_2("clip_grad_value_");
  at::NoGradGuard no_grad;
  for (at::Tensor gradient : engine.owned_gradients(/*want_squares=*/false).tensors) {
    gradient.clamp_(-clip_value, clip_value);
  }
}

}  // namespace shardstep
