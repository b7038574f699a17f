#pragma once

// The file of a state dict, one tensor at a time. In the StateDicts here, large tensors are on the
// meta device: they describe the file's contents and hold nothing. Not thread-safe.

#include <functional>
#include <memory>
#include <string>

#include "shardstep/state_dict.h"

namespace shardstep::detail {

// Writes what a meta storage stands for to `memory`, which has room for it.
using StorageContent = std::function<void(const c10::Storage&, void* memory)>;

// Writes the file of shardstep/state_dict.h.
void write_state_dict(const StateDict& dict, const std::string& path,
                      const StorageContent& content);

// Reads such a file. Errors name the file.
class StateDictFile {
 public:
  explicit StateDictFile(const std::string& path);
  ~StateDictFile();

  const StateDict& dict() const;
  // What a meta tensor of dict() stands for.
  at::Tensor read(const at::Tensor& tensor);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardstep::detail
