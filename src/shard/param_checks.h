#pragma once

// What parameters must be like for a ShardEngine. Nothing here communicates.

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "shard/engine_options.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

// Throws ValueError unless the parameter is a dense tensor.
void check_param(const at::Tensor& param, const std::string& label);
// Throws ValueError unless these, all that there are, can be optimized together.
void check_params(const std::vector<at::Tensor>& params, const EngineOptions& options,
                  const ProcessGroupPtr& group);
// What ranks compare of a cost, in words. Throws ValueError for one that cannot be divided.
std::string describe_cost(std::optional<double> cost, size_t param, const ProcessGroupPtr& group);

}  // namespace shardstep::detail
