#include "shardstep/zero_redundancy_optimizer.h"

#include <torch/optim/lbfgs.h>

#include <unordered_set>

#include "checkpoint/checkpointer.h"
#include "launch/who.h"
#include "shard/gradient_clipping.h"
#include "shard/shard_engine.h"

namespace shardstep {
namespace {

using torch::optim::OptimizerParamGroup;

std::vector<OptimizerParamGroup> one_group(std::vector<at::Tensor> params) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(params));
  return groups;
}

// libtorch lists a tied weight under every name it has.
void drop_repeats(std::vector<at::Tensor>& params) {
  std::unordered_set<const void*> seen;
  std::erase_if(params, [&](const at::Tensor& param) {
    return !seen.insert(param.unsafeGetTensorImpl()).second;
  });
}

EngineOptions engine_options(const ZeroOptions& options, const ProcessGroupPtr& group) {
  return {.stage2 = stage2_options(options.stage(),
                                   {.share_parameters = options.share_parameters(),
                                    .overlap_forward = options.overlap_forward(),
                                    .gradient_dtype = options.gradient_dtype()},
                                   group),
          .sharding = options.sharding(),
          .storage =
              options.parameters_as_bucket_view() ? BucketStorage::kFlat : BucketStorage::kInPlace,
          .exchange = options.exchange(),
          .bucket_cap_mb = options.bucket_cap_mb(),
          .overlap = options.overlap_with_ddp()};
}

std::string describe(const LocalOptimizer& local, const torch::optim::OptimizerOptions& options) {
  std::ostringstream text;
  text << local.name;
  for (const auto& item : local.read_options(options))
    text << " " << item.key() << "=" << item.value();
  return text.str();
}

std::unique_ptr<ShardEngine> make_engine(const ZeroOptions& options) {
  const auto group = options.process_group() ? options.process_group() : default_process_group();
  return std::make_unique<ShardEngine>(group, engine_options(options, group));
}

class StepHook : public JoinHook {
 public:
  explicit StepHook(ZeroRedundancyOptimizer& optimizer) : optimizer_(optimizer) {}
  void main_hook() override { optimizer_.step(); }

 private:
  ZeroRedundancyOptimizer& optimizer_;
};

}  // namespace

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<OptimizerParamGroup> param_groups,
                                                 LocalOptimizer local, const ZeroOptions& options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, local.defaults->clone()),
      local_(std::move(local)),
      engine_(make_engine(options)),
      checkpointer_(std::make_unique<Checkpointer>(*engine_)) {
  local_.elementwise = local_.elementwise || options.elementwise();
  add_groups(std::move(param_groups));
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<at::Tensor> params,
                                                 LocalOptimizer local, const ZeroOptions& options)
    : ZeroRedundancyOptimizer(one_group(std::move(params)), std::move(local), options) {}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

const ProcessGroupPtr& ZeroRedundancyOptimizer::process_group() const {
  return engine_->process_group();
}

bool ZeroRedundancyOptimizer::parameters_as_bucket_view() const {
  return engine_->options().storage == BucketStorage::kFlat;
}

bool ZeroRedundancyOptimizer::overlap_with_ddp() const { return engine_->options().overlap; }

void ZeroRedundancyOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  adopt_new_groups(nullptr);
  add_groups({param_group});
}

void ZeroRedundancyOptimizer::add_groups(std::vector<OptimizerParamGroup> groups) {
  std::exception_ptr error;
  try {
    TORCH_CHECK_VALUE(
        local_.elementwise || engine_->options().sharding == Sharding::kParameter,
        "shardstep: expected an optimizer that is known to be element-wise when sharding by "
        "element, got ",
        local_.name,
        "; if its update of an element depends on nothing but that element's gradient and state, "
        "say elementwise(true); otherwise shard by parameter");
    TORCH_CHECK_VALUE(
        dynamic_cast<const torch::optim::LBFGSOptions*>(local_.defaults.get()) == nullptr,
        "shardstep: expected an optimizer that updates each parameter on its own, got LBFGS, whose "
        "step depends on the gradients of all parameters at once");
    for (auto& group : groups) {
      for (const auto& param : group.params()) {
        TORCH_CHECK_VALUE(param.defined(),
                          "shardstep: expected parameters that are tensors, got an ",
                          "undefined one in group ", param_groups_.size());
      }
      drop_repeats(group.params());
      Optimizer::add_param_group(group);
    }
  } catch (...) {
    error = std::current_exception();
  }
  adopt_new_groups(error);
}

// Groups that the base class has and the engine does not know yet. If ranks do not agree on them,
// they are gone again.
void ZeroRedundancyOptimizer::adopt_new_groups(std::exception_ptr error) {
  const size_t known = engine_->group_count();
  if (!error && param_groups_.size() == known && optim_) return;
  try {
    std::vector<EngineGroup> groups;
    if (!error) {
      try {
        for (size_t g = known; g < param_groups_.size(); ++g) {
          drop_repeats(param_groups_[g].params());
          groups.push_back(
              {param_groups_[g].params(), describe(local_, param_groups_[g].options())});
        }
      } catch (...) {
        error = std::current_exception();
      }
    }
    engine_->add_groups(groups, error);
  } catch (...) {
    param_groups_.erase(param_groups_.begin() + static_cast<std::ptrdiff_t>(known),
                        param_groups_.end());
    throw;
  }

  for (int64_t i = static_cast<int64_t>(index_of_.size()); i < engine_->param_count(); ++i) {
    index_of_.emplace(engine_->param(i).unsafeGetTensorImpl(), i);
  }
  std::vector<OptimizerParamGroup> added;
  for (size_t g = known; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> params;
    for (const auto& local : engine_->local_params(g)) params.push_back(local.tensor);
    added.emplace_back(std::move(params), param_groups_[g].options().clone());
  }
  if (!optim_) {
    optim_ = local_.make(std::move(added));
    TORCH_CHECK_VALUE(dynamic_cast<torch::optim::LBFGS*>(optim_.get()) == nullptr,
                      "shardstep: expected an optimizer that updates each parameter on its own, ",
                      "got ", local_.name,
                      ": LBFGS's step depends on the gradients of all parameters at once",
                      detail::who(process_group()));
  } else {
    for (const auto& group : added) optim_->add_param_group(group);
    push_options();
  }
}

