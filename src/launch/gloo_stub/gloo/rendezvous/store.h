#pragma once

#include <chrono>
#include <string>
#include <vector>

// The virtual functions c10d's GlooStore overrides, in gloo's order. No object of this type is made
// here; c10d makes its own inside libtorch.
namespace gloo::rendezvous {
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace gloo::rendezvous
