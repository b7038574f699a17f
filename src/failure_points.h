#pragma once

// Named steps at which tests end a process, to show what becomes of the others
// (tests/cpp/zero/death_test.cpp). SHARDSTEP_FAILURE_POINTS compiles them in, which wheels do not;
// otherwise they are nothing.

#include <string>
#include <vector>

#include "shardstep/export.h"

#ifdef SHARDSTEP_FAILURE_POINTS
#include <atomic>

namespace shardstep::detail {

// Called at each point, with its name, if set.
extern SHARDSTEP_API std::atomic<void (*)(const char*)> on_failure_point;

// The names of all points in the library, as the linker has collected them, sorted.
SHARDSTEP_API std::vector<std::string> failure_points();

}  // namespace shardstep::detail

// REQUIRES: a function that is neither inline nor a template, for the sake of the section.
#define SHARDSTEP_FAILURE_POINT(name)                                                            \
  do {                                                                                           \
    [[gnu::used, gnu::section("shardstep_points")]] static const char* listed = name;            \
    auto* const reached = ::shardstep::detail::on_failure_point.load(std::memory_order_relaxed); \
    if (reached) [[unlikely]]                                                                    \
      reached(listed);                                                                           \
  } while (false)
#else
#define SHARDSTEP_FAILURE_POINT(name) ((void)0)
#endif
