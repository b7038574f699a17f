#include "comm/rank_order_sum.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

namespace shardstep::detail {
namespace {

constexpr int64_t kBlock = 4096;  // elements; a block's sum stays in the L1 cache

bool all_of(const std::vector<at::Tensor>& terms, at::ScalarType dtype) {
  return std::all_of(terms.begin(), terms.end(),
                     [=](const at::Tensor& term) { return term.scalar_type() == dtype; });
}

// Dividing by a power of two equals multiplying by its inverse bit for bit, which is faster.
bool is_power_of_two(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5;
}

// In lanes, so that the compiler can vectorize.
template <class T>
double squares_of(const T* values, int64_t size) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (; i < size; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (double lane : lanes) sum += lane;
  return sum;
}

template <class T, class Term = T>
double sum_on_cpu(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                  const SumOptions& options) {
  std::vector<const Term*> inputs;
  for (const auto& term : terms) inputs.push_back(term.const_data_ptr<Term>());
  T* const output = into.mutable_data_ptr<T>();
  const bool multiply = is_power_of_two(options.divisor);
  const T factor = static_cast<T>(multiply ? 1 / options.divisor : options.divisor);
  double squares = 0;
  T sum[kBlock];
  for (int64_t begin = 0; begin < into.numel(); begin += kBlock) {
    const int64_t size = std::min(kBlock, into.numel() - begin);
    std::copy_n(inputs[0] + begin, size, sum);
    for (size_t t = 1; t < inputs.size(); ++t) {
      const Term* const term = inputs[t] + begin;
      for (int64_t i = 0; i < size; ++i) sum[i] += term[i];
    }
    T* const out = output + begin;
    if (multiply) {
      for (int64_t i = 0; i < size; ++i) out[i] = sum[i] * factor;
    } else {
      for (int64_t i = 0; i < size; ++i) out[i] = sum[i] / factor;
    }
    if (options.squares) squares += squares_of(out, size);
  }
  return squares;
}

double squares_with_aten(const at::Tensor& values) {
  const auto real = values.is_complex() ? at::view_as_real(values) : values;
  return real.to(at::kDouble).square().sum().item<double>();  // not in place: it may be `values`
}

double sum_with_aten(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                     const SumOptions& options) {
  at::NoGradGuard no_grad;
  // On the CPU below ATen's grain size, above which it would start threads.
  const int64_t block = into.is_cpu() ? 4 * kBlock : std::max<int64_t>(1, into.numel());
  const auto room = [&](at::ScalarType dtype) {
    return at::empty({std::min(block, into.numel())}, into.options().dtype(dtype));
  };
  // Narrow sums are rounded once, at the end.
  const auto dtype = into.scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto sums = room(narrow ? at::kFloat : dtype);
  const auto widened = room(narrow ? at::kFloat : dtype);
  const auto rounded = options.rounded_to ? room(*options.rounded_to) : at::Tensor();
  double squares = 0;
  for (int64_t begin = 0; begin < into.numel(); begin += block) {
    const int64_t size = std::min(block, into.numel() - begin);
    const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, 0, size); };
    auto sum = part(sums);
    for (size_t t = 0; t < terms.size(); ++t) {
      auto term = terms[t].narrow(0, begin, size);
      if (rounded.defined() && term.scalar_type() != rounded.scalar_type()) {
        term = part(rounded).copy_(term);
      }
      if (t == 0) {
        sum.copy_(term);
      } else if (term.scalar_type() == sum.scalar_type()) {
        sum.add_(term);
      } else {
        sum.add_(part(widened).copy_(term));
      }
    }
    if (options.divisor != 1) sum.div_(options.divisor);
    auto result = into.narrow(0, begin, size).copy_(sum);
    if (options.squares) squares += squares_with_aten(result);
  }
  return squares;
}

}  // namespace

double sum_in_rank_order(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                         const SumOptions& options) {
  const auto dtype = into.scalar_type();
  const auto sums_of = [&](at::ScalarType sum, at::ScalarType term) {
    return dtype == sum && into.is_cpu() && all_of(terms, term) &&
           options.rounded_to.value_or(term) == term;
  };
  if (sums_of(at::kFloat, at::kFloat)) return sum_on_cpu<float>(terms, into, options);
  if (sums_of(at::kDouble, at::kDouble)) return sum_on_cpu<double>(terms, into, options);
  if (sums_of(at::kFloat, at::kBFloat16)) {
    return sum_on_cpu<float, at::BFloat16>(terms, into, options);
  }
  if (sums_of(at::kFloat, at::kHalf)) return sum_on_cpu<float, at::Half>(terms, into, options);
  return sum_with_aten(terms, into, options);
}

}  // namespace shardstep::detail
