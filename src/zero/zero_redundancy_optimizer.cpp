#include "shardstep/zero_redundancy_optimizer.h"

#include <c10/util/ScopeExit.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_set>

#include "checkpoint/checkpointer.h"
#include "comm/agreement.h"
#include "comm/collectives.h"
#include "launch/chosen_group.h"
#include "launch/who.h"
#include "shard/gradient_clipping.h"
#include "shard/gradient_lending.h"
#include "shard/shard_engine.h"
#include "zero/param_names.h"

namespace shardstep {
namespace {

using torch::optim::OptimizerParamGroup;

std::vector<OptimizerParamGroup> one_group(std::vector<at::Tensor> params) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(params));
  return groups;
}

// libtorch lists a tied weight under each of its names.
void drop_repeats(std::vector<at::Tensor>& params, size_t group, const ProcessGroupPtr& ranks) {
  std::unordered_set<const void*> seen;
  const auto repeats = std::erase_if(params, [&](const at::Tensor& param) {
    return !seen.insert(param.unsafeGetTensorImpl()).second;
  });
  if (repeats == 0) return;
  TORCH_WARN("shardstep: param group ", group, " lists ", repeats,
             " parameters more than once, as parameters() of a module with tied weights does; "
             "each is updated once per step",
             detail::who(ranks));
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
          .overlap = options.overlap_with_ddp(),
          .master_dtype = options.master_dtype(),
          .rounding = options.rounding()};
}

std::string describe(const LocalOptimizer& local, const torch::optim::OptimizerOptions& options) {
  std::ostringstream text;
  text << local.name;
  for (const auto& item : local.read_options(options))
    text << " " << item.key() << "=" << item.value();
  return text.str();
}

// Where the options are wrong, an engine with none, through which the other ranks hear of `error`.
std::unique_ptr<ShardEngine> make_engine(const ZeroOptions& options, std::exception_ptr& error) {
  const auto group = detail::chosen_group(options.process_group());
  try {
    return std::make_unique<ShardEngine>(group, engine_options(options, group));
  } catch (...) {
    error = std::current_exception();
    return std::make_unique<ShardEngine>(group, EngineOptions());
  }
}

const LocalOptimizer& complete(const LocalOptimizer& local) {
  TORCH_CHECK_VALUE(local.make && local.defaults,
                    "shardstep: expected a LocalOptimizer with `make` and `defaults`, got one "
                    "without; local_optimizer_for() makes those of torch's optimizers");
  return local;
}

template <class... Types>
bool is_one_of(const torch::optim::OptimizerOptions& options) {
  return ((dynamic_cast<const Types*>(&options) != nullptr) || ...);
}

bool is_torchs(const torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  return is_one_of<AdagradOptions, AdamOptions, AdamWOptions, LBFGSOptions, RMSpropOptions,
                   SGDOptions>(options);
}

std::vector<double> costs_of(const LocalOptimizer& local, const std::vector<at::Tensor>& params) {
  std::vector<double> costs;
  if (!local.cost) return costs;
  for (const auto& param : params) costs.push_back(local.cost(param));
  return costs;
}

// What ranks compare of a module, in words.
std::string describe_module(const torch::nn::Module* module) {
  std::string text;
  if (module == nullptr) return text;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      text += c10::str(' ', item.key(), ' ', item.value().scalar_type(), item.value().sizes());
    }
  };
  add(module->named_parameters());
  add(module->named_buffers());
  return text;
}

class StepHook : public JoinHook {
 public:
  StepHook(ZeroRedundancyOptimizer& optimizer, ShardEngine& engine, bool& has_joined)
      : optimizer_(optimizer), engine_(engine), has_joined_(has_joined) {}
  void main_hook() override {
    set_joined(true);
    const auto after = c10::make_scope_exit([this] { set_joined(false); });
    optimizer_.step();
  }
  void post_hook(bool is_last_joiner) override { engine_.end_join(is_last_joiner); }

 private:
  void set_joined(bool joined) {
    has_joined_ = joined;
    engine_.set_joined(joined);
  }