void ZeroRedundancyOptimizer::push_options() {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_.assign_options(param_groups_[g].options(), optim_->param_groups()[g].options());
  }
}

void ZeroRedundancyOptimizer::pull_options() {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_.assign_options(optim_->param_groups()[g].options(), param_groups_[g].options());
  }
}

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  if (overlap_with_ddp()) {
    TORCH_WARN(
        "shardstep: step() does nothing with overlap_with_ddp: the hook of zero_hooks.h updates "
        "the parameters inside the backward pass",
        detail::who(process_group()));
    return {};
  }
  if (!closure) Join::notify_join_context(*this);
  adopt_new_groups(nullptr);
  consolidated_.reset();
  may_have_state_ = true;
  push_options();
  const auto loss = update_own(closure);
  pull_options();
  engine_->after_step();
  return loss;
}

at::Tensor ZeroRedundancyOptimizer::update_own(const LossClosure& closure) {
  try {
    if (!closure) {
      engine_->before_step();
      return optim_->step();
    }
    return optim_->step([&, announced = false]() mutable {
      auto loss = closure();
      // A closure's forward announces itself, and joined ranks shadow it before this step.
      if (!std::exchange(announced, true)) Join::notify_join_context(*this);
      engine_->before_step();
      return loss;
    });
  } catch (...) {
    engine_->fail_step(std::current_exception());
    throw;
  }
}

void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) {
  auto* const sharded = engine_->gradients();
  if (set_to_none || !sharded) {
    Optimizer::zero_grad(set_to_none);
    return engine_->drop_sums();
  }
  std::vector<int64_t> all;
  for (const auto& param : engine_->params()) {
    if (param.grad().defined() && param.grad().has_storage()) param.mutable_grad().zero_();
    all.push_back(static_cast<int64_t>(all.size()));
  }
  sharded->zero(all);
}

at::Tensor ZeroRedundancyOptimizer::full_gradient(const at::Tensor& param) {
  adopt_new_groups(nullptr);
  const auto found = index_of_.find(param.unsafeGetTensorImpl());
  TORCH_CHECK_VALUE(found != index_of_.end(),
                    "shardstep: expected a parameter of this optimizer, got a tensor of sizes ",
                    param.sizes(), detail::who(process_group()));
  auto* const sharded = engine_->gradients();
  return sharded ? sharded->whole(found->second) : param.grad();
}

ZeroRedundancyOptimizer::NoSync::NoSync(ShardEngine& engine)
    : engine_(engine), before_(engine.sync()) {
  engine_.set_sync(false);
}

ZeroRedundancyOptimizer::NoSync::~NoSync() { engine_.set_sync(before_); }

double ZeroRedundancyOptimizer::clip_grad_norm_(double max_norm, double norm_type,
                                                bool error_if_nonfinite) {
  adopt_new_groups(nullptr);
  return clip_grad_norm(*engine_, max_norm, norm_type, error_if_nonfinite);
}

void ZeroRedundancyOptimizer::clip_grad_value_(double clip_value) {
  adopt_new_groups(nullptr);
  clip_grad_value(*engine_, clip_value);
}

// Those that this optimizer has.
std::vector<ParamGradient> ZeroRedundancyOptimizer::by_index(
    const ParamsAndGradients& gradients) const {
  std::vector<ParamGradient> known;
  for (const auto& [param, gradient] : gradients) {
    const auto found = index_of_.find(param.unsafeGetTensorImpl());
    if (found != index_of_.end()) known.push_back({found->second, gradient});
  }
  return known;
}

std::unique_ptr<Pending> ZeroRedundancyOptimizer::reduce_to_owners(
    const ParamsAndGradients& gradients, int tag) {
  return engine_->reduce_to_owners(by_index(gradients), tag);
}

void ZeroRedundancyOptimizer::update(const ParamsAndGradients& gradients, int tag) {
  TORCH_CHECK_VALUE(overlap_with_ddp(), "shardstep: expected an optimizer with overlap_with_ddp",
                    detail::who(process_group()));
  adopt_new_groups(nullptr);
  consolidated_.reset();
  may_have_state_ = true;
  const auto known = by_index(gradients);
  push_options();
  engine_->before_partial_step(known);
  optim_->step();
  pull_options();
  if (auto pending = engine_->after_partial_step(known, tag)) {
    arriving_.push_back(std::move(pending));
  }
}

void ZeroRedundancyOptimizer::wait() {
  adopt_new_groups(nullptr);
  const auto arriving = std::exchange(arriving_, {});
  for (const auto& pending : arriving) pending->wait();
  engine_->wait();
}

std::unique_ptr<JoinHook> ZeroRedundancyOptimizer::join_hook(const JoinOptions&) {
  return std::make_unique<StepHook>(*this);
}

at::Device ZeroRedundancyOptimizer::join_device() const { return engine_->param(0).device(); }

}  // namespace shardstep
