#pragma once

// Readers of what others wrote, each as a function of arbitrary bytes, for libFuzzer (`make fuzz`)
// and for the test that replays what it has found (corpus_test.cpp). A target reads its input or
// refuses it with one of our errors (refusal_text); any other exception is a defect, as is a value
// that cannot be read back. Not thread-safe: files are at fixed places in a temporary folder of the
// process.

#include <string>
#include <string_view>
#include <vector>

namespace shardstep::test {

struct FuzzTarget {
  const char* name;
  // Whether the input was accepted.
  bool (*read)(std::string_view input);
  // Inputs that are accepted, from which a fuzzer starts.
  std::vector<std::string> (*seeds)();
};

const std::vector<FuzzTarget>& fuzz_targets();
const FuzzTarget& fuzz_target(const std::string& name);

}  // namespace shardstep::test
