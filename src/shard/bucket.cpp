#include "shard/bucket.h"

#include <ATen/core/grad_mode.h>

namespace shardstep {

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense();
}

std::optional<int64_t> version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? std::nullopt : std::optional<int64_t>(tensor._version());
}

at::Tensor flat_view(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& tensor) {
  // Strides of axes with one element do not matter, so they may differ.
  bool same = is_dense(tensor) && tensor.sizes() == like.sizes();
  for (int64_t axis = 0; same && axis < tensor.dim(); ++axis) {
    same = tensor.size(axis) <= 1 || tensor.stride(axis) == like.stride(axis);
  }
  if (same) return tensor;
  at::NoGradGuard no_grad;
  return at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor.detach());
}

Bucket::Bucket(BucketLayout layout, std::vector<at::Tensor> params, BucketStorage storage,
               at::Tensor flat)
    : layout_(std::move(layout)),
      params_(std::move(params)),
      data_(params_.size()),
      flat_(std::move(flat)) {
  if (storage == BucketStorage::kFlat && !flat_.defined()) {
    flat_ = at::zeros({layout_.numel()}, params_.front().options().requires_grad(false));
  }
  refresh();
}

bool Bucket::refresh() {
  bool moved = false;
  for (size_t slot = 0; slot < params_.size(); ++slot) {
    if (data_[slot] == params_[slot].const_data_ptr()) continue;
    adopt(slot);
    moved = true;
  }
  return moved;
}

void Bucket::adopt(size_t slot) {
  auto& param = params_[slot];
  const Range range = layout_.slots[slot].range;
  TORCH_CHECK_VALUE(is_dense(param) && param.numel() == range.size(),
                    "shardstep: expected parameter ", layout_.slots[slot].param, " to keep its ",
                    range.size(), " elements without gaps, got sizes ", param.sizes(),
                    " and strides ", param.strides());
  if (flat_.defined()) {
    TORCH_CHECK_VALUE(
        param.scalar_type() == flat_.scalar_type() && param.device() == flat_.device(),
        "shardstep: expected parameter ", layout_.slots[slot].param, " to stay ",
        flat_.scalar_type(), " on ", flat_.device(), ", got ", param.scalar_type(), " on ",
        param.device());
    flat_.narrow(0, range.begin, range.size()).copy_(flat_view(param));
    param.set_data(flat_.as_strided(param.sizes(), param.strides(), range.begin));
  }
  data_[slot] = param.const_data_ptr();
}

at::Tensor Bucket::view(size_t slot, Range elements) const {
  return flat_view(params_[slot]).narrow(0, elements.begin, elements.size());
}

Parts Bucket::parts(const std::vector<bool>& active) const {
  Parts parts(layout_.shards.size());
  const bool whole =
      flat_.defined() && std::find(active.begin(), active.end(), false) == active.end();
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const Range shard = layout_.shards[rank];
    if (shard.empty()) continue;
    if (whole) {
      parts[rank].push_back(flat_.narrow(0, shard.begin, shard.size()));
      continue;
    }
    for (size_t slot = 0; slot < params_.size(); ++slot) {
      const Range range = layout_.slots[slot].range;
      const Range part = intersect(shard, range);
      if (part.empty() || !active[slot]) continue;
      parts[rank].push_back(view(slot, {part.begin - range.begin, part.end - range.begin}));
    }
  }
  return parts;
}

}  // namespace shardstep
