// The four optimizers differ in their state and in the kernel that they call; a Rule describes
// both. What they share is written once: deciding what may be fused, and passing each kernel its
// lists.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <c10/core/DispatchKey.h>

#include <array>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardstep/optim/adagrad.h"
#include "shardstep/optim/adam.h"
#include "shardstep/optim/adamw.h"
#include "shardstep/optim/sgd.h"

namespace shardstep::optim {
namespace {

using Closure = torch::optim::Optimizer::LossClosure;
using Tensors = std::vector<at::Tensor>;
using StateTensors = c10::SmallVector<at::Tensor, 3>;
using State = torch::optim::OptimizerParamState;
using StateMap = ska::flat_hash_map<void*, std::unique_ptr<State>>;

// The lists of one kernel call: entry i of each belongs to one parameter.
struct Batch {
  at::Device device;
  at::ScalarType dtype;
  bool first_step;
  Tensors params{}, grads{}, steps{};
  std::array<Tensors, 3> state{};
};

// One parameter's state, as a rule prepares it when its step begins.
struct Entry {
  StateTensors state;
  int64_t step = 0;  // 0: the optimizer does not count
  bool first_step = false;
};

// ---- rules -------------------------------------------------------------------------------------
// kLowPrecision: whether the kernel can be trusted with float16 and bfloat16.  tensors(): the state
// that exists, which must fit the parameter.  begin(): creates missing state and counts the step.
// run(): the kernel.

template <typename Optimizer, typename OptionsT, typename StateT, typename KernelT>
struct AdamRule {
  using Base = Optimizer;
  using Options = OptionsT;
  using ParamState = StateT;
  using Kernel = KernelT;
  static constexpr bool kLowPrecision = true;

  static StateTensors tensors(const ParamState& state, const Options& options) {
    StateTensors result{state.exp_avg(), state.exp_avg_sq()};
    if (options.amsgrad()) result.push_back(state.max_exp_avg_sq());
    return result;
  }

  static Entry begin(const at::Tensor& param, StateMap& states, const Options& options) {
    auto& slot = states[param.unsafeGetTensorImpl()];
    if (!slot) {
      auto fresh = std::make_unique<ParamState>();
      fresh->exp_avg(at::zeros_like(param));
      fresh->exp_avg_sq(at::zeros_like(param));
      if (options.amsgrad()) fresh->max_exp_avg_sq(at::zeros_like(param));
      slot = std::move(fresh);
    }
    auto& state = static_cast<ParamState&>(*slot);
    state.step(state.step() + 1);
    return {.state = tensors(state, options), .step = state.step()};
  }

  static void run(const Batch& batch, const Options& options) {
    const auto [beta1, beta2] = options.betas();
    Kernel::call(batch.params, batch.grads, batch.state[0], batch.state[1], batch.state[2],
                 batch.steps, options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
                 options.amsgrad(), /*maximize=*/false, {}, {});
  }
};

struct SGDRule {
  using Base = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using ParamState = torch::optim::SGDParamState;
  using Kernel = at::_ops::_fused_sgd_;
  // torch 2.13's CPU kernel leaves all full SIMD blocks as they were (pytorch issue 191763).
  static constexpr bool kLowPrecision = false;

  static StateTensors tensors(const ParamState& state, const Options& options) {
    if (options.momentum() == 0) return {};
    return {state.momentum_buffer()};
  }

  static Entry begin(const at::Tensor& param, StateMap& states, const Options& options) {
    if (options.momentum() == 0) return {};
    auto& slot = states[param.unsafeGetTensorImpl()];
    const bool first_step = !slot;
    if (first_step) {
      auto fresh = std::make_unique<ParamState>();
      fresh->momentum_buffer(at::empty_like(param));  // the kernel writes it before it reads it
      slot = std::move(fresh);
    }
    return {.state = tensors(static_cast<ParamState&>(*slot), options), .first_step = first_step};
  }

