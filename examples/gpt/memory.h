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
  int64_t peak = 0;  // the largest resident set of the whole process; 0: unknown
};

struct NamedMemory {
  std::string name;
  Memory memory;
};

// What each rank holds, measured: `mine` on this one. Collective.
std::vector<NamedMemory> gather_memory(Memory mine, c10d::ProcessGroup& group);

// Bytes of a model's parameters.
int64_t parameter_bytes(const torch::nn::Module& model);

// What each rank would hold in stage 1, where gradients are whole, and under DDP, where the state
// is too. `state`: bytes of the whole optimizer state.
std::vector<NamedMemory> other_ways(int64_t parameters, int64_t state, int stage, int world_size);

// One line per name.
std::string memory_table(const std::vector<NamedMemory>& rows);
// The same in bytes, as CSV.
void write_memory(const std::string& file, const std::vector<NamedMemory>& rows);

}  // namespace gpt
