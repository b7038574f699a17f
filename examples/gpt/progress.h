#pragma once

// What train_gpt shows: progress while it trains, and a table of memory at the end.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

// A bar that redraws itself when stdout is a terminal, else a plain line now and then.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step);
  // Leaves the cursor on a line of its own.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `step` steps are done.
  void update(int64_t step, double loss);

 private:
  using Clock = std::chrono::steady_clock;
  std::string numbers(int64_t step, double loss) const;
  void draw_bar(int64_t step, const std::string& numbers);

  int64_t steps_, tokens_per_step_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_;
};

// Bytes that one rank holds.
struct Memory {
  int64_t optimizer_state = 0;
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t peak = 0;  // of the whole process; 0: unknown
};

// A line for each rank, and one for what a rank would hold with a replicated optimizer.
std::string memory_table(const std::vector<Memory>& ranks, const Memory& replicated);

// The most memory this process has had resident at once, in bytes; 0 where the system does not
// tell.
int64_t peak_memory();

// "12.3 MiB"
std::string human_bytes(int64_t bytes);

}  // namespace gpt
