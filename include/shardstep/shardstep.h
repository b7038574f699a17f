#pragma once

// Everything a program needs.

#include "shardstep/local_optimizer.h"
#include "shardstep/process_group.h"
#include "shardstep/state_dict.h"
#include "shardstep/zero_redundancy_optimizer.h"
