#pragma once

// The choices that decide which rank owns what, and how it is sent and rounded.

namespace shardstep {

enum class Sharding {
  kParameter,  // every parameter belongs to one rank; for any optimizer
  kElement,    // every rank owns equally many elements; for element-wise optimizers
};

enum class ExchangeKind {
  kAuto,          // on Gloo one of the last three, by which ranks share a host; else native
  kNative,        // c10d's collectives
  kPairwise,      // a message between every two ranks
  kSharedMemory,  // all ranks on one host, tensors on the CPU
  kHierarchical,  // shared memory inside each host, messages between hosts; tensors on the CPU
};

// How the update of a bfloat16 parameter without a master becomes bfloat16 again.
enum class Rounding {
  kNearest,     // what the local optimizer itself does
  kStochastic,  // computed in float32, then up or down at random: right on average
};

}  // namespace shardstep
