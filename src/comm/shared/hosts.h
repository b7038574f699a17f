#pragma once

// Which ranks of a group are on one host: those that can open each other's memory. Pure arithmetic.

#include <cstddef>
#include <vector>

namespace shardstep::detail {

struct Hosts {
  // By host, in order of their lowest ranks; the ranks of a host are in rank order.
  std::vector<std::vector<int>> ranks;

  size_t count() const { return ranks.size(); }
  size_t of(int rank) const;
  bool every_rank_is_alone() const;
};

// `opens[a][b]`: rank a can open rank b's memory. All ranks of a host can open each other's.
Hosts group_by_host(const std::vector<std::vector<bool>>& opens);

}  // namespace shardstep::detail
