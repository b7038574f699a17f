#include "shard/attended_step.h"

#include <map>
#include <mutex>

#include "launch/who.h"

namespace shardstep::detail {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, const AttendedStep*> by_group;
};

Registry& registry() {
  static auto* const registry = new Registry();
  return *registry;
}

}  // namespace

void AttendedStep::check_no_other() const {
  auto& [mutex, by_group] = registry();
  const std::lock_guard lock(mutex);
  const auto found = by_group.find(group_.get());
  TORCH_CHECK(
      found == by_group.end() || found->second == this,
      "shardstep: expected step() of the optimizer whose gradients this rank has clipped or "
      "looked at, in which ranks that have joined take part until then, got a call of "
      "another one; in a Join, let each optimizer of stage 2 clip and step before the next "
      "one does",
      who(group_));
}

void AttendedStep::begin() {
  auto& [mutex, by_group] = registry();
  const std::lock_guard lock(mutex);
  by_group[group_.get()] = this;
}

void AttendedStep::end() {
  auto& [mutex, by_group] = registry();
  const std::lock_guard lock(mutex);
  const auto found = by_group.find(group_.get());
  if (found != by_group.end() && found->second == this) by_group.erase(found);
}

}  // namespace shardstep::detail
