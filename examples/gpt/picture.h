#pragma once

// Plots for the terminal, in Unicode's braille and block characters.

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"

namespace gpt {

// The losses of steps first, first + 1, ... as a curve. Empty if there are fewer than two.
std::string loss_curve(const std::vector<double>& losses, int64_t first);

// A stacked bar per name.
std::string memory_bars(const std::vector<NamedMemory>& rows);

}  // namespace gpt
