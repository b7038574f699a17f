#pragma once

// Which ranks a backend has lost, for its errors: Gloo's collectives do not say it.

#include <string>

#include "shardstep/process_group.h"

namespace shardstep::detail {

// "; lost the connection to rank 1, rank 2", or nothing if none is known. Only for use after an
// error: it leaves a message of one byte to each rank that is still connected. Not collective.
std::string lost_ranks(const ProcessGroupPtr& group);

}  // namespace shardstep::detail
