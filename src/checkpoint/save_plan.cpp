#include "checkpoint/save_plan.h"

#include <ATen/core/grad_mode.h>

#include "format/tensor_memory.h"
#include "shard/state_layout.h"

namespace shardstep::detail {
namespace {

// Module parameters are cut at multiples of this many elements, so that small ones stay whole.
constexpr int64_t kCutElements = 1 << 16;

at::Tensor dense(const at::Tensor& tensor) {
  return is_dense(tensor) ? tensor.detach() : tensor.detach().contiguous();
}

void check_memory(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(has_memory(tensor), "shardstep: cannot save ", name, ": expected ", kWithMemory,
                    ", got ", describe_memory(tensor));
}

// A copy of the value that later changes of its tensors do not affect.
c10::IValue snapshot(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().detach().cpu().clone();
  if (value.isTuple()) {
    std::vector<c10::IValue> items;
    for (const auto& item : value.toTupleRef().elements()) items.push_back(snapshot(item));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (value.isList()) {
    c10::impl::GenericList items(c10::AnyType::get());
    for (const auto& item : value.toList().vec()) items.push_back(snapshot(item));
    return items;
  }
  if (value.isGenericDict()) {
    c10::impl::GenericDict items(c10::StringType::get(), c10::AnyType::get());
    for (const auto& item : value.toGenericDict()) items.insert(item.key(), snapshot(item.value()));
    return items;
  }
  return value;
}

// Throws here for what JSON cannot hold, and not after the shards are written.
c10::IValue checked_snapshot(const c10::IValue& value, const std::string& name) {
  to_json(value, name);
  return snapshot(value);
}

// A parameter's state on this rank. State that is not cut is the same on all owners, so the first
// one writes it.
void plan_state(const ShardEngine& engine, const LocalParam& local, const NamedValues& values,
                ShardContent& shard) {
  const auto& param = engine.param(local.index);
  const bool first = engine.partition().slices(local.index).front().rank == engine.rank();
  if (first) shard.state[local.index];  // also if it is empty
  for (const auto& item : values) {
    const auto name = state_name(local.index, item.key());
    if (first) shard.state[local.index].push_back(item.key());
    if (!item.value().isTensor()) {
      if (first) shard.values.emplace(name, checked_snapshot(item.value(), name));
      continue;
    }
    const auto& tensor = item.value().toTensor();
    check_memory(tensor, name);
    if (is_cut(tensor, local.elements, engine.sharding(local.index))) {
      auto whole = describe(param);
      whole.dtype = tensor.scalar_type();
      shard.parts.push_back({name, std::move(whole), local.elements, tensor.detach().contiguous()});
    } else if (first) {
      const auto ordered = like_param(item.key(), tensor.sizes(), param)
                               ? in_order_of(param, tensor.detach())
                               : tensor.detach().contiguous();
      shard.parts.push_back({name, describe(ordered), {0, tensor.numel()}, ordered});
    }
  }
}

// Where rank `rank`'s share of all module parameters' bytes begins in one of them.
int64_t cut_of(int64_t total, int64_t before, const at::Tensor& tensor, int rank, int world_size) {
  if (rank == world_size) return tensor.numel();
  const auto bytes = static_cast<int64_t>(static_cast<double>(total) * rank / world_size) - before;
  const int64_t element = bytes / tensor.element_size() / kCutElements * kCutElements;
  return bytes <= 0 ? 0 : std::min(element, tensor.numel());
}

void plan_module(const ShardEngine& engine, const std::vector<ModuleTensor>& module,
                 ShardContent& shard) {
  int64_t total = 0, before = 0;
  for (const auto& [name, tensor, is_buffer] : module) {
    check_memory(tensor, "module." + name);
    if (!is_buffer) total += static_cast<int64_t>(tensor.nbytes());
  }
  for (const auto& [name, tensor, is_buffer] : module) {
    Range own{0, engine.rank() == 0 ? tensor.numel() : 0};
    if (!is_buffer && tensor.numel() > 0) {
      own = {cut_of(total, before, tensor, engine.rank(), engine.world_size()),
             cut_of(total, before, tensor, engine.rank() + 1, engine.world_size())};
      before += static_cast<int64_t>(tensor.nbytes());
    }
    if (own.empty() && !(tensor.numel() == 0 && engine.rank() == 0)) continue;
    const auto ordered = dense(tensor);
    shard.parts.push_back({"module." + name, describe(ordered), own,
                           flat_view(ordered).narrow(0, own.begin, own.size())});
  }
}

// Extra state of the module, from rank 0.
void plan_module_values(const std::map<std::string, c10::IValue>& values, SavePlan& plan) {
  for (const auto& [name, value] : values) {
    if (!value.isTensor()) {
      plan.head.module_values.emplace(name, checked_snapshot(value, "module." + name));
      continue;
    }
    check_memory(value.toTensor(), "module." + name);
    const auto tensor = value.toTensor().detach().contiguous();
    plan.shard.parts.push_back({"module." + name, describe(tensor), {0, tensor.numel()}, tensor});
  }
}

std::vector<CheckpointParameter> parameters_of(const ShardEngine& engine,
                                               const std::vector<std::string>& names) {
  std::vector<CheckpointParameter> parameters;
  for (int64_t i = 0; i < engine.param_count(); ++i) {
    const auto& param = engine.param(i);
    parameters.push_back({std::nullopt, param.sizes().vec(), param.scalar_type()});
    if (!names.empty() && !names[i].empty()) parameters.back().name = names[i];
  }
  return parameters;
}

}  // namespace

SavePlan plan_save(const ShardEngine& engine, const CheckpointContent& content) {
  at::NoGradGuard no_grad;
  SavePlan plan;
  auto& [shard, head] = plan;
  for (size_t group = 0; group < engine.group_count(); ++group) {
    for (const auto& local : engine.local_params(group)) {
      const auto found = content.state.find(local.index);
      if (found != content.state.end()) plan_state(engine, local, found->second, shard);
    }
  }
  plan_module(engine, content.module, shard);
  if (engine.rank() == 0) plan_module_values(content.module_values, plan);
  for (const auto& [device, state] : content.rng) {
    const auto own = state.detach().contiguous();
    const auto name = c10::str("rng.", engine.rank(), ".", device);
    shard.parts.push_back({name, describe(own), {0, own.numel()}, own});
  }
  head.world_size = engine.world_size();
  head.stage = engine.stage();
  head.sharding = engine.options().sharding;
  head.parameters = parameters_of(engine, content.names);
  head.extra = checked_snapshot(content.extra, "extra");
  for (size_t g = 0; g < content.param_groups.size(); ++g) {
    auto& group = head.param_groups.emplace_back();
    group.params = content.param_groups[g].params;
    for (const auto& item : content.param_groups[g].options) {
      const auto name = c10::str("param group ", g, ".", item.key());
      group.options.insert(item.key(), checked_snapshot(item.value(), name));
    }
  }
  // Also throws for strings that are not UTF-8.
  index_to_text(head);
  return plan;
}

std::vector<std::string> comparable_lines(const std::string& directory,
                                          const CheckpointContent& content, SaveMode mode) {
  std::vector<std::string> lines{c10::str("checkpoint in ", directory, ", in the background ",
                                          mode == SaveMode::kBackground, ", generators ",
                                          !content.rng.empty())};
  for (const auto& [name, tensor, is_buffer] : content.module) {
    lines.push_back(c10::str("module.", name, ": ", tensor.scalar_type(), " ", tensor.sizes(),
                             " strides ", tensor.strides()));
  }
  return lines;
}

}  // namespace shardstep::detail
