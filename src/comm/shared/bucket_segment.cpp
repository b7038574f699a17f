#include "comm/shared/bucket_segment.h"

#include <cstring>

#include "comm/shared/copy_past_caches.h"
#include "failure_points.h"

namespace shardstep::detail {

BucketSegment::BucketSegment(SharedMemory& shared, int64_t key, const std::vector<int64_t>& bytes)
    : shared_(shared),
      layout_(shared.world_size() * static_cast<int64_t>(sizeof(Counts)), bytes),
      memory_(shared.allocate(key, layout_).memory) {}

bool BucketSegment::fits(const std::vector<int64_t>& bytes) const {
  for (int rank = 0; rank < static_cast<int>(bytes.size()); ++rank) {
    if (bytes[rank] > layout_.end(rank) - layout_.begin(rank)) return false;
  }
  return true;
}

uint32_t BucketSegment::publish(const Parts& parts) {
  std::byte* to = begin_part();
  for (const auto& tensor : parts[shared_.rank()]) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    copy_past_caches(to, static_cast<const std::byte*>(tensor.const_data_ptr()), bytes);
    to += bytes;
    shared_.count_copied(bytes);
  }
  end_part();
  return rounds_;
}

std::byte* BucketSegment::begin_part() {
  const auto what = [] { return std::string("the reading of the last parts"); };
  for (int other = 0; other < shared_.world_size(); ++other) {
    if (other == shared_.rank()) continue;
    shared_.wait(counts(other).fetched, rounds_, other, what);
    shared_.check_count(counts(other).fetched, rounds_, other);
  }
  ++rounds_;
  return slot(shared_.rank());
}

void BucketSegment::end_part() {
  SHARDSTEP_FAILURE_POINT("bucket: copied");
  shared_.raise(counts(shared_.rank()).published);
  SHARDSTEP_FAILURE_POINT("bucket: published");
}

void BucketSegment::fetch(const Parts& parts, uint32_t round) {
  for (int distance = 1; distance < shared_.world_size(); ++distance) {
    read(parts, (shared_.rank() + distance) % shared_.world_size(), round);
  }
  SHARDSTEP_FAILURE_POINT("bucket: fetched");
  shared_.raise(counts(shared_.rank()).fetched);
}

void BucketSegment::fetch_own(const Parts& parts, uint32_t round) {
  read(parts, shared_.rank(), round);
}

void BucketSegment::read(const Parts& parts, int owner, uint32_t round) {
  const auto what = [] { return std::string("the parts"); };
  shared_.wait(counts(owner).published, round, owner, what);
  shared_.check_count(counts(owner).published, round, owner);
  const std::byte* from = slot(owner);
  for (const auto& tensor : parts[owner]) {
    if (tensor.nbytes() > 0) std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
    from += tensor.nbytes();
  }
}

}  // namespace shardstep::detail
