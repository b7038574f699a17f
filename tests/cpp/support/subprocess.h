#pragma once

// A program started by a test, with a time limit. Its standard output and error are read together.

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace shardstep::test {

struct ProcessResult {
  int exit_code = -1;  // 128 + signal if a signal ended it.
  bool timed_out = false;
  std::string output;
};

class Subprocess {
 public:
  // Starts `command` (looked up in PATH) with this process's environment, less what launchers set,
  // plus `environment` ("NAME=value").
  explicit Subprocess(const std::vector<std::string>& command,
                      const std::vector<std::string>& environment = {});
  ~Subprocess();
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  // Reads to the end; past the limit, ends the program's process group.
  ProcessResult wait(std::chrono::seconds limit = std::chrono::seconds(90));

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

// The path of a program in PATH, or "" if there is none.
std::string find_program(const std::string& name);

}  // namespace shardstep::test
