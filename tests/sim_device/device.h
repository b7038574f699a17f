#pragma once

// Streams and events. Kernels have run when their call returns, whatever the stream; what is really
// under way is a collective, and only its results can be waited for. So an event stands for the
// collectives of the stream that it was recorded on.

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <memory>

namespace sim {

// Something that is under way on a stream of its own.
class Arrival {
 public:
  virtual ~Arrival() = default;
  // Waits for it and puts its results in place, once; throws if it failed.
  virtual void arrive() = 0;
  virtual bool under_way() = 0;
};

// The stream waits for it; what is queued on the stream afterwards sees its results.
void wait_on_stream(const std::shared_ptr<Arrival>& arrival, const c10::Stream& stream);

// A new stream on which this alone is under way.
c10::Stream stream_of(const std::shared_ptr<Arrival>& arrival, int device);

// The generator that a CPU kernel draws from in place of a device's.
at::Generator cpu_generator(const at::Generator& generator);

}  // namespace sim
