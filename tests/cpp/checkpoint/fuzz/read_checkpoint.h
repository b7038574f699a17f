#pragma once

// Reads a directory of arbitrary contents, for the fuzzers.

#include <optional>
#include <string>

#include "shardstep/state_dict.h"

namespace shardstep::test {

struct ReadOutcome {
  std::optional<StateDict> state;  // nothing if it was refused
  std::string error;
};

// Opens, verifies and reads all of a checkpoint. Refusals are ValueErrors that start with
// "shardstep: "; any other exception passes through.
ReadOutcome read_whole_checkpoint(const std::string& directory);

// Whether two values are equal bit for bit, tensors also in strides.
bool same_value(const c10::IValue& a, const c10::IValue& b);
bool same_state(const StateDict& a, const StateDict& b);

}  // namespace shardstep::test
