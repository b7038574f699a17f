#include "shard/step_outcome.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "comm/agreement.h"
#include "launch/who.h"

namespace shardstep::detail {
namespace {

struct Message {
  int64_t summary = 0;
  char text[248] = {};  // ends with a zero; the rank that failed throws the whole error
};

}  // namespace

const Parts& StepOutcome::of_this_rank(at::Device device, const std::exception_ptr& error,
                                       int64_t summary) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Message));
  const int ranks = group_->getSize();
  if (!messages_.defined()) {
    messages_ = at::empty({ranks * kBytes}, at::dtype(at::kByte).device(device));
    parts_.resize(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      parts_[rank] = {messages_.narrow(0, rank * kBytes, kBytes)};
    }
  }
  Message message{.summary = summary};
  if (error) {
    auto text = message_of(error);
    if (text.empty()) text = "an error without a message";
    std::memcpy(message.text, text.data(), std::min(text.size(), sizeof(message.text) - 1));
  }
  parts_[group_->getRank()].front().copy_(at::from_blob(&message, {kBytes}, at::kByte));
  return parts_;
}

void StepOutcome::check() const {
  const auto bytes = messages_.cpu();
  std::vector<Message> messages(group_->getSize());
  std::memcpy(messages.data(), bytes.const_data_ptr(), bytes.nbytes());
  const auto& own = messages[group_->getRank()];
  if (own.text[0] != 0) return;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto& [summary, text] = messages[rank];
    TORCH_CHECK(text[0] == 0, "shardstep: rank ", rank,
                " failed in its update with: ", std::string(text, ::strnlen(text, sizeof(text))),
                who(group_));
    TORCH_CHECK_VALUE(summary == own.summary,
                      "shardstep: expected the same parameters on every rank, got some on rank ",
                      rank,
                      " that differ from this rank's in dtype, shape, memory order or in being "
                      "frozen; change, freeze and unfreeze parameters on all ranks alike",
                      who(group_));
  }
}

}  // namespace shardstep::detail