  ZeroRedundancyOptimizer& optimizer_;
  ShardEngine& engine_;
  bool& has_joined_;
};

}  // namespace

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<OptimizerParamGroup> param_groups,
                                                 LocalOptimizer local, const ZeroOptions& options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, complete(local).defaults->clone()),
      module_(options.module()),
      broadcast_buffers_(options.broadcast_buffers()) {
  std::exception_ptr error;
  engine_ = make_engine(options, error);
  checkpointer_ = std::make_unique<Checkpointer>(*engine_);
  local.elementwise = local.elementwise || options.elementwise();
  if (options.cost()) local.cost = options.cost();
  members_.push_back({std::move(local), nullptr});
  engine_->set_announce([this] { announce(); });
  add_groups(std::move(param_groups), error);
  if (!module_) return;
  auto others = module_->buffers();
  for (const auto& param : module_->parameters()) {
    if (!has(param)) others.push_back(param);
  }
  detail::broadcast(process_group(), others);
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

void ZeroRedundancyOptimizer::add_groups(std::vector<OptimizerParamGroup> groups,
                                         std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
    const auto& local = members_.front().local;
    TORCH_CHECK_VALUE(
        local.elementwise || engine_->options().sharding == Sharding::kParameter,
        "shardstep: expected an optimizer that is known to be element-wise when sharding by "
        "element, got ",
        local.name,
        "; if its update of an element depends on nothing but that element's gradient and state, "
        "set elementwise(true); otherwise shard by parameter");
    TORCH_CHECK_VALUE(
        dynamic_cast<const torch::optim::LBFGSOptions*>(local.defaults.get()) == nullptr,
        "shardstep: expected an optimizer that updates each parameter on its own, got LBFGS, whose "
        "step depends on the gradients of all parameters at once");
    TORCH_CHECK_VALUE(!module_ || engine_->stage() == 2,
                      "shardstep: expected stage 2 with module, got stage ", engine_->stage());
    for (auto& group : groups) {
      for (const auto& param : group.params()) {
        TORCH_CHECK_VALUE(param.defined(),
                          "shardstep: expected parameters that are tensors, got an ",
                          "undefined one in group ", param_groups_.size());
      }
      drop_repeats(group.params(), param_groups_.size(), process_group());
      Optimizer::add_param_group(group);
      if (!group.has_options()) continue;
      const auto& own = std::as_const(group).options();
      const auto& defaults = *defaults_;
      if (typeid(own) == typeid(defaults) && is_torchs(own)) continue;
      // torch merges options with the defaults, and loses those of types that it does not know.
      param_groups_.back().set_options(own.clone());
    }
  } catch (...) {
    error = std::current_exception();
  }
  adopt_new_groups(error);
}

// Adds the groups that the base class has and the engine does not know yet. If ranks do not agree
// on them, removes them again.
void ZeroRedundancyOptimizer::adopt_new_groups(std::exception_ptr error) {
  const size_t known = engine_->group_count();
  if (!error && param_groups_.size() <= known && known > 0) return;  // fewer: check_groups() throws
  try {
    std::vector<EngineGroup> groups;
    if (!error) {
      try {
        for (size_t g = known; g < param_groups_.size(); ++g) groups.push_back(describe_group(g));
      } catch (...) {
        error = std::current_exception();
      }
    }
    engine_->add_groups(groups, error, [&] {
      for (int64_t i = static_cast<int64_t>(index_of_.size()); i < engine_->param_count(); ++i) {
        index_of_.emplace(engine_->param(i).unsafeGetTensorImpl(), i);
      }
      make_local_groups(known);
    });
  } catch (...) {
    forget_groups_from(known);
    throw;
  }
}

