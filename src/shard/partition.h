#pragma once

// Which rank owns which elements of which parameter: sizes in, ranges out. Pure arithmetic, so
// every rank computes the whole partition by itself. Adding groups never changes earlier
// assignments.
// Thread safety: none needed; a Partition changes only in add_groups.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "shardstep/export.h"
#include "shardstep/range.h"
#include "shardstep/sharding.h"

namespace shardstep {

// What the partition must know about a parameter. Only parameters of one kind share a bucket.
struct ParamSpec {
  int64_t numel = 0;
  int64_t element_size = 1;
  int64_t kind = 0;
  // By parameter: each pool's cost is divided among the ranks as evenly as possible.
  int64_t pool = 0;
  // The number of elements if unset.
  std::optional<double> cost = std::nullopt;
  // The partition's own if unset. The same for all parameters of a group and of a kind.
  std::optional<Sharding> sharding = std::nullopt;

  double weight() const { return cost.value_or(static_cast<double>(numel)); }
};

// A parameter's position in a bucket.
struct Slot {
  int64_t param = 0;  // index across groups
  Range range;        // elements of the bucket
};

// A flat storage with one range per rank. Ranges are adjacent and start at 0. By parameter, slots
// are adjacent too. By element, ranges are equal, and slots and ranges start at multiples of a
// cache line, so that an element-wise kernel rounds a part of a parameter as it rounds the whole.
struct BucketLayout {
  int64_t kind = 0;
  std::vector<Slot> slots;    // in order of their ranges
  std::vector<Range> shards;  // one per rank

  int64_t numel() const { return shards.back().end; }
};

// The elements of one parameter that one rank owns.
struct Slice {
  int64_t param = 0;  // index across groups
  int rank = 0;
  Range elements;  // of the parameter
  size_t bucket = 0;
  int64_t offset = 0;  // of the first element in the bucket
};

class SHARDSTEP_API Partition {
 public:
  // `sharding` is for parameters that say nothing else. A bucket holds whole parameters, as many as
  // fit into bucket_cap_bytes (0: no limit) but at least one. REQUIRES: world_size > 0.
  Partition(Sharding sharding, int world_size, int64_t bucket_cap_bytes = 0);

  // Assigns the parameters of these groups, given what each rank already has. Indices continue from
  // the parameters added before; parameters of one kind may share a bucket across the groups of one
  // call.
  void add_groups(const std::vector<std::vector<ParamSpec>>& groups);

  // How a parameter is divided.
  Sharding sharding(int64_t param) const { return shardings_[param]; }
  Sharding sharding() const { return sharding_; }  // by default
  int world_size() const { return world_size_; }
  size_t group_count() const { return group_begins_.size(); }
  // The parameters of a group.
  Range group(size_t group) const;
  int64_t param_count() const { return static_cast<int64_t>(slices_.size()); }
  const std::vector<BucketLayout>& buckets() const { return buckets_; }

  // What `rank` owns of a group, in order of assignment.
  const std::vector<Slice>& owned(int rank, size_t group) const { return owned_[rank][group]; }
  // What `rank` owns of all groups, bucket by bucket.
  std::vector<const Slice*> owned(int rank) const;
  // The owners of a parameter, in order of rank. Never empty: a zero-size parameter has one owner.
  const std::vector<Slice>& slices(int64_t param) const { return slices_[param]; }
  // How many elements `rank` owns.
  int64_t owned_elements(int rank) const;

 private:
  struct Member {
    int64_t param;
    size_t group;
    ParamSpec spec;
    int owner;  // by parameter only
    Sharding sharding;
  };
  std::vector<int> assign_owners(const std::vector<ParamSpec>& group);
  void add_bucket(const std::vector<Member>& members);

  Sharding sharding_;
  int world_size_;
  int64_t bucket_cap_bytes_;
  std::vector<int64_t> group_begins_;                // [group]: its first parameter
  std::map<int64_t, std::vector<double>> assigned_;  // [pool][rank]: cost, by parameter
  std::vector<BucketLayout> buckets_;
  std::vector<std::vector<std::vector<Slice>>> owned_;  // [rank][group]
  std::vector<std::vector<Slice>> slices_;              // [param]
  std::vector<Sharding> shardings_;                     // [param]
};

}  // namespace shardstep
