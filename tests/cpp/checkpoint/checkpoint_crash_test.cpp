// A rank that is killed at any of the calls by which a save reaches the disk: the directory then
// holds the old checkpoint or the new one, whole. Ranks are forked processes here; this process
// itself must not use torch before.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <filesystem>

#include "support/full_run.h"
#include "support/zero_support.h"

namespace {

// Calls that this process may still make; it dies at the one after.
std::atomic<int> calls_left{-1};

void count_call() {
  if (calls_left >= 0 && calls_left-- == 0) ::kill(::getpid(), SIGKILL);
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// The library finds these before the C library's.
extern "C" {
int fallocate(int fd, int mode, off_t offset, off_t size) {
  count_call();
  return next<int(int, int, off_t, off_t)>("fallocate")(fd, mode, offset, size);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  count_call();
  return next<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, data, size, offset);
}
int fsync(int fd) {
  count_call();
  return next<int(int)>("fsync")(fd);
}
int rename(const char* from, const char* to) noexcept {
  count_call();
  return next<int(const char*, const char*)>("rename")(from, to);
}
int unlink(const char* path) noexcept {
  count_call();
  return next<int(const char*)>("unlink")(path);
}
}

namespace shardstep {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;

// Runs `body` in a forked process; returns its id.
pid_t fork_process(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::alarm(60);
  int code = 0;
  try {
    body();
    code = ::testing::Test::HasFailure() ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "process: %s\n", error.what());
    code = 1;
  }
  std::fflush(nullptr);
  ::_exit(code);
}

int status_of(pid_t pid) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

// One optimizer and what it had when it saved `generation` times.
class Run {
 public:
  explicit Run(const ProcessGroupPtr& group)
      : params_{torch::ones({20, 5}).requires_grad_(), torch::ones({33}).requires_grad_()},
        zero_(params_, torch::optim::AdamWOptions(0.01),
              ZeroOptions().process_group(group).sharding(Sharding::kElement)) {}

  ZeroRedundancyOptimizer& zero() { return zero_; }
  void step_to(int generation) {
    for (; done_ < generation; ++done_) {
      test::set_gradients(params_, done_);
      zero_.step();
    }
  }
  void save(const std::string& directory, bool asynchronous) {
    NamedValues extra;
    extra.insert("generation", int64_t{done_});
    zero_.save_checkpoint(directory,
                          CheckpointOptions().extra(extra).rng(false).asynchronous(asynchronous));
  }

 private:
  std::vector<at::Tensor> params_;
  ZeroRedundancyOptimizer zero_;
  int done_ = 0;
};

ProcessGroupPtr join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size) {
  at::set_num_threads(1);
  return make_process_group(
      store, rank, world_size,
      ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(20)));
}

ProcessGroupPtr alone() { return join_group(c10::make_intrusive<c10d::HashStore>(), 0, 1); }

// Which checkpoint the directory holds; it loads, and is what a run without an accident had.
void check(const std::string& directory, const std::vector<int>& allowed) {
  const auto pid = fork_process([&] {
    Checkpoint checkpoint(directory);
    checkpoint.verify();
    Run run(alone());
    const auto extra = run.zero().load_checkpoint(directory);
    const auto generation = static_cast<int>(extra["generation"].toInt());
    EXPECT_NE(std::find(allowed.begin(), allowed.end(), generation), allowed.end()) << generation;
    Run expected(alone());
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
      Run run(join_group(c10::make_intrusive<c10d::FileStore>(folder + "/store", kRanks), rank,
                         kRanks));
      run.step_to(1);
      run.save(directory, false);
      run.step_to(2);
      if (rank == victim) calls_left = at;
      // Survivors hear of it, or are done before.
      try {
        run.save(directory, asynchronous);
        run.zero().wait_checkpoint();
      } catch (const c10::Error& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("could not hear from every rank"), std::string::npos) << text;
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
  // Room, data, header, three syncs or more, renames; rank 0 writes and cleans up too.
  const int known = victim == 0 ? 12 : 7;
  for (int at : test::sample(known, 2)) {
    EXPECT_TRUE(crash_at(victim, at, asynchronous)) << "call " << at;
  }
  if (!test::full_run()) return;
  int at = known;
  while (crash_at(victim, at, asynchronous) && !HasFailure()) ++at;
  std::printf("rank %d was killed at %d calls\n", victim, at);
}

INSTANTIATE_TEST_SUITE_P(EveryCall, CheckpointCrash,
                         ::testing::Combine(::testing::Values(0, 1), ::testing::Bool()));

}  // namespace
}  // namespace shardstep
