// Sharded checkpoints of ZeroRedundancyOptimizer: at any world size and sharding, whole runs, saves
// that fail or run in the background, and damage. Ranks that die are in checkpoint_crash_test.cpp.

#include "shardstep/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/folder.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::expect_equal;
using test::Folder;
using test::make_params;
using test::names_in;
using test::one_group;
using test::optimizers;
using test::plain_state_dict;
using test::run_ranks;
using test::train;
using torch::optim::AdamWOptions;

ZeroOptions options(const ProcessGroupPtr& group, Sharding sharding = Sharding::kElement) {
  return ZeroOptions().process_group(group).sharding(sharding);
}

std::string shard(const std::string& directory, int rank) {
  const Checkpoint checkpoint(directory);
  return (fs::path(directory) / checkpoint.index().files.at(rank).name).string();
}

void set_values(std::vector<at::Tensor>& params, const std::vector<at::Tensor>& values) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < params.size(); ++i) params[i].copy_(values[i]);
}

TEST(Checkpoint, LoadsAtAnyWorldSizeAndShardingAndGoesOnBitForBit) {
  for (const auto& local : optimizers()) {
    auto plain_params = make_params();
    auto plain = local.make(one_group(plain_params));
    train(plain_params, *plain, 0, 3);
    const auto expected = plain_state_dict(local, *plain);
    std::vector<at::Tensor> values;
    for (const auto& param : plain_params) values.push_back(param.detach().clone());
    StateDict expected_state;
    expected_state.param_groups = expected.param_groups;
    for (const auto& [index, state] : expected.state) {
      NamedValues copy;
      for (const auto& item : state) copy.insert(item.key(), item.value().toTensor().clone());
      expected_state.state.emplace(index, copy);
    }
    train(plain_params, *plain, 3, 6);
    for (auto [from, from_sharding, to, to_sharding] :
         std::vector<std::tuple<int, Sharding, int, Sharding>>{
             {4, Sharding::kElement, 3, Sharding::kParameter},
             {2, Sharding::kParameter, 3, Sharding::kElement},
             {3, Sharding::kElement, 1, Sharding::kElement},
             {1, Sharding::kParameter, 2, Sharding::kElement}}) {
      const Folder folder;
      run_ranks(from, [&, from_sharding = from_sharding](const ProcessGroupPtr& group) {
        auto params = make_params();
        ZeroRedundancyOptimizer zero(params, local, options(group, from_sharding));
        train(params, zero, 0, 3);
        zero.save_checkpoint(folder / "c");
      });
      expect_equal(read_checkpoint(folder / "c"), expected_state);
      Checkpoint(folder / "c").verify();
      run_ranks(to, [&, to_sharding = to_sharding](const ProcessGroupPtr& group) {
        auto params = make_params();
        set_values(params, values);
        ZeroRedundancyOptimizer zero(params, local, options(group, to_sharding));
        zero.load_checkpoint(folder / "c");
        train(params, zero, 3, 6);
        expect_equal(params, plain_params, local.name);
      });
    }
  }
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    last = register_module("last", torch::nn::Linear(7, 5));
    tied = register_parameter("tied", first->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor tied;
};
TORCH_MODULE(Net);

Net make_net(uint64_t seed) {
  Net net;
  at::NoGradGuard no_grad;
  auto random = test::generator(seed);
  for (auto& param : net->parameters()) param.normal_(0, 1, random);
  return net;
}

// The same inputs on every rank, so stage 1 needs no DDP.
std::vector<double> losses(Net& net, ZeroRedundancyOptimizer& zero, int from, int to) {
  std::vector<double> losses;
  for (int step = from; step < to; ++step) {
    zero.zero_grad();
    const auto loss = net->forward(torch::randn({4, 5}, test::generator(step))).square().sum();
    loss.backward();
    zero.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

TEST(Checkpoint, HoldsAWholeRun) {
  for (int stage : {1, 2}) {
    const Folder folder;
    NamedValues extra;
    extra.insert("epoch", int64_t{3});
    extra.insert("ratio", 0.1);
    extra.insert("none", c10::IValue());
    std::vector<double> expected;
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      auto net = make_net(1);
      ZeroRedundancyOptimizer zero(net->parameters(), AdamWOptions(0.05),
                                   options(group).stage(stage));
      losses(net, zero, 0, 3);
      zero.save_checkpoint(folder / "run", CheckpointOptions().module(net.ptr()).extra(extra));
      const auto after = losses(net, zero, 3, 6);
      if (group->getRank() == 0) expected = after;
    });
    for (int world_size : {2, 3}) {
      run_ranks(world_size, [&](const ProcessGroupPtr& group) {
        auto net = make_net(2);
        ZeroRedundancyOptimizer zero(net->parameters(), AdamWOptions(0.9),
                                     options(group, Sharding::kParameter).stage(stage));
        const auto found =
            zero.load_checkpoint(folder / "run", CheckpointOptions().module(net.ptr()));
        EXPECT_EQ(found.keys(), extra.keys());
        EXPECT_EQ(found["epoch"].toInt(), 3);
        EXPECT_EQ(found["ratio"].toDouble(), 0.1);
        EXPECT_TRUE(found["none"].isNone());
        const auto after = losses(net, zero, 3, 6);
        for (size_t i = 0; i < after.size(); ++i) {
          // Means over 2 ranks are exact; over 3 they are rounded.
          const bool rounded = stage == 2 && world_size == 3;
          EXPECT_NEAR(after[i], expected[i], rounded ? 1e-5 * expected[i] : 0);
        }
      });
    }
    Checkpoint checkpoint(folder / "run");
    EXPECT_EQ(checkpoint.index().stage, stage);
    // One tensor, one name.
    EXPECT_EQ(checkpoint.index().tensors.count("module.tied"), 1u);
    EXPECT_EQ(checkpoint.index().tensors.count("module.first.weight"), 0u);
    EXPECT_EQ(checkpoint.index().tensors.count("module.norm.running_mean"), 1u);
    EXPECT_EQ(checkpoint.index().parameters[0].name, "tied");
    EXPECT_EQ(checkpoint.index().parameters[1].name, "first.bias");
  }
}

TEST(Checkpoint, ReadsElementRangesAndCountsBytes) {
  const Folder folder;
  constexpr int64_t kElements = 3'000'000;  // 11.4 blocks
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{torch::zeros({3000, 1000}).requires_grad_()};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group));
    params[0].mutable_grad() = torch::randn({3000, 1000}, test::generator(1));
    zero.step();
    zero.save_checkpoint(folder / "c", CheckpointOptions().rng(false));
  });
  Checkpoint checkpoint(folder / "c");
  const auto whole = checkpoint.read("state.0.exp_avg").flatten();
  EXPECT_EQ(checkpoint.bytes_read(), 4 * kElements);
  for (auto [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {7, 7}, {262143, 262145}, {1'400'000, 1'600'000}, {kElements - 1, kElements}}) {
    Checkpoint fresh(folder / "c");
    EXPECT_TRUE(at::equal(fresh.read("state.0.exp_avg", {begin, end}),
                          whole.narrow(0, begin, end - begin)));
    EXPECT_LE(fresh.bytes_read(), 4 * (end - begin) + 3 * fresh.index().block);
  }
  error_of<c10::ValueError>([&] { checkpoint.read("state.0.exp_avg", {-1, 3}); });
  error_of<c10::ValueError>([&] { checkpoint.read("state.0.exp_avg", {5, kElements + 1}); });
  error_of<c10::ValueError>([&] { checkpoint.read("state.1.exp_avg"); });
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{torch::zeros({3000, 1000}).requires_grad_()};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group));
    zero.load_checkpoint(folder / "c");
    EXPECT_LE(zero.checkpoint_bytes_read(),
              zero.local_state_bytes() + 6 * checkpoint.index().block);
    EXPECT_GE(zero.checkpoint_bytes_read(), zero.local_state_bytes());
  });
}

