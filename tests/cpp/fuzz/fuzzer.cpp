// libFuzzer's entry points: SHARDSTEP_FUZZ_TARGET names the target (fuzz/targets.h),
// SHARDSTEP_FUZZ_SEEDS a folder into which its seeds are written first.

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "fuzz/targets.h"

namespace {
const shardstep::test::FuzzTarget* target = nullptr;
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  at::set_num_threads(1);
  const char* const name = std::getenv("SHARDSTEP_FUZZ_TARGET");
  if (!name) {
    std::fputs("expected SHARDSTEP_FUZZ_TARGET to be set; use make fuzz\n", stderr);
    std::exit(2);
  }
  target = &shardstep::test::fuzz_target(name);
  int number = 0;
  for (const auto& seed : target->seeds()) {
    if (!target->read(seed)) {
      std::fprintf(stderr, "a seed of %s is refused\n", name);
      std::exit(2);
    }
    if (const char* const folder = std::getenv("SHARDSTEP_FUZZ_SEEDS")) {
      const auto path = std::string(folder) + "/seed-" + std::to_string(number++);
      std::ofstream(path, std::ios::binary) << seed;
    }
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  target->read({reinterpret_cast<const char*>(data), size});
  return 0;
}
