#pragma once

#include <cstdint>

#include "shardstep/export.h"

namespace shardstep {

// Half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool operator==(const Range&) const = default;
};

// The elements that are in both ranges; empty if there are none.
SHARDSTEP_API Range intersect(Range a, Range b);

}  // namespace shardstep
