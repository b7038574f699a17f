#include "rank_order_sum.h"

#include <algorithm>
#include <cmath>

namespace shardstep::detail {
namespace {

constexpr int64_t kBlock = 4096;  // elements; a block's sum stays in the first cache

bool all_of(const std::vector<at::Tensor>& terms, at::ScalarType dtype) {
  return std::all_of(terms.begin(), terms.end(),
                     [=](const at::Tensor& term) { return term.scalar_type() == dtype; });
}

// Dividing by a power of two is multiplying by its inverse, to the bit, and quicker.
bool is_power_of_two(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5;
}

template <class T>
void sum_on_cpu(const std::vector<at::Tensor>& terms, const at::Tensor& into, double divisor) {
  std::vector<const T*> inputs;
  for (const auto& term : terms) inputs.push_back(term.const_data_ptr<T>());
  T* const output = into.mutable_data_ptr<T>();
  const bool multiply = is_power_of_two(divisor);
  const T factor = static_cast<T>(multiply ? 1 / divisor : divisor);
  T sum[kBlock];
  for (int64_t begin = 0; begin < into.numel(); begin += kBlock) {
    const int64_t size = std::min(kBlock, into.numel() - begin);
    std::copy_n(inputs[0] + begin, size, sum);
    for (size_t t = 1; t < inputs.size(); ++t) {
      const T* const term = inputs[t] + begin;
      for (int64_t i = 0; i < size; ++i) sum[i] += term[i];
    }
    T* const out = output + begin;
    if (multiply) {
      for (int64_t i = 0; i < size; ++i) out[i] = sum[i] * factor;
    } else {
      for (int64_t i = 0; i < size; ++i) out[i] = sum[i] / factor;
    }
  }
}

void sum_with_aten(const std::vector<at::Tensor>& terms, const at::Tensor& into, double divisor) {
  at::NoGradGuard no_grad;
  // On the CPU below ATen's grain: it would start threads of its own for more.
  const int64_t block = into.is_cpu() ? 4 * kBlock : std::max<int64_t>(1, into.numel());
  for (int64_t begin = 0; begin < into.numel(); begin += block) {
    const int64_t size = std::min(block, into.numel() - begin);
    auto sum = terms[0].narrow(0, begin, size).to(into.scalar_type(), false, /*copy=*/true);
    for (size_t t = 1; t < terms.size(); ++t) sum.add_(terms[t].narrow(0, begin, size));
    if (divisor != 1) sum.div_(divisor);
    into.narrow(0, begin, size).copy_(sum);
  }
}

}  // namespace

void sum_in_rank_order(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                       double divisor) {
  const auto dtype = into.scalar_type();
  if (into.is_cpu() && dtype == at::kFloat && all_of(terms, dtype)) {
    sum_on_cpu<float>(terms, into, divisor);
  } else if (into.is_cpu() && dtype == at::kDouble && all_of(terms, dtype)) {
    sum_on_cpu<double>(terms, into, divisor);
  } else {
    sum_with_aten(terms, into, divisor);
  }
}

}  // namespace shardstep::detail
