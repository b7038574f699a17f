#include "checkpoint/checkpoint_load.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>

#include "format/param_group_keys.h"
#include "shard/state_layout.h"
#include "shard/state_matching.h"

namespace shardstep::detail {
namespace {

// A name without the prefixes of DistributedDataParallel and torch.compile.
std::string unwrapped(std::string name) {
  constexpr std::string_view kParallel = "module.", kCompiled = "_orig_mod.";
  for (size_t at = 0; (at = name.find(kCompiled, at)) != std::string::npos;) {
    const bool segment = at == 0 || name[at - 1] == '.';
    if (segment)
      name.erase(at, kCompiled.size());
    else
      at += kCompiled.size();
  }
  while (name.starts_with(kParallel)) name.erase(0, kParallel.size());
  return name;
}

// The kind of an option's value, as far as it matters to an optimizer.
const char* kind_of(const c10::IValue& value) {
  if (value.isBool()) return "a bool";
  if (value.isInt() || value.isDouble()) return "a number";
  if (value.isTensor()) return value.toTensor().numel() == 1 ? "a number" : "a tensor";
  if (value.isString()) return "a string";
  if (value.isTuple() || value.isList()) return "a sequence";
  if (value_to_dtype(value)) return "a dtype";
  return "a dict";
}

// Options that one side has and the other lacks, except those that no optimizer reads.
std::vector<std::string> lacking(const NamedValues& some, const NamedValues& others) {
  std::vector<std::string> keys;
  for (const auto& item : some) {
    if (!others.contains(item.key()) && !is_foreign(item.key())) keys.push_back(item.key());
  }
  return keys;
}

// An option that the saver did not have takes its default. If each side has options that the other
// lacks, they belong to different optimizers.
void check_options(const NamedValues& expected, const NamedValues& saved,
                   const NamedValues& defaults, size_t group) {
  const auto missing = lacking(defaults, saved), unknown = lacking(saved, expected);
  TORCH_CHECK_VALUE(missing.empty() || unknown.empty(), "shardstep: expected param group ", group,
                    " to have '", missing.front(),
                    "', got the options of another optimizer, with '", unknown.front(), "'");
  for (const auto& item : expected) {
    const auto* value = saved.find(item.key());
    if (value == nullptr || value->isNone() || item.value().isNone()) continue;
    const std::string ours = kind_of(item.value()), theirs = kind_of(*value);
    TORCH_CHECK_VALUE(ours == theirs, "shardstep: expected '", item.key(), "' of param group ",
                      group, " to be ", ours, ", got ", theirs);
    if (item.value().isTuple() && value->isTuple()) {
      const auto count = item.value().toTupleRef().elements().size();
      const auto got = value->toTupleRef().elements().size();
      TORCH_CHECK_VALUE(count == got, "shardstep: expected '", item.key(), "' of param group ",
                        group, " to have ", count, " values, got ", got);
    }
  }
}

// Options that say how an optimizer computes, not what; a saved none leaves them unchanged.
bool is_hint(const std::string& key) { return key == "foreach" || key == "fused"; }

NamedValues merged(const NamedValues& current, const NamedValues& saved,
                   const NamedValues& defaults) {
  NamedValues options;
  for (const auto& item : saved) {
    const auto* ours = current.find(item.key());
    const bool keep = is_hint(item.key()) && item.value().isNone() && ours != nullptr;
    options.insert(item.key(), keep ? *ours : item.value());
  }
  for (const auto& item : defaults) {
    if (!options.contains(item.key())) options.insert(item.key(), item.value());
  }
  return options;
}

// For each of the engine's parameters, its index in the checkpoint. Throws unless the two fit.
std::vector<int64_t> match(const ShardEngine& engine, const CheckpointIndex& index,
                           const CheckpointTarget& target) {
  const auto ours_of =
      match_params(params_of(index.param_groups), params_of(target.param_groups), "");
  std::vector<int64_t> saved(ours_of.size());
  for (const auto& [theirs, ours] : ours_of) saved[ours] = theirs;
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto& theirs = index.parameters[saved[i]];
    const auto& param = engine.param(static_cast<int64_t>(i));
    const std::string name = target.names.empty() ? "" : target.names[i];
    TORCH_CHECK_VALUE(name.empty() || !theirs.name || unwrapped(*theirs.name) == unwrapped(name),
                      "shardstep: expected parameter ", i, " to be ", name, ", got ",
                      theirs.name.value_or(""));
    TORCH_CHECK_VALUE(!theirs.shape || param.sizes() == *theirs.shape,
                      "shardstep: expected parameter ", i, name.empty() ? "" : " (" + name + ")",
                      " with shape ", param.sizes(), ", got ",
                      at::IntArrayRef(theirs.shape.value_or(std::vector<int64_t>{})));
  }
  for (size_t g = 0; g < index.param_groups.size(); ++g) {
    check_options(target.param_groups[g].options, index.param_groups[g].options, target.defaults[g],
                  g);
  }
  return saved;
}

// State that had the dtype of its parameter follows the parameter, or master, that it is loaded
// for; any other keeps its own.
at::ScalarType loaded_dtype(at::ScalarType saved, std::optional<at::ScalarType> saved_param,
                            const at::Tensor& local) {
  const bool followed = saved_param == saved && at::isFloatingType(saved);
  return followed ? state_dtype(saved, local) : saved;
}

// This rank's part of a state tensor, laid out as the parameter.
at::Tensor read_like_param(Checkpoint& checkpoint, const std::string& name, const at::Tensor& param,
                           Range elements, Sharding sharding) {
  const auto& info = checkpoint.index().tensors.at(name);
  if (sharding == Sharding::kElement && info.order == memory_order(param)) {
    return checkpoint.read(name, elements);
  }
  auto tensor = in_order_of(param, checkpoint.read(name));
  if (sharding == Sharding::kElement) {
    tensor = flat_view(tensor).narrow(0, elements.begin, elements.size()).clone();
  }
  return tensor;
}

NamedValues read_state(Checkpoint& checkpoint, const ShardEngine& engine, const LocalParam& local,
                       int64_t saved, bool known_elementwise) {
  const auto& index = checkpoint.index();
  const auto& param = engine.param(local.index);
  const auto sharding = engine.sharding(local.index);
  NamedValues values;
  for (const auto& key : index.state.at(saved)) {
    const auto name = state_name(saved, key);
    const auto value = index.values.find(name);
    if (value != index.values.end()) {
      values.insert(key, value->second);
      continue;
    }
    const auto& info = index.tensors.at(name);
    if (like_param(key, info.shape, param)) {
      const auto dtype = loaded_dtype(info.dtype, index.parameters[saved].dtype, local.tensor);
      const auto tensor = read_like_param(checkpoint, name, param, local.elements, sharding);
      values.insert(key, tensor.to(tensor.options().dtype(dtype).device(param.device())));
      continue;
    }
    check_state_shape(key, info.shape, local.index, param, known_elementwise, "");
    values.insert(key, checkpoint.read(name));
  }
  return values;
}

// The names in the checkpoint of a module's tensors and values; the module may be wrapped
// differently than when it was saved.
class ModuleNames {
 public:
  explicit ModuleNames(const CheckpointIndex& index) {
    for (const auto& [name, tensor] : index.tensors) {
      if (name.starts_with(kPrefix)) add(name.substr(kPrefix.size()));
    }
    for (const auto& [name, value] : index.module_values) add(name);
  }
  // Empty if there is none.
  std::string take(const std::string& name) {
    if (left_.erase(name) > 0) return name;
    const auto found = by_unwrapped_.find(unwrapped(name));
    const bool is_left = found != by_unwrapped_.end() && left_.erase(found->second) > 0;
    return is_left ? found->second : "";
  }
  void check_all_taken() const {
    TORCH_CHECK_VALUE(left_.empty(), "shardstep: expected only tensors that the module has, got ",
                      kPrefix, *left_.begin());
  }
  static std::string tensor(const std::string& name) { return std::string(kPrefix) + name; }

