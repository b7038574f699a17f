#pragma once

// Who speaks for a host. What a rank owns concerns every host but its own, and crosses each of
// these links once: a host's sum of gradients goes to the owner, and the owner's parameters come
// back, through the rank of that host that runs the errand. Pure arithmetic, the same on all ranks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/shared/hosts.h"

namespace shardstep::detail {

struct Errand {
  int owner = 0;
  int64_t begin = 0, end = 0;  // of what it owns
  int speaker = 0;             // a rank of another host

  int64_t size() const { return end - begin; }
};

// The errands of a host, by speaker and owner: what the ranks of other hosts own, by rank, cut into
// one range per rank of the host. The ranges are equal, except that a cut near the border between
// two owners, within `margin`, is made there, and that cuts are multiples of `grain`.
std::vector<Errand> errands_of_host(const Hosts& hosts, size_t host,
                                    const std::vector<int64_t>& owned, int64_t grain,
                                    int64_t margin);

// What `tensors`, one after the other, have from `begin` to `end`. REQUIRES: 1-D tensors.
std::vector<at::Tensor> range_of(const std::vector<at::Tensor>& tensors, int64_t begin,
                                 int64_t end);

}  // namespace shardstep::detail
