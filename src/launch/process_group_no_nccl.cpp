#include <c10/util/Exception.h>

#include "launch/process_group_backends.h"
#include "launch/who.h"

namespace shardstep::detail {

bool nccl_is_usable() { return false; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                    int rank, int size, std::chrono::milliseconds) {
  TORCH_CHECK_VALUE(false,
                    "shardstep: expected backend \"gloo\", got \"nccl\", which this build does not "
                    "have; build shardstep against a libtorch with CUDA and NCCL",
                    who(rank, size));
}

}  // namespace shardstep::detail
