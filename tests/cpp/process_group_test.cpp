#include <gtest/gtest.h>
#include <torch/torch.h>

#include "test_support.h"

namespace shardstep {
namespace {

TEST(ProcessGroup, RanksAsThreadsSum) {
  test::run_ranks(3, [](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> tensors{at::full({4}, group->getRank() + 1.0)};
    group->allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({4}, 6.0)));
  });
}

}  // namespace
}  // namespace shardstep
