#pragma once

// Parameters laid out in one range per rank. With flat storage the parameters become views of one
// tensor; without it, they stay where they are and the bucket is only a view of them. Either way, a
// bucket returns 1-D tensors that alias the parameters' memory, in memory order.
// Thread safety: none. Nothing here communicates.

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "comm/parts.h"
#include "shard/partition.h"
#include "shardstep/export.h"

namespace shardstep {

// Whether the elements of `tensor` fill memory without gaps or overlap, in any order.
SHARDSTEP_API bool is_dense(const at::Tensor& tensor);

// All elements in memory order, aliasing. REQUIRES: is_dense(tensor).
SHARDSTEP_API at::Tensor flat_view(const at::Tensor& tensor);

// `tensor` with the memory order of `like`: itself if it has it already, else a copy.
SHARDSTEP_API at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& tensor);

// How often `tensor` was changed in place; unset if torch does not count.
SHARDSTEP_API std::optional<int64_t> version_of(const at::Tensor& tensor);

enum class BucketStorage {
  kInPlace,  // parameters stay where they are
  kFlat,     // parameters become views of one tensor
};

class SHARDSTEP_API Bucket {
 public:
  // `params` in the order of the layout's slots. `flat` is zeroed flat storage to use instead of
  // the bucket's own. REQUIRES: all dense, of one dtype and device.
  Bucket(BucketLayout layout, std::vector<at::Tensor> params, BucketStorage storage,
         at::Tensor flat = {});

  // Follows parameters whose memory was replaced since the last call (`param.data = …`); with flat
  // storage, copies their values back into it. Returns whether there were any.
  bool refresh();

  // Parameter `slot`'s elements, aliasing.
  at::Tensor view(size_t slot, Range elements) const;

  // What is sent: the shards, without the parameters whose `active` entry (by slot) is false. With
  // flat storage and everything active, this is one part per rank, including padding.
  Parts parts(const std::vector<bool>& active) const;

  const BucketLayout& layout() const { return layout_; }
  const std::vector<at::Tensor>& params() const { return params_; }
  // The whole storage; undefined in place.
  const at::Tensor& flat() const { return flat_; }

 private:
  void adopt(size_t slot);

  BucketLayout layout_;
  std::vector<at::Tensor> params_;
  std::vector<const void*> data_;  // each parameter's memory at the last refresh()
  at::Tensor flat_;
};

}  // namespace shardstep
