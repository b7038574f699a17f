#pragma once

// Stage 2: numbers that describe a whole gradient, from those of its parts on the ranks.
// Thread safety: none. Nothing here communicates.

#include <ATen/ATen.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace shardstep {

enum class GradientStatistic : int64_t {
  kNorm,  // of a type
  kSum,
  kLargest,
  kSmallest,
  kNans,  // how many
  kInfinities,
};

// Merges the values of two disjoint parts of a tensor into that of the whole.
class StatisticMerging {
 public:
  StatisticMerging(GradientStatistic statistic, double norm_type)
      : statistic_(statistic), norm_type_(norm_type) {}

  double neutral() const;
  // Of a part, as a tensor of one number on its device. REQUIRES: not empty.
  at::Tensor of(const at::Tensor& part) const;
  double merge(double a, double b) const;

 private:
  GradientStatistic statistic_;
  double norm_type_;
};

// Tensors of one number each, for which the host waits once per device.
class NumbersToRead {
 public:
  // REQUIRES: `into` exists until read() has filled it.
  void add(const at::Tensor& number, double& into);
  void read();

 private:
  std::unordered_map<at::Device, std::pair<std::vector<at::Tensor>, std::vector<double*>>>
      by_device_;
};

}  // namespace shardstep
