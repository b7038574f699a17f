#include "shardstep/zero_redundancy_optimizer.h"

#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <unordered_set>

#include "checkpoint/checkpointer.h"
#include "comm/who.h"
#include "shard/shard_engine.h"
#include "shard/state_matching.h"

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

EngineOptions engine_options(const ZeroOptions& options) {
  return {.stage = options.stage(),
          .sharding = options.sharding(),
          .storage =
              options.parameters_as_bucket_view() ? BucketStorage::kFlat : BucketStorage::kInPlace,
          .exchange = options.exchange(),
          .bucket_cap_mb = options.bucket_cap_mb(),
          .overlap = options.overlap_with_ddp(),
          .share_parameters = options.share_parameters(),
          .overlap_forward = options.overlap_forward(),
          .gradient_dtype = options.gradient_dtype()};
}

std::string describe(const LocalOptimizer& local, const torch::optim::OptimizerOptions& options) {
  std::ostringstream text;
  text << local.name;
  for (const auto& item : local.read_options(options))
    text << " " << item.key() << "=" << item.value();
  return text.str();
}

// IValues that are not tensors travel as bytes.
std::string to_bytes(const c10::IValue& value) {
  const auto bytes = torch::pickle_save(value);
  return {bytes.begin(), bytes.end()};
}

c10::IValue from_bytes(const std::string& bytes) {
  return torch::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
}

ParamState to_engine(const NamedValues& values) {
  ParamState state;
  for (const auto& item : values) {
    const auto& value = item.value();
    if (value.isTensor()) {
      state.push_back({item.key(), value.toTensor(), {}});
    } else {
      state.push_back({item.key(), {}, to_bytes(value)});
    }
  }
  return state;
}

NamedValues from_engine(const ParamState& state) {
  NamedValues values;
  for (const auto& value : state) {
    values.insert(value.name,
                  value.tensor.defined() ? c10::IValue(value.tensor) : from_bytes(value.bytes));
  }
  return values;
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
      engine_(std::make_unique<ShardEngine>(
          options.process_group() ? options.process_group() : default_process_group(),
          engine_options(options))),
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
        "the parameters inside the backward pass (rank ",
        rank(), " of ", world_size(), ")");
    return {};
  }
  // A closure's forward announces itself, and joined ranks must shadow it before this step.
  if (!closure) Join::notify_join_context(*this);
  adopt_new_groups(nullptr);
  consolidated_.reset();
  may_have_state_ = true;
  push_options();
  engine_->before_step();
  at::Tensor loss;
  if (closure) {
    loss = optim_->step([&] {
      auto value = closure();
      engine_->before_step();
      return value;
    });
    Join::notify_join_context(*this);
  } else {
    loss = optim_->step();
  }
  pull_options();
  engine_->after_step();
  return loss;
}

void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none);
  engine_->drop_sums();
}

ZeroRedundancyOptimizer::NoSync::NoSync(ShardEngine& engine)
    : engine_(engine), before_(engine.sync()) {
  engine_.set_sync(false);
}

ZeroRedundancyOptimizer::NoSync::~NoSync() { engine_.set_sync(before_); }

double ZeroRedundancyOptimizer::clip_grad_norm_(double max_norm, double norm_type,
                                                bool error_if_nonfinite) {
  adopt_new_groups(nullptr);
  return engine_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
}

void ZeroRedundancyOptimizer::clip_grad_value_(double clip_value) {
  adopt_new_groups(nullptr);
  engine_->clip_grad_value(clip_value);
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
  TORCH_CHECK_VALUE(overlap_with_ddp(),
                    "shardstep: expected an optimizer with overlap_with_ddp (rank ", rank(), " of ",
                    world_size(), ")");
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

// By parameter index; parameters without state are absent.
std::map<int64_t, NamedValues> ZeroRedundancyOptimizer::read_local_state() const {
  const auto& states = std::as_const(*optim_).state();
  std::map<int64_t, NamedValues> local;
  for (size_t g = 0; g < engine_->group_count(); ++g) {
    for (const auto& param : engine_->local_params(g)) {
      const auto found = states.find(param.tensor.unsafeGetTensorImpl());
      if (found == states.end()) continue;
      auto values = local_.read_state(*found->second);
      if (!values.is_empty()) local.emplace(param.index, std::move(values));
    }
  }
  return local;
}

std::optional<StateDict> ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  wait();
  adopt_new_groups(nullptr);
  consolidated_.reset();
  EngineState local;
  for (const auto& [index, values] : read_local_state()) local[index] = to_engine(values);
  const auto whole = engine_->gather_state(local, to);
  if (rank() == to) consolidated_ = whole_state_dict(whole);
  return consolidated_;
}

