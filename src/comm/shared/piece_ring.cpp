#include "comm/shared/piece_ring.h"

#include <algorithm>
#include <cstring>

#include "comm/shared/copy_past_caches.h"
#include "comm/shared/cursor.h"
#include "failure_points.h"

namespace shardstep::detail {

// The bytes of tensors, one after the other.
class PieceRing::PartBytes {
 public:
  void add(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      tensors_.push_back(tensor);
      cursor_.add(static_cast<int64_t>(tensor.nbytes()));
    }
  }
  int64_t left() const { return cursor_.left(); }
  // Returns how many bytes it had.
  int64_t read_piece(std::byte* to) {
    const int64_t before = left();
    cursor_.advance(kPieceBytes, [&](size_t which, int64_t offset, int64_t size) {
      std::memcpy(to, at(which, offset), static_cast<size_t>(size));
      to += size;
    });
    return before - left();
  }
  void write_piece(const std::byte* from) {
    cursor_.advance(kPieceBytes, [&](size_t which, int64_t offset, int64_t size) {
      copy_past_caches(at(which, offset), from, size);
      from += size;
    });
  }

 private:
  std::byte* at(size_t which, int64_t offset) {
    return static_cast<std::byte*>(tensors_[which].mutable_data_ptr()) + offset;
  }
  std::vector<at::Tensor> tensors_;
  Cursor cursor_;
};

PieceRing::PieceRing(SharedMemory& shared, int64_t key)
    : shared_(shared),
      layout_(shared.world_size() * static_cast<int64_t>(sizeof(Counts)),
              std::vector<int64_t>(shared.world_size(), kSlots * kPieceBytes)),
      memory_(shared.allocate(key, layout_).memory) {}

void PieceRing::all_gather(const std::vector<const Parts*>& buckets) {
  std::vector<PartBytes> parts(shared_.world_size());
  for (const auto* bucket : buckets) {
    for (int owner = 0; owner < shared_.world_size(); ++owner) parts[owner].add((*bucket)[owner]);
  }
  int64_t bytes = 0;
  for (const auto& part : parts) bytes = std::max(bytes, part.left());
  const uint32_t end = fetched_ + static_cast<uint32_t>((bytes + kPieceBytes - 1) / kPieceBytes);
  while (fetched_ != end) {
    while (published_ != end && published_ - fetched_ <= kAhead) publish(parts[shared_.rank()]);
    fetch(parts);
  }
}

void PieceRing::publish(PartBytes& own) {
  const auto what = [] { return std::string("the reading of parameters"); };
  for (int other = 0; other < shared_.world_size(); ++other) {
    if (other == shared_.rank()) continue;
    shared_.wait(counts(other).fetched, published_ + 1 - kSlots, other, what);
    shared_.check_count(counts(other).fetched, published_, other);
  }
  shared_.count_copied(own.read_piece(slot(shared_.rank(), published_)));
  SHARDSTEP_FAILURE_POINT("ring: copied");
  shared_.raise(counts(shared_.rank()).published);
  SHARDSTEP_FAILURE_POINT("ring: published");
  ++published_;
}

void PieceRing::fetch(std::vector<PartBytes>& parts) {
  const auto what = [] { return std::string("the parameters"); };
  for (int distance = 1; distance < shared_.world_size(); ++distance) {
    const int owner = (shared_.rank() + distance) % shared_.world_size();
    shared_.wait(counts(owner).published, fetched_ + 1, owner, what);
    shared_.check_count(counts(owner).published, fetched_ + kSlots, owner);
    parts[owner].write_piece(slot(owner, fetched_));
  }
  SHARDSTEP_FAILURE_POINT("ring: fetched");
  shared_.raise(counts(shared_.rank()).fetched);
  ++fetched_;
}

}  // namespace shardstep::detail
