#include "comm/errands.h"

#include <algorithm>
#include <cstdlib>

namespace shardstep::detail {
namespace {

// The border that is nearest to `position`, if it is within `margin`; else `position`.
int64_t near_border(const std::vector<int64_t>& borders, int64_t position, int64_t margin) {
  const auto above = std::lower_bound(borders.begin(), borders.end(), position);
  int64_t nearest = above == borders.end() ? borders.back() : *above;
  if (above != borders.begin() && position - *(above - 1) <= nearest - position) {
    nearest = *(above - 1);
  }
  return std::abs(nearest - position) < margin ? nearest : position;
}

}  // namespace

std::vector<Errand> errands_of_host(const Hosts& hosts, size_t host,
                                    const std::vector<int64_t>& owned, int64_t grain,
                                    int64_t margin) {
  const auto& speakers = hosts.ranks[host];
  std::vector<int> owners;
  std::vector<int64_t> borders{0};
  for (int rank = 0; rank < static_cast<int>(owned.size()); ++rank) {
    if (std::binary_search(speakers.begin(), speakers.end(), rank)) continue;
    owners.push_back(rank);
    borders.push_back(borders.back() + owned[rank]);
  }
  const auto count = static_cast<int64_t>(speakers.size());
  const auto cut = [&](int64_t number) {
    if (number == count) return borders.back();
    const int64_t even = borders.back() / count * number;
    return near_border(borders, even / grain * grain, margin);
  };
  std::vector<Errand> errands;
  size_t o = 0;
  int64_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = std::max(begin, cut(i + 1));
    while (begin < end) {
      while (borders[o + 1] <= begin) ++o;
      const int64_t last = std::min(end, borders[o + 1]);
      errands.push_back({owners[o], begin - borders[o], last - borders[o], speakers[i]});
      begin = last;
    }
  }
  return errands;
}

std::vector<at::Tensor> range_of(const std::vector<at::Tensor>& tensors, int64_t begin,
                                 int64_t end) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const int64_t first = std::max(begin, offset);
    const int64_t last = std::min(end, offset + tensor.numel());
    if (first < last) views.push_back(tensor.narrow(0, first - offset, last - first));
    offset += tensor.numel();
  }
  return views;
}

}  // namespace shardstep::detail
