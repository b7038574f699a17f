#pragma once

// The choices that decide which rank owns what, and how it is sent.

namespace shardstep {

enum class Sharding {
  kParameter,  // every parameter belongs to one rank: any optimizer works
  kElement,  // every bucket is cut into equal slices: perfect balance, element-wise optimizers only
};

enum class ExchangeKind {
  kAuto,          // on Gloo: what fits the hosts, of the last three; otherwise native
  kNative,        // c10d's collectives
  kPairwise,      // a message between every two ranks
  kSharedMemory,  // all ranks on one host, tensors on the CPU
  kHierarchical,  // shared memory inside each host, messages between hosts; tensors on the CPU
};

}  // namespace shardstep
