#include "comm/shared/shared_keys.h"

#include <ATen/ATen.h>

namespace shardstep::detail {

std::shared_ptr<BucketSegment> BucketSegments::of(MessageTag tag, const std::vector<int64_t>& bytes,
                                                  int which) {
  constexpr int64_t kKinds = 2;
  TORCH_INTERNAL_ASSERT(which < kKinds);
  auto& [last, count] = made_[{tag.value(), which}];
  if (!last || !last->fits(bytes)) {
    const int64_t key = tag.value() + ((++count * kKinds + which) << MessageTag::kBits);
    last = std::make_shared<BucketSegment>(shared_, key, bytes);
  }
  return last;
}

at::Tensor SharedTensors::make(int64_t numel, const at::TensorOptions& options) {
  const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  std::vector<int64_t> of_ranks(shared_.world_size(), bytes / shared_.world_size());
  of_ranks.back() += bytes % shared_.world_size();
  const SegmentLayout layout(0, of_ranks);
  const auto segment = shared_.allocate(SharedKey::kFirstTensor - made_++, layout);
  // This rank may write before the others have reserved their ranges.
  if (const int error = segment.reserve(0, layout.bytes())) shared_.throw_no_room(bytes, error);
  return at::from_blob(segment.memory.get(), {numel}, [memory = segment.memory](void*) {}, options);
}

}  // namespace shardstep::detail
