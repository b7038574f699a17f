#pragma once

// Numbers that another rank has written, in shared memory or in a message. Each that becomes a
// size, an index or the end of a loop passes through here first, so that a damaged rank causes an
// error on the others and never a crash. Flags and numbers that are only compared need no check.

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "launch/who.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

class PeerInput {
 public:
  PeerInput(const ProcessGroupPtr& group, int from) : group_(group), from_(from) {}
  // For what any rank may have written.
  explicit PeerInput(const ProcessGroupPtr& group) : PeerInput(group, -1) {}

  // The number, if it is at least `least` and at most `most`; else throws.
  int64_t check(const char* what, int64_t number, int64_t least, int64_t most) const {
    TORCH_CHECK(least <= number && number <= most, "shardstep: expected ", what, " of ", from(),
                " to be from ", least, " to ", most, ", got ", number,
                "; its memory is damaged, or it runs another version", who(group_));
    return number;
  }
  // Throws unless `good`, which says whether `what` can be.
  void require(bool good, const char* what) const {
    TORCH_CHECK(good, "shardstep: got ", what, " from ", from(),
                "; its memory is damaged, or it runs another version", who(group_));
  }

 private:
  std::string from() const { return from_ < 0 ? "some rank" : c10::str("rank ", from_); }

  const ProcessGroupPtr& group_;
  int from_;
};

}  // namespace shardstep::detail
