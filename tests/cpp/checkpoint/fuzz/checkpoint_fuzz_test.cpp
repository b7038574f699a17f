// Damaged checkpoints, thousands in a full run: each is refused with one of our errors, or reads as
// before.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/fuzz/mutate.h"
#include "checkpoint/fuzz/read_checkpoint.h"
#include "format/crc32.h"
#include "shardstep/shardstep.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The text of an index, with the checksum that belongs to it.
std::string with_checksum(Json json) {
  if (json.is_object()) json.erase("crc-32");
  const auto text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (!json.is_object() || json.empty()) return text;
  const auto rest = text.substr(1);
  char digits[9];
  std::snprintf(digits, sizeof(digits), "%08x", detail::crc32(rest.data(), rest.size()));
  return std::string("{\"crc-32\":\"") + digits + "\"," + rest;
}

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// A shard whose header says something else, of the same length if that is possible.
std::string with_mutated_header(const std::string& shard, Random& random) {
  uint64_t length = 0;
  std::memcpy(&length, shard.data(), sizeof(length));
  auto json = Json::parse(shard.substr(sizeof(length), length));
  auto& metadata = json["__metadata__"]["shardstep"];
  if (draw(random, 2) == 0) {
    metadata = mutate_json(Json::parse(metadata.get<std::string>()), random).dump();
  } else {
    json = mutate_json(json, random);
  }
  auto text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize(std::max<size_t>(text.size(), length), ' ');
  length = text.size();
  std::string head(reinterpret_cast<const char*>(&length), sizeof(length));
  return head + text + shard.substr(std::min(shard.size(), head.size() + length));
}

// What this process may map, over what it has mapped now. A reader that allocates what a damaged
// file asks for fails by std::bad_alloc. Address sanitizer needs all the room there is, and ends
// the process itself at such a request.
class MemoryLimit {
 public:
  explicit MemoryLimit(int64_t extra) {
#ifndef __SANITIZE_ADDRESS__
    ::getrlimit(RLIMIT_AS, &before_);
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    auto limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(pages * ::getpagesize() + extra);
    ::setrlimit(RLIMIT_AS, &limit);
#endif
  }
  ~MemoryLimit() {
#ifndef __SANITIZE_ADDRESS__
    ::setrlimit(RLIMIT_AS, &before_);
#endif
  }

 private:
  rlimit before_{};
};

// At least this share was refused, less what chance may take away in so few rounds.
void expect_share(int refused, int count, double share) {
  const double chance = 4 * std::sqrt(count * share * (1 - share));
  EXPECT_GT(refused, count * share - chance) << "of " << count;
}

class CheckpointFuzz : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(::testing::TempDir()) / ("checkpoint_fuzz_" + std::to_string(::getpid()));
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      auto params = make_params();
      ZeroRedundancyOptimizer optimizer(
          params, torch::optim::AdamOptions(0.1),
          ZeroOptions().process_group(group).sharding(Sharding::kElement));
      for (int step = 0; step < 3; ++step) {
        set_gradients(params, step);
        optimizer.step();
      }
      optimizer.save_checkpoint(directory_.string());
    });
    for (const auto& entry : fs::directory_iterator(directory_)) {
      files_.emplace_back(entry.path(), read_file(entry.path()));
    }
    std::sort(files_.begin(), files_.end());
    expected_ = read_whole_checkpoint(directory_.string()).state;
    ASSERT_TRUE(expected_);
    ASSERT_FALSE(expected_->state.empty());
    ASSERT_EQ(files_.size(), 3u);  // index.json and two shards
  }
  void TearDown() override { fs::remove_all(directory_); }

  const std::string& index_text() const { return files_[0].second; }

  // Reads the checkpoint with another content of one file.
  ReadOutcome read_with(size_t file, const std::string& bytes) {
    write_file(files_[file].first, bytes);
    ReadOutcome outcome;
    {
      const MemoryLimit limit(int64_t{256} << 20);
      outcome = read_whole_checkpoint(directory_.string());
    }
    write_file(files_[file].first, files_[file].second);
    return outcome;
  }

  fs::path directory_;
  std::vector<std::pair<fs::path, std::string>> files_;
  std::optional<StateDict> expected_;
};

