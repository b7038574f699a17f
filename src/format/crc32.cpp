#include "format/crc32.h"

#include <caffe2/serialize/crc_alt.h>

namespace shardstep::detail {

uint32_t crc32(const void* data, size_t size) { return crc32_16bytes(data, size); }

}  // namespace shardstep::detail
