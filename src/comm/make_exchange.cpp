#include "comm/make_exchange.h"

#include "comm/native_exchange.h"
#include "comm/pairwise_exchange.h"
#include "comm/shared/shared_memory_exchange.h"
#include "launch/who.h"

namespace shardstep {

std::unique_ptr<Exchange> make_exchange(const ProcessGroupPtr& group,
                                        const ExchangeOptions& options) {
  const auto& [kind, device, channel] = options;
  if (kind == ExchangeKind::kNative) return detail::make_native_exchange(group, channel);
  if (kind == ExchangeKind::kPairwise) return detail::make_pairwise_exchange(group, channel);
  const bool gloo = group->getBackend(device.type())->getBackendName() == "gloo";
  if (gloo || kind == ExchangeKind::kSharedMemory) {
    if (auto exchange = detail::make_shared_memory_exchange(group, device, channel)) {
      return exchange;
    }
  }
  TORCH_CHECK_VALUE(
      kind != ExchangeKind::kSharedMemory,
      "shardstep: expected CPU tensors and ranks on one host for exchange "
      "\"shared_memory\", got ",
      device.is_cpu() ? "ranks that cannot open each other's memory" : "tensors on another device",
      detail::who(group));
  return gloo ? detail::make_pairwise_exchange(group, channel)
              : detail::make_native_exchange(group, channel);
}

}  // namespace shardstep
