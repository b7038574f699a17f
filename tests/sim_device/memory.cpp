#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "sim_device.h"

namespace sim {
namespace {

constexpr size_t kDeviceBytes = size_t{2} << 30;
constexpr size_t kAlignment = 512;  // CUDA's

uint8_t* reserve(int protection) {
  void* range = ::mmap(nullptr, kDevices * kDeviceBytes, protection,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(range != MAP_FAILED, "sim: cannot reserve address space: ", std::strerror(errno));
  ::madvise(range, kDevices * kDeviceBytes, MADV_DONTDUMP);
  return static_cast<uint8_t*>(range);
}

// One device's blocks, by their offset from the beginning of the device.
class Blocks {
 public:
  Blocks() { free_[0] = kDeviceBytes; }

  size_t take(size_t bytes) {
    std::lock_guard lock(mutex_);
    const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const auto found = std::find_if(free_.begin(), free_.end(),
                                    [&](const auto& block) { return block.second >= size; });
    TORCH_CHECK_WITH(OutOfMemoryError, found != free_.end(), "sim: out of memory: ", bytes,
                     " bytes, ", allocated_, " of ", kDeviceBytes, " in use");
    const auto [offset, available] = *found;
    free_.erase(found);
    if (available > size) free_[offset + size] = available - size;
    used_[offset] = bytes;
    allocated_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, allocated_);
    return offset;
  }

  // `host`: the block's alias, which is poisoned.
  void give_back(size_t offset, uint8_t* host) {
    std::lock_guard lock(mutex_);
    const size_t bytes = used_.at(offset);
    used_.erase(offset);
    std::memset(host, kPoison, bytes);
    allocated_ -= static_cast<int64_t>(bytes);
    size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += size;
        return;
      }
    }
    free_[offset] = size;
  }

  int64_t allocated() const {
    std::lock_guard lock(mutex_);
    return allocated_;
  }
  int64_t peak() const {
    std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    peak_ = allocated_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_, used_;
  int64_t allocated_ = 0, peak_ = 0;
};

struct Memory {
  uint8_t* const device = reserve(PROT_NONE);
  uint8_t* const host = reserve(PROT_READ | PROT_WRITE);
  Blocks blocks[kDevices];
  std::atomic<int64_t> reads[kDevices]{}, uploads[kDevices]{};
};

// Never destroyed: tensors in static objects may outlive it.
Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

size_t offset_of(const void* pointer) {
  return static_cast<size_t>(static_cast<const uint8_t*>(pointer) - memory().device);
}

bool within(const void* pointer, const uint8_t* begin) {
  const auto* byte = static_cast<const uint8_t*>(pointer);
  return byte >= begin && byte < begin + kDevices * kDeviceBytes;
}

void free_memory(void* pointer) {
  if (pointer == nullptr) return;
  const int device = device_of(pointer);
  memory().blocks[device].give_back(offset_of(pointer) - device * kDeviceBytes,
                                    host_alias(pointer));
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    void* pointer = nullptr;
    if (bytes > 0) {
      pointer = memory().device + index * kDeviceBytes + memory().blocks[index].take(bytes);
      std::memset(host_alias(pointer), kPoison, bytes);
    }
    return {pointer, pointer, &free_memory, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(host_alias(to), host_alias(from), bytes);
  }
};

struct Pinned {
  std::mutex mutex;
  std::map<const uint8_t*, size_t> blocks;
};

Pinned& pinned() {
  static auto* instance = new Pinned;
  return *instance;
}

void free_pinned(void* pointer) {
  std::lock_guard lock(pinned().mutex);
  pinned().blocks.erase(static_cast<uint8_t*>(pointer));
  std::free(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(pinned().mutex);
    void* pointer = std::malloc(std::max<size_t>(bytes, 1));
    pinned().blocks[static_cast<uint8_t*>(pointer)] = bytes;
    return {pointer, pointer, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator;
  return instance;
}

bool is_pinned(const void* pointer) {
  std::lock_guard lock(pinned().mutex);
  const auto* byte = static_cast<const uint8_t*>(pointer);
  const auto after = pinned().blocks.upper_bound(byte);
  if (after == pinned().blocks.begin()) return false;
  const auto block = std::prev(after);
  return byte < block->first + std::max<size_t>(block->second, 1);
}

c10::Allocator* allocator() {
  static auto* instance = new DeviceAllocator;
  return instance;
}

bool is_device_pointer(const void* pointer) { return within(pointer, memory().device); }
bool is_host_alias(const void* pointer) { return within(pointer, memory().host); }

uint8_t* host_alias(const void* pointer) {
  if (pointer == nullptr) return nullptr;
  TORCH_CHECK(is_device_pointer(pointer), "sim: expected device memory, got a host pointer");
  return memory().host + offset_of(pointer);
}

int device_of(const void* pointer) { return static_cast<int>(offset_of(pointer) / kDeviceBytes); }

void count_read(int device) { ++memory().reads[device]; }
void count_upload(int device) { ++memory().uploads[device]; }

int64_t memory_allocated(int device) { return memory().blocks[device].allocated(); }
int64_t max_memory_allocated(int device) { return memory().blocks[device].peak(); }
void reset_peak_memory(int device) { memory().blocks[device].reset_peak(); }
HostSyncs host_syncs(int device) { return {memory().reads[device], memory().uploads[device]}; }

}  // namespace sim
