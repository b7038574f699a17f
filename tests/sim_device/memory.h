#pragma once

// The devices' memory: two address ranges of equal size. Tensors point into the first, which cannot
// be accessed; kernels use the same offset in the second.

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace sim {

// What uninitialized, freed and not yet arrived elements hold: NaN, -1 or 255, by dtype.
constexpr int kPoison = 0xff;

c10::Allocator* allocator();
// Of host memory that uploads need not wait for.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
bool is_device_pointer(const void* pointer);
bool is_host_alias(const void* pointer);
// The alias of a device pointer. REQUIRES: null or is_device_pointer.
uint8_t* host_alias(const void* pointer);
int device_of(const void* pointer);

void count_read(int device);
void count_upload(int device);

}  // namespace sim
