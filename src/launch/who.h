#pragma once

// How errors end: " (rank r of w)".

#include <c10/util/StringUtil.h>

#include <string>

#include "shardstep/process_group.h"

namespace shardstep::detail {

inline std::string who(int rank, int world_size) {
  return c10::str(" (rank ", rank, " of ", world_size, ")");
}

inline std::string who(const ProcessGroupPtr& group) {
  return who(group->getRank(), group->getSize());
}

}  // namespace shardstep::detail