// Takes back what was made of groups that the engine does not have.
void ZeroRedundancyOptimizer::forget_groups_from(size_t known) {
  const auto shorten = [](auto& items, size_t size) {
    if (items.size() > size) {
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(size), items.end());
    }
  };
  shorten(param_groups_, known);
  shorten(places_, known);
  std::vector<size_t> groups(members_.size());
  for (const auto& place : places_) ++groups[place.member];
  for (size_t m = 0; m < members_.size(); ++m) {
    if (groups[m] == 0) members_[m].optim.reset();
    if (members_[m].optim) shorten(members_[m].optim->param_groups(), groups[m]);
  }
  while (members_.size() > 1 && groups[members_.size() - 1] == 0) members_.pop_back();
  std::erase_if(index_of_,
                [&](const auto& entry) { return entry.second >= engine_->param_count(); });
}

EngineGroup ZeroRedundancyOptimizer::describe_group(size_t g) {
  auto& params = param_groups_[g].params();
  drop_repeats(params, g, process_group());
  places_.resize(g + 1);
  places_[g].member = member_for(param_groups_[g].options());
  const auto& local = local_of(g);
  for (const auto& param : params) {
    if (local.check_param && param.defined()) local.check_param(param);
  }
  return {.params = params,
          .description = describe(local, param_groups_[g].options()) +
                         (g == 0 ? describe_module(module_.get()) : ""),
          .names = detail::param_names(module_.get(), params),
          .costs = costs_of(local, params),
          .cost_pool = local.cost ? static_cast<int64_t>(places_[g].member) + 1 : 0,
          .sharding = local.elementwise ? std::nullopt : std::optional(Sharding::kParameter)};
}

size_t ZeroRedundancyOptimizer::member_for(const torch::optim::OptimizerOptions& options) {
  for (size_t m = 0; m < members_.size(); ++m) {
    const auto& theirs = *members_[m].local.defaults;
    if (typeid(theirs) == typeid(options)) return m;
  }
  members_.push_back({local_optimizer_for(options), nullptr});
  return members_.size() - 1;
}

// Gives the groups from `known` on to local optimizers, which are made where missing.
void ZeroRedundancyOptimizer::make_local_groups(size_t known) {
  std::vector<std::vector<OptimizerParamGroup>> added(members_.size());
  for (size_t g = known; g < param_groups_.size(); ++g) {
    auto& [member, position] = places_[g];
    const auto& optim = members_[member].optim;
    position = (optim ? optim->param_groups().size() : 0) + added[member].size();
    std::vector<at::Tensor> params;
    for (const auto& local : engine_->local_params(g)) params.push_back(local.tensor);
    added[member].emplace_back(std::move(params), param_groups_[g].options().clone());
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    auto& [local, optim] = members_[m];
    if (added[m].empty()) continue;
    if (optim) {
      for (const auto& group : added[m]) optim->add_param_group(group);
      continue;
    }
    optim = local.make(std::move(added[m]));
    TORCH_CHECK_VALUE(dynamic_cast<torch::optim::LBFGS*>(optim.get()) == nullptr,
                      "shardstep: expected an optimizer that updates each parameter on its own, ",
                      "got ", local.name,
                      ", whose step depends on the gradients of all parameters (LBFGS)",
                      detail::who(process_group()));
  }
  push_options();
}

// Parameters that were taken out of param_groups() or put there are neither.
void ZeroRedundancyOptimizer::check_groups() const {
  bool same = param_groups_.size() == engine_->group_count();
  for (size_t g = 0; same && g < param_groups_.size(); ++g) {
    const auto& params = param_groups_[g].params();
    const auto given = engine_->partition().group(g);
    same = static_cast<int64_t>(params.size()) == given.size();
    for (int64_t i = 0; same && i < given.size(); ++i) {
      same = params[i].is_same(engine_->param(given.begin + i));
    }
  }
  TORCH_CHECK_VALUE(same,
                    "shardstep: expected param_groups() to keep the parameters that they were "
                    "given, got others; use add_param_group() to add some, requires_grad_(false) "
                    "or an undefined gradient to leave some out, or create a new optimizer",
                    detail::who(process_group()));
}

void ZeroRedundancyOptimizer::push_options() {
  check_groups();
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_of(g).assign_options(param_groups_[g].options(), local_group(g).options());
  }
}

