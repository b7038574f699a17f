#pragma once

// The file of a state dict, a tensor at a time. In a StateDict of this header's, large tensors are
// on the meta device: they say what is in the file and hold nothing. Not thread-safe.

#include <functional>
#include <memory>
#include <string>

#include "shardstep/state_dict.h"

namespace shardstep::detail {

// Puts what a meta storage stands for into memory that has room for it.
using StorageContent = std::function<void(const c10::Storage&, void* memory)>;

// Writes the file of shardstep/state_dict.h.
void write_state_dict(const StateDict& dict, const std::string& path,
                      const StorageContent& content);

// Reads one. Errors name the file.
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
