#include "shard/partition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace shardstep {
namespace {

// Parameters start, and are cut, at cache lines. ATen's kernels round the elements that do not fill
// a vector differently, so a cut anywhere else would change an update's last bit.
constexpr int64_t kLineBytes = 64;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Range intersect(Range a, Range b) {
  Range both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Range{} : both;
}

Partition::Partition(Sharding sharding, int world_size, int64_t bucket_cap_bytes)
    : sharding_(sharding), world_size_(world_size), bucket_cap_bytes_(bucket_cap_bytes) {
  TORCH_CHECK_VALUE(world_size > 0, "shardstep: expected a world size above 0, got ", world_size);
  TORCH_CHECK_VALUE(bucket_cap_bytes >= 0, "shardstep: expected a bucket cap of 0 or more bytes, ",
                    "got ", bucket_cap_bytes);
  owned_.resize(world_size);
}

// Dearest first, each to the rank that has the least of its pool so far.
std::vector<int> Partition::assign_owners(const std::vector<ParamSpec>& group) {
  std::vector<size_t> order(group.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return group[a].weight() > group[b].weight(); });
  std::vector<int> owners(group.size());
  for (size_t i : order) {
    auto& assigned = assigned_[group[i].pool];
    assigned.resize(world_size_);
    auto least = std::min_element(assigned.begin(), assigned.end());
    *least += group[i].weight();
    owners[i] = static_cast<int>(least - assigned.begin());
  }
  return owners;
}

void Partition::add_groups(const std::vector<std::vector<ParamSpec>>& groups) {
  std::map<int64_t, std::vector<Member>> by_kind;
  int64_t param = param_count();
  for (const auto& group : groups) {
    const auto sharding = group.empty() ? sharding_ : group.front().sharding.value_or(sharding_);
    const auto owners =
        sharding == Sharding::kParameter ? assign_owners(group) : std::vector<int>(group.size(), 0);
    const size_t number = group_count();
    group_begins_.push_back(param);
    for (size_t i = 0; i < group.size(); ++i) {
      by_kind[group[i].kind].push_back({param++, number, group[i], owners[i], sharding});
      shardings_.push_back(sharding);
    }
  }
  slices_.resize(param);
  for (auto& rank : owned_) rank.resize(group_count());

  for (const auto& [kind, members] : by_kind) {
    std::vector<Member> bucket;
    int64_t bytes = 0;
    for (const auto& member : members) {
      const int64_t size = member.spec.numel * member.spec.element_size;
      if (bucket_cap_bytes_ > 0 && !bucket.empty() && bytes + size > bucket_cap_bytes_) {
        add_bucket(bucket);
        bucket.clear();
        bytes = 0;
      }
      bucket.push_back(member);
      bytes += size;
    }
    add_bucket(bucket);
  }
}

void Partition::add_bucket(const std::vector<Member>& members) {
  std::vector<Member> laid_out = members;
  const auto sharding = members.front().sharding;
  const int64_t line = sharding == Sharding::kElement
                           ? std::max<int64_t>(1, kLineBytes / members.front().spec.element_size)
                           : 1;
  BucketLayout layout{.kind = members.front().spec.kind, .slots = {}, .shards = {}};
  if (sharding == Sharding::kParameter) {
    std::stable_sort(laid_out.begin(), laid_out.end(),
                     [](const Member& a, const Member& b) { return a.owner < b.owner; });
  }
  int64_t end = 0;
  std::vector<int64_t> owned_end(world_size_, 0);
  for (const auto& member : laid_out) {
    const int64_t begin = round_up(end, line);
    end = begin + member.spec.numel;
    layout.slots.push_back({member.param, {begin, end}});
    owned_end[member.owner] = end;
  }
  const int64_t share = round_up(round_up(end, world_size_) / world_size_, line);
  int64_t begin = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    const int64_t stop =
        sharding == Sharding::kElement ? begin + share : std::max(begin, owned_end[rank]);
    layout.shards.push_back({begin, stop});
    begin = stop;
  }

  const size_t bucket = buckets_.size();
  for (size_t i = 0; i < laid_out.size(); ++i) {
    const int64_t param = laid_out[i].param;
    const size_t group = laid_out[i].group;
    const Range slot = layout.slots[i].range;
    auto own = [&](int rank, Range in_bucket) {
      Slice slice{param,
                  rank,
                  {in_bucket.begin - slot.begin, in_bucket.end - slot.begin},
                  bucket,
                  in_bucket.begin};
      owned_[rank][group].push_back(slice);
      slices_[param].push_back(slice);
    };
    if (sharding == Sharding::kParameter) {
      own(laid_out[i].owner, slot);
    } else if (slot.empty()) {
      // Nothing to update, but its state (a step counter) needs an owner.
      own(share == 0 ? 0 : static_cast<int>(std::min<int64_t>(slot.begin / share, world_size_ - 1)),
          slot);
    } else {
      for (int rank = 0; rank < world_size_; ++rank) {
        const Range part = intersect(layout.shards[rank], slot);
        if (!part.empty()) own(rank, part);
      }
    }
  }
  buckets_.push_back(std::move(layout));
}

Range Partition::group(size_t group) const {
  const bool is_last = group + 1 == group_count();
  return {group_begins_[group], is_last ? param_count() : group_begins_[group + 1]};
}

std::vector<const Slice*> Partition::owned(int rank) const {
  std::vector<const Slice*> slices;
  for (const auto& group : owned_[rank]) {
    for (const auto& slice : group) slices.push_back(&slice);
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const Slice* a, const Slice* b) { return a->bucket < b->bucket; });
  return slices;
}

int64_t Partition::owned_elements(int rank) const {
  int64_t total = 0;
  for (const auto& group : owned_[rank]) {
    for (const auto& slice : group) total += slice.elements.size();
  }
  return total;
}

}  // namespace shardstep
