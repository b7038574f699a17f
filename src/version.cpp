#include "shardstep/version.h"

namespace shardstep {

const char* version() { return SHARDSTEP_VERSION; }

}  // namespace shardstep
