// ZeroRedundancyOptimizer's checkpoints: what of the module, generators and local optimizer goes
// into them and comes out.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>

#include <unordered_map>
#include <unordered_set>

#include "checkpoint/checkpointer.h"
#include "shard/shard_engine.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {
namespace {

// Tied tensors have one name, the first.
std::vector<ModuleTensor> tensors_of(const torch::nn::Module* module) {
  std::vector<ModuleTensor> tensors;
  if (module == nullptr) return tensors;
  std::unordered_set<const void*> seen;
  auto add = [&](const auto& items, bool is_buffer) {
    for (const auto& item : items) {
      if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second) {
        continue;
      }
      tensors.push_back({item.key(), item.value(), is_buffer});
    }
  };
  add(module->named_parameters(), false);
  add(module->named_buffers(), true);
  return tensors;
}

std::vector<std::string> names_of(const ShardEngine& engine,
                                  const std::vector<ModuleTensor>& module) {
  if (module.empty()) return {};
  std::unordered_map<const void*, std::string> by_tensor;
  for (const auto& [name, tensor, is_buffer] : module) {
    by_tensor.emplace(tensor.unsafeGetTensorImpl(), name);
  }
  std::vector<std::string> names;
  for (int64_t i = 0; i < engine.param_count(); ++i) {
    const auto found = by_tensor.find(engine.param(i).unsafeGetTensorImpl());
    names.push_back(found == by_tensor.end() ? "" : found->second);
  }
  return names;
}

// The generators that torch's functions use unless told otherwise, by device type.
std::map<std::string, at::Generator> generators() {
  std::map<std::string, at::Generator> generators{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (at::hasCUDA()) {
    generators.emplace("cuda", at::globalContext().defaultGenerator(at::Device(at::kCUDA)));
  }
  return generators;
}

std::map<std::string, at::Tensor> read_rng() {
  std::map<std::string, at::Tensor> states;
  for (auto [device, generator] : generators()) {
    const std::lock_guard lock(generator.mutex());
    states.emplace(device, generator.get_state());
  }
  return states;
}

void write_rng(const std::map<std::string, at::Tensor>& states) {
  for (auto [device, generator] : generators()) {
    const auto found = states.find(device);
    if (found == states.end()) continue;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(found->second);
  }
}

c10::IValue to_dict(const NamedValues& values) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& item : values) dict.insert(item.key(), item.value());
  return dict;
}

NamedValues from_dict(const c10::IValue& dict) {
  NamedValues values;
  if (!dict.isGenericDict()) return values;
  for (const auto& item : dict.toGenericDict()) {
    values.insert(item.key().toStringRef(), item.value());
  }
  return values;
}

}  // namespace

void ZeroRedundancyOptimizer::save_checkpoint(const std::string& directory,
                                              const CheckpointOptions& options) {
  wait();
  adopt_new_groups(nullptr);
  CheckpointContent content;
  std::exception_ptr error;
  try {
    content.state = read_local_state();
    content.param_groups = whole_state_dict({}).param_groups;
    content.module = tensors_of(options.module().get());
    content.names = names_of(*engine_, content.module);
    if (options.rng()) content.rng = read_rng();
    if (!options.extra().is_empty()) content.extra = to_dict(options.extra());
  } catch (...) {
    error = std::current_exception();
  }
  SaveOptions how;
  how.mode = options.asynchronous() ? SaveMode::kBackground : SaveMode::kBlocking;
  how.progress = options.progress();
  how.timeout = options.timeout();
  checkpointer_->save(directory, std::move(content), how, error);
}

void ZeroRedundancyOptimizer::wait_checkpoint() { checkpointer_->wait(); }

CheckpointProgress ZeroRedundancyOptimizer::checkpoint_progress() const {
  return checkpointer_->progress();
}

int64_t ZeroRedundancyOptimizer::checkpoint_bytes_read() const {
  return checkpointer_->bytes_read();
}

NamedValues ZeroRedundancyOptimizer::load_checkpoint(const std::string& directory,
                                                     const CheckpointOptions& options) {
  wait();
  adopt_new_groups(nullptr);
  CheckpointTarget target;
  target.param_groups = whole_state_dict({}).param_groups;
  target.module = tensors_of(options.module().get());
  target.names = names_of(*engine_, target.module);
  target.known_elementwise = local_.elementwise && is_known_elementwise(local_.name);
  target.defaults = local_.read_options(*local_.defaults);

  GroupOptions group_options;
  ParamStates states;
  const auto loaded = checkpointer_->load(directory, target, [&](const LoadedCheckpoint& found) {
    for (size_t g = 0; g < param_groups_.size(); ++g) {
      group_options.push_back(param_groups_[g].options().clone());
      local_.write_options(found.param_groups[g].options, *group_options.back());
      for (const auto& param : engine_->local_params(g)) {
        const auto state = found.state.find(param.index);
        if (state == found.state.end()) continue;
        states.emplace_back(param.tensor.unsafeGetTensorImpl(), local_.write_state(state->second));
      }
    }
  });

  take(group_options, states);
  may_have_state_ = true;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < target.module.size(); ++i) {
    target.module[i].tensor.detach().copy_(loaded.module[i]);
  }
  if (options.rng()) write_rng(loaded.rng);
  return from_dict(loaded.extra);
}

}  // namespace shardstep