 private:
  static constexpr std::string_view kPrefix = "module.";
  void add(const std::string& name) {
    left_.insert(name);
    by_unwrapped_.emplace(unwrapped(name), name);
  }
  std::set<std::string> left_;
  std::map<std::string, std::string> by_unwrapped_;
};

void read_module(Checkpoint& checkpoint, const CheckpointTarget& target, LoadedCheckpoint& loaded) {
  const auto& index = checkpoint.index();
  ModuleNames names(index);
  std::vector<std::string> found;
  for (const auto& [name, tensor, is_buffer] : target.module) {
    const auto saved = names.take(name);
    const auto info = index.tensors.find(ModuleNames::tensor(saved));
    TORCH_CHECK_VALUE(!saved.empty() && info != index.tensors.end(),
                      "shardstep: expected the module's ", name, ", got a checkpoint without it");
    TORCH_CHECK_VALUE(tensor.sizes() == info->second.shape, "shardstep: expected the module's ",
                      name, " with shape ", tensor.sizes(), ", got ",
                      at::IntArrayRef(info->second.shape));
    found.push_back(info->first);
  }
  for (const auto& name : target.module_values) {
    const auto saved = names.take(name);
    if (saved.empty()) continue;
    const auto value = index.module_values.find(saved);
    loaded.module_values.emplace(name, value != index.module_values.end()
                                           ? value->second
                                           : checkpoint.read(ModuleNames::tensor(saved)));
  }
  names.check_all_taken();
  for (const auto& name : found) loaded.module.push_back(checkpoint.read(name));
}

}  // namespace

LoadedCheckpoint read_checkpoint_for(const ShardEngine& engine, Checkpoint& checkpoint,
                                     const CheckpointTarget& target) {
  at::NoGradGuard no_grad;
  const auto& index = checkpoint.index();
  const auto saved = match(engine, index, target);
  LoadedCheckpoint loaded;
  for (const auto& [param, keys] : index.state) {
    if (std::find(keys.begin(), keys.end(), kMasterKey) != keys.end()) loaded.has_masters = true;
  }
  for (size_t group = 0; group < engine.group_count(); ++group) {
    for (const auto& local : engine.local_params(group)) {
      if (index.state.count(saved[local.index]) == 0) continue;
      loaded.state.emplace(local.index, read_state(checkpoint, engine, local, saved[local.index],
                                                   target.known_elementwise[group]));
    }
  }
  if (!target.module.empty() || !target.module_values.empty()) {
    read_module(checkpoint, target, loaded);
  }
  const auto own_rng = c10::str("rng.", engine.rank(), ".");
  for (const auto& [name, tensor] : index.tensors) {
    if (name.starts_with(own_rng)) {
      loaded.rng.emplace(name.substr(own_rng.size()), checkpoint.read(name));
    }
  }
  for (size_t g = 0; g < index.param_groups.size(); ++g) {
    loaded.param_groups.push_back(
        {merged(target.param_groups[g].options, index.param_groups[g].options, target.defaults[g]),
         target.param_groups[g].params});
  }
  loaded.extra = index.extra;
  return loaded;
}

}  // namespace shardstep::detail
