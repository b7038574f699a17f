#include "memory.h"

#include <torch/types.h>

#include <array>
#include <cstdio>
#include <fstream>

namespace gpt {
namespace {

// VmHWM is in kibibytes, and only Linux tells it.
int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

Memory memory_of(const torch::nn::Module& model, int64_t optimizer_state) {
  Memory memory{.optimizer_state = optimizer_state};
  for (const auto& parameter : model.parameters()) {
    memory.parameters += static_cast<int64_t>(parameter.nbytes());
    if (!parameter.grad().defined()) continue;
    memory.gradients += static_cast<int64_t>(parameter.grad().nbytes());
  }
  return memory;
}

// "12.3 MiB"; nothing known: "-"
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

std::vector<Memory> gather_memory(const torch::nn::Module& model, int64_t optimizer_state,
                                  c10d::ProcessGroup& group) {
  const auto mine = memory_of(model, optimizer_state);
  auto row = torch::tensor({mine.optimizer_state, mine.parameters, mine.gradients, peak_memory()});
  std::vector<at::Tensor> inputs{row};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) outputs[0].push_back(torch::empty_like(row));
  group.allgather(outputs, inputs)->wait();
  std::vector<Memory> all;
  for (const auto& output : outputs[0]) {
    auto value = output.accessor<int64_t, 1>();
    all.push_back({value[0], value[1], value[2], value[3]});
  }
  return all;
}

Memory replicated_memory(const torch::nn::Module& model, const std::string& optimizer) {
  auto memory = memory_of(model, 0);
  const bool two = optimizer == "adam" || optimizer == "adamw";
  memory.optimizer_state = (two ? 2 : 1) * memory.parameters;
  return memory;
}

std::string memory_table(const std::vector<Memory>& ranks, const Memory& replicated) {
  std::string table =
      line("memory", {"optimizer state", "parameters", "gradients", "process peak"});
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    table += line("rank " + std::to_string(rank), cells_of(ranks[rank]));
  }
  return table + line("replicated (computed)", cells_of(replicated));
}

void write_memory(const std::string& file, const std::vector<Memory>& ranks,
                  const Memory& replicated) {
  std::ofstream out(file);
  out << "who,optimizer_state,parameters,gradients\n";
  const auto row = [&out](const std::string& who, const Memory& memory) {
    out << who << ',' << memory.optimizer_state << ',' << memory.parameters << ','
        << memory.gradients << '\n';
  };
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    row("rank " + std::to_string(rank), ranks[rank]);
  row("replicated", replicated);
}

}  // namespace gpt
