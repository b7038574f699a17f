#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardstep::detail {

// Walks through consecutive items of given sizes, in steps that may end inside an item.
class Cursor {
 public:
  Cursor() = default;
  void add(int64_t size) {
    sizes_.push_back(size);
    left_ += size;
  }
  int64_t left() const { return left_; }

  // Calls visit(item, offset in it, size) for the items that hold the next `size` units, as far as
  // there are any.
  template <class Visit>
  void advance(int64_t size, Visit visit) {
    while (size > 0 && which_ < sizes_.size()) {
      const int64_t step = std::min(size, sizes_[which_] - offset_);
      if (step > 0) visit(which_, offset_, step);
      offset_ += step;
      size -= step;
      left_ -= step;
      if (offset_ < sizes_[which_]) continue;
      ++which_;
      offset_ = 0;
    }
  }

 private:
  std::vector<int64_t> sizes_;
  size_t which_ = 0;
  int64_t offset_ = 0;
  int64_t left_ = 0;
};

}  // namespace shardstep::detail
