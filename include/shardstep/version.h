#pragma once

// The library's version, from the VERSION file of its source.

#include "shardstep/export.h"

namespace shardstep {

// The version of the loaded library, which may differ from the one compiled against.
SHARDSTEP_API const char* version();

}  // namespace shardstep
