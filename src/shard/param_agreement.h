#pragma once

// Before each step, the ranks compare every parameter. One that was changed, frozen or unfrozen on
// some ranks only would be exchanged wrongly, or waited for in vain.
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

// How errors name a parameter: its number, and its name if it has one.
std::string param_label(size_t index, const std::string& name);

// A description of a parameter: dtype, sizes, strides, device, and whether it is frozen.
std::string describe_param(const at::Tensor& param);

class ParamAgreement {
 public:
  explicit ParamAgreement(ProcessGroupPtr group);

  // `name` may be empty.
  void add(const at::Tensor& param, const std::string& name, FixedLayout fixed);
  // Forgets the parameters from number `count` on.
  void forget_from(size_t count);

  std::string label(size_t index) const { return param_label(index, added_[index].name); }

  // Call when this rank's update has thrown: the next check() throws on every rank.
  void fail(std::exception_ptr error) {
    if (!failure_) failure_ = std::move(error);
  }

  // The parameters on this rank, as one number.
  int64_t summary(const std::vector<at::Tensor>& params) const;
  // Throws a ValueError on every rank, naming the parameter, if one has changed that must not or is
  // not the same on every rank; throws a rank's failure if there is one. `summaries` are those of
  // all ranks. Collective if they differ.
  void check(Exchange& control, const std::vector<at::Tensor>& params,
             const std::vector<int64_t>& summaries);
  // Both, for callers that have no other message to send. Collective.
  void compare(Exchange& control, const std::vector<at::Tensor>& params);
  // Throws if a parameter has changed on this rank that must not. Not collective.
  void check_here(const std::vector<at::Tensor>& params) const;

 private:
  struct Added {
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    std::string description;
    std::string name;
    FixedLayout fixed;
  };
  bool has_changed(size_t index, const at::Tensor& param) const;
  int64_t status_of(size_t index, const at::Tensor& param) const;
  std::vector<int64_t> statuses_of(const std::vector<at::Tensor>& params) const;
  [[noreturn]] void refuse(Exchange& control, const std::vector<at::Tensor>& params) const;
  [[noreturn]] void refuse_changed(size_t index, const at::Tensor& param) const;

  ProcessGroupPtr group_;
  std::vector<Added> added_;
  std::exception_ptr failure_;
};

}  // namespace shardstep::detail