StateDict ZeroRedundancyOptimizer::whole_state_dict(const EngineState& state) const {
  StateDict dict;
  for (const auto& [index, values] : state) dict.state.emplace(index, from_engine(values));
  int64_t index = 0;
  for (const auto& group : param_groups_) {
    auto& out = dict.param_groups.emplace_back();
    out.options = local_.read_options(group.options());
    for (size_t i = 0; i < group.params().size(); ++i) out.params.push_back(index++);
  }
  return dict;
}

StateDict ZeroRedundancyOptimizer::state_dict() const {
  if (consolidated_) return *consolidated_;
  TORCH_CHECK(!may_have_state_ && !has_state_from_the_start(),
              "shardstep: expected a consolidated state, got none on this rank: call "
              "consolidate_state_dict(to) on all ranks, after the last step, and state_dict() on "
              "rank `to`",
              detail::who(process_group()));
  return whole_state_dict({});
}

// Whether local optimizers are made with state, as Adagrad is. A rank that owns nothing asks a new
// one.
bool ZeroRedundancyOptimizer::has_state_from_the_start() const {
  if (!std::as_const(*optim_).state().empty() || engine_->partition().owned_elements(rank()) > 0) {
    return !std::as_const(*optim_).state().empty();
  }
  const auto made = local_.make(one_group({at::zeros({1}).set_requires_grad(true)}));
  return !std::as_const(*made).state().empty();
}

void ZeroRedundancyOptimizer::load_state_dict(const StateDict& dict) {
  wait();
  const auto where = detail::who(process_group());

  // Everything that can fail comes first, on copies. Positions in the file need not be ours.
  const auto positions =
      detail::match_params(detail::params_of(dict.param_groups),
                           detail::params_of(whole_state_dict({}).param_groups), where);
  GroupOptions options;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    options.push_back(param_groups_[g].options().clone());
    local_.write_options(dict.param_groups[g].options, *options.back());
  }
  const bool known = local_.elementwise && is_known_elementwise(local_.name);
  EngineState whole;
  for (const auto& [index, values] : dict.state) {
    const auto position = positions.find(index);
    TORCH_CHECK_VALUE(position != positions.end(),
                      "shardstep: expected state of parameters that a ", "group lists, got index ",
                      index, where);
    const auto& param = engine_->param(position->second);
    for (const auto& item : values) {
      if (!item.value().isTensor()) continue;
      detail::check_state_shape(item.key(), item.value().toTensor().sizes(), position->second,
                                param, known, where);
    }
    whole.emplace(position->second, to_engine(values));
  }
  const auto own = engine_->cut_state(whole);
  ParamStates states;
  for (size_t g = 0; g < engine_->group_count(); ++g) {
    for (const auto& param : engine_->local_params(g)) {
      const auto found = own.find(param.index);
      if (found == own.end()) continue;
      states.emplace_back(param.tensor.unsafeGetTensorImpl(),
                          local_.write_state(from_engine(found->second)));
    }
  }

  take(options, states);
  may_have_state_ = !dict.state.empty();
}

void ZeroRedundancyOptimizer::take(const GroupOptions& options, ParamStates& states) {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_.assign_options(*options[g], param_groups_[g].options());
  }
  push_options();
  optim_->state().clear();
  for (auto& [key, state] : states) optim_->state()[key] = std::move(state);
  consolidated_.reset();
}

// A plain optimizer over the whole parameters, without state.
std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::make_plain() const {
  auto plain = local_.make(param_groups_);
  plain->state().clear();
  return plain;
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const auto& dict = state_dict();
  auto plain = make_plain();
  for (const auto& [index, values] : dict.state) {
    plain->state()[engine_->param(index).unsafeGetTensorImpl()] = local_.write_state(values);
  }
  plain->save(archive);
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  auto plain = make_plain();
  plain->load(archive);
  StateDict dict = whole_state_dict({});
  for (size_t g = 0; g < dict.param_groups.size(); ++g) {
    dict.param_groups[g].options = local_.read_options(plain->param_groups()[g].options());
  }
  for (int64_t index = 0; index < engine_->param_count(); ++index) {
    const auto found = plain->state().find(engine_->param(index).unsafeGetTensorImpl());
    if (found != plain->state().end()) dict.state.emplace(index, local_.read_state(*found->second));
  }
  load_state_dict(dict);
}

int64_t ZeroRedundancyOptimizer::local_state_bytes() const {
  int64_t bytes = 0;
  for (const auto& [index, values] : read_local_state()) {
    for (const auto& item : values) {
      if (item.value().isTensor()) bytes += static_cast<int64_t>(item.value().toTensor().nbytes());
    }
  }
  return bytes;
}

}  // namespace shardstep
