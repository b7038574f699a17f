#include "checkpoint/fuzz/read_checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "shardstep/checkpoint.h"

namespace shardstep::test {
namespace {

// Elements of a hostile file may share memory, so that a copy would take far more than the file.
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes_from_first = [](const at::Tensor& tensor) {
    return tensor.storage().nbytes() - tensor.storage_offset() * tensor.element_size();
  };
  if (a.nbytes() > std::min(bytes_from_first(a), bytes_from_first(b))) {
    return bytes_from_first(a) == bytes_from_first(b) &&
           std::memcmp(a.const_data_ptr(), b.const_data_ptr(), bytes_from_first(a)) == 0;
  }
  return std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                     a.nbytes()) == 0;
}

bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && (a.numel() == 0 || same_memory(a, b));
}

bool same_values(const NamedValues& a, const NamedValues& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].key() != b[i].key() || !same_value(a[i].value(), b[i].value())) return false;
  }
  return true;
}

bool all_same(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same_value);
}

// Texts of errors that no input should cause. The colon tells them from what an input spells.
constexpr std::string_view kDefects[] = {
    "INTERNAL ASSERT FAILED",
    "DefaultCPUAllocator: ",
    ": std::",
    ": vector::",
    ": basic_string::",
    ": basic_string_view::",
    ": map::at",
    ": unordered_map::at",
    ": _Map_base::at",
    ": array::at",
    ": bad ",
    ": cannot create std::",
    ": sto",  // stoi and its like
};

// Not by find(), whose arguments libFuzzer would put into its inputs.
bool has(std::string_view text, std::string_view part) {
  return std::search(text.begin(), text.end(), part.begin(), part.end()) != text.end();
}

}  // namespace

bool same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isTensor()) return same_tensor(a.toTensor(), b.toTensor());
  if (a.isDouble()) {
    return std::bit_cast<uint64_t>(a.toDouble()) == std::bit_cast<uint64_t>(b.toDouble());
  }
  if (a.isTuple()) return all_same(a.toTupleRef().elements(), b.toTupleRef().elements());
  if (a.isList()) return all_same(a.toListRef(), b.toListRef());
  return a == b;
}

bool same_state(const StateDict& a, const StateDict& b) {
  if (a.state.size() != b.state.size() || a.param_groups.size() != b.param_groups.size()) {
    return false;
  }
  for (const auto& [index, values] : a.state) {
    const auto other = b.state.find(index);
    if (other == b.state.end() || !same_values(values, other->second)) return false;
  }
  for (size_t g = 0; g < a.param_groups.size(); ++g) {
    if (a.param_groups[g].params != b.param_groups[g].params ||
        !same_values(a.param_groups[g].options, b.param_groups[g].options)) {
      return false;
    }
  }
  return true;
}

std::string refusal_text(const c10::Error& error) {
  std::string text = error.what_without_backtrace();
  const bool is_defect = std::any_of(std::begin(kDefects), std::end(kDefects),
                                     [&](auto defect) { return has(text, defect); });
  if (is_defect || !text.starts_with("shardstep: ")) {
    throw std::logic_error("expected a refusal, got: " + text);
  }
  return text;
}

ReadOutcome read_whole_checkpoint(const std::string& directory) {
  try {
    Checkpoint checkpoint(directory);
    checkpoint.verify();
    for (const auto& [name, tensor] : checkpoint.index().tensors) {
      checkpoint.read(name);
      checkpoint.read(name, {tensor.numel() / 3, tensor.numel() / 2});
    }
    return {checkpoint.state_dict(), {}};
  } catch (const c10::ValueError& error) {
    return {std::nullopt, refusal_text(error)};
  }
}

}  // namespace shardstep::test
