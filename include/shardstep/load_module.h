#pragma once

// The weights of a checkpoint in a module, without ranks and without an optimizer.
// Thread safety: one thread at a time. Not collective.

#include <torch/nn/module.h>

#include "shardstep/checkpoint.h"
#include "shardstep/export.h"

namespace shardstep {

// Copies the checkpoint's weights into the module's parameters and buffers, one at a time, cast to
// their dtypes. If one is missing on either side or has a different shape, throws ValueError and
// changes nothing.
SHARDSTEP_API void load_module(Checkpoint& checkpoint, torch::nn::Module& module);

}  // namespace shardstep
