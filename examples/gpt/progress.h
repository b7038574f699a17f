#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace gpt {

// A bar that redraws itself if stdout is a terminal, otherwise an occasional line. Writes the loss
// of every step to the CSV file `log`, unless that is empty.
class Progress {
 public:
  // An earlier run made `done` steps.
  Progress(int64_t steps, int64_t tokens_per_step, const std::string& log, int64_t done);

  // `step` steps are done.
  void update(int64_t step, double loss);
  // Of the steps that this run made.
  const std::vector<double>& losses() const { return losses_; }
  // Leaves the cursor on a line of its own.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  std::string numbers(int64_t step, double loss) const;
  void draw_bar(int64_t step, const std::string& numbers);

  int64_t steps_, tokens_per_step_, done_;
  std::ofstream log_;
  std::vector<double> losses_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_;
};

}  // namespace gpt
