#include "comm/abandoned_messages.h"

#include <chrono>
#include <list>
#include <mutex>
#include <thread>

namespace shardstep::detail {
namespace {

// Lives as long as the process: its thread may.
struct Registry {
  std::mutex mutex;
  std::list<AbandonedMessages> kept;
  bool has_thread = false;  // that releases what is kept
};

Registry& registry() {
  static auto* const registry = new Registry();
  return *registry;
}

// The connections of a group close when all its messages are released, and other ranks may wait for
// that.
void release_with_groups() {
  constexpr std::chrono::milliseconds kInterval{50};
  auto& [mutex, kept, has_thread] = registry();
  for (;;) {
    std::this_thread::sleep_for(kInterval);
    std::list<AbandonedMessages> released;  // after the lock: that may take Python's
    const std::lock_guard lock(mutex);
    for (auto it = kept.begin(); it != kept.end();) {
      const auto next = std::next(it);
      if (it->group.expired()) released.splice(released.end(), kept, it);
      it = next;
    }
    if (kept.empty()) {
      has_thread = false;
      return;
    }
  }
}

}  // namespace

void keep_abandoned(AbandonedMessages messages) {
  if (messages.works.empty() || messages.group.expired()) return;
  auto& [mutex, kept, has_thread] = registry();
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(messages));
  if (has_thread) return;
  has_thread = true;
  std::thread(release_with_groups).detach();
}

}  // namespace shardstep::detail
