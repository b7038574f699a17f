#pragma once

// Shared memory of one tag: a place for each rank in which it shows its part of a bucket to all
// others, and counts that say who has got how far.

#include <string>
#include <vector>

#include "comm/parts.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

class BucketSegment {
 public:
  // Parts may have up to bytes[r] bytes.
  BucketSegment(SharedMemory& shared, int64_t key, const std::vector<int64_t>& bytes);

  bool fits(const std::vector<int64_t>& bytes) const;

  // Starts a round: shows this rank's part, once all have read the last one. Says how many rounds
  // that makes.
  uint32_t publish(const Parts& parts);
  // Ends a round: reads the parts of all others, once they are there.
  void fetch(const Parts& parts, uint32_t round);

 private:
  // The header: how often each rank has shown its part, and read everyone's.
  struct Counts {
    SharedCount published;
    SharedCount fetched;
  };
  Counts& counts(int rank) { return reinterpret_cast<Counts*>(memory_.get())[rank]; }
  std::byte* place(int owner) { return memory_.get() + layout_.begin(owner); }

  SharedMemory& shared_;
  SegmentLayout layout_;
  std::shared_ptr<std::byte> memory_;
  uint32_t rounds_ = 0;  // this rank's, begun
};

}  // namespace shardstep::detail
