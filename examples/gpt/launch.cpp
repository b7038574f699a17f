#include "launch.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <system_error>

namespace gpt {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// A port that was free a moment ago.
int free_port() {
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) fail("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  if (::bind(fd, plain, size) != 0 || ::getsockname(fd, plain, &size) != 0) fail("bind");
  ::close(fd);
  return ntohs(address.sin_port);
}

pid_t start_rank(int rank, int ranks, int port, char** argv, const sigset_t& mask) {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) fail("fork");
  if (pid > 0) return pid;
  // A rank must not outlive this process, however that ends.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  ::execv("/proc/self/exe", argv);
  std::perror("train_gpt: exec");
  ::_exit(127);
}

std::string describe(int status) {
  return WIFSIGNALED(status) ? "was ended by signal " + std::to_string(WTERMSIG(status))
                             : "exited with " + std::to_string(WEXITSTATUS(status));
}

void signal_all(const std::map<pid_t, int>& running, int signal) {
  for (const auto& [pid, rank] : running) ::kill(pid, signal);
}

}  // namespace

bool started_by_launcher() {
  const auto names = {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS"};
  return std::any_of(names.begin(), names.end(),
                     [](const char* name) { return std::getenv(name) != nullptr; });
}

int launch_ranks(int ranks, char** argv) {
  // Signals are taken one at a time by sigwaitinfo below, so that no handler is needed.
  sigset_t waited, before;
  sigemptyset(&waited);
  for (int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&waited, signal);
  ::sigprocmask(SIG_BLOCK, &waited, &before);

  const int port = free_port();
  std::map<pid_t, int> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.emplace(start_rank(rank, ranks, port, argv, before), rank);
  }
  int result = 0;
  while (!running.empty()) {
    siginfo_t info;
    const int signal = ::sigwaitinfo(&waited, &info);
    // A terminal has sent SIGINT to the ranks already; kill(1) has not.
    if (signal == SIGTERM || (signal == SIGINT && info.si_code != SI_KERNEL)) {
      signal_all(running, signal);
    }
    int status = 0;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      auto ended = running.extract(pid);
      if (ended.empty() || status == 0 || result != 0) continue;
      result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      std::fprintf(stderr, "train_gpt: rank %d %s%s\n", ended.mapped(), describe(status).c_str(),
                   running.empty() ? "" : "; ending the others");
      signal_all(running, SIGKILL);
    }
  }
  return result;
}

}  // namespace gpt
