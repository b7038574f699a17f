#pragma once

// Sends what each rank owns to all others in pieces, through slots so small that they stay in the
// caches. This costs 2 MiB per rank and no second pass through memory. Modelled in
// proofs/piece_ring.pml.

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/parts.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

class PieceRing {
 public:
  explicit PieceRing(SharedMemory& shared, int64_t key);

  // Copies parts[r] from rank r to every rank, bucket by bucket. REQUIRES: parts of the same sizes
  // on all ranks. Collective.
  void all_gather(const std::vector<const Parts*>& buckets);

 private:
  static constexpr int64_t kPieceBytes = 512 * 1024;
  static constexpr uint32_t kSlots = 4;
  static constexpr uint32_t kAhead = 2;  // fewer than kSlots, so that ranks need not run in step

  class PartBytes;
  // The header: how many pieces each rank has published and fetched.
  struct Counts {
    SharedCount published;
    SharedCount fetched;
  };
  Counts& counts(int rank) { return reinterpret_cast<Counts*>(memory_.get())[rank]; }
  std::byte* slot(int owner, uint32_t piece) {
    return memory_.get() + layout_.begin(owner) + piece % kSlots * kPieceBytes;
  }
  void publish(PartBytes& own);
  void fetch(std::vector<PartBytes>& parts);

  SharedMemory& shared_;
  SegmentLayout layout_;
  std::shared_ptr<std::byte> memory_;
  // Pieces are counted without end; a rank without bytes publishes empty ones.
  uint32_t published_ = 0;  // by this rank
  uint32_t fetched_ = 0;
};

}  // namespace shardstep::detail
