#include "shard/master_param.h"

#include <ATen/core/grad_mode.h>

#include "shard/bucket.h"

namespace shardstep {

bool can_be_widened(const at::Tensor& param) {
  return param.scalar_type() == at::kFloat || param.scalar_type() == at::kDouble;
}

void widen_from_master(const at::Tensor& param, const at::Tensor& master) {
  at::NoGradGuard no_grad;
  const auto values = param.detach();
  const auto wide = master.to(values.device());
  auto is_rounded = wide.to(at::kBFloat16).to(values.scalar_type()).eq(values);
  is_rounded.logical_or_(wide.to(at::kHalf).to(values.scalar_type()).eq(values));
  values.copy_(at::where(is_rounded, wide.to(values.scalar_type()), values));
}

MasterParam::MasterParam(const at::Tensor& own)
    : tensor_(at::empty_strided(own.sizes(), own.strides(), own.options().dtype(at::kFloat))) {
  at::NoGradGuard no_grad;
  tensor_.copy_(own);
}

void MasterParam::follow(const at::Tensor& param, const at::Tensor& own, bool moved) {
  const auto version = version_of(param);
  if (!moved && version && version == version_) return;
  version_ = version;
  at::NoGradGuard no_grad;
  const auto changed = tensor_.to(own.scalar_type()).ne(own);
  auto master = tensor_.detach();
  if (changed.any().item<bool>()) master.copy_(at::where(changed, own.to(at::kFloat), master));
}

void MasterParam::round_into(const at::Tensor& param, const at::Tensor& own) {
  at::NoGradGuard no_grad;
  own.copy_(tensor_);
  version_ = version_of(param);
  is_wider_ = true;
}

void MasterParam::keep_up_with(const at::Tensor& param) {
  if (version_) version_ = version_of(param);
}

void MasterParam::load(const at::Tensor& values) {
  at::NoGradGuard no_grad;
  tensor_.detach().copy_(values);
  version_.reset();
  is_wider_ = true;
}

void MasterParam::reset(const at::Tensor& own) {
  load(own);
  is_wider_ = false;
}

}  // namespace shardstep