  static void run(const Batch& batch, const Options& options) {
    Kernel::call(batch.params, batch.grads, batch.state[0], options.weight_decay(),
                 options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                 /*maximize=*/false, batch.first_step, {}, {});
  }
};

struct AdagradRule {
  using Base = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using ParamState = torch::optim::AdagradParamState;
  using Kernel = at::_ops::_fused_adagrad_;
  static constexpr bool kLowPrecision = true;

  static StateTensors tensors(const ParamState& state, const Options&) { return {state.sum()}; }

  static Entry begin(const at::Tensor& param, StateMap& states, const Options& options) {
    auto& state = static_cast<ParamState&>(*states.at(param.unsafeGetTensorImpl()));
    state.step(state.step() + 1);
    return {.state = tensors(state, options), .step = state.step()};
  }

  static void run(const Batch& batch, const Options& options) {
    Kernel::call(batch.params, batch.grads, batch.state[0], batch.steps, options.lr(),
                 options.lr_decay(), options.weight_decay(), options.eps(), /*maximize=*/false, {},
                 {});
  }
};

// ---- what may be fused -------------------------------------------------------------------------

// The kernels treat all tensors of a parameter as flat memory, so element i must be the same in all
// of them.
bool walks_alike(const at::Tensor& param, const at::Tensor& other) {
  if (!other.defined() || other.layout() != c10::kStrided || other.is_neg() ||
      other.scalar_type() != param.scalar_type() || other.device() != param.device() ||
      other.sizes() != param.sizes()) {
    return false;
  }
  return (param.is_contiguous() && other.is_contiguous()) ||
         (param.is_non_overlapping_and_dense() && other.strides() == param.strides());
}

template <typename Rule>
bool has_kernel(const at::Tensor& param) {
  using Kernel = typename Rule::Kernel;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(Kernel::name, Kernel::overload_name);
  const auto dtype = param.scalar_type();
  const bool low_precision = dtype == at::kHalf || dtype == at::kBFloat16;
  if (!(dtype == at::kFloat || dtype == at::kDouble || (low_precision && Rule::kLowPrecision))) {
    return false;
  }
  return op.hasKernelForDispatchKey(c10::computeDispatchKey(dtype, param.layout(), param.device()));
}

// The only place that decides between ATen's kernel and torch::optim's step.
template <typename Rule>
bool fusible(const at::Tensor& param, const State* state, const typename Rule::Options& options) {
  if (!has_kernel<Rule>(param) || !walks_alike(param, param) || !walks_alike(param, param.grad())) {
    return false;
  }
  if (!state) return true;
  for (const auto& tensor :
       Rule::tensors(static_cast<const typename Rule::ParamState&>(*state), options)) {
    if (!walks_alike(param, tensor)) return false;
  }
  return true;
}

// ---- the step ----------------------------------------------------------------------------------

Batch& batch_for(std::vector<Batch>& batches, const at::Tensor& param, bool first_step) {
  for (auto& batch : batches) {
    if (batch.device == param.device() && batch.dtype == param.scalar_type() &&
        batch.first_step == first_step) {
      return batch;
    }
  }
  return batches.emplace_back(Batch{param.device(), param.scalar_type(), first_step});
}

template <typename Rule>
void fused_update(const Tensors& params, typename Rule::Base& optimizer,
                  const typename Rule::Options& options) {
  std::vector<Batch> batches;
  // The kernels only read the counters, so parameters with the same step count share one.
  std::unordered_map<at::Device, std::unordered_map<int64_t, at::Tensor>> counters;
  for (const auto& param : params) {
    auto entry = Rule::begin(param, optimizer.state(), options);
    auto& batch = batch_for(batches, param, entry.first_step);
    batch.params.push_back(param);
    batch.grads.push_back(param.grad());
    for (size_t i = 0; i < entry.state.size(); ++i) batch.state[i].push_back(entry.state[i]);
    if (entry.step == 0) continue;
    auto& counter = counters[param.device()][entry.step];
    if (!counter.defined()) {
      counter = at::full({}, entry.step, at::dtype(at::kFloat).device(param.device()));
    }
    batch.steps.push_back(counter);
  }
  for (const auto& batch : batches) Rule::run(batch, options);
  // Unlike torch's own in-place steps, the kernels do not do this, and autograd would miss the
  // change.
  for (const auto& param : params) param.unsafeGetTensorImpl()->bump_version();
}

// Lets torch's own step see only the given parameters of each group, until it is destroyed.
class NarrowedGroups {
 public:
  NarrowedGroups(torch::optim::Optimizer& optimizer, std::vector<Tensors> params)
      : optimizer_(optimizer), params_(std::move(params)) {
    exchange();
  }
  ~NarrowedGroups() { exchange(); }
  NarrowedGroups(const NarrowedGroups&) = delete;
  NarrowedGroups& operator=(const NarrowedGroups&) = delete;

