#include "ddp/side_streams.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace shardstep::detail {
namespace {

// What is queued on `then` from here on runs behind what is queued on `first`.
void run_behind(const c10::Stream& first, const c10::Stream& then) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

}  // namespace

void SideStreams::run(c10::Device device, const std::function<void()>& body) {
  if (device.is_cpu()) return body();
  const c10::impl::VirtualGuardImpl streams(device.type());
  auto found = streams_.find(device);
  if (found == streams_.end()) {
    found = streams_.emplace(device, streams.getStreamFromGlobalPool(device)).first;
  }
  run_behind(streams.getStream(device), found->second);
  const c10::StreamGuard guard(found->second);
  body();
}

void SideStreams::join() {
  for (const auto& [device, stream] : streams_) {
    run_behind(stream, c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
}

}  // namespace shardstep::detail
