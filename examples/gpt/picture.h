#pragma once

// Pictures for the terminal, in Unicode's braille and block characters.

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"

namespace gpt {

// The losses of steps first, first + 1, ... as a curve. Empty if there are fewer than two.
std::string loss_curve(const std::vector<double>& losses, int64_t first);

// What each rank holds, and what it would hold with a replicated optimizer, as stacked bars.
std::string memory_bars(const std::vector<Memory>& ranks, const Memory& replicated);

}  // namespace gpt
