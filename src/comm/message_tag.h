#pragma once

// The tags of all messages between the ranks of an optimizer: what kind of message, and its number
// within that kind. Messages of different kinds or numbers are never confused.

#include <c10/util/Exception.h>

#include <cstdint>

namespace shardstep {

enum class MessageKind : int {
  kBucket,          // parameters of a bucket of the engine
  kGradients,       // of a bucket of the engine; a rank may post them long before another
  kState,           // of a bucket of the engine
  kArriving,        // parameters of a bucket that are still being sent after step()
  kPartialStep,     // parameters that were updated inside DDP's backward pass
  kReduceToOwners,  // gradients of a bucket of DDP
  kControl,         // numbered by ControlMessage
};

enum class ControlMessage : int {
  kGradientMeeting,
  kGradientValues,
  kFollowedChanges,
  kWholeGradient,
  kLentGradients,
  kParamStatus,
  kStepOutcome,
  kStateSizes,
  kStateCatalogues,
  kFirstProbe,  // of what a backend can do
  kSecondProbe,
};

class MessageTag {
 public:
  static constexpr int kKindBits = 3, kNumberBits = 16;
  static constexpr int kBits = kKindBits + kNumberBits;
  static constexpr int kMost = (1 << kBits) - 1;

  // Throws if `number` is too large for a tag.
  MessageTag(MessageKind kind, int64_t number)
      : value_(static_cast<int>(kind) << kNumberBits | static_cast<int>(number)) {
    TORCH_CHECK_VALUE(number >= 0 && number < int64_t{1} << kNumberBits,
                      "shardstep: expected at most ", int64_t{1} << kNumberBits,
                      " buckets, got bucket number ", number, "; raise bucket_cap_mb");
  }
  MessageTag(ControlMessage message)
      : MessageTag(MessageKind::kControl, static_cast<int64_t>(message)) {}

  static MessageTag bucket(int64_t number) { return {MessageKind::kBucket, number}; }

  // From 0 to kMost.
  int value() const { return value_; }

 private:
  int value_;
};

}  // namespace shardstep
