#include "failure_points.h"

#include <algorithm>

// The bounds of the section in which each point leaves its name.
extern "C" {
[[gnu::visibility("hidden")]] extern const char* __start_shardstep_points[];
[[gnu::visibility("hidden")]] extern const char* __stop_shardstep_points[];
}

namespace shardstep::detail {

std::atomic<void (*)(const char*)> on_failure_point{nullptr};

std::vector<std::string> failure_points() {
  std::vector<std::string> names(__start_shardstep_points, __stop_shardstep_points);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace shardstep::detail
