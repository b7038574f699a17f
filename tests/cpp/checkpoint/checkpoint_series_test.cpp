// Weights back without ranks and optimizer, and series of checkpoints.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/directory_lock.h"
#include "shardstep/load_module.h"
#include "support/folder.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::test {
namespace {

using torch::optim::AdamWOptions;

torch::nn::Sequential make_net(int seed, int width = 5) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(7, width), torch::nn::BatchNorm1d(width));
}

NamedValues step_of(int64_t step) {
  NamedValues extra;
  extra.insert("step", step);
  return extra;
}

TEST(CheckpointWeights, LoadIntoAModuleWithoutRanks) {
  const Folder folder;
  const auto net = make_net(1);
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto mine = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    ZeroRedundancyOptimizer zero(mine->parameters(), AdamWOptions(0.1),
                                 ZeroOptions().process_group(group).sharding(Sharding::kElement));
    zero.save_checkpoint(folder / "c", CheckpointOptions().module(mine));
  });
  Checkpoint checkpoint(folder / "c");
  EXPECT_EQ(checkpoint.module_names().size(), 7U);
  auto other = make_net(2);
  load_module(checkpoint, *other);
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(item.value().equal(other->named_parameters()[item.key()])) << item.key();
  }
  auto wide = make_net(2, 6);
  EXPECT_NE(error_of<c10::ValueError>([&] { load_module(checkpoint, *wide); }).find("0.weight"),
            std::string::npos);
  torch::nn::Sequential fewer(torch::nn::Linear(7, 5));
  EXPECT_NE(error_of<c10::ValueError>([&] {
              load_module(checkpoint, *fewer);
            }).find("which the module lacks"),
            std::string::npos);
}

TEST(CheckpointSeries, ASeriesKeepsTheLastAndALinkToTheLatest) {
  const Folder folder;
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{at::ones({100}).set_requires_grad(true)};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.1), ZeroOptions().process_group(group));
    for (int64_t step : {8, 9, 10}) {
      zero.save_checkpoint(
          folder / "{step:03d}",
          CheckpointOptions().extra(step_of(step)).keep_last(2).asynchronous(step == 9));
      zero.wait_checkpoint();
      EXPECT_EQ(zero.load_checkpoint(folder / "latest")["step"].toInt(), step);
    }
    const auto message = error_of<c10::ValueError>(
        [&] { zero.save_checkpoint(folder / "c", CheckpointOptions().keep_last(2)); });
    EXPECT_NE(message.find("with keep_last"), std::string::npos) << message;
  });
  EXPECT_EQ(names_in(folder / ""), (std::vector<std::string>{"009", "010", "latest"}));
}

// A process died while it saved one or removed one: what is left goes with the next save, unless a
// writer is at it or it is not ours.
TEST(CheckpointSeries, WhatAProcessThatDiedHasLeftIsRemoved) {
  const Folder folder;
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{at::ones({100}).set_requires_grad(true)};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.1), ZeroOptions().process_group(group));
    const auto save = [&](int64_t step) {
      zero.save_checkpoint(folder / "{step}",
                           CheckpointOptions().extra(step_of(step)).keep_last(3));
    };
    save(1);
    save(2);
    for (const auto* step : {"1", "2"}) std::filesystem::remove(folder / step + "/index.json");
    // What is left of one whose index was being read when its removal began.
    std::filesystem::create_directories(folder / "0");
    std::ofstream(folder / "0/index-0123456789abcdef.json") << "{}";
    std::filesystem::create_directories(folder / "mine");
    std::ofstream(folder / "mine/notes.txt") << "not ours";
    {
      const detail::DirectoryLock lock(folder / "2");
      save(3);
    }
    EXPECT_EQ(names_in(folder / ""), (std::vector<std::string>{"2", "3", "latest", "mine"}));
    save(4);
  });
  EXPECT_EQ(names_in(folder / ""), (std::vector<std::string>{"3", "4", "latest", "mine"}));
}

// As the system finds it: ".." of a link is the parent of what it points to.
TEST(CheckpointSeries, ADirectoryBehindALinkIsMade) {
  const Folder folder;
  std::filesystem::create_directories(folder / "far/away");
  std::filesystem::create_directory_symlink(folder / "far/away", folder / "link");
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{at::ones({100}).set_requires_grad(true)};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.1), ZeroOptions().process_group(group));
    zero.save_checkpoint(folder / "link/../a/b");
    zero.load_checkpoint(folder / "far/a/b");
  });
  EXPECT_EQ(names_in(folder / ""), (std::vector<std::string>{"far", "link"}));
}

}  // namespace
}  // namespace shardstep::test
