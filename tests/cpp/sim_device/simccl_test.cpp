// simccl behaves as NCCL does where it hurts.

#include "simccl.h"

#include <gtest/gtest.h>

#include "support/device.h"
#include "support/torch.h"
#include "support/zero_support.h"
#include "torch_versions.h"

namespace shardstep::test {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor numbers(std::vector<float> values) { return on_device(torch::tensor(values)); }

void expect_numbers(const at::Tensor& tensor, std::vector<float> values) {
  EXPECT_TRUE(at::equal(tensor.cpu(), torch::tensor(values))) << tensor.cpu();
}

TEST(Simccl, ReducesAndGathers) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const auto rank = static_cast<float>(group->getRank());
    Tensors sum{numbers({rank, 1})};
    group->allreduce(sum)->wait();
    expect_numbers(sum[0], {3, 3});
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    sum = {numbers({rank, -rank})};
    group->allreduce(sum, options)->wait();
    expect_numbers(sum[0], {2, 0});

    auto own = numbers({rank}), whole = numbers({0, 0, 0});
    detail::all_gather_single(*group, whole, own)->wait();
    expect_numbers(whole, {0, 1, 2});
    auto input = numbers({rank, 10 * rank, 100 * rank}), part = numbers({0});
    detail::reduce_scatter_single(*group, part, input)->wait();
    expect_numbers(part, {3 * std::pow(10.f, rank)});
    Tensors sent{numbers({rank, 7})};
    c10d::BroadcastOptions from_one;
    from_one.rootRank = 1;
    group->broadcast(sent, from_one)->wait();
    expect_numbers(sent[0], {1, 7});

    std::vector<int64_t> twos{2, 2, 2};
    auto all = numbers({rank, 0, rank, 1, rank, 2}), mine = torch::empty_like(all);
    detail::all_to_all_single(*group, mine, all, twos, twos)->wait();
    expect_numbers(mine, {0, rank, 1, rank, 2, rank});
    auto large = on_device(torch::full({10000}, rank));
    sum = {large};
    group->allreduce(sum)->wait();
    EXPECT_EQ(large.min().item<float>(), 3);
    EXPECT_EQ(sim::traffic(group).at("all_reduce").calls, 3);
    EXPECT_EQ(sim::traffic(group).at("all_reduce").bytes, 8 + 8 + 40000);
  });
}

TEST(Simccl, SendsInOrder) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Tensors first{numbers({1})}, second{numbers({2, 3})};
    if (group->getRank() == 0) {
      const auto a = group->send(first, 1, 0), b = group->send(second, 1, 0);
      a->wait();
      b->wait();
    } else {
      Tensors one{numbers({0})}, two{numbers({0, 0})};
      const auto a = group->recv(one, 0, 0), b = group->recv(two, 0, 0);
      b->wait();
      a->wait();
      expect_numbers(one[0], {1});
      expect_numbers(two[0], {2, 3});
    }
  });
}

TEST(Simccl, RefusesCpuTensors) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Tensors tensors{torch::ones({2})};
    EXPECT_THROW(group->allreduce(tensors), c10::Error);
  });
}

TEST(Simccl, RanksMustMakeTheSameCalls) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    Tensors tensors{numbers({1, 2})};
    group->allreduce(tensors)->wait();
    Tensors other{on_device(torch::ones({rank == 0 ? 2 : 3}))};
    const auto error = error_of([&] { group->allreduce(other)->wait(); });
    EXPECT_NE(error.find("call 1 (all_reduce(sum) of 2 x Float)"), std::string::npos) << error;
    EXPECT_NE(error.find("call 1 (all_reduce(sum) of 3 x Float)"), std::string::npos) << error;
    EXPECT_ANY_THROW(group->allreduce(tensors)->wait());
  });
}

TEST(Simccl, ResultsArriveAtWait) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Tensors tensors{numbers({1, 2})};
    const auto work = group->allreduce(tensors);
    EXPECT_TRUE(tensors[0].isnan().all().item<bool>());
    const auto future = work->getFuture();
    EXPECT_TRUE(future->completed());
    EXPECT_TRUE(tensors[0].isnan().all().item<bool>());
    future->wait();
    expect_numbers(tensors[0], {2, 4});
  });
}

TEST(Simccl, NoticesWhatChangesBeforeWait) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto own = numbers({1}), whole = numbers({0, 0});
    const auto work = detail::all_gather_single(*group, whole, own);
    own.add_(1);
    const auto error = error_of([&] { work->wait(); });
    EXPECT_NE(error.find("was changed between the call and wait()"), std::string::npos) << error;
    Tensors tensors{numbers({1, 2})};
    const auto sum = group->allreduce(tensors);
    tensors[0].zero_();
    EXPECT_THROW(sum->wait(), c10::Error);
  });
}

TEST(Simccl, CallsOnTheSameMemoryFollowEachOther) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Tensors tensors{numbers({1, 2})};
    const auto first = group->allreduce(tensors), second = group->allreduce(tensors);
    second->wait();
    first->wait();
    expect_numbers(tensors[0], {4, 8});
    auto whole = numbers({5, 6});
    auto own = whole.narrow(0, group->getRank(), 1);  // in place
    detail::all_gather_single(*group, whole, own)->wait();
    expect_numbers(whole, {5, 6});
  });
}

}  // namespace
}  // namespace shardstep::test
