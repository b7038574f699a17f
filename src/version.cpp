#include "shardstep/version.h"

#include <string_view>

static_assert(std::string_view(SHARDSTEP_VERSION) == SHARDSTEP_VERSION_FILE,
              "include/shardstep/version.h and VERSION must name the same version");

namespace shardstep {

const char* version() { return SHARDSTEP_VERSION; }

}  // namespace shardstep
