#include "shardstep/optim/muon.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>

namespace shardstep::optim {
namespace {

constexpr int64_t kMostSteps = 100;

template <class Value>
void check(bool good, const char* name, const char* expected, const Value& got) {
  TORCH_CHECK_VALUE(good, "shardstep: expected Muon's ", name, " to be ", expected, ", got ", got);
}

void check_steps(int64_t steps) {
  check(steps >= 0 && steps < kMostSteps, "ns_steps", "from 0 to 99", steps);
}

void check_muon_options(const MuonOptions& options) {
  check(options.lr() >= 0, "lr", "0 or more", options.lr());
  check(options.momentum() >= 0, "momentum", "0 or more", options.momentum());
  check(options.weight_decay() >= 0, "weight_decay", "0 or more", options.weight_decay());
  check_steps(options.ns_steps());
  const auto& adjust = options.adjust_lr_fn();
  check(!adjust || *adjust == "original" || *adjust == "match_rms_adamw", "adjust_lr_fn",
        "\"original\" or \"match_rms_adamw\"", adjust.value_or(""));
}

// Brings the singular values of a matrix close to 1.
at::Tensor orthogonalized(const at::Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool is_tall = matrix.size(0) > matrix.size(1);
  auto result = matrix.to(at::kBFloat16);
  if (result.is_same(matrix)) result = result.clone();
  if (is_tall) result = result.t();
  result.div_(result.norm().clamp_min(options.eps()));
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const auto gram = result.mm(result.t());
    const auto update = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    result = at::addmm(result, update, result, /*beta=*/a);
  }
  return is_tall ? result.t() : result;
}

double adjusted_lr(const MuonOptions& options, const at::Tensor& matrix) {
  const auto rows = static_cast<double>(matrix.size(0)),
             columns = static_cast<double>(matrix.size(1));
  if (options.adjust_lr_fn().value_or("original") == "original") {
    return options.lr() * std::sqrt(std::max(1.0, rows / columns));
  }
  return options.lr() * 0.2 * std::sqrt(std::max(rows, columns));
}

void update_matrix(at::Tensor param, const at::Tensor& gradient, at::Tensor buffer,
                   const MuonOptions& options) {
  buffer.lerp_(gradient, 1 - options.momentum());
  const auto direction = options.nesterov() ? gradient.lerp(buffer, options.momentum()) : buffer;
  const auto update = orthogonalized(direction, options);
  param.mul_(1 - options.lr() * options.weight_decay());
  param.add_(update, -adjusted_lr(options, param));
}

// torch replaces options of types that it does not know with the defaults.
void keep_options(const torch::optim::OptimizerParamGroup& given,
                  torch::optim::OptimizerParamGroup& group) {
  if (!given.has_options()) return;
  check_muon_options(static_cast<const MuonOptions&>(given.options()));
  group.set_options(given.options().clone());
}

// The matrices of a stack, as views.
std::vector<at::Tensor> matrices_of(const at::Tensor& stack) {
  if (stack.dim() == 2) return {stack};
  std::vector<at::Tensor> matrices;
  for (const auto& item : stack.unbind(0)) {
    for (auto& matrix : matrices_of(item)) matrices.push_back(std::move(matrix));
  }
  return matrices;
}

}  // namespace

void check_muon_param(const at::Tensor& param) {
  TORCH_CHECK_VALUE(param.dim() >= 2 && param.is_floating_point(),
                    "shardstep: expected matrices for Muon, got a parameter of ",
                    param.scalar_type(), " with sizes ", param.sizes(),
                    "; give it to another optimizer, such as AdamW");
}

double muon_cost(const at::Tensor& param, int64_t ns_steps) {
  check_steps(ns_steps);
  if (param.dim() < 2 || param.numel() == 0) return static_cast<double>(param.numel());
  const auto rows = static_cast<double>(param.size(-2)),
             columns = static_cast<double>(param.size(-1));
  const double less = std::min(rows, columns), more = std::max(rows, columns);
  const double per_iteration = 4 * less * less * more + 2 * less * less * less;
  return static_cast<double>(param.numel()) / (rows * columns) * per_iteration *
         static_cast<double>(ns_steps);
}

bool operator==(const MuonOptions& a, const MuonOptions& b) {
  return a.lr() == b.lr() && a.weight_decay() == b.weight_decay() && a.momentum() == b.momentum() &&
         a.nesterov() == b.nesterov() && a.ns_coefficients() == b.ns_coefficients() &&
         a.eps() == b.eps() && a.ns_steps() == b.ns_steps() && a.adjust_lr_fn() == b.adjust_lr_fn();
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("momentum", c10::IValue(momentum()));
  archive.write("nesterov", c10::IValue(nesterov()));
  archive.write("ns_coefficients", c10::IValue(ns_coefficients()));
  archive.write("eps", c10::IValue(eps()));
  archive.write("ns_steps", c10::IValue(ns_steps()));
  archive.write("adjust_lr_fn", c10::IValue(adjust_lr_fn()));
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  lr(read("lr").toDouble());
  weight_decay(read("weight_decay").toDouble());
  momentum(read("momentum").toDouble());
  nesterov(read("nesterov").toBool());
  const auto coefficients = read("ns_coefficients").toTuple()->elements().vec();
  ns_coefficients({coefficients.at(0).toDouble(), coefficients.at(1).toDouble(),
                   coefficients.at(2).toDouble()});
  eps(read("eps").toDouble());
  ns_steps(read("ns_steps").toInt());
  adjust_lr_fn(read("adjust_lr_fn").toOptional<std::string>());
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("momentum_buffer", momentum_buffer(), /*is_buffer=*/true);
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  archive.try_read("momentum_buffer", momentum_buffer_, /*is_buffer=*/true);
}

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, MuonOptions defaults)
    : Optimizer(param_groups, std::make_unique<MuonOptions>(defaults)) {
  check_muon_options(defaults);
  for (size_t i = 0; i < param_groups.size(); ++i) keep_options(param_groups[i], param_groups_[i]);
  for (const auto& group : param_groups_) {
    check_muon_options(static_cast<const MuonOptions&>(group.options()));
    for (const auto& param : group.params()) check_muon_param(param);
  }
}

Muon::Muon(std::vector<at::Tensor> params, MuonOptions defaults)
    : Muon(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(
               std::move(params))},
           std::move(defaults)) {}

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  for (const auto& param : group.params()) check_muon_param(param);
  Optimizer::add_param_group(group);
  keep_options(group, param_groups_.back());
}

at::Tensor Muon::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const auto& param : group.params()) {
      const auto& gradient = param.grad();
      if (!gradient.defined()) continue;
      check_muon_param(param);  // groups may have been added
      TORCH_CHECK_VALUE(gradient.layout() == at::kStrided,
                        "shardstep: expected dense gradients for Muon, got ", gradient.layout());
      auto& slot = state_[param.unsafeGetTensorImpl()];
      if (!slot) {
        auto fresh = std::make_unique<MuonParamState>();
        fresh->momentum_buffer(at::zeros_like(gradient));
        slot = std::move(fresh);
      }
      const auto params = matrices_of(param), gradients = matrices_of(gradient);
      const auto buffers = matrices_of(static_cast<MuonParamState&>(*slot).momentum_buffer());
      for (size_t i = 0; i < params.size(); ++i) {
        update_matrix(params[i], gradients[i], buffers[i], options);
      }
    }
  }
  return loss;
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

void Muon::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

}  // namespace shardstep::optim
