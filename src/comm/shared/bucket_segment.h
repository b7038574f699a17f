#pragma once

// Shared memory of one tag: a slot for each rank, in which it publishes its part of a bucket to all
// others, and counts of how far each rank has got. Modelled in proofs/bucket_segment.pml.

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

  // Starts a round: publishes this rank's part, once all have read the last one. Returns the number
  // of rounds so far.
  uint32_t publish(const Parts& parts);
  // The same in two steps, for a part that is yet to come: where this rank's part goes, once all
  // have read the last one; and that it is there, which another thread may say.
  std::byte* begin_part();
  void end_part();
  uint32_t rounds() const { return rounds_; }
  // Ends a round: reads the parts of all others, once they are published.
  void fetch(const Parts& parts, uint32_t round);
  // Reads this rank's own part, once it is published.
  void fetch_own(const Parts& parts, uint32_t round);

 private:
  // The header: how often each rank has published its part, and read everyone's.
  struct Counts {
    SharedCount published;
    SharedCount fetched;
  };
  Counts& counts(int rank) { return reinterpret_cast<Counts*>(memory_.get())[rank]; }
  void read(const Parts& parts, int owner, uint32_t round);
  std::byte* slot(int owner) { return memory_.get() + layout_.begin(owner); }

  SharedMemory& shared_;
  SegmentLayout layout_;
  std::shared_ptr<std::byte> memory_;
  uint32_t rounds_ = 0;  // that this rank has started
};

}  // namespace shardstep::detail