 private:
  void exchange() {
    for (size_t i = 0; i < params_.size(); ++i) {
      optimizer_.param_groups()[i].params().swap(params_[i]);
    }
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<Tensors> params_;
};

template <typename Rule>
void step(typename Rule::Base& optimizer) {
  at::NoGradGuard no_grad;
  auto& groups = optimizer.param_groups();
  std::vector<Tensors> fused(groups.size()), rest(groups.size());
  bool any_rest = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = static_cast<const typename Rule::Options&>(groups[i].options());
    for (const auto& param : groups[i].params()) {
      if (!param.grad().defined()) continue;
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      const auto* state = found == optimizer.state().end() ? nullptr : found->second.get();
      const bool fuse = fusible<Rule>(param, state, options);
      (fuse ? fused : rest)[i].push_back(param);
      any_rest |= !fuse;
    }
  }
  // First what torch may refuse, so that a refused step has changed nothing.
  if (any_rest) {
    NarrowedGroups narrowed(optimizer, std::move(rest));
    optimizer.Rule::Base::step();
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    fused_update<Rule>(fused[i], optimizer,
                       static_cast<const typename Rule::Options&>(groups[i].options()));
  }
}

// torch creates Adagrad's state only in the constructor, and then refuses groups that are added
// later.
void make_missing_state(Adagrad& optimizer) {
  const auto& defaults = static_cast<const AdagradRule::Options&>(optimizer.defaults());
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& param : group.params()) {
      auto& slot = optimizer.state()[param.unsafeGetTensorImpl()];
      if (slot) continue;
      auto fresh = std::make_unique<AdagradRule::ParamState>();
      fresh->sum(at::full_like(param, defaults.initial_accumulator_value()));
      slot = std::move(fresh);
    }
  }
}

at::Tensor loss_of(const Closure& closure) {
  if (!closure) return {};
  at::AutoGradMode enable_grad(true);
  return closure();
}

}  // namespace

torch::Tensor Adam::step(LossClosure closure) {
  auto loss = loss_of(closure);
  optim::step<AdamRule<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                       at::_ops::_fused_adam_>>(*this);
  return loss;
}

torch::Tensor AdamW::step(LossClosure closure) {
  auto loss = loss_of(closure);
  optim::step<AdamRule<torch::optim::AdamW, torch::optim::AdamWOptions,
                       torch::optim::AdamWParamState, at::_ops::_fused_adamw_>>(*this);
  return loss;
}

torch::Tensor SGD::step(LossClosure closure) {
  auto loss = loss_of(closure);
  optim::step<SGDRule>(*this);
  return loss;
}

torch::Tensor Adagrad::step(LossClosure closure) {
  auto loss = loss_of(closure);
  make_missing_state(*this);
  optim::step<AdagradRule>(*this);
  return loss;
}

}  // namespace shardstep::optim
