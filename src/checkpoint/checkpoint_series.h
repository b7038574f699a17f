#pragma once

// A series of checkpoints: directories side by side whose names come from one pattern, such as
// "runs/{step}", and a link `latest` beside them to the last that is complete. Nothing here is
// collective: only rank 0 calls update_series. Thread safety: none needed.

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>

#include "shardstep/export.h"

namespace shardstep::detail {

constexpr const char* kLatestName = "latest";

// The directory that a pattern stands for: "{name}" becomes the integer or string of that name in
// `extra`, "{name:06d}" the integer with zeros in front, "{{" a brace. Throws ValueError if `extra`
// has no such value.
SHARDSTEP_API std::string expand_directory(const std::string& pattern, const c10::IValue& extra);

// Whether the directory's name, the last component, comes from a pattern.
SHARDSTEP_API bool is_series(const std::string& pattern);

// Makes `latest` point at the directory, and removes the oldest checkpoints of the series beyond
// `keep_last`, and what a process that died while it saved or removed one has left. What is being
// read or written stays until a later save.
// REQUIRES: the checkpoint in `directory` is complete, and is_series(pattern).
SHARDSTEP_API void update_series(const std::string& pattern, const std::string& directory,
                                 std::optional<int64_t> keep_last);

// Removes the checkpoint of a directory, and the directory if nothing else is in it. False if it
// is being read or written.
SHARDSTEP_API bool remove_checkpoint(const std::string& directory);

// The directory that a link such as `latest` points at; any other directory as it is.
std::string resolve_link(const std::string& directory);

}  // namespace shardstep::detail
