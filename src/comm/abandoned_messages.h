#pragma once

// Keeps messages that nobody waits for any more, with their memory, until their process group is
// gone. A connection of Gloo whose next message belongs to a buffer that no longer exists delivers
// nothing after that, whoever it is for. Thread safety: any thread.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

#include "shardstep/process_group.h"

namespace shardstep::detail {

struct AbandonedMessages {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> memory;
};

void keep_abandoned(AbandonedMessages messages);

}  // namespace shardstep::detail
