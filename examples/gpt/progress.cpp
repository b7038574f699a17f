#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>

namespace gpt {
namespace {

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...) {
  char buffer[256];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof(buffer), pattern, arguments);
  va_end(arguments);
  return buffer;
}

int terminal_width() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string clock_time(double seconds) {
  const auto whole = static_cast<long>(std::lround(seconds));
  return format("%ld:%02ld", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(int64_t steps, int64_t tokens_per_step, const std::string& log, int64_t done)
    : steps_(steps),
      tokens_per_step_(tokens_per_step),
      done_(done),
      terminal_(::isatty(STDOUT_FILENO) == 1) {
  if (log.empty()) return;
  log_.open(log);
  log_.precision(std::numeric_limits<float>::max_digits10);
  log_ << "step,loss" << std::endl;
}

void Progress::finish() {
  if (terminal_ && drawn_) std::printf("\n");
  drawn_ = false;
  std::fflush(stdout);
}

void Progress::update(int64_t step, double loss) {
  using namespace std::chrono_literals;
  losses_.push_back(loss);
  if (log_.is_open()) log_ << step << ',' << loss << std::endl;
  const bool edge = step == done_ + 1 || step == steps_;
  if (terminal_) {
    if (!edge && Clock::now() - last_draw_ < 100ms) return;
    draw_bar(step, numbers(step, loss));
  } else if (edge || step % std::max<int64_t>(1, steps_ / 20) == 0) {
    std::printf("%s\n", numbers(step, loss).c_str());
  }
  std::fflush(stdout);
}

std::string Progress::numbers(int64_t step, double loss) const {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const auto made = static_cast<double>(step - done_);
  const double speed = made * static_cast<double>(tokens_per_step_) / seconds;
  const double left = seconds / made * static_cast<double>(steps_ - step);
  const int digits = static_cast<int>(std::to_string(steps_).size());
  return format("step %*lld/%lld  loss %.4f  %6.0f tokens/s  ETA %s", digits,
                static_cast<long long>(step), static_cast<long long>(steps_), loss, speed,
                clock_time(left).c_str());
}

void Progress::draw_bar(int64_t step, const std::string& numbers) {
  // "[bar] numbers", one column short of the edge so that no terminal wraps it.
  const int room = terminal_width() - static_cast<int>(numbers.size()) - 4;
  const int width = std::clamp(room, 0, 40);
  const auto filled = static_cast<int>(width * step / steps_);
  std::string bar;
  if (width > 4) bar.append("[").append(filled, '#').append(width - filled, '.').append("] ");
  std::printf("\r%s%s\033[K", bar.c_str(), numbers.c_str());
  drawn_ = true;
  last_draw_ = Clock::now();
}

}  // namespace gpt
