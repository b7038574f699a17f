#include "comm/lost_ranks.h"

#include <ATen/ATen.h>

namespace shardstep::detail {
namespace {

// Outside the tags of exchanges.
constexpr int kProbeTag = 0x7ffffffe;

// Gloo notices at once when a connection is closed, and refuses to send from then on.
bool is_connected(const ProcessGroupPtr& group, int peer) {
  try {
    std::vector<at::Tensor> byte{at::zeros({1}, at::kByte)};
    group->send(byte, peer, kProbeTag);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool has_gloo(const ProcessGroupPtr& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

std::string lost_ranks(const ProcessGroupPtr& group) {
  std::string lost;
  if (!group || !has_gloo(group)) return lost;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    if (rank == group->getRank() || is_connected(group, rank)) continue;
    lost += c10::str(lost.empty() ? "; lost the connection to rank " : ", rank ", rank);
  }
  return lost;
}

}  // namespace shardstep::detail
