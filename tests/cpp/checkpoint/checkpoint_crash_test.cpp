// Kills a rank at each of the calls by which a save reaches the disk: the directory then holds the
// old checkpoint or the new one, whole. Also calls that fail, are interrupted, or are too many.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/crash/crash_support.h"
#include "checkpoint/crash/file_calls.h"
#include "checkpoint/directory_lock.h"
#include "support/folder.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;

using namespace crash;

// Which checkpoint the directory holds; it loads, and is what a run without an accident had.
void check(const std::string& directory, const std::vector<int>& allowed) {
  const auto pid = fork_process([&] {
    Checkpoint(directory).verify();
    Trained run(alone());
    const auto extra = run.zero().load_checkpoint(directory);
    const auto generation = static_cast<int>(extra["generation"].toInt());
    EXPECT_NE(std::find(allowed.begin(), allowed.end(), generation), allowed.end()) << generation;
    Trained expected(alone());
    expected.step_to(generation);
    test::expect_equal(*run.zero().consolidate_state_dict(),
                       *expected.zero().consolidate_state_dict());
    // And the next save removes what is left over.
    run.zero().save_checkpoint(directory);
    int files = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(directory)) ++files;
    EXPECT_EQ(files, 2);
  });
  EXPECT_EQ(status_of(pid), 0);
}

// Two ranks save once, then again; `victim` is killed at call `at` of the second. Says whether it
// came so far.
bool crash_at(int victim, int at, bool asynchronous) {
  const auto folder =
      (fs::temp_directory_path() / c10::str("shardstep_crash_", ::getpid(), "_", victim, "_", at))
          .string();
  const auto directory = folder + "/checkpoint";
  fs::create_directories(folder);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(fork_process([&, rank] {
      Trained run(join_group(c10::make_intrusive<c10d::FileStore>(folder + "/store", kRanks), rank,
                             kRanks));
      run.step_to(1);
      run.save(directory, false);
      run.step_to(2);
      if (rank == victim) calls_left = at;
      // Survivors get an error, or were done before.
      try {
        run.save(directory, asynchronous);
        run.zero().wait_checkpoint();
      } catch (const c10::Error& error) {
        const std::string text = error.what();
        // Before anything is written, the ranks agree on it.
        const bool clear = text.find("could not learn from every rank") != std::string::npos ||
                           text.find("lost another rank while agreeing") != std::string::npos;
        EXPECT_TRUE(clear) << text;
        EXPECT_NE(text.find("(rank "), std::string::npos) << text;
      }
      calls_left = -1;
    }));
  }
  bool killed = false;
  for (int rank = 0; rank < kRanks; ++rank) {
    const int status = status_of(ranks[rank]);
    if (rank == victim && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
      killed = true;
    } else {
      EXPECT_EQ(status, 0) << "rank " << rank << " with rank " << victim << " killed at call "
                           << at;
    }
  }
  check(directory, killed ? std::vector<int>{1, 2} : std::vector<int>{2});
  fs::remove_all(folder);
  return killed;
}

class CheckpointCrash : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(CheckpointCrash, LeavesAWholeCheckpoint) {
  const auto [victim, asynchronous] = GetParam();
  // Every call in a full run, else each so many, from one that the seed chooses.
  const int step = test::full_run() ? 1 : 7;
  const int first = test::full_run() ? 0 : static_cast<int>(test::seed() % step);
  int at = first, killed = 0;
  for (; crash_at(victim, at, asynchronous) && !HasFailure(); at += step) ++killed;
  // Room, data, header, three syncs or more, renames; rank 0 writes and cleans up too.
  EXPECT_GE(at, victim == 0 ? 12 : 7);
  std::printf("rank %d was killed at %d calls\n", victim, killed);
}

INSTANTIATE_TEST_SUITE_P(EveryCall, CheckpointCrash,
                         ::testing::Combine(::testing::Values(0, 1), ::testing::Bool()));

