#pragma once

// What an exchange keeps in shared memory, and under which keys. Ranks that use the same tags and
// make the same tensors, in any order of tags, find each other's.

#include <map>
#include <memory>
#include <vector>

#include "comm/message_tag.h"
#include "comm/shared/bucket_segment.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

// Those of buckets are positive, those of shared tensors lower than these.
struct SharedKey {
  static constexpr int64_t kRing = -1, kSums = -2, kFirstTensor = -3;
};

// The segments of buckets, by tag.
class BucketSegments {
 public:
  explicit BucketSegments(SharedMemory& shared) : shared_(shared) {}

  // One in which parts of so many bytes fit. Every rank knows all sizes, so all pass the same.
  // `which` tells apart segments of one tag.
  std::shared_ptr<BucketSegment> of(MessageTag tag, const std::vector<int64_t>& bytes,
                                    int which = 0);

 private:
  struct Made {
    std::shared_ptr<BucketSegment> last;
    int64_t count = 0;
  };
  SharedMemory& shared_;
  std::map<std::pair<int, int>, Made> made_;
};

// Tensors of which the ranks of a host share one copy.
class SharedTensors {
 public:
  explicit SharedTensors(SharedMemory& shared) : shared_(shared) {}

  at::Tensor make(int64_t numel, const at::TensorOptions& options);
  // Ranks may have come to different numbers.
  void start_anew() { made_ = ++attempts_ << 32; }

 private:
  SharedMemory& shared_;
  int64_t made_ = 0, attempts_ = 0;
};

}  // namespace shardstep::detail
