#include "support/full_run.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <random>
#include <string>

namespace shardstep::test {

bool full_run() {
  static const bool full = [] {
    const char* const value = std::getenv("SHARDSTEP_FULL");
    return value && *value && std::string(value) != "0";
  }();
  return full;
}

uint64_t seed() {
  static const uint64_t seed = [] {
    const char* const value = std::getenv("SHARDSTEP_SEED");
    return value && *value ? std::strtoull(value, nullptr, 10) : 0;
  }();
  return seed;
}

int patience() {
  static const int patience = [] {
    const char* const value = std::getenv("SHARDSTEP_PATIENCE");
    return value && *value ? std::max(1, std::atoi(value)) : 1;
  }();
  return patience;
}

std::vector<int> sample(int size, int count) {
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  if (full_run() || count >= size) return all;
  std::vector<int> chosen;
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, std::mt19937_64(seed()));
  return chosen;
}

}  // namespace shardstep::test
