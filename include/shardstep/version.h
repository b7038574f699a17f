#pragma once

// The library's version, as in the VERSION file; src/version.cpp does not compile if they differ.

#include "shardstep/export.h"

#define SHARDSTEP_VERSION "0.1.0"

namespace shardstep {

// The version of the library that is loaded, which may not be the one compiled against.
SHARDSTEP_API const char* version();

}  // namespace shardstep
