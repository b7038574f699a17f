#pragma once

// Ranks that are forked processes, for tests in which one dies. The process that forks must not use
// torch before.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>

#include "shardstep/process_group.h"
#include "support/full_run.h"
#include "support/torch.h"

namespace shardstep::test {

// Within which the others raise when a rank has died: far less than the timeout. Times patience().
constexpr std::chrono::seconds kPromised{15};

// Runs `body` in a forked process, for at most so many seconds, times patience(); returns its id.
inline pid_t fork_process(const std::function<void()>& body, unsigned seconds = 60) {
  const bool failed_before = ::testing::Test::HasFailure();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::alarm(patience() * seconds);
  int code = 0;
  try {
    body();
    code = ::testing::Test::HasFailure() && !failed_before ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "process: %s\n", error.what());
    code = 1;
  }
  std::fflush(nullptr);
  ::_exit(code);
}

inline int status_of(pid_t pid) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

// A value in memory that this process shares with those that it forks.
template <class Value>
class Shared {
 public:
  Shared()
      : memory_(::mmap(nullptr, sizeof(Value), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0)) {
    TORCH_CHECK(memory_ != MAP_FAILED, "mmap failed");
    new (memory_) Value();
  }
  ~Shared() { ::munmap(memory_, sizeof(Value)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  Value& operator*() const { return *static_cast<Value*>(memory_); }
  Value* operator->() const { return static_cast<Value*>(memory_); }

 private:
  void* memory_;
};

inline ProcessGroupPtr join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                  int world_size,
                                  std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  at::set_num_threads(1);
  return make_process_group(store, rank, world_size,
                            ProcessGroupOptions().backend("gloo").timeout(timeout));
}

inline ProcessGroupPtr alone() { return join_group(c10::make_intrusive<c10d::HashStore>(), 0, 1); }

}  // namespace shardstep::test
