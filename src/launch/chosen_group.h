#pragma once

// The process group that an option names.

#include <c10/util/Exception.h>

#include <optional>

#include "launch/who.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

// How errors end where a group is missing: the rank in the default group, if there is one.
inline std::string who_in_default_group() {
  return has_default_process_group() ? who(default_process_group()) : "";
}

inline void check_member(const ProcessGroupPtr& group) {
  TORCH_CHECK_VALUE(group,
                    "shardstep: expected a process group that this rank is in, got a null one, as "
                    "new_group() returns it on other ranks; use it only on the group's ranks",
                    who_in_default_group());
}

// The default group if none was given.
inline ProcessGroupPtr chosen_group(const std::optional<ProcessGroupPtr>& given) {
  if (!given.has_value()) return default_process_group();
  check_member(*given);
  return *given;
}

}  // namespace shardstep::detail
