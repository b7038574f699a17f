#include "comm/exchange.h"

#include "comm/pending_works.h"
#include "failure_points.h"

namespace shardstep {

Exchange::Exchange(ProcessGroupPtr group, int64_t channel)
    : group_(std::move(group)),
      watch_(std::make_shared<detail::ConnectionWatch>(group_)),
      channel_(channel) {}

int Exchange::message_tag(MessageTag tag) const {
  // c10d's tags are non-negative 32-bit numbers; the top bit avoids users' small tags. Channels are
  // reused after some thousand optimizers.
  constexpr int kOurs = 30, kChannelBits = kOurs - MessageTag::kBits;
  const auto channel = static_cast<int>(channel_ & ((1 << kChannelBits) - 1));
  return 1 << kOurs | channel << MessageTag::kBits | tag.value();
}

at::Tensor Exchange::make_shared(int64_t, const at::TensorOptions&) {
  TORCH_INTERNAL_ASSERT(false, "exchange ", name(), " shares no memory");
}

void Exchange::all_gather_and_wait(const std::vector<const Parts*>& buckets) {
  std::vector<std::unique_ptr<Pending>> pending;
  for (size_t b = 0; b < buckets.size(); ++b) {
    pending.push_back(all_gather(*buckets[b], MessageTag::bucket(static_cast<int64_t>(b))));
  }
  for (auto& bucket : pending) bucket->wait();
}

std::unique_ptr<Pending> Exchange::gather(const std::vector<at::Tensor>& own, const Parts& into,
                                          int to, MessageTag tag) {
  auto pending = std::make_unique<detail::PendingWorks>(group_, watch_);
  pending->need_only_the_awaited();
  if (rank() != to) {
    messages_->add_sent(detail::send(group_, *pending, own, to, message_tag(tag)));
    SHARDSTEP_FAILURE_POINT("gather: sent");
    return pending;
  }
  SHARDSTEP_FAILURE_POINT("gather: receives");
  for (int from = 0; from < world_size(); ++from) {
    if (from == to) continue;
    messages_->add_received(detail::receive(group_, *pending, into[from], from, message_tag(tag)));
  }
  return pending;
}

std::unique_ptr<Pending> Exchange::transfer(const std::vector<at::Tensor>& tensors, int from,
                                            int to, MessageTag tag) {
  auto pending = std::make_unique<detail::PendingWorks>(group_, watch_);
  pending->need_only_the_awaited();
  if (rank() == from) {
    messages_->add_sent(detail::send(group_, *pending, tensors, to, message_tag(tag)));
  } else if (rank() == to) {
    messages_->add_received(detail::receive(group_, *pending, tensors, from, message_tag(tag)));
  }
  return pending;
}

}  // namespace shardstep
