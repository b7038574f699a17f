#pragma once

// Whether a saved state fits an optimizer, for state dicts and checkpoints, in C++ and Python. Pure
// functions; errors end in `where`.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "shardstep/export.h"
#include "shardstep/state_dict.h"

namespace shardstep::detail {

// The parameters of each param group.
using GroupParams = std::vector<std::vector<int64_t>>;
SHARDSTEP_API GroupParams params_of(const std::vector<StateDict::ParamGroup>& groups);

// Our index of each parameter of a saved state. Throws ValueError unless the numbers of groups and
// of parameters in each group are the same, and each parameter matches only one of ours.
SHARDSTEP_API std::map<int64_t, int64_t> match_params(const GroupParams& saved,
                                                      const GroupParams& ours,
                                                      const std::string& where);

// Throws ValueError unless a state tensor of this shape can belong to the parameter: for an
// optimizer known to be element-wise, it has the parameter's shape or no axes; for others, any. A
// master has the parameter's shape.
SHARDSTEP_API void check_state_shape(const std::string& key, at::IntArrayRef shape, int64_t index,
                                     const at::Tensor& param, bool known_elementwise,
                                     const std::string& where);

}  // namespace shardstep::detail
