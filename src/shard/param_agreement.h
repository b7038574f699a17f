#pragma once

// Before each step the ranks compare what they see of every parameter. One that was changed, frozen
// or unfrozen on some ranks only would be exchanged wrongly, or waited for in vain.
// Thread safety: one thread at a time.

#include <ATen/ATen.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "comm/exchange.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

// What must stay as it was when the parameter was added. Its number of elements always must.
struct FixedLayout {
  bool dtype_and_shape = false;
  bool memory_order = false;
};

// A parameter in words: dtype, sizes, strides, device, and whether it is frozen.
std::string describe_param(const at::Tensor& param);

class ParamAgreement {
 public:
  ParamAgreement(ProcessGroupPtr group, FixedLayout fixed);

  void add(const at::Tensor& param);
  // Forgets the parameters from number `count` on.
  void forget_from(size_t count);

  // This rank's update has thrown: the next check() throws on every rank.
  void fail(std::exception_ptr error) { failure_ = std::move(error); }

  // What this rank sees, as one number.
  int64_t summary(const std::vector<at::Tensor>& params) const;
  // Throws ValueError on every rank, naming the parameter, if one has changed and must not, or is
  // not the same on every rank, or what a rank has failed with. `summaries` are those of all ranks.
  // Collective if they differ.
  void check(Exchange& exchange, const std::vector<at::Tensor>& params,
             const std::vector<int64_t>& summaries);
  // Both, for who has no other message to send. Collective.
  void compare(Exchange& exchange, const std::vector<at::Tensor>& params);
  // Throws if a parameter has changed here and must not, without the other ranks.
  void check_here(const std::vector<at::Tensor>& params) const;

 private:
  struct Added {
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    std::string description;
  };
  bool has_changed(size_t index, const at::Tensor& param) const;
  int64_t status_of(size_t index, const at::Tensor& param) const;
  std::vector<int64_t> statuses_of(const std::vector<at::Tensor>& params) const;
  [[noreturn]] void refuse(Exchange& exchange, const std::vector<at::Tensor>& params) const;
  [[noreturn]] void refuse_changed(size_t index, const at::Tensor& param) const;

  ProcessGroupPtr group_;
  FixedLayout fixed_;
  std::vector<Added> added_;
  std::exception_ptr failure_;
};

}  // namespace shardstep::detail