TEST(Checkpoint, DamageIsAnErrorOnEveryRankAndChangesNothing) {
  const Folder folder;
  const auto path = folder / "c";
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group));
    train(params, zero, 0, 2);
    zero.save_checkpoint(path);
    zero.param_groups()[0].options().set_lr(0.5);
    train(params, zero, 2, 3);
    const auto before = zero.consolidate_state_dict(0);
    const auto file = shard(path, 1);
    group->barrier()->wait();
    if (group->getRank() == 0) {
      std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
      out.seekp(-1, std::ios::end);
      out.put('?');
    }
    group->barrier()->wait();
    const auto message = error_of<c10::ValueError>([&] { zero.load_checkpoint(path); });
    EXPECT_NE(message.find(file), std::string::npos) << message;
    EXPECT_NE(message.find("is damaged"), std::string::npos) << message;
    EXPECT_NE(message.find(" of 2)"), std::string::npos) << message;
    EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.5);
    const auto after = zero.consolidate_state_dict(0);
    if (before) expect_equal(*after, *before);
    group->barrier()->wait();
    if (group->getRank() == 0) fs::remove(file);
    group->barrier()->wait();
    const auto missing = error_of<c10::ValueError>([&] { zero.load_checkpoint(path); });
    EXPECT_NE(missing.find(file + ": No such file"), std::string::npos) << missing;
    error_of<c10::ValueError>([&] { zero.load_checkpoint(folder / "nowhere"); });
  });
}

