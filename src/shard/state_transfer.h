#pragma once

// Gathers optimizer state from the parts that ranks hold, and cuts whole state into these.

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shard/shard_engine.h"
#include "shardstep/export.h"

namespace shardstep {

// A value of a parameter's optimizer state: a tensor, or bytes that only the caller understands.
struct StateValue {
  std::string name;
  at::Tensor tensor;
  std::string bytes;
};
using ParamState = std::vector<StateValue>;
// By parameter index across groups.
using EngineState = std::map<int64_t, ParamState>;

// The state of all ranks on rank `to`, whole and on the CPU; empty on other ranks. Tensors go to
// `to` alone, one bucket at a time. Collective.
SHARDSTEP_API EngineState gather_state(const ShardEngine& engine, const EngineState& local, int to);

// A copy of this rank's share of a whole state, on the parameters' devices. Tensors keep their
// dtype; the local optimizer may convert them.
SHARDSTEP_API EngineState cut_state(const ShardEngine& engine, const EngineState& whole);

}  // namespace shardstep