// Runs `body` in a process of its own, which may use torch and break calls.
void in_a_process(const std::function<void()>& body) {
  EXPECT_EQ(status_of(fork_process(body)), 0);
}

TEST(CheckpointCalls, ADirectoryThatCannotBeSyncedIsAnErrorAndNothingIsRemoved) {
  const test::Folder folder;
  const auto directory = folder / "c";
  in_a_process([&] {
    Trained run(alone());
    run.step_to(1);
    run.save(directory, false);
    const auto before = test::names_in(directory);
    run.step_to(2);
    calls.index_has_its_name = false;
    calls.no_directory_sync = true;
    for (bool asynchronous : {false, true}) {
      const auto message = test::error_of<c10::Error>([&] {
        run.save(directory, asynchronous);
        run.zero().wait_checkpoint();
      });
      EXPECT_NE(message.find("cannot sync the directory " + directory), std::string::npos)
          << message;
      EXPECT_NE(message.find("(rank 0 of 1)"), std::string::npos) << message;
      // The next save fails before it has an index.
    }
    const auto after = test::names_in(directory);
    EXPECT_TRUE(std::includes(after.begin(), after.end(), before.begin(), before.end()));
    calls.no_directory_sync = false;
  });
  check(directory, {2});
}

// Rank 0 finds the shard of another rank, which cannot sync the directory and says so: whichever
// comes first, the index or the news, the shards of the index stay.
TEST(CheckpointCalls, AShardIsNotRemovedWhileRank0MayNameIt) {
  for (int slow_ms : {0, 5, 50, 200}) {
    SCOPED_TRACE(slow_ms);
    const test::Folder folder;
    const auto directory = folder / "c";
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(fork_process([&, rank] {
        const auto store = c10::make_intrusive<c10d::FileStore>(folder / "store", kRanks);
        Trained run(join_group(store, rank, kRanks));
        run.step_to(1);
        run.save(directory, false);
        run.step_to(2);
        if (rank == 0) calls.directory_sync_ms = slow_ms;
        calls.no_directory_sync = rank == 1;
        calls.index_has_its_name = true;
        const auto message = test::error_of<c10::Error>([&] {
          run.save(directory, true);
          run.zero().wait_checkpoint();
        });
        EXPECT_NE(message.find("cannot sync the directory " + directory), std::string::npos)
            << message;
        calls.no_directory_sync = false;
      }));
    }
    for (pid_t rank : ranks) EXPECT_EQ(status_of(rank), 0);
    check(directory, {1, 2});
  }
}

TEST(CheckpointCalls, SignalsInterruptNothing) {
  const test::Folder folder;
  in_a_process([&] {
    Trained run(alone());
    run.step_to(2);
    calls.interrupted = true;
    run.save(folder / "c", false);
    Checkpoint(folder / "c").verify();
    calls.interrupted = false;
  });
  check(folder / "c", {2});
}

TEST(CheckpointCalls, ParentsOfANewDirectoryAreSynced) {
  const test::Folder folder;
  in_a_process([&] {
    Trained run(alone());
    run.step_to(1);
    run.save(folder / "a/b/c/", false);
    for (const auto* parent : {"", "a", "a/b", "a/b/c"}) {
      struct stat status{};
      ASSERT_EQ(::stat((folder / parent).c_str(), &status), 0);
      EXPECT_EQ(calls.synced_directories.count(status.st_ino), 1u) << parent;
    }
    // A process that made the directory may have died before it synced the parent.
    calls.synced_directories.clear();
    run.save(folder / "a/b/c", false);
    struct stat status{};
    ASSERT_EQ(::stat((folder / "a/b").c_str(), &status), 0);
    EXPECT_EQ(calls.synced_directories.count(status.st_ino), 1u);
  });
}

