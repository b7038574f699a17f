#include "memory.h"

#include <torch/types.h>

#include <array>
#include <cstdio>
#include <fstream>

namespace gpt {
namespace {

// VmHWM is in kibibytes, and exists only on Linux.
int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

// "12.3 MiB", or "-" if unknown.
std::string human_bytes(int64_t bytes) {
  if (bytes <= 0) return "-";
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f %s", unit == 0 ? 0 : 1, value, units[unit]);
  return text;
}

using Cells = std::array<std::string, 4>;

std::string line(const std::string& name, const Cells& cells) {
  char text[128];
  std::snprintf(text, sizeof(text), "%-22s %16s %12s %12s %13s\n", name.c_str(), cells[0].c_str(),
                cells[1].c_str(), cells[2].c_str(), cells[3].c_str());
  return text;
}

Cells cells_of(const Memory& memory) {
  return {human_bytes(memory.optimizer_state), human_bytes(memory.parameters),
          human_bytes(memory.gradients), human_bytes(memory.peak)};
}

}  // namespace

std::vector<NamedMemory> gather_memory(Memory mine, c10d::ProcessGroup& group) {
  auto row = torch::tensor({mine.optimizer_state, mine.parameters, mine.gradients, peak_memory()});
  std::vector<at::Tensor> inputs{row};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) outputs[0].push_back(torch::empty_like(row));
  group.allgather(outputs, inputs)->wait();
  std::vector<NamedMemory> all;
  for (const auto& output : outputs[0]) {
    auto value = output.accessor<int64_t, 1>();
    all.push_back({"rank " + std::to_string(all.size()), {value[0], value[1], value[2], value[3]}});
  }
  return all;
}

int64_t parameter_bytes(const torch::nn::Module& model) {
  int64_t bytes = 0;
  for (const auto& parameter : model.parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes;
}

std::vector<NamedMemory> other_ways(int64_t parameters, int64_t state, int stage, int world_size) {
  std::vector<NamedMemory> ways;
  if (stage == 2) ways.push_back({"stage 1", {state / world_size, parameters, parameters, 0}});
  ways.push_back({"DDP", {state, parameters, parameters, 0}});
  return ways;
}

std::string memory_table(const std::vector<NamedMemory>& rows) {
  std::string table =
      line("memory", {"optimizer state", "parameters", "gradients", "process peak"});
  for (const auto& [name, memory] : rows) {
    table += line(memory.peak > 0 ? name : name + " (computed)", cells_of(memory));
  }
  return table;
}

void write_memory(const std::string& file, const std::vector<NamedMemory>& rows) {
  std::ofstream out(file);
  out << "who,optimizer_state,parameters,gradients\n";
  for (const auto& [name, memory] : rows) {
    out << name << ',' << memory.optimizer_state << ',' << memory.parameters << ','
        << memory.gradients << '\n';
  }
}

}  // namespace gpt
