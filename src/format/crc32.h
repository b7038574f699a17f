#pragma once

// CRC-32 as in zip and PNG.

#include <cstddef>
#include <cstdint>

#include "shardstep/export.h"

namespace shardstep::detail {

SHARDSTEP_API uint32_t crc32(const void* data, size_t size);

}  // namespace shardstep::detail
