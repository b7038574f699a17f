#include "picture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace gpt {
namespace {

// Dots in character cells of 2 x 4. (0, 0) is at the top left.
class Canvas {
 public:
  static constexpr int kColumns = 64, kRows = 10;
  static constexpr int kWidth = 2 * kColumns, kHeight = 4 * kRows;

  void set(int x, int y) {
    static constexpr unsigned char kDots[4][2] = {
        {0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    cells_[y / 4][x / 2] |= kDots[y % 4][x % 2];
  }

  // Braille patterns start at U+2800; each dot is a bit of the code point.
  std::string row(int index) const {
    std::string text;
    for (const unsigned char dots : cells_[index]) {
      text += {'\xe2', static_cast<char>(0xa0 | dots >> 6), static_cast<char>(0x80 | (dots & 63))};
    }
    return text;
  }

 private:
  unsigned char cells_[kRows][kColumns] = {};
};

// The means of `count` windows of equal length, each of at least one value.
std::vector<double> means(const std::vector<double>& values, int count) {
  std::vector<double> result;
  const auto size = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < count; ++i) {
    const auto begin = i * size / count;
    const auto end = std::max(begin + 1, (i + 1) * size / count);
    result.push_back(std::accumulate(values.begin() + begin, values.begin() + end, 0.0) /
                     static_cast<double>(end - begin));
  }
  return result;
}

std::string repeat(const char* text, int64_t count) {
  std::string result;
  for (int64_t i = 0; i < count; ++i) result += text;
  return result;
}

std::string bar(const std::string& name, const Memory& memory, double bytes_per_cell) {
  // Cells end where the sums end, so that equal sums have bars of equal length.
  const auto cells = [&](int64_t bytes) {
    return std::llround(static_cast<double>(bytes) / bytes_per_cell);
  };
  const auto held = memory.parameters + memory.gradients;
  const auto total = held + memory.optimizer_state;
  char size[32];
  std::snprintf(size, sizeof(size), " %.1f MiB\n", static_cast<double>(total) / (1 << 20));
  return (name + std::string(12, ' ')).substr(0, 12) + repeat("░", cells(memory.parameters)) +
         repeat("▒", cells(held) - cells(memory.parameters)) +
         repeat("█", cells(total) - cells(held)) + size;
}

}  // namespace

std::string loss_curve(const std::vector<double>& losses, int64_t first) {
  const bool finite =
      std::all_of(losses.begin(), losses.end(), [](double loss) { return std::isfinite(loss); });
  if (losses.size() < 2 || !finite) return "";
  const auto curve = means(losses, Canvas::kWidth);
  const auto [low, high] = std::minmax_element(curve.begin(), curve.end());
  const double range = std::max(*high - *low, 1e-9);
  Canvas canvas;
  int before = -1;
  for (int x = 0; x < Canvas::kWidth; ++x) {
    const auto y =
        static_cast<int>(std::lround((*high - curve[x]) / range * (Canvas::kHeight - 1)));
    const int from = before < 0 ? y : before;
    for (int dot = std::min(from, y); dot <= std::max(from, y); ++dot) canvas.set(x, dot);
    before = y;
  }

  std::string picture = "loss\n";
  for (int row = 0; row < Canvas::kRows; ++row) {
    char label[16] = "       │";
    if (row == 0) std::snprintf(label, sizeof(label), "%6.2f ┤", *high);
    if (row == Canvas::kRows - 1) std::snprintf(label, sizeof(label), "%6.2f ┤", *low);
    picture += label + canvas.row(row) + "\n";
  }
  const auto last = std::to_string(first + static_cast<int64_t>(losses.size()) - 1);
  const auto begin = "step " + std::to_string(first);
  const auto gap = Canvas::kColumns - static_cast<int64_t>(begin.size() + last.size());
  return picture + "       └" + repeat("─", Canvas::kColumns) + "\n        " + begin +
         repeat(" ", gap) + last + "\n";
}

std::string memory_bars(const std::vector<NamedMemory>& rows) {
  int64_t largest = 1;
  for (const auto& [name, memory] : rows) {
    largest = std::max(largest, memory.parameters + memory.gradients + memory.optimizer_state);
  }
  const double bytes_per_cell = static_cast<double>(largest) / 48;
  std::string picture = "memory per rank: ░ parameters  ▒ gradients  █ optimizer state\n";
  for (const auto& [name, memory] : rows) picture += bar(name, memory, bytes_per_cell);
  return picture;
}

}  // namespace gpt
