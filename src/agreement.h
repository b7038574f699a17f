#pragma once

// Ranks compare what they were given before they exchange anything else.

#include <exception>
#include <string>
#include <vector>

#include "shardstep/process_group.h"

namespace shardstep::detail {

// The device that small control messages of a group travel on.
at::Device control_device(const ProcessGroupPtr& group);

// The tensor of every rank, by rank and on the CPU; the same shape everywhere. Collective.
std::vector<at::Tensor> all_gather(const ProcessGroupPtr& group, const at::Tensor& own);

// Every rank hands in `lines` that should be the same everywhere, or an error that kept it from
// making them. If they are, returns a number that all ranks agree on and that none of them got
// before. If not, every rank throws: its own error, or one that names the first rank and line that
// differ. Collective.
int64_t agree(const ProcessGroupPtr& group, const std::vector<std::string>& lines,
              const std::exception_ptr& error);

}  // namespace shardstep::detail
