#include "comm/lost_ranks.h"

#include <ATen/ATen.h>

#include "launch/process_group_backends.h"

namespace shardstep::detail {
namespace {

// Outside the tags of exchanges.
constexpr int kProbeTag = 0x7ffffffe;

}  // namespace

bool is_connected(const ProcessGroupPtr& group, int peer) {
  try {
    std::vector<at::Tensor> byte{at::zeros({1}, at::kByte)};
    group->send(byte, peer, kProbeTag);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool can_ask_for_lost_ranks(const ProcessGroupPtr& group) {
  try {
    return group && refuses_to_send_to_lost_ranks(*group->getBackend(c10::DeviceType::CPU));
  } catch (const std::exception&) {
    return false;
  }
}

std::string lost_ranks(const ProcessGroupPtr& group) {
  std::string lost;
  if (!can_ask_for_lost_ranks(group)) return lost;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    if (rank == group->getRank() || is_connected(group, rank)) continue;
    lost += c10::str(lost.empty() ? "; lost the connection to rank " : ", rank ", rank);
  }
  return lost;
}

}  // namespace shardstep::detail
