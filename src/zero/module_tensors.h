#pragma once

// The tensors of a module that a checkpoint holds.

#include <torch/nn/module.h>

#include <vector>

#include "checkpoint/checkpointer.h"

namespace shardstep::detail {

// Parameters, then buffers; nothing without a module. Tied tensors have one name, the first.
std::vector<ModuleTensor> module_tensors(const torch::nn::Module* module);

}  // namespace shardstep::detail