void ZeroRedundancyOptimizer::pull_options() {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_of(g).assign_options(local_group(g).options(), param_groups_[g].options());
  }
}

bool ZeroRedundancyOptimizer::is_known_elementwise_group(size_t group) const {
  return local_of(group).elementwise && is_known_elementwise(local_of(group).name);
}

// The first to step evaluates the closure.
at::Tensor ZeroRedundancyOptimizer::step_members(const LossClosure& closure) {
  at::Tensor loss;
  bool first = true;
  for (auto& member : members_) {
    if (!member.optim) continue;
    if (std::exchange(first, false)) {
      loss = member.optim->step(closure);
    } else {
      member.optim->step();
    }
  }
  return loss;
}

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  if (overlap_with_ddp()) {
    TORCH_WARN(
        "shardstep: step() does nothing with overlap_with_ddp, because a hook of zero_hooks.h "
        "updates the parameters inside the backward pass",
        detail::who(process_group()));
    return {};
  }
  const auto after = c10::make_scope_exit([this] { announced_ = false; });
  if (!closure) announce();
  adopt_new_groups(nullptr);
  consolidated_.reset();
  may_have_state_ = true;
  const auto loss = update_own(closure);
  pull_options();
  engine_->after_step();
  return loss;
}

at::Tensor ZeroRedundancyOptimizer::update_own(const LossClosure& closure) {
  try {
    push_options();
    if (!closure) {
      take_gradients(true);
      const PhaseTimer timer(engine_->phase_times(), StepPhase::kUpdate);
      return step_members(nullptr);
    }
    return step_members([&, first = true]() mutable {
      engine_->before_closure();
      auto loss = closure();
      // A closure's forward announces itself, and joined ranks shadow it before this step.
      announce();
      take_gradients(std::exchange(first, false));
      return loss;
    });
  } catch (...) {
    engine_->fail_step(std::current_exception());
    throw;
  }
}

void ZeroRedundancyOptimizer::take_gradients(bool first_in_step) {
  // What DDP leaves on a rank that has joined was neither unscaled nor clipped.
  const bool lends = first_in_step && !only_owners_have_sums_ && (is_in_join() || has_joined_);
  if (lends) lend_gradients(*engine_, !has_joined_);
  engine_->before_step();
  // Here every rank is, or none: later one might have failed.
  if (first_in_step && module_ && broadcast_buffers_) {
    detail::broadcast(process_group(), module_->buffers());
  }
}

void ZeroRedundancyOptimizer::announce() {
  if (!std::exchange(announced_, true)) Join::notify_join_context(*this);
}

void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) {
  auto* const sharded = engine_->gradients();
  if (set_to_none || !sharded) {
    Optimizer::zero_grad(set_to_none);
    return engine_->drop_sums();
  }
  for (const auto& param : engine_->params()) {
    if (param.grad().defined() && param.grad().has_storage()) param.mutable_grad().zero_();
  }
  sharded->zero_all();
}

at::Tensor ZeroRedundancyOptimizer::full_gradient(const at::Tensor& param) {
  adopt_new_groups(nullptr);
  const auto found = index_of_.find(param.unsafeGetTensorImpl());
  const bool is_ours = found != index_of_.end();
  if (auto* const sharded = engine_->gradients()) {
    announce();
    return sharded->whole(is_ours ? std::optional(found->second) : std::nullopt);
  }
  TORCH_CHECK_VALUE(is_ours,
                    "shardstep: expected a parameter of this optimizer in full_gradient(), got "
                    "another tensor, of sizes ",
                    param.sizes(), detail::who(process_group()));
  return param.grad();
}

ZeroRedundancyOptimizer::NoSync::NoSync(ShardEngine& engine)
    : engine_(engine), before_(engine.sync()) {
  engine_.set_sync(false);
}

ZeroRedundancyOptimizer::NoSync::~NoSync() { engine_.set_sync(before_); }

