#include "shard/bucket.h"
#include "support/torch.h"

#include <gtest/gtest.h>

namespace shardstep {
namespace {

struct Model {
  std::vector<at::Tensor> params;
  BucketLayout layout;
};

Model model(Sharding sharding, int world_size) {
  torch::manual_seed(1);
  Model out;
  out.params = {torch::randn({3, 4}).requires_grad_(),
                torch::randn({2, 3, 4, 5}).to(at::MemoryFormat::ChannelsLast).requires_grad_(),
                torch::randn({0}).requires_grad_(), torch::randn({}).requires_grad_()};
  std::vector<ParamSpec> specs;
  for (const auto& param : out.params) specs.push_back({param.numel(), 4, 0});
  Partition partition(sharding, world_size);
  partition.add_groups({specs});
  out.layout = partition.buckets()[0];
  std::vector<at::Tensor> laid_out;
  for (const auto& slot : out.layout.slots) laid_out.push_back(out.params[slot.param]);
  out.params = laid_out;
  return out;
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& tensor : tensors) out.push_back(tensor.detach().clone());
  return out;
}

class BucketTest : public testing::TestWithParam<std::tuple<Sharding, BucketStorage, int>> {};

TEST_P(BucketTest, KeepsValuesShapesAndStrides) {
  const auto [sharding, storage, world_size] = GetParam();
  auto [params, layout] = model(sharding, world_size);
  const auto before = copies(params);
  Bucket bucket(layout, params, storage);
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::equal(params[i], before[i]));
    EXPECT_EQ(params[i].strides(), before[i].strides());
    EXPECT_TRUE(params[i].requires_grad());
    EXPECT_TRUE(params[i].is_leaf());
  }
  EXPECT_EQ(bucket.flat().defined(), storage == BucketStorage::kFlat);
}

TEST_P(BucketTest, PartsAliasWhatEachRankOwns) {
  const auto [sharding, storage, world_size] = GetParam();
  auto [params, layout] = model(sharding, world_size);
  Bucket bucket(layout, params, storage);
  const auto parts = bucket.parts(std::vector<bool>(params.size(), true));
  ASSERT_EQ(parts.size(), static_cast<size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) {
    for (const auto& part : parts[rank]) {
      EXPECT_TRUE(part.is_contiguous());
      EXPECT_GT(part.numel(), 0);
      at::Tensor(part).fill_(rank + 1);
    }
    if (storage == BucketStorage::kFlat) {
      EXPECT_LE(parts[rank].size(), 1u);
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const Range slot = layout.slots[i].range;
    const auto flat = flat_view(params[i]);
    for (int64_t element = 0; element < flat.numel(); ++element) {
      int owner = 0;
      while (layout.shards[owner].end <= slot.begin + element) ++owner;
      EXPECT_EQ(flat[element].item<float>(), owner + 1);
    }
  }
}

TEST_P(BucketTest, LeavesInactiveParametersOut) {
  const auto [sharding, storage, world_size] = GetParam();
  auto [params, layout] = model(sharding, world_size);
  Bucket bucket(layout, params, storage);
  const auto before = params[0].detach().clone();
  std::vector<bool> active(params.size(), true);
  active[0] = false;
  for (const auto& rank : bucket.parts(active)) {
    for (const auto& part : rank) at::Tensor(part).fill_(7);
  }
  EXPECT_TRUE(at::equal(params[0], before));
  for (size_t i = 1; i < params.size(); ++i) EXPECT_TRUE((params[i] == 7).all().item<bool>());
}

TEST_P(BucketTest, FollowsParametersThatMove) {
  const auto [sharding, storage, world_size] = GetParam();
  auto [params, layout] = model(sharding, world_size);
  Bucket bucket(layout, params, storage);
  EXPECT_FALSE(bucket.refresh());
  params[0].set_data(torch::full_like(params[0], 3));
  EXPECT_TRUE(bucket.refresh());
  EXPECT_FALSE(bucket.refresh());
  EXPECT_TRUE((params[0] == 3).all().item<bool>());
  const Range all{0, params[0].numel()};
  at::Tensor(bucket.view(0, all)).fill_(5);
  EXPECT_TRUE((params[0] == 5).all().item<bool>());
  params[0].set_data(torch::zeros({2}));
  EXPECT_THROW(bucket.refresh(), c10::ValueError);
}

INSTANTIATE_TEST_SUITE_P(All, BucketTest,
                         testing::Combine(testing::Values(Sharding::kParameter, Sharding::kElement),
                                          testing::Values(BucketStorage::kInPlace,
                                                          BucketStorage::kFlat),
                                          testing::Values(1, 2, 5, 300)));

TEST(FlatView, FollowsMemoryOrder) {
  const auto tensor = torch::arange(6).reshape({2, 3}).t();
  EXPECT_TRUE(at::equal(flat_view(tensor), torch::arange(6)));
  EXPECT_FALSE(is_dense(torch::arange(6).slice(0, 0, 6, 2)));
  EXPECT_FALSE(is_dense(torch::ones({1}).expand({4})));
  const auto other = torch::randn({3, 2});
  const auto ordered = in_order_of(tensor, other);
  EXPECT_TRUE(at::equal(ordered, other));
  EXPECT_EQ(ordered.strides(), tensor.strides());
  EXPECT_TRUE(in_order_of(tensor, tensor).is_same(tensor));
}

}  // namespace
}  // namespace shardstep
