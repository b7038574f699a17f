#pragma once

// How much of a long test runs: all of it with SHARDSTEP_FULL=1 in the environment, else a part
// that a seed chooses. The seed is printed; SHARDSTEP_SEED repeats it.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace shardstep::test {

inline bool full_run() {
  const char* value = std::getenv("SHARDSTEP_FULL");
  return value != nullptr && std::string(value) == "1";
}

inline uint64_t printed_seed() {
  const char* given = std::getenv("SHARDSTEP_SEED");
  const uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device()();
  std::printf("SHARDSTEP_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace shardstep::test
