#pragma once

// Reads a directory of arbitrary contents, for the fuzzers.

#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "shardstep/state_dict.h"

namespace shardstep::test {

struct ReadOutcome {
  std::optional<StateDict> state;  // nothing if it was refused
  std::string error;
};

// The text of an error by which an input is refused. Throws std::logic_error unless it starts with
// "shardstep: ", and if what it passes on is a failed assertion, an error of the standard library,
// such as of an index that is too large, or a lack of memory.
std::string refusal_text(const c10::Error& error);

// Opens, verifies and reads all of a checkpoint. Refusals are ValueErrors that have a refusal_text;
// any other exception passes through.
ReadOutcome read_whole_checkpoint(const std::string& directory);

// Whether two values are equal bit for bit, tensors also in strides.
bool same_value(const c10::IValue& a, const c10::IValue& b);
bool same_state(const StateDict& a, const StateDict& b);

}  // namespace shardstep::test