TEST(Checkpoint, WhatDoesNotFitIsNamed) {
  const Folder folder;
  const auto path = folder / "c";
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group));
    train(params, zero, 0, 2);
    zero.save_checkpoint(path);
    auto refuse = [&](std::vector<at::Tensor> others, const LocalOptimizer& local,
                      const std::string& part) {
      ZeroRedundancyOptimizer other(others, local, options(group));
      const auto message = error_of<c10::ValueError>([&] { other.load_checkpoint(path); });
      EXPECT_NE(message.find(part), std::string::npos) << message;
      EXPECT_EQ(other.local_state_bytes(), 0);
    };
    const auto local = local_optimizer(AdamWOptions(0.01));
    refuse({torch::zeros({3}, torch::requires_grad())}, local,
           "expected 1 parameters in group 0, got 8");
    auto others = make_params();
    others[1] = torch::zeros({21}, torch::requires_grad());
    refuse(others, local, "expected parameter 1 with shape [21], got [20]");
    refuse(make_params(), local_optimizer(torch::optim::SGDOptions(0.1)), "'momentum'");
    refuse(make_params(), local_optimizer(torch::optim::AdamOptions(0.1)),
           "decoupled_weight_decay");
    Net net;
    const auto message = error_of<c10::ValueError>(
        [&] { zero.load_checkpoint(path, CheckpointOptions().module(net.ptr())); });
    EXPECT_NE(message.find("expected the module's tied"), std::string::npos) << message;
  });
}

TEST(Checkpoint, AFailedSaveLeavesTheLastOne) {
  const Folder folder;
  const auto path = folder / "c";
  std::ofstream(folder / "file") << "x";
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group));
    train(params, zero, 0, 2);
    zero.save_checkpoint(path);
    const auto before = names_in(path);
    group->barrier()->wait();
    train(params, zero, 2, 3);
    for (bool asynchronous : {false, true}) {
      // One rank's writing ends half way.
      const auto save = CheckpointOptions().asynchronous(asynchronous);
      const auto fails =
          CheckpointOptions(save).progress([](CheckpointProgress) { TORCH_CHECK(false, "stop"); });
      const auto message = error_of<c10::Error>([&] {
        zero.save_checkpoint(path, group->getRank() == 1 ? fails : save);
        zero.wait_checkpoint();
      });
      EXPECT_NE(message.find("stop (rank 1 of 2)"), std::string::npos) << message;
      group->barrier()->wait();
      EXPECT_EQ(names_in(path), before);
      group->barrier()->wait();
    }
    // Here one rank's arguments are bad.
    const auto message = error_of<c10::Error>(
        [&] { zero.save_checkpoint(group->getRank() == 1 ? folder / "file" : path); });
    EXPECT_NE(message.find("cannot create the directory"), std::string::npos) << message;
    EXPECT_NE(message.find("(rank 1 of 2)"), std::string::npos) << message;
    zero.load_checkpoint(path);
    Checkpoint(path).verify();
    zero.save_checkpoint(path);
    EXPECT_EQ(names_in(path).size(), 3u);
  });
}

