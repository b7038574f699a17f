#pragma once

// A float32 copy of what this rank owns of a bfloat16 or float16 parameter. The local optimizer
// updates the copy, and the parameter gets the rounded result. A change that somebody else makes to
// the parameter reaches the master before the next update.
// Thread safety: none. Nothing here communicates.

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>

#include "shardstep/export.h"

namespace shardstep {

// The key of a master in an optimizer's state.
constexpr const char* kMasterKey = "master_param";

// Whether parameters of this dtype have masters, if there are any.
constexpr bool is_narrow(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Whether a parameter that has no master has room for a master's bits.
SHARDSTEP_API bool can_be_widened(const at::Tensor& param);

// Where the elements of a parameter of full width are those of `master`, rounded, they become those
// of `master`. REQUIRES: tensors of one size.
SHARDSTEP_API void widen_from_master(const at::Tensor& param, const at::Tensor& master);

class MasterParam {
 public:
  // `own` is what this rank owns of `param`, in its memory.
  explicit MasterParam(const at::Tensor& own);

  const at::Tensor& tensor() const { return tensor_; }

  // Where the parameter is no longer the rounded master, the master becomes the parameter. `moved`:
  // the parameter's memory was replaced. Costs nothing if the parameter's version is the same.
  void follow(const at::Tensor& param, const at::Tensor& own, bool moved);
  // Writes the rounded master into the parameter.
  void round_into(const at::Tensor& param, const at::Tensor& own);
  // The engine has written the parameter, which is still the rounded master here.
  void keep_up_with(const at::Tensor& param);
  // Takes saved values; follow() compares them with the parameter.
  void load(const at::Tensor& values);
  // Starts from the parameter again.
  void reset(const at::Tensor& own);
  // Whether it can differ from the parameter, so that saving the parameter is not enough.
  bool is_wider() const { return is_wider_; }

 private:
  at::Tensor tensor_;
  bool is_wider_ = false;
  // The parameter's when it last was the rounded master. Changes through `.data` do not count.
  std::optional<int64_t> version_;
};

}  // namespace shardstep
