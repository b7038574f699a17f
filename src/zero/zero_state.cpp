// ZeroRedundancyOptimizer's state: gathered, loaded, and in torch::save's format.

#include <torch/serialize.h>

#include "comm/agreement.h"
#include "launch/who.h"
#include "shard/state_matching.h"
#include "shard/state_transfer.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {
namespace {

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

}  // namespace

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
  std::exception_ptr error;
  try {
    for (const auto& [index, values] : read_local_state()) local[index] = to_engine(values);
  } catch (...) {
    error = std::current_exception();
  }
  detail::tell_every_rank(process_group(), error);
  const auto whole = gather_state(*engine_, local, to);
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
  const auto made = local_.make(std::vector<torch::optim::OptimizerParamGroup>{
      torch::optim::OptimizerParamGroup(std::vector{at::zeros({1}).set_requires_grad(true)})});
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
  const auto own = cut_state(*engine_, whole);
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
  const auto dict = state_dict();
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
