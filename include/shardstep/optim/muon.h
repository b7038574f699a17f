#pragma once

// torch.optim.Muon for C++: the same options, state and update, one matrix at a time. Momentum is
// orthogonalized by Newton-Schulz iterations in bfloat16, so an update depends on the whole matrix,
// and parameters must not be cut. A parameter with more than two axes (experts) is a stack of
// matrices in its last two. Other parameters (embeddings, norms, biases) want another optimizer.
// Like every torch optimizer, not safe for concurrent use. Nothing here is collective.

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "shardstep/export.h"

namespace shardstep::optim {

struct SHARDSTEP_API MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  explicit MuonOptions(double lr = 1e-3) : lr_(lr) {}

  using Coefficients = std::tuple<double, double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  // Of the polynomial a x + b x^3 + c x^5 that is iterated.
  TORCH_ARG(Coefficients, ns_coefficients) = { 3.4445, -4.7750, 2.0315 };
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(int64_t, ns_steps) = 5;
  // How lr depends on a matrix's shape: "original" (also if unset) or "match_rms_adamw".
  TORCH_ARG(std::optional<std::string>, adjust_lr_fn);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  friend SHARDSTEP_API bool operator==(const MuonOptions& a, const MuonOptions& b);
};

struct SHARDSTEP_API MuonParamState
    : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class SHARDSTEP_API Muon : public torch::optim::Optimizer {
 public:
  // Throws ValueError for options that make no sense, and for parameters with fewer than two axes.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                MuonOptions defaults = MuonOptions());
  explicit Muon(std::vector<at::Tensor> params, MuonOptions defaults = MuonOptions());

  // Hides torch's, which is not virtual and would lose the group's options.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

// Throws ValueError for a parameter that is no matrix or stack of matrices.
SHARDSTEP_API void check_muon_param(const at::Tensor& param);

// The floating-point operations of an update of `param`, which the ranks divide among themselves.
SHARDSTEP_API double muon_cost(const at::Tensor& param, int64_t ns_steps = 5);

}  // namespace shardstep::optim