TEST_F(CheckpointFuzz, DamagedBytesAreNoticedOrHarmless) {
  Random random(seed() + 1);
  const int count = rounds(100, 1000);
  int refused = 0;
  for (int round = 0; round < count; ++round) {
    const size_t file = draw(random, files_.size());
    const auto bytes = mutate_bytes(files_[file].second, random);
    const auto outcome = read_with(file, bytes);
    refused += outcome.state ? 0 : 1;
    if (outcome.state) {
      EXPECT_TRUE(same_state(*outcome.state, *expected_)) << "round " << round << ", file " << file;
    } else {
      EXPECT_NE(outcome.error.find(directory_.string()), std::string::npos) << outcome.error;
    }
  }
  expect_share(refused, count, 0.9);
}

// The index as someone else would write it, with a checksum that is right: what it says is all
// there is to tell that it is wrong.
TEST_F(CheckpointFuzz, AnIndexThatLiesIsRefusedOrReadAsItSays) {
  Random random(seed() + 2);
  const int count = rounds(70, 700);
  int refused = 0;
  for (int round = 0; round < count; ++round) {
    const auto json = mutate_json(Json::parse(index_text()), random);
    const auto outcome = read_with(0, with_checksum(json));
    refused += outcome.state ? 0 : 1;
    if (!outcome.state) {
      EXPECT_NE(outcome.error.find(directory_.string()), std::string::npos) << outcome.error;
    }
  }
  expect_share(refused, count, 0.5);
}

// The tensors stay where they were.
TEST_F(CheckpointFuzz, AHeaderThatLiesIsRefusedOrHarmless) {
  Random random(seed() + 3);
  const int count = rounds(40, 300);
  int refused = 0;
  for (int round = 0; round < count; ++round) {
    const size_t file = 1 + draw(random, 2);
    const auto outcome = read_with(file, with_mutated_header(files_[file].second, random));
    refused += outcome.state ? 0 : 1;
    if (outcome.state) {
      EXPECT_TRUE(same_state(*outcome.state, *expected_)) << "round " << round;
    } else {
      EXPECT_NE(outcome.error.find(files_[file].first.string()), std::string::npos)
          << outcome.error;
    }
  }
  expect_share(refused, count, 0.5);
}

TEST_F(CheckpointFuzz, WhatIsRefusedChangesNothing) {
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    Random random(seed() + 4);
    const int count = rounds(30, 200);
    auto params = make_params();
    ZeroRedundancyOptimizer optimizer(params, torch::optim::AdamOptions(0.5),
                                      ZeroOptions().process_group(group));
    set_gradients(params, 7);
    optimizer.step();
    const auto before = *optimizer.consolidate_state_dict();
    int refused = 0;
    for (int round = 0; round < count; ++round) {
      const size_t file = draw(random, files_.size());
      const bool lies = file == 0 && draw(random, 2) == 0;
      write_file(files_[file].first,
                 lies ? with_checksum(mutate_json(Json::parse(index_text()), random))
                      : mutate_bytes(files_[file].second, random));
      bool loaded = true;
      try {
        optimizer.load_checkpoint(directory_.string());
      } catch (const c10::ValueError& error) {
        loaded = false;
        EXPECT_TRUE(std::string(error.what_without_backtrace()).starts_with("shardstep: "))
            << error.what_without_backtrace();
      }
      write_file(files_[file].first, files_[file].second);
      if (loaded) {
        optimizer.load_state_dict(before);
      } else {
        ++refused;
        ASSERT_TRUE(same_state(*optimizer.consolidate_state_dict(), before)) << "round " << round;
      }
    }
    expect_share(refused, count, 0.5);
  });
}

}  // namespace
}  // namespace shardstep::test
