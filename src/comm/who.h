#pragma once

// How errors end: " (rank r of w)".

#include <c10/util/StringUtil.h>

#include <string>

#include "shardstep/process_group.h"

namespace shardstep::detail {

inline std::string who(const ProcessGroupPtr& group) {
  return c10::str(" (rank ", group->getRank(), " of ", group->getSize(), ")");
}

}  // namespace shardstep::detail
