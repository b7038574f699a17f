#pragma once

// Numbers that another rank has written, in shared memory or in a message. Each that becomes a
// size, an index or the end of a loop passes through here first, so that a damaged rank causes an
// error on the others and never a crash. Flags and numbers that are only compared need no check.

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <string>

#include "launch/who.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

class PeerInput {
 public:
  // Calls `give_up`, if there is one, with the message of an error before it throws.
  using GiveUp = std::function<void(const std::string& message)>;
  PeerInput(const ProcessGroupPtr& group, int from, GiveUp give_up = {})
      : group_(group), from_(from), give_up_(std::move(give_up)) {}
  // For what any rank may have written.
  explicit PeerInput(const ProcessGroupPtr& group, GiveUp give_up = {})
      : PeerInput(group, -1, std::move(give_up)) {}

  // The number, if it is at least `least` and at most `most`; else throws.
  int64_t check(const char* what, int64_t number, int64_t least, int64_t most) const {
    if (number < least || number > most) {
      const auto whose =
          from_ < 0 ? ", which some rank has written," : c10::str(" of rank ", from_);
      fail(c10::str("expected ", what, whose, " to be from ", least, " to ", most, ", got ",
                    number));
    }
    return number;
  }
  // Throws unless `good`, which says whether `what` can be.
  void require(bool good, const char* what) const {
    if (!good)
      fail(c10::str("got ", what, " from ", from_ < 0 ? "some rank" : c10::str("rank ", from_)));
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const auto whose = from_ < 0 ? "that rank's" : "its";
    const auto message =
        c10::str(what, "; ", whose, " memory is damaged, or it runs another version");
    if (give_up_) give_up_(message);
    TORCH_CHECK(false, "shardstep: ", message, who(group_));
  }

  const ProcessGroupPtr& group_;
  int from_;
  GiveUp give_up_;
};

}  // namespace shardstep::detail
