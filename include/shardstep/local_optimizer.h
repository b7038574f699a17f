#pragma once

// The optimizer that runs on a shard: how to create it, and how its options and state map to the
// names, order and types that the torch.optim class of the same name has in Python. A value type;
// its functions hold no state and may be called from any thread.

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardstep/export.h"
#include "shardstep/optim/muon.h"
#include "shardstep/state_dict.h"

namespace shardstep {

struct LocalOptimizer {
  // Its name in Python's torch.optim: "AdamW".
  std::string name;
  // Whether an element's update depends on nothing but that element's gradient and state, so that
  // the optimizer may run on a part of a parameter.
  bool elementwise = false;
  // What the update of a parameter costs, which sharding by parameter divides evenly among the
  // ranks. Unset: the number of elements, as torch's ZeroRedundancyOptimizer does.
  std::function<double(const at::Tensor&)> cost;
  // Throws ValueError for a parameter that the optimizer cannot update. Unset: it takes any.
  std::function<void(const at::Tensor&)> check_param;
  std::shared_ptr<const torch::optim::OptimizerOptions> defaults;
  // Groups with options keep exactly these; groups without get the defaults. (torch::optim itself
  // treats an option that equals its class's default as unset.)
  std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup>)>
      make;
  // Copies every option; `to` keeps its address.
  std::function<void(const torch::optim::OptimizerOptions& from,
                     torch::optim::OptimizerOptions& to)>
      assign_options;
  std::function<NamedValues(const torch::optim::OptimizerOptions&)> read_options;
  // Sets every option, or changes nothing and throws a ValueError that names the key.
  std::function<void(const NamedValues&, torch::optim::OptimizerOptions&)> write_options;
  // The tensors are the state's own, not copies, except for custom_optimizer. Undefined ones are
  // left out.
  std::function<NamedValues(const torch::optim::OptimizerParamState&)> read_state;
  // The state keeps the given tensors without copying them, except for custom_optimizer.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const NamedValues&)> write_state;
};

// Whether the torch.optim class of this name is element-wise. The only such list, used by C++ and
// Python.
SHARDSTEP_API bool is_known_elementwise(std::string_view name);

SHARDSTEP_API LocalOptimizer local_optimizer(const torch::optim::AdamOptions& defaults);
SHARDSTEP_API LocalOptimizer local_optimizer(const torch::optim::AdamWOptions& defaults);
SHARDSTEP_API LocalOptimizer local_optimizer(const torch::optim::SGDOptions& defaults);
SHARDSTEP_API LocalOptimizer local_optimizer(const torch::optim::AdagradOptions& defaults);
SHARDSTEP_API LocalOptimizer local_optimizer(const torch::optim::RMSpropOptions& defaults);
SHARDSTEP_API LocalOptimizer local_optimizer(const optim::MuonOptions& defaults);
// Throws ValueError: LBFGS's update of one parameter depends on all the others.
SHARDSTEP_API LocalOptimizer local_optimizer(const torch::optim::LBFGSOptions& defaults);

// The one whose options have this type. Throws TypeError for options of a user's own.
SHARDSTEP_API LocalOptimizer local_optimizer_for(const torch::optim::OptimizerOptions& options);

// A user-defined optimizer, constructed as Optimizer(param_groups, defaults). Options and state
// have the names that their serialize() uses. It gets whole parameters, unless the user sets
// `elementwise` on the result.
// REQUIRES: Options and ParamState are copyable and implement serialize() both ways.
template <class Optimizer, class Options, class ParamState>
LocalOptimizer custom_optimizer(Options defaults, std::string name);

namespace detail {

// The values that `serialize` writes into an archive, by key. `type` names it in errors.
SHARDSTEP_API NamedValues
archive_to_values(const std::function<void(torch::serialize::OutputArchive&)>& serialize,
                  const std::string& type);
// Lets `serialize` read an archive that holds `values`.
SHARDSTEP_API void values_to_archive(
    const NamedValues& values,
    const std::function<void(torch::serialize::InputArchive&)>& serialize, const std::string& type);
// Throws ValueError unless `values` has exactly the keys of `expected`; a scheduler's additional
// keys are dropped.
SHARDSTEP_API NamedValues matching_keys(const NamedValues& values, const NamedValues& expected,
                                        const std::string& type);

// `object` as a To; throws TypeError if it is not one.
template <class To, class From>
To& downcast(From& object, const std::string& name) {
  auto* typed = dynamic_cast<To*>(&object);
  TORCH_CHECK_TYPE(typed, "shardstep: expected options or state of ", name, ", got ",
                   c10::demangle(typeid(object).name()));
  return *typed;
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    std::vector<torch::optim::OptimizerParamGroup> groups, const Options& defaults,
    const std::string& name) {
  auto optimizer = std::make_unique<Optimizer>(groups, defaults);
  auto& made = optimizer->param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].has_options()) {
      downcast<Options>(made[i].options(), name) =
          downcast<const Options>(std::as_const(groups[i]).options(), name);
    }
  }
  return optimizer;
}

// The part of a LocalOptimizer that needs no names.
template <class Optimizer, class Options>
LocalOptimizer base_optimizer(const Options& defaults, const std::string& name) {
  LocalOptimizer local;
  local.name = name;
  local.defaults = std::make_shared<const Options>(defaults);
  local.make = [defaults, name](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return make_optimizer<Optimizer, Options>(std::move(groups), defaults, name);
  };
  local.assign_options = [name](const torch::optim::OptimizerOptions& from,
                                torch::optim::OptimizerOptions& to) {
    downcast<Options>(to, name) = downcast<const Options>(from, name);
  };
  return local;
}

}  // namespace detail

template <class Optimizer, class Options, class ParamState>
LocalOptimizer custom_optimizer(Options defaults, std::string name) {
  using torch::serialize::InputArchive;
  using torch::serialize::OutputArchive;
  auto local = detail::base_optimizer<Optimizer, Options>(defaults, name);
  local.read_options = [name](const torch::optim::OptimizerOptions& options) {
    return detail::archive_to_values([&](OutputArchive& archive) { options.serialize(archive); },
                                     name + "'s options");
  };
  local.write_options = [name, read = local.read_options](const NamedValues& values,
                                                          torch::optim::OptimizerOptions& options) {
    auto& to = detail::downcast<Options>(options, name);
    Options next(to);
    detail::values_to_archive(
        detail::matching_keys(values, read(to), name),
        [&](InputArchive& archive) {
          static_cast<torch::optim::OptimizerOptions&>(next).serialize(archive);
        },
        name + "'s options");
    to = std::move(next);
  };
  local.read_state = [name](const torch::optim::OptimizerParamState& state) {
    return detail::archive_to_values([&](OutputArchive& archive) { state.serialize(archive); },
                                     name + "'s state");
  };
  local.write_state = [name](const NamedValues& values) {
    std::unique_ptr<torch::optim::OptimizerParamState> state = std::make_unique<ParamState>();
    detail::values_to_archive(
        values, [&](InputArchive& archive) { state->serialize(archive); }, name + "'s state");
    return state;
  };
  return local;
}

}  // namespace shardstep
