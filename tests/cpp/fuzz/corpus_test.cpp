// Replays what the fuzzers of `make fuzz` have found: inputs that reach every branch that they
// reached, and those that once were a defect.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "checkpoint/fuzz/read_checkpoint.h"
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

template <class Body>
std::string refusal_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return refusal_text(c10::ValueError(
        {}, std::string("shardstep: cannot read a: ") +
                (dynamic_cast<const c10::Error*>(&error)
                     ? static_cast<const c10::Error&>(error).what_without_backtrace()
                     : error.what())));
  }
  return {};
}

TEST(FuzzRefusal, IsNoErrorThatNoInputShouldCause) {
  std::vector<int> numbers(3);
  const auto too_large = [&] { numbers.at(numbers.size()); };
  EXPECT_THROW(refusal_of(too_large), std::logic_error);
  EXPECT_THROW(refusal_of([&] { numbers.resize(numbers.max_size() + 1); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { std::map<int, int>().at(0); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { std::unordered_map<int, int>().at(0); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { std::string("a").substr(2); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { std::stoull("99999999999999999999"); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { throw std::bad_alloc(); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { throw std::bad_optional_access(); }), std::logic_error);
  EXPECT_THROW(refusal_of([] { TORCH_INTERNAL_ASSERT(false, "why"); }), std::logic_error);
  EXPECT_THROW(refusal_text(c10::ValueError({}, "not ours")), std::logic_error);
  EXPECT_EQ(refusal_of([] { TORCH_CHECK_VALUE(false, "expected 'vector::', got 'std::'"); }),
            "shardstep: cannot read a: expected 'vector::', got 'std::'");
}

}  // namespace
}  // namespace shardstep::test