TEST(Checkpoint, InTheBackgroundItHoldsTheStateOfTheCall) {
  const Folder folder;
  const auto path = folder / "c";
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    auto net = make_net(1);
    ZeroRedundancyOptimizer zero(net->parameters(), AdamWOptions(0.01), options(group).stage(2));
    std::optional<StateDict> expected;
    for (int save = 0; save < 3; ++save) {
      losses(net, zero, 10 * save, 10 * save + 2);
      expected = zero.consolidate_state_dict(0);
      zero.save_checkpoint(path, CheckpointOptions().asynchronous(true).module(net.ptr()));
      losses(net, zero, 10 * save + 2, 10 * save + 4);
    }
    zero.wait_checkpoint();
    const auto progress = zero.checkpoint_progress();
    EXPECT_EQ(progress.written, progress.total);
    EXPECT_GT(progress.total, 0);
    if (expected) expect_equal(read_checkpoint(path), *expected);
    EXPECT_EQ(names_in(path).size(), 4u);
  });
  // Nobody waits for this one: the destructors do.
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group));
    train(params, zero, 0, 2);
    zero.save_checkpoint(folder / "left", CheckpointOptions().asynchronous(true));
  });
  Checkpoint(folder / "left").verify();
}

TEST(Checkpoint, AWriterNeedsNoRanks) {
  const Folder folder;
  CheckpointIndex index;
  index.parameters.push_back(
      {.name = "w", .shape = std::vector<int64_t>{2, 3, 4, 5}, .dtype = at::kFloat});
  index.param_groups.emplace_back().params = {0};
  index.param_groups[0].options.insert("lr", 0.25);
  index.state[0] = {"sum", "count"};
  index.values["state.0.count"] = int64_t{4};
  const auto tensor = torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  auto& declared = index.tensors["state.0.sum"];
  declared = {
      .dtype = at::kFloat, .shape = {2, 3, 4, 5}, .order = memory_order(tensor), .parts = {}};
  EXPECT_EQ(declared.order, (std::vector<int64_t>{0, 2, 3, 1}));
  EXPECT_EQ(declared.strides(), tensor.strides().vec());
  CheckpointWriter writer(folder / "c", index);
  error_of<c10::ValueError>([&] { writer.commit(); });
  writer.write("state.0.sum", tensor.contiguous());
  writer.commit();
  const auto dict = read_checkpoint(folder / "c");
  const auto sum = dict.state.at(0)["sum"].toTensor();
  EXPECT_TRUE(at::equal(sum, tensor));
  EXPECT_EQ(sum.strides(), tensor.strides());
  EXPECT_EQ(dict.state.at(0)["count"].toInt(), 4);
  EXPECT_EQ(dict.param_groups[0].options["lr"].toDouble(), 0.25);
  for (int64_t negative : {-1, -4000}) {
    auto wrong = index;
    wrong.param_groups[0].params = {negative};
    error_of<c10::ValueError>([&] { CheckpointWriter(folder / "c", wrong); });
    wrong = index;
    wrong.state[negative] = {};
    error_of<c10::ValueError>([&] { CheckpointWriter(folder / "c", wrong); });
  }
}

}  // namespace
}  // namespace shardstep
