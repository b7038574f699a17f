#pragma once

// The library's version, as in the VERSION file; src/version.cpp fails to compile if they differ.

#include "shardstep/export.h"

#define SHARDSTEP_VERSION "0.1.0"

namespace shardstep {

// The version of the loaded library, which may differ from the one compiled against.
SHARDSTEP_API const char* version();

}  // namespace shardstep
