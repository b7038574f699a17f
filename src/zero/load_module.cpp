#include "shardstep/load_module.h"

#include <ATen/core/grad_mode.h>

#include <set>
#include <unordered_set>

#include "zero/module_tensors.h"

namespace shardstep {

std::vector<ModuleTensor> detail::module_tensors(const torch::nn::Module* module) {
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

void load_module(Checkpoint& checkpoint, torch::nn::Module& module) {
  const auto& saved = checkpoint.index().tensors;
  const auto tensors = detail::module_tensors(&module);
  std::set<std::string> unused;
  for (const auto& name : checkpoint.module_names()) unused.insert(name);
  TORCH_CHECK_VALUE(!unused.empty(), "shardstep: expected weights in the checkpoint ",
                    checkpoint.directory(), ", got none; save it with a module");
  for (const auto& [name, tensor, is_buffer] : tensors) {
    const auto found = saved.find(kModulePrefix + name);
    TORCH_CHECK_VALUE(found != saved.end(), "shardstep: expected the module's ", name,
                      " in the checkpoint ", checkpoint.directory(), ", got none");
    TORCH_CHECK_VALUE(tensor.sizes() == found->second.shape, "shardstep: expected ", name,
                      " of sizes ", tensor.sizes(), ", got ", at::IntArrayRef(found->second.shape),
                      " in the checkpoint ", checkpoint.directory());
    unused.erase(name);
  }
  TORCH_CHECK_VALUE(unused.empty(), "shardstep: expected the checkpoint ", checkpoint.directory(),
                    " to hold this module, got ", *unused.begin(), ", which the module lacks");
  for (const auto& item : tensors) checkpoint.verify(kModulePrefix + item.name);
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor, is_buffer] : tensors) {
    tensor.detach().copy_(checkpoint.read(kModulePrefix + name));
  }
}

}  // namespace shardstep
