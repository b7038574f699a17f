#include "comm/shared/hosts.h"

#include <algorithm>

namespace shardstep::detail {

size_t Hosts::of(int rank) const {
  size_t host = 0;
  while (std::find(ranks[host].begin(), ranks[host].end(), rank) == ranks[host].end()) ++host;
  return host;
}

bool Hosts::every_rank_is_alone() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [](const auto& of_host) { return of_host.size() == 1; });
}

Hosts group_by_host(const std::vector<std::vector<bool>>& opens) {
  Hosts hosts;
  for (int rank = 0; rank < static_cast<int>(opens.size()); ++rank) {
    const auto fits = [&](const std::vector<int>& host) {
      return std::all_of(host.begin(), host.end(),
                         [&](int other) { return opens[rank][other] && opens[other][rank]; });
    };
    const auto host = std::find_if(hosts.ranks.begin(), hosts.ranks.end(), fits);
    host == hosts.ranks.end() ? hosts.ranks.push_back({rank}) : host->push_back(rank);
  }
  return hosts;
}

}  // namespace shardstep::detail
