// ZeroRedundancyOptimizer's state: gathered, loaded, and in torch::save's format.

#include <torch/serialize.h>

#include "comm/agreement.h"
#include "launch/who.h"
#include "shard/state_matching.h"
#include "shard/state_transfer.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {
namespace {

// IValues that are not tensors are sent as bytes.
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

}  // namespace

// By parameter index; parameters without state are absent.
std::map<int64_t, NamedValues> ZeroRedundancyOptimizer::read_local_state() const {
  std::map<int64_t, NamedValues> local;
  for (size_t g = 0; g < engine_->group_count(); ++g) {
    const auto& [local_optimizer, optim] = members_[places_[g].member];
    const auto& states = std::as_const(*optim).state();
    for (const auto& param : engine_->local_params(g)) {
      const auto found = states.find(param.tensor.unsafeGetTensorImpl());
      auto values =
          found == states.end() ? NamedValues() : local_optimizer.read_state(*found->second);
      const auto master = engine_->saved_master(param.index);
      if (master.defined()) values.insert(kMasterKey, master);
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
  std::exception_ptr error;
  try {
    for (const auto& [index, values] : read_local_state()) local[index] = to_engine(values);
  } catch (...) {
    error = std::current_exception();
  }
  detail::tell_every_rank(engine_->control_group(), error);
  const auto whole = gather_state(*engine_, local, to);
  if (rank() == to) consolidated_ = whole_state_dict(whole);
  return consolidated_;
}

StateDict ZeroRedundancyOptimizer::whole_state_dict(const EngineState& state) const {
  StateDict dict;
  for (const auto& [index, values] : state) dict.state.emplace(index, from_engine(values));
  int64_t index = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    auto& out = dict.param_groups.emplace_back();
    out.options = local_of(g).read_options(param_groups_[g].options());
    for (size_t i = 0; i < param_groups_[g].params().size(); ++i) out.params.push_back(index++);
  }
  return dict;
}

StateDict ZeroRedundancyOptimizer::state_dict() const {
  if (consolidated_) return *consolidated_;
  TORCH_CHECK(!may_have_state_ && !has_state_from_the_start(),
              "shardstep: expected a consolidated state, got none on this rank; call "
              "consolidate_state_dict(to) on all ranks, after the last step, and state_dict() on "
              "rank `to`",
              detail::who(process_group()));
  return whole_state_dict({});
}

// Whether local optimizers have state from construction, as Adagrad does. A rank that owns nothing
// tries a new one.
bool ZeroRedundancyOptimizer::has_state_from_the_start() const {
  const auto has_state = [](const torch::optim::Optimizer& optim) {
    return !optim.state().empty();
  };
  for (const auto& [local, optim] : members_) {
    if (optim && has_state(*optim)) return true;
  }
  if (engine_->partition().owned_elements(rank()) > 0) return false;
  for (const auto& [local, optim] : members_) {
    if (!optim) continue;
    // A matrix, since some take nothing else.
    const auto made = local.make(std::vector<torch::optim::OptimizerParamGroup>{
        torch::optim::OptimizerParamGroup(std::vector{at::zeros({1, 1}).set_requires_grad(true)})});
    if (has_state(*made)) return true;
  }
  return false;
}

void ZeroRedundancyOptimizer::load_state_dict(const StateDict& dict) {
  wait();
  const auto where = detail::who(process_group());

  // Everything that can fail comes first, on copies. The dict's indices may differ from ours.
  const auto positions =
      detail::match_params(detail::params_of(dict.param_groups),
                           detail::params_of(whole_state_dict({}).param_groups), where);
  GroupOptions options;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    options.push_back(param_groups_[g].options().clone());
    local_of(g).write_options(dict.param_groups[g].options, *options.back());
  }
  std::vector<bool> known;  // by parameter
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    known.insert(known.end(), param_groups_[g].params().size(), is_known_elementwise_group(g));
  }
  EngineState whole;
  Masters whole_masters, masters;
  for (const auto& [index, values] : dict.state) {
    const auto position = positions.find(index);
    TORCH_CHECK_VALUE(position != positions.end(),
                      "shardstep: expected state of parameters that a ", "group lists, got index ",
                      index, where);
    const auto& param = engine_->param(position->second);
    for (const auto& item : values) {
      TORCH_CHECK_VALUE(item.key() != kMasterKey || item.value().isTensor(), "shardstep: expected ",
                        kMasterKey, " of parameter ", position->second, " to be a tensor", where);
      if (!item.value().isTensor()) continue;
      detail::check_state_shape(item.key(), item.value().toTensor().sizes(), position->second,
                                param, known[position->second], where);
    }
    whole.emplace(position->second, to_engine(values));
    if (const auto* master = values.find(kMasterKey)) {
      whole_masters.emplace(position->second, master->toTensor());
    }
  }
  const auto own = cut_state(*engine_, whole);
  ParamStates states;
  for (size_t g = 0; g < engine_->group_count(); ++g) {
    for (const auto& param : engine_->local_params(g)) {
      const auto found = own.find(param.index);
      if (found == own.end()) continue;
      add_state(g, param, from_engine(found->second), states, masters);
    }
  }

  take(options, states, masters);
  widen_params(engine_->params(), whole_masters);
  may_have_state_ = !dict.state.empty();
}

