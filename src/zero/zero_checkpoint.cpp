// ZeroRedundancyOptimizer's checkpoints: what goes into them from the module, the generators and
// the local optimizer, and back.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_map>
#include <unordered_set>

#include "checkpoint/checkpointer.h"
#include "shard/shard_engine.h"
#include "shard/state_transfer.h"
#include "shardstep/zero_redundancy_optimizer.h"
#include "zero/module_tensors.h"
#include "zero/param_names.h"

namespace shardstep {
namespace {

// torch's default generators, by device type: the CPU's and the current accelerator's.
std::map<std::string, at::Generator> generators() {
  std::map<std::string, at::Generator> generators{{"cpu", at::detail::getDefaultCPUGenerator()}};
  // A CUDA build of torch names CUDA where there is no GPU too, and could not name a current one.
  if (const auto type = at::getAccelerator(); type && at::accelerator::deviceCount() > 0) {
    const auto device = c10::impl::VirtualGuardImpl(*type).getDevice();
    generators.emplace(c10::DeviceTypeName(*type, /*lower_case=*/true),
                       at::globalContext().defaultGenerator(device));
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

// Where a state has no masters, they start from the module's parameters as they were saved, which
// may have been wider.
void take_module_as_masters(const ShardEngine& engine, const std::vector<ModuleTensor>& module,
                            const std::vector<at::Tensor>& saved,
                            std::map<int64_t, at::Tensor>& masters) {
  std::unordered_map<const void*, size_t> position_of;
  for (size_t i = 0; i < saved.size(); ++i) {
    position_of.emplace(module[i].tensor.unsafeGetTensorImpl(), i);
  }
  EngineState whole;
  for (int64_t index = 0; index < engine.param_count(); ++index) {
    const auto found = position_of.find(engine.param(index).unsafeGetTensorImpl());
    const auto given = masters.find(index);
    if (found == position_of.end() || (given != masters.end() && given->second.defined())) continue;
    if (engine.has_master(index)) whole[index] = {{kMasterKey, saved[found->second], {}}};
  }
  for (auto& [index, values] : cut_state(engine, whole)) masters[index] = values.front().tensor;
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
    content.module = detail::module_tensors(options.module().get());
    content.names = detail::param_names((options.module() ? options.module() : module_).get(),
                                        engine_->params());
    if (options.rng()) content.rng = read_rng();
    if (!options.extra().is_empty()) content.extra = to_dict(options.extra());
  } catch (...) {
    error = std::current_exception();
  }
  SaveOptions how;
  how.mode = options.asynchronous() ? SaveMode::kBackground : SaveMode::kBlocking;
  how.progress = options.progress();
  how.timeout = options.timeout();
  how.keep_last = options.keep_last();
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
  target.module = detail::module_tensors(options.module().get());
  target.names =
      detail::param_names((options.module() ? options.module() : module_).get(), engine_->params());
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    target.known_elementwise.push_back(is_known_elementwise_group(g));
    target.defaults.push_back(local_of(g).read_options(*local_of(g).defaults));
  }

  GroupOptions group_options;
  ParamStates states;
  Masters masters;
  const auto loaded = checkpointer_->load(directory, target, [&](const LoadedCheckpoint& found) {
    for (size_t g = 0; g < param_groups_.size(); ++g) {
      group_options.push_back(param_groups_[g].options().clone());
      local_of(g).write_options(found.param_groups[g].options, *group_options.back());
      for (const auto& param : engine_->local_params(g)) {
        const auto state = found.state.find(param.index);
        if (state == found.state.end()) continue;
        add_state(g, param, state->second, states, masters);
      }
    }
  });

  take_module_as_masters(*engine_, target.module, loaded.module, masters);
  take(group_options, states, masters);
  may_have_state_ = true;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < target.module.size(); ++i) {
    target.module[i].tensor.detach().copy_(loaded.module[i]);
  }
  if (loaded.has_masters) engine_->widen_own_params(masters);
  if (options.rng()) write_rng(loaded.rng);
  return from_dict(loaded.extra);
}

}  // namespace shardstep
