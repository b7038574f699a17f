#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"
#include "memory.h"
#include "sim_device.h"

namespace sim {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local int current = 0;
thread_local std::map<int, c10::StreamId> current_streams;

void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim: expected a device from 0 to ", kDevices - 1,
              ", got ", index);
}

// Streams

struct Streams {
  std::mutex mutex;
  c10::StreamId next = 1;  // 0 is the default stream
  std::map<c10::StreamId, std::pair<int, std::weak_ptr<Arrival>>> under_way;
};

Streams& streams() {
  static auto* instance = new Streams;
  return *instance;
}

using Arrivals = std::vector<std::shared_ptr<Arrival>>;

Arrivals under_way_on(c10::StreamId id) {
  auto& all = streams();
  std::lock_guard lock(all.mutex);
  const auto found = all.under_way.find(id);
  if (found == all.under_way.end()) return {};
  auto arrival = found->second.second.lock();
  return arrival ? Arrivals{std::move(arrival)} : Arrivals{};
}

std::atomic<int64_t> waits_of_default_stream[kDevices]{};

void wait_for(const Arrivals& arrivals) {
  for (const auto& arrival : arrivals) arrival->arrive();
}

// Guard

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(current); }
  void setDevice(c10::Device to) const override { set_current_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Device indexed(c10::Device device) const {
    return device.has_index() ? device : getDevice();
  }
  c10::Stream getStream(c10::Device device) const override {
    device = indexed(device);
    return stream(device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(indexed(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto& all = streams();
    std::lock_guard lock(all.mutex);
    return stream(indexed(device), all.next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current_streams[to.device_index()] = to.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Arrivals;
    *static_cast<Arrivals*>(*event) = under_way_on(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    for (const auto& arrival : *static_cast<Arrivals*>(event)) wait_on_stream(arrival, stream);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for(*static_cast<Arrivals*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Arrivals*>(event)->empty();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Arrivals*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return under_way_on(stream.id()).empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(under_way_on(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize(index); }
};

// Random numbers: the CPU's, with a state per device.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int index)
      : c10::GeneratorImpl(sim::device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(at::make_generator<at::CPUGeneratorImpl>()) {}

  const at::Generator& cpu() const { return cpu_; }
  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return at::Generator(cpu_).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->cpu_ = cpu_.clone();
    return copy;
  }
  at::Generator cpu_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  c10::Device getDeviceFromPtr(void* data) const override { return device(device_of(data)); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* const all = [] {
      auto* generators = new std::vector<at::Generator>;
      for (int i = 0; i < kDevices; ++i) generators->push_back(at::make_generator<Generator>(i));
      return generators;
    }();
    return all->at(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto memory = allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) allocator()->copy_data(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

c10::Stream stream_of(const std::shared_ptr<Arrival>& arrival, int device) {
  auto& all = streams();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.under_way, [](const auto& entry) { return entry.second.second.expired(); });
  all.under_way[all.next] = {device, arrival};
  return c10::Stream(c10::Stream::UNSAFE, sim::device(device), all.next++);
}

void wait_on_stream(const std::shared_ptr<Arrival>& arrival, const c10::Stream& stream) {
  if (stream.id() == 0 && arrival->under_way()) ++waits_of_default_stream[stream.device_index()];
  arrival->arrive();
}

int64_t stream_waits(int device) { return waits_of_default_stream[device]; }

at::Generator cpu_generator(const at::Generator& generator) {
  return generator.device().type() == kType ? generator.get<Generator>()->cpu() : generator;
}

c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
int current_device() { return current; }
void set_current_device(int index) {
  check_index(index);
  current = index;
}

void synchronize(int device) {
  Arrivals arrivals;
  {
    auto& all = streams();
    std::lock_guard lock(all.mutex);
    for (const auto& [id, entry] : all.under_way) {
      auto arrival = entry.first == device ? entry.second.lock() : nullptr;
      if (arrival) arrivals.push_back(std::move(arrival));
    }
  }
  wait_for(arrivals);
}

void activate() {
  static const bool once = [] {
    static Hooks hooks;
    c10::register_privateuse1_backend("sim");
    c10::SetAllocator(kType, allocator());
    c10::impl::registerDeviceGuard(kType, new Guard);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
  }();
  (void)once;
}

}  // namespace sim
