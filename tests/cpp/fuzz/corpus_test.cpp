// Replays what the fuzzers of `make fuzz` have found: inputs that reach every branch that they
// reached, and those that once were a defect.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "fuzz/targets.h"

namespace shardstep::test {
namespace {

namespace fs = std::filesystem;

class FuzzCorpus : public testing::TestWithParam<FuzzTarget> {};

TEST_P(FuzzCorpus, IsReadOrRefused) {
  const auto& target = GetParam();
  int count = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(SHARDSTEP_FUZZ_CORPUS) / target.name)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string input(std::istreambuf_iterator<char>(file), {});
    SCOPED_TRACE(entry.path().string());
    EXPECT_NO_THROW(target.read(input));
    ++count;
  }
  EXPECT_GE(count, 10);
}

TEST_P(FuzzCorpus, SeedsAreAccepted) {
  const auto& target = GetParam();
  for (const auto& seed : target.seeds()) EXPECT_TRUE(target.read(seed));
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzCorpus, testing::ValuesIn(fuzz_targets()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardstep::test
