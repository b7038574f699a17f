#include "shard/state_matching.h"

#include "shard/master_param.h"

namespace shardstep::detail {

GroupParams params_of(const std::vector<StateDict::ParamGroup>& groups) {
  GroupParams params;
  for (const auto& group : groups) params.push_back(group.params);
  return params;
}

std::map<int64_t, int64_t> match_params(const GroupParams& saved, const GroupParams& ours,
                                        const std::string& where) {
  TORCH_CHECK_VALUE(saved.size() == ours.size(), "shardstep: expected ", ours.size(),
                    " param groups, got ", saved.size(), where);
  std::map<int64_t, int64_t> matches;
  for (size_t g = 0; g < ours.size(); ++g) {
    TORCH_CHECK_VALUE(saved[g].size() == ours[g].size(), "shardstep: expected ", ours[g].size(),
                      " parameters in group ", g, ", got ", saved[g].size(), where);
    for (size_t i = 0; i < ours[g].size(); ++i) {
      const auto [match, is_new] = matches.emplace(saved[g][i], ours[g][i]);
      TORCH_CHECK_VALUE(is_new || match->second == ours[g][i], "shardstep: expected every ",
                        "parameter once in the groups of a state, got ", saved[g][i], " for ",
                        match->second, " and ", ours[g][i], where);
    }
  }
  return matches;
}

void check_state_shape(const std::string& key, at::IntArrayRef shape, int64_t index,
                       const at::Tensor& param, bool known_elementwise, const std::string& where) {
  const bool any_shape = key != kMasterKey && (!known_elementwise || shape.empty());
  TORCH_CHECK_VALUE(any_shape || shape == param.sizes(), "shardstep: expected ", key,
                    " of parameter ", index, " with shape ", param.sizes(), ", got ", shape, where);
}

}  // namespace shardstep::detail
