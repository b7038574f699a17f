#pragma once

// Streams beside those on which the backward pass computes, one per device. What runs on them may
// wait for messages without making the backward pass wait. Nothing happens on the CPU.
// Thread safety: one thread at a time.

#include <c10/core/Stream.h>

#include <functional>
#include <unordered_map>

namespace shardstep::detail {

class SideStreams {
 public:
  // Runs `body` with the device's side stream as the current one, behind what has been queued on
  // the current one so far.
  void run(c10::Device device, const std::function<void()>& body);
  // The current streams wait for what has run on the side streams.
  void join();

 private:
  std::unordered_map<c10::Device, c10::Stream> streams_;
};

}  // namespace shardstep::detail
