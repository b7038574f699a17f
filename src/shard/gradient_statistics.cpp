#include "shard/gradient_statistics.h"

#include <cmath>
#include <limits>

namespace shardstep {
namespace {

double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }
double smaller(double a, double b) { return std::isnan(a) || a < b ? a : b; }

}  // namespace

double StatisticMerging::neutral() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (statistic_ == GradientStatistic::kLargest) return -kInfinity;
  return statistic_ == GradientStatistic::kSmallest ? kInfinity : 0;
}

at::Tensor StatisticMerging::of(const at::Tensor& part) const {
  switch (statistic_) {
    case GradientStatistic::kNorm: {
      // A norm of narrow numbers may be too large for their type.
      const auto type = part.scalar_type();
      const bool narrow = type == at::kHalf || type == at::kBFloat16;
      const auto dtype = narrow ? std::optional(at::kFloat) : std::nullopt;
      return at::linalg_vector_norm(part, norm_type_, std::nullopt, false, dtype);
    }
    case GradientStatistic::kSum:
      return part.sum(at::kDouble);
    case GradientStatistic::kLargest:
      return part.max();
    case GradientStatistic::kSmallest:
      return part.min();
    case GradientStatistic::kNans:
      return part.isnan().sum();
    case GradientStatistic::kInfinities:
      return part.isinf().sum();
  }
  TORCH_INTERNAL_ASSERT(false, "shardstep: an unknown statistic");
}

double StatisticMerging::merge(double a, double b) const {
  switch (statistic_) {
    case GradientStatistic::kNorm:
      break;
    case GradientStatistic::kSum:
    case GradientStatistic::kNans:
    case GradientStatistic::kInfinities:
      return a + b;
    case GradientStatistic::kLargest:
      return larger(a, b);
    case GradientStatistic::kSmallest:
      return smaller(a, b);
  }
  if (std::isinf(norm_type_)) return larger(a, b);
  if (norm_type_ == 0 || norm_type_ == 1) return a + b;
  if (a == 0 || b == 0) return a + b;
  if (norm_type_ == 2) return std::sqrt(a * a + b * b);
  return std::pow(std::pow(a, norm_type_) + std::pow(b, norm_type_), 1 / norm_type_);
}

void NumbersToRead::add(const at::Tensor& number, double& into) {
  auto& [numbers, targets] = by_device_[number.device()];
  numbers.push_back(number.to(at::kDouble));
  targets.push_back(&into);
}

void NumbersToRead::read() {
  for (auto& [device, waiting] : by_device_) {
    const auto numbers = at::stack(waiting.first).cpu();
    const auto* data = numbers.const_data_ptr<double>();
    for (size_t i = 0; i < waiting.second.size(); ++i) *waiting.second[i] = data[i];
  }
}

}  // namespace shardstep
