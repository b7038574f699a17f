#pragma once

// Which ranks a backend has lost: Gloo's collectives do not say it in their errors, and may not
// even end. Asking leaves a message of one byte to each rank that is still connected, so it is for
// use after an error, or in a wait that takes seconds. Not collective.

#include <string>

#include "shardstep/process_group.h"

namespace shardstep::detail {

// Whether the group's backend knows. `group` may be null.
bool can_ask_for_lost_ranks(const ProcessGroupPtr& group);

// REQUIRES: can_ask_for_lost_ranks(group).
bool is_connected(const ProcessGroupPtr& group, int peer);

// "; lost the connection to rank 1, rank 2", or nothing if none is known.
std::string lost_ranks(const ProcessGroupPtr& group);

}  // namespace shardstep::detail
