#pragma once

// What a module calls the parameters of an optimizer.

#include <torch/nn/module.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace shardstep::detail {

// By parameter; empty for one that is not the module's. Tied ones have their first name. Nothing
// without a module.
inline std::vector<std::string> param_names(const torch::nn::Module* module,
                                            const std::vector<at::Tensor>& params) {
  if (module == nullptr) return {};
  std::unordered_map<const void*, std::string> by_tensor;
  for (const auto& item : module->named_parameters()) {
    by_tensor.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::vector<std::string> names;
  for (const auto& param : params) {
    const auto found = by_tensor.find(param.unsafeGetTensorImpl());
    names.push_back(found == by_tensor.end() ? "" : found->second);
  }
  return names;
}

}  // namespace shardstep::detail
