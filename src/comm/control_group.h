#pragma once

// The group for messages that the host reads: agreement between ranks, flags, sizes, outcomes.

#include "shardstep/process_group.h"

namespace shardstep::detail {

// `group` itself if it takes CPU tensors. Otherwise, as after init_process_group("nccl"), a group
// of the same ranks over Gloo, made through the store of `group`: the host need not wait for the
// device to read such a message. Where Gloo cannot connect the ranks, `group` after all, whose
// messages are then on its device. `number` is the same on all ranks and new for each call.
// Collective.
ProcessGroupPtr make_control_group(const ProcessGroupPtr& group, int64_t number);

// How long the group waits for a rank.
std::chrono::milliseconds timeout_of(const ProcessGroupPtr& group);

}  // namespace shardstep::detail
