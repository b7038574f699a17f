#pragma once

// The choices that decide who owns what and how it travels.

namespace shardstep {

enum class Sharding {
  kParameter,  // every parameter belongs to one rank: any optimizer works
  kElement,    // every bucket is cut in equal slices: perfect balance, element-wise optimizers
};

enum class ExchangeKind {
  kAuto,          // on Gloo shared memory where possible, else pairwise; native elsewhere
  kNative,        // c10d's collectives
  kPairwise,      // a message between every two ranks
  kSharedMemory,  // ranks of one host, tensors on the CPU
};

}  // namespace shardstep
