#include <ATen/Context.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "launch/process_group_backends.h"
#include "launch/who.h"

namespace shardstep::detail {

bool nccl_is_usable() { return at::hasCUDA(); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(
      nccl_is_usable(),
      "shardstep: expected backend \"gloo\", got \"nccl\", for which torch finds no GPU",
      who(rank, size));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

}  // namespace shardstep::detail