TEST(CheckpointCalls, AWriterThatDiedDoesNotBlockTheNext) {
  const test::Folder folder;
  const auto directory = folder / "c";
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  fs::create_directories(directory);
  const auto other = fork_process([&] {
    const detail::DirectoryLock lock(directory);
    [[maybe_unused]] const auto written = ::write(ready[1], "x", 1);
    ::pause();
  });
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  in_a_process([&] {
    Trained run(alone());
    const auto message = test::error_of<c10::Error>([&] { run.save(directory, false); });
    EXPECT_NE(message.find(c10::str("got process ", other, " on ")), std::string::npos) << message;
  });
  ::kill(other, SIGKILL);
  status_of(other);
  EXPECT_TRUE(fs::exists(fs::path(directory) / detail::kLockName));
  in_a_process([&] {
    Trained run(alone());
    run.step_to(2);
    run.save(directory, false);
  });
  check(directory, {2});
}

// The checkpoint of a world of so many ranks, with one parameter.
void simulate_ranks(const std::string& directory, int world_size, int64_t elements) {
  CheckpointIndex head;
  head.id = detail::new_id();
  head.world_size = world_size;
  head.sharding = Sharding::kElement;
  head.parameters.push_back({.name = std::nullopt,
                             .shape = std::vector<int64_t>{world_size * elements},
                             .dtype = at::kFloat});
  const torch::optim::AdamWOptions options(0.01);
  head.param_groups.push_back({local_optimizer(options).read_options(options), {0}});
  fs::create_directories(directory);
  for (int rank = 0; rank < world_size; ++rank) {
    detail::ShardContent content;
    for (const auto* key : {"exp_avg", "exp_avg_sq"}) {
      CheckpointTensor whole;
      whole.shape = {world_size * elements};
      content.parts.push_back({state_name(0, key),
                               whole,
                               {rank * elements, (rank + 1) * elements},
                               torch::full({elements}, double(rank))});
    }
    if (rank == 0) {
      content.parts.push_back({"state.0.step", {}, {0, 1}, torch::ones({})});
      content.state[0] = {"step", "exp_avg", "exp_avg_sq"};
    }
    detail::ShardWriter writer(directory, content, head, rank);
    for (size_t i = 0; i < content.parts.size(); ++i) writer.write(i, content.parts[i].tensor);
    writer.commit();
  }
  detail::commit_index(directory, head);
}

TEST(CheckpointCalls, DoNotGrowWithTheRanksThatSaved) {
  constexpr int kSavers = 512;
  constexpr int64_t kElements = 4096;
  const test::Folder folder;
  const auto directory = folder / "c";
  in_a_process([&] {
    simulate_ranks(directory, kSavers, kElements);
    const auto index_bytes = static_cast<int64_t>(fs::file_size(directory + "/index.json"));
    calls.opened_shards = 0;
    Checkpoint checkpoint(directory);
    EXPECT_EQ(calls.opened_shards, 0);
    const auto part = checkpoint.read("state.0.exp_avg", {7 * kElements, 8 * kElements});
    EXPECT_TRUE(at::equal(part, torch::full({kElements}, 7.0)));
    EXPECT_EQ(calls.opened_shards, 1);
    // A rank of 16 reads a sixteenth. Here it is alone, and has as much.
    for (int rank = 0; rank < kSavers / 16; ++rank) {
      checkpoint.read("state.0.exp_avg", {rank * kElements, (rank + 1) * kElements});
    }
    EXPECT_LE(calls.opened_shards, kSavers / 16 + 1);
    std::printf("an index of %d ranks has %ld bytes\n", kSavers, long(index_bytes));
    Trained run(alone());
    run.step_to(1);
    calls.opened_shards = 0;
    calls.bytes_read = 0;
    run.save(directory, false);
    EXPECT_LE(calls.opened_shards, 1);
    EXPECT_LT(calls.bytes_read, index_bytes / 10);
    // All of them, without as many open files.
    checkpoint.verify();
    checkpoint.state_dict();
    int open_files = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++open_files;
    EXPECT_LT(open_files, 200);
  });
}

}  // namespace
}  // namespace shardstep
