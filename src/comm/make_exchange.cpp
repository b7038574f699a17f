#include "comm/make_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/agreement.h"
#include "comm/control_group.h"
#include "comm/hierarchical_exchange.h"
#include "comm/native_exchange.h"
#include "comm/pairwise_exchange.h"
#include "comm/shared/shared_memory_exchange.h"
#include "launch/who.h"

namespace shardstep {
namespace {

// The exchange through shared memory that fits the hosts, null if none does. Collective.
std::unique_ptr<Exchange> make_exchange_in_memory(const ProcessGroupPtr& group,
                                                  const ExchangeOptions& options) {
  const auto kind = options.kind;
  auto shared = options.device.is_cpu() ? detail::SharedMemory::connect(group) : nullptr;
  if (!shared) return nullptr;
  const auto& hosts = shared->hosts();
  if (hosts.count() == 1 && kind != ExchangeKind::kHierarchical) {
    return detail::make_shared_memory_exchange(group, options.channel, std::move(shared));
  }
  const bool is_worth_it = !hosts.every_rank_is_alone() || options.share_tensors;
  if (kind == ExchangeKind::kHierarchical || (kind == ExchangeKind::kAuto && is_worth_it)) {
    return detail::make_hierarchical_exchange(group, options.channel, std::move(shared));
  }
  return nullptr;
}

// Whether messages are told apart by their tags, in whatever order they come: each rank sends two
// to the next in the order in which it does not receive them. Collective.
bool has_tagged_messages(const ProcessGroupPtr& group, int64_t channel) {
  const auto exchange = detail::make_pairwise_exchange(group, channel);
  const int self = group->getRank(), ranks = group->getSize();
  const int next = (self + 1) % ranks, last = (self + ranks - 1) % ranks;
  const MessageTag one = ControlMessage::kFirstProbe, two = ControlMessage::kSecondProbe;
  const auto first = at::zeros({1}), second = at::zeros({1});
  bool works = false;
  try {
    std::vector<std::unique_ptr<Pending>> pending;
    pending.push_back(exchange->transfer({first}, last, self, one));
    pending.push_back(exchange->transfer({second}, last, self, two));
    pending.push_back(exchange->transfer({at::full({1}, 2.0)}, self, next, two));
    pending.push_back(exchange->transfer({at::full({1}, 1.0)}, self, next, one));
    for (auto& message : pending) message->wait();
    works = first.item<float>() == 1 && second.item<float>() == 2;
  } catch (const std::exception&) {
    // It cannot, or a rank is gone, as the next message will show.
  }
  const auto all = detail::all_gather_number(group, works ? 1 : 0);
  return std::find(all.begin(), all.end(), 0) == all.end();
}

void check_cpu(const char* kind, at::Device device, const ProcessGroupPtr& group) {
  TORCH_CHECK_VALUE(device.is_cpu(), "shardstep: expected CPU tensors for exchange \"", kind,
                    "\", got tensors on ", device.type(), "; use \"native\" or \"auto\"",
                    detail::who(group));
}

}  // namespace

std::unique_ptr<Exchange> make_exchange(const ProcessGroupPtr& group,
                                        const ExchangeOptions& options) {
  const auto kind = options.kind;
  const auto channel = options.channel;
  if (kind == ExchangeKind::kPairwise) {
    check_cpu("pairwise", options.device, group);
    return detail::make_pairwise_exchange(group, channel);
  }
  if (kind == ExchangeKind::kSharedMemory) check_cpu("shared_memory", options.device, group);
  if (kind == ExchangeKind::kHierarchical) check_cpu("hierarchical", options.device, group);
  if (kind == ExchangeKind::kNative || !options.device.is_cpu()) {
    return detail::make_native_exchange(group, channel);
  }
  if (auto exchange = make_exchange_in_memory(group, options)) return exchange;
  TORCH_CHECK_VALUE(kind != ExchangeKind::kSharedMemory,
                    "shardstep: expected ranks on one host for exchange \"shared_memory\", got "
                    "ranks that cannot open each other's memory",
                    detail::who(group));
  TORCH_CHECK_VALUE(kind != ExchangeKind::kHierarchical,
                    "shardstep: expected memory to share for exchange \"hierarchical\", got a rank "
                    "that cannot create shared memory",
                    detail::who(group));
  return has_tagged_messages(group, channel) ? detail::make_pairwise_exchange(group, channel)
                                             : detail::make_native_exchange(group, channel);
}

std::unique_ptr<Exchange> make_control_exchange(const ProcessGroupPtr& group, int64_t channel) {
  const auto control = detail::make_control_group(group, channel);
  if (detail::control_device(control).is_cpu() && has_tagged_messages(control, channel)) {
    return detail::make_pairwise_exchange(control, channel);
  }
  return detail::make_native_exchange(control, channel);
}

}  // namespace shardstep
