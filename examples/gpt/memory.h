#pragma once

// What training holds in memory on each rank, and the table that shows it.

#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

// Bytes that one rank holds.
struct Memory {
  int64_t optimizer_state = 0;
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t peak = 0;  // the most that the whole process had resident at once; 0: unknown
};

// What each rank holds, measured. Collective.
std::vector<Memory> gather_memory(const torch::nn::Module& model, int64_t optimizer_state,
                                  c10d::ProcessGroup& group);

// What each rank would hold if it kept the whole state, computed from the sizes: two values per
// element for Adam and AdamW, one for the other optimizers.
Memory replicated_memory(const torch::nn::Module& model, const std::string& optimizer);

// One line per rank, and one for the replicated optimizer.
std::string memory_table(const std::vector<Memory>& ranks, const Memory& replicated);
// The same in bytes, as CSV.
void write_memory(const std::string& file, const std::vector<Memory>& ranks,
                  const Memory& replicated);

}  // namespace gpt