double ZeroRedundancyOptimizer::clip_grad_norm_(double max_norm, double norm_type,
                                                bool error_if_nonfinite) {
  adopt_new_groups(nullptr);
  if (engine_->gradients()) announce();
  return clip_grad_norm(*engine_, max_norm, norm_type, error_if_nonfinite);
}

void ZeroRedundancyOptimizer::clip_grad_value_(double clip_value) {
  adopt_new_groups(nullptr);
  if (engine_->gradients()) announce();
  clip_grad_value(*engine_, clip_value);
}

bool ZeroRedundancyOptimizer::scale_gradients_(double factor) {
  const auto where = detail::who(process_group());
  TORCH_CHECK_VALUE(!overlap_with_ddp(),
                    "shardstep: expected a GradScaler with an optimizer that updates in step(), ",
                    "got one with overlap_with_ddp, which updates inside the backward pass, before "
                    "gradients are unscaled",
                    where);
  TORCH_CHECK_VALUE(!only_owners_have_sums_ || !is_in_join(),
                    "shardstep: expected a GradScaler without reduce_to_owners_hook inside a Join, "
                    "got both, and ranks that have joined could not say whether gradients are "
                    "finite",
                    where);
  adopt_new_groups(nullptr);
  at::NoGradGuard no_grad;
  bool finite = true;
  if (auto* const sharded = engine_->gradients()) {
    announce();
    std::vector<int64_t> params;
    for (int64_t i = 0; i < engine_->param_count(); ++i) params.push_back(i);
    for (bool one : sharded->finite()) finite = finite && one;
    sharded->scale(params, factor);
    return finite;
  }
  for (const auto& param : engine_->params()) {
    auto gradient = param.grad();
    if (!gradient.defined()) continue;
    const auto values = gradient.is_sparse() ? gradient._values() : gradient;
    finite = finite && values.isfinite().all().item<bool>();
    gradient.mul_(factor);
  }
  if (!only_owners_have_sums_) return finite;
  const auto all = detail::all_gather_number(engine_->control_group(), finite ? 1 : 0);
  return std::all_of(all.begin(), all.end(), [](double one) { return one == 1; });
}

// The gradients of parameters that belong to this optimizer.
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
  only_owners_have_sums_ = true;
  return engine_->reduce_to_owners(by_index(gradients), tag);
}

void ZeroRedundancyOptimizer::update(const ParamsAndGradients& gradients, int tag) {
  TORCH_CHECK_VALUE(overlap_with_ddp(),
                    "shardstep: expected an optimizer with overlap_with_ddp, got one without",
                    detail::who(process_group()));
  adopt_new_groups(nullptr);
  consolidated_.reset();
  may_have_state_ = true;
  const auto known = by_index(gradients);
  try {
    push_options();
    engine_->before_partial_step(known);
    const PhaseTimer timer(engine_->phase_times(), StepPhase::kUpdate);
    step_members(nullptr);
    pull_options();
  } catch (...) {
    if (world_size() == 1) throw;
    // The others wait for the parameters: all ranks throw when these have arrived.
    if (!update_error_) update_error_ = std::current_exception();
  }
  if (auto pending = engine_->after_partial_step(known, tag)) {
    arriving_.push_back(std::move(pending));
  }
}

void ZeroRedundancyOptimizer::end_updates() { engine_->end_partial_steps(update_error_); }

void ZeroRedundancyOptimizer::wait() {
  adopt_new_groups(nullptr);
  const auto arriving = std::exchange(arriving_, {});
  for (const auto& pending : arriving) pending->wait();
  engine_->wait();
  if (const auto error = std::exchange(update_error_, nullptr)) std::rethrow_exception(error);
}

std::unique_ptr<JoinHook> ZeroRedundancyOptimizer::join_hook(const JoinOptions&) {
  announced_ = false;
  return std::make_unique<StepHook>(*this, *engine_, has_joined_);
}

at::Device ZeroRedundancyOptimizer::join_device() const { return engine_->param(0).device(); }

}  // namespace shardstep
