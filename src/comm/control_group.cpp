#include "comm/control_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "comm/agreement.h"
#include "launch/who.h"

namespace shardstep::detail {
namespace {

// Null if Gloo cannot connect the ranks.
ProcessGroupPtr make_companion(const ProcessGroupPtr& group, int64_t number) {
  const auto store = group->getStore();
  if (!store) return nullptr;
  try {
    return make_process_group(
        c10::make_intrusive<c10d::PrefixStore>(c10::str("shardstep/control/", number), store),
        group->getRank(), group->getSize(),
        ProcessGroupOptions().backend("gloo").timeout(timeout_of(group)));
  } catch (const std::exception& error) {
    TORCH_WARN(
        "shardstep: Gloo cannot connect the ranks, so their control messages go through the "
        "device, for which the host waits in each step; set GLOO_SOCKET_IFNAME to a network "
        "interface that the ranks share: ",
        error.what(), who(group));
    return nullptr;
  }
}

}  // namespace

std::chrono::milliseconds timeout_of(const ProcessGroupPtr& group) {
  try {
    return group->getBackend(control_device(group).type())->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kProcessGroupDefaultTimeout;
  }
}

ProcessGroupPtr make_control_group(const ProcessGroupPtr& group, int64_t number) {
  if (control_device(group).is_cpu()) return group;
  auto companion = make_companion(group, number);
  const auto made = all_gather_number(group, companion ? 1 : 0);
  return std::find(made.begin(), made.end(), 0) == made.end() ? companion : group;
}

}  // namespace shardstep::detail
