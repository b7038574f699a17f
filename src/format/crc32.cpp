#include "format/crc32.h"

#include <zlib.h>

namespace shardstep::detail {

uint32_t crc32(const void* data, size_t size) {
  return static_cast<uint32_t>(::crc32_z(0, static_cast<const Bytef*>(data), size));
}

}  // namespace shardstep::detail
