#pragma once

// A simulated accelerator, "sim", for tests on machines without one. It behaves as a GPU does where
// that catches mistakes:
// - host code that reads or writes device memory crashes: data_ptr() points into address space that
//   is not mapped for access. Kernels run on the CPU, on an alias of the same memory;
// - tensors of two devices do not mix, except for CPU tensors without dimensions;
// - memory is counted per device, and so are the moments when the host waits for the device;
// - its c10d backend, "simccl" (simccl.h), behaves as NCCL does.
//
// Thread safety: all functions may be called from any thread. The current device is per thread.

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace sim {

// More than any test has ranks, so that ranks that are threads have two devices each: the autograd
// engine has one thread per device, and ranks on one device would wait for each other in it.
constexpr int kDevices = 16;

// Makes the device known to torch, once per process. REQUIRES: no backward pass before.
void activate();

c10::Device device(int index);
void set_current_device(int index);
int current_device();

// Bytes of living tensors, and the most since the last reset_peak_memory().
int64_t memory_allocated(int device);
int64_t max_memory_allocated(int device);
void reset_peak_memory(int device);

// How often the host waited for the device: values that were read, results whose size depends on
// values, and uploads that were not non_blocking.
struct HostSyncs {
  int64_t reads = 0;
  int64_t uploads = 0;
  int64_t all() const { return reads + uploads; }
};
HostSyncs host_syncs(int device);

// How often the stream that kernels run on by default was told to wait for a collective that was
// still under way.
int64_t stream_waits(int device);

// Waits for everything that is under way on a device.
void synchronize(int device);

}  // namespace sim
