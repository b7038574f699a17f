#pragma once

// Keys of param groups that no optimizer reads.

#include <algorithm>
#include <array>
#include <string_view>

namespace shardstep::detail {

// Keys that schedulers and named parameters add.
constexpr std::array<std::string_view, 8> kForeignKeys = {
    "initial_lr",    "max_lr",  "min_lr", "max_momentum",
    "base_momentum", "base_lr", "swa_lr", "param_names"};

inline bool is_foreign(std::string_view key) {
  return std::find(kForeignKeys.begin(), kForeignKeys.end(), key) != kForeignKeys.end();
}

}  // namespace shardstep::detail
