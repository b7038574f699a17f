#pragma once

// Includes the whole public API.

#include "shardstep/checkpoint.h"
#include "shardstep/distributed_data_parallel.h"
#include "shardstep/grad_scaler.h"
#include "shardstep/join.h"
#include "shardstep/load_module.h"
#include "shardstep/local_optimizer.h"
#include "shardstep/optim/adagrad.h"
#include "shardstep/optim/adam.h"
#include "shardstep/optim/adamw.h"
#include "shardstep/optim/muon.h"
#include "shardstep/optim/sgd.h"
#include "shardstep/optimizer_stats.h"
#include "shardstep/process_group.h"
#include "shardstep/state_dict.h"
#include "shardstep/version.h"
#include "shardstep/zero_hooks.h"
#include "shardstep/zero_redundancy_optimizer.h"
