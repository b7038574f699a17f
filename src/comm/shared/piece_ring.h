#pragma once

// What every rank owns flows to all others in pieces, through places so small that they stay in the
// caches. It costs 2 MiB per rank and no second pass through memory.

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/parts.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

class PieceRing {
 public:
  explicit PieceRing(SharedMemory& shared, int64_t key);

  // parts[r] of rank r reach every rank, for bucket after bucket. All ranks come with parts of the
  // same sizes. Collective.
  void all_gather(const std::vector<Parts>& buckets);

 private:
  static constexpr int64_t kPieceBytes = 512 * 1024;
  static constexpr uint32_t kPlaces = 4;
  static constexpr uint32_t kAhead = 2;  // less than places: others need not keep in step

  class PartBytes;
  // The header: how many pieces each rank has published and fetched.
  struct Counts {
    SharedCount published;
    SharedCount fetched;
  };
  Counts& counts(int rank) { return reinterpret_cast<Counts*>(memory_.get())[rank]; }
  std::byte* place(int owner, uint32_t piece) {
    return memory_.get() + layout_.begin(owner) + piece % kPlaces * kPieceBytes;
  }
  void publish(PartBytes& own);
  void fetch(std::vector<PartBytes>& parts);

  SharedMemory& shared_;
  SegmentLayout layout_;
  std::shared_ptr<std::byte> memory_;
  // Pieces count on for ever; a rank without bytes publishes empty ones.
  uint32_t published_ = 0;  // by this rank
  uint32_t fetched_ = 0;
};

}  // namespace shardstep::detail
