#pragma once

// An optimizer that ranks train and save.

#include "support/forked_ranks.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::crash {

using test::alone;
using test::fork_process;
using test::join_group;
using test::status_of;

// One optimizer and what it had when it saved `generation` times.
class Trained {
 public:
  explicit Trained(const ProcessGroupPtr& group)
      : params_{torch::ones({20, 5}).requires_grad_(), torch::ones({33}).requires_grad_()},
        zero_(params_, torch::optim::AdamWOptions(0.01),
              ZeroOptions().process_group(group).sharding(Sharding::kElement)) {}

  ZeroRedundancyOptimizer& zero() { return zero_; }
  void step_to(int generation) {
    for (; done_ < generation; ++done_) {
      test::set_gradients(params_, done_);
      zero_.step();
    }
  }
  void save(const std::string& directory, bool asynchronous) {
    NamedValues extra;
    extra.insert("generation", int64_t{done_});
    zero_.save_checkpoint(directory,
                          CheckpointOptions().extra(extra).rng(false).asynchronous(asynchronous));
  }

 private:
  std::vector<at::Tensor> params_;
  ZeroRedundancyOptimizer zero_;
  int done_ = 0;
};

}  // namespace shardstep::crash
