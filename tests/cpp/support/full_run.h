#pragma once

// Which tests a short run skips, and how long tests wait. `make test FULL=1` sets SHARDSTEP_FULL=1;
// SHARDSTEP_SEED, which tools/run_tests.py prints, selects what a short run includes.

#include <cstdint>
#include <vector>

namespace shardstep::test {

bool full_run();
uint64_t seed();

// SHARDSTEP_PATIENCE, or 1: how many times longer than on a machine of their own tests may take.
// tools/run_tests.py sets it for sanitizers. It scales limits on what a test takes, never the
// timeouts that a test is about.
int patience();

// How many rounds of something random to run.
inline int rounds(int short_run, int full) { return full_run() ? full : short_run; }

// All of it in a full run, else `count` of it in their order, chosen by the seed.
std::vector<int> sample(int size, int count);
template <class T>
std::vector<T> sample(const std::vector<T>& all, int count) {
  std::vector<T> chosen;
  for (int index : sample(static_cast<int>(all.size()), count)) chosen.push_back(all[index]);
  return chosen;
}

}  // namespace shardstep::test
