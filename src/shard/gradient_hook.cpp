#include "shard/gradient_hook.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace shardstep {
namespace {

using Gradients = torch::autograd::variable_list;

struct BeforeGradient : torch::autograd::FunctionPreHook {
  explicit BeforeGradient(std::function<void()> call) : call(std::move(call)) {}
  Gradients operator()(const Gradients& gradients) override {
    call();
    return gradients;
  }
  std::function<void()> call;
};

struct AfterGradient : torch::autograd::FunctionPostHook {
  explicit AfterGradient(std::function<void()> call) : call(std::move(call)) {}
  Gradients operator()(const Gradients& outputs, const Gradients&) override {
    call();
    return outputs;
  }
  std::function<void()> call;
};

template <class Hook>
int count_hooks(torch::autograd::Node& accumulator) {
  int count = 0;
  for (const auto& hook : accumulator.post_hooks()) {
    if (dynamic_cast<Hook*>(hook.get())) ++count;
  }
  return count;
}

}  // namespace

void check_not_under_ddp(const at::Tensor& param, int64_t index) {
  if (!param.requires_grad()) return;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
  // Only c10d's Reducer, which torch's DDP and ours use, uses this class; users' hooks have
  // Python's types, and ours have their own.
  TORCH_CHECK_VALUE(
      !accumulator || count_hooks<torch::autograd::utils::LambdaPostHook>(*accumulator) == 0,
      "shardstep: expected a model without DistributedDataParallel in stage 2, which averages the "
      "gradients itself, got parameter ",
      index, " of a model under it; remove DistributedDataParallel, or use stage 1");
}

GradientHook::GradientHook(const at::Tensor& param, std::function<void()> before,
                           std::function<void()> after)
    : accumulator_(torch::autograd::impl::grad_accumulator(param)) {
  auto hook = std::make_unique<BeforeGradient>(std::move(before));
  before_ = hook.get();
  accumulator_->add_pre_hook(std::move(hook));
  after_ = accumulator_->add_post_hook(std::make_unique<AfterGradient>(std::move(after)));
}

GradientHook::~GradientHook() {
  accumulator_->del_post_hook(after_);
  std::erase_if(accumulator_->pre_hooks(), [&](const auto& hook) { return hook.get() == before_; });
}

int GradientHook::count() const { return count_hooks<AfterGradient>(*accumulator_); }

}  // namespace shardstep