void ZeroRedundancyOptimizer::add_state(size_t group, const LocalParam& param, NamedValues values,
                                        ParamStates& states, Masters& masters) const {
  auto& master = masters[param.index];
  if (const auto* found = values.find(kMasterKey)) {
    master = found->toTensor();
    values.erase(kMasterKey);
    if (values.is_empty()) return;
  }
  if (engine_->updates_copy(param.index)) {
    // State of a run without copies may be as narrow as its parameters.
    for (auto& item : values) {
      if (!item.value().isTensor() || item.key() == "step") continue;
      const auto& tensor = item.value().toTensor();
      if (tensor.defined() && is_narrow(tensor.scalar_type())) {
        item.value() = tensor.to(param.tensor.scalar_type());
      }
    }
  }
  states.push_back(
      {group, param.tensor.unsafeGetTensorImpl(), local_of(group).write_state(values)});
}

void ZeroRedundancyOptimizer::take(const GroupOptions& options, ParamStates& states,
                                   const Masters& masters) {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_of(g).assign_options(*options[g], param_groups_[g].options());
  }
  push_options();
  for (auto& member : members_) {
    if (member.optim) member.optim->state().clear();
  }
  for (auto& [group, key, state] : states) member_of(group).optim->state()[key] = std::move(state);
  engine_->load_masters(masters);
  consolidated_.reset();
}

// A plain optimizer over the whole parameters, without state.
std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::make_plain() const {
  TORCH_CHECK_VALUE(members_.size() == 1,
                    "shardstep: expected one optimizer for torch::save and torch::load, whose "
                    "format is that of a plain one, got ",
                    members_.size(), "; use write_state_dict() or save_checkpoint()",
                    detail::who(process_group()));
  auto plain = members_.front().local.make(param_groups_);
  plain->state().clear();
  return plain;
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const auto dict = state_dict();
  auto plain = make_plain();
  bool has_masters = false;
  for (auto [index, values] : dict.state) {
    if (values.contains(kMasterKey)) {
      has_masters = true;
      values.erase(kMasterKey);
      if (values.is_empty()) continue;
    }
    plain->state()[engine_->param(index).unsafeGetTensorImpl()] = local_of(0).write_state(values);
  }
  if (has_masters) {
    TORCH_WARN("shardstep: torch::save's format has no room for float32 masters: after loading, ",
               "they start from the parameters; to keep them, use write_state_dict() or "
               "save_checkpoint()",
               detail::who(process_group()));
  }
  plain->save(archive);
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  auto plain = make_plain();
  plain->load(archive);
  StateDict dict = whole_state_dict({});
  for (size_t g = 0; g < dict.param_groups.size(); ++g) {
    dict.param_groups[g].options = local_of(0).read_options(plain->param_groups()[g].options());
  }
  for (int64_t index = 0; index < engine_->param_count(); ++index) {
    const auto found = plain->state().find(engine_->param(index).unsafeGetTensorImpl());
    if (found == plain->state().end()) continue;
    dict.state.emplace(index, local_of(0).read_state(*found->second));
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
