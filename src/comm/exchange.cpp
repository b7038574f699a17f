#include "comm/exchange.h"

#include "comm/exchanges.h"
#include "comm/pending_works.h"
#include "launch/who.h"

namespace shardstep {

Exchange::Exchange(ProcessGroupPtr group, int64_t channel)
    : group_(std::move(group)), channel_(channel) {}

int Exchange::message_tag(int tag) const {
  // c10d's tags are non-negative 32 bit numbers; the top one keeps clear of users' small tags.
  constexpr int64_t kOurs = int64_t{1} << 30;
  return static_cast<int>(kOurs | (channel_ & 0x3fff) << 16 | (tag & 0xffff));
}

void Exchange::all_gather_and_wait(const std::vector<Parts>& buckets) {
  std::vector<std::unique_ptr<Pending>> pending;
  for (size_t b = 0; b < buckets.size(); ++b) {
    pending.push_back(all_gather(buckets[b], static_cast<int>(b)));
  }
  for (auto& bucket : pending) bucket->wait();
}

std::unique_ptr<Pending> Exchange::gather(const std::vector<at::Tensor>& own, const Parts& into,
                                          int to, int tag) {
  auto pending = std::make_unique<detail::PendingWorks>(group_);
  if (rank() != to) {
    traffic_.bytes_sent += detail::send(group_, *pending, own, to, message_tag(tag));
    return pending;
  }
  for (int from = 0; from < world_size(); ++from) {
    if (from == to) continue;
    traffic_.bytes_received +=
        detail::receive(group_, *pending, into[from], from, message_tag(tag));
  }
  return pending;
}

std::unique_ptr<Pending> Exchange::transfer(const std::vector<at::Tensor>& tensors, int from,
                                            int to, int tag) {
  auto pending = std::make_unique<detail::PendingWorks>(group_);
  if (rank() == from) {
    traffic_.bytes_sent += detail::send(group_, *pending, tensors, to, message_tag(tag));
  } else if (rank() == to) {
    traffic_.bytes_received += detail::receive(group_, *pending, tensors, from, message_tag(tag));
  }
  return pending;
}

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
