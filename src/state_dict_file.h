#pragma once

// The file of a state dict, a tensor at a time. In a StateDict of this header's, large tensors are
// on the meta device: they say what is in the file and hold nothing. Not thread-safe.

#include <functional>
#include <memory>
#include <string>

#include "shardstep/state_dict.h"

namespace shardstep::detail {

// Writes the file of shardstep/state_dict.h. `content` gives a tensor whose storage is to be
// written in place of a meta tensor's; it is let go before the next one.
void write_state_dict(const StateDict& dict, const std::string& path,
                      const std::function<at::Tensor(const c10::Storage&)>& content);

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
