#include "support/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace shardstep::test {
namespace {

using Clock = std::chrono::steady_clock;

bool is_set_by_launcher(std::string_view variable) {
  for (std::string_view prefix : {"RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=",
                                  "MASTER_", "TORCHELASTIC_", "OMPI_", "PMIX_", "SLURM_"}) {
    if (variable.starts_with(prefix)) return true;
  }
  return false;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

// Appends what can be read until the deadline; false once the deadline has passed.
bool read_until(int fd, Clock::time_point deadline, std::string& output) {
  std::array<char, 4096> buffer;
  while (true) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    pollfd request{fd, POLLIN, 0};
    if (poll(&request, 1, static_cast<int>(left.count())) <= 0) continue;
    auto count = read(fd, buffer.data(), buffer.size());
    if (count <= 0) return true;
    output.append(buffer.data(), static_cast<size_t>(count));
  }
}

}  // namespace

Subprocess::Subprocess(const std::vector<std::string>& command,
                       const std::vector<std::string>& environment) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!is_set_by_launcher(*variable)) variables.emplace_back(*variable);
  }
  variables.insert(variables.end(), environment.begin(), environment.end());

  std::array<int, 2> pipe_ends;
  if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe failed");
  output_ = pipe_ends[0];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  auto argv = pointers(command);
  auto envp = pointers(variables);
  int error = posix_spawnp(&pid_, argv[0], &actions, &attributes, argv.data(), envp.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  if (error != 0) {
    close(output_);
    throw std::runtime_error("cannot start " + command[0] + ": " + std::strerror(error));
  }
}

Subprocess::~Subprocess() {
  if (pid_ > 0) {
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(output_);
}

ProcessResult Subprocess::wait(std::chrono::seconds limit) {
  ProcessResult result;
  if (!read_until(output_, Clock::now() + limit, result.output)) {
    result.timed_out = true;
    // A launcher ends its ranks when asked politely.
    kill(-pid_, SIGTERM);
    if (!read_until(output_, Clock::now() + std::chrono::seconds(10), result.output)) {
      kill(-pid_, SIGKILL);
    }
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    auto candidate = folder + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

}  // namespace shardstep::test
