// Checkpoints that differ slightly from what the optimizer would write: from another torch, with
// state of another dtype, from a wrapped module. Also the bytes that all of them share.

#include <gtest/gtest.h>

#include "format/crc32.h"
#include "shardstep/checkpoint.h"
#include "support/folder.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::test {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

// One parameter of AdamW, after one step.
struct Saved {
  at::ScalarType param_dtype = at::kFloat;
  at::ScalarType state_dtype = at::kFloat;
  NamedValues options = local_optimizer(AdamWOptions(0.25)).read_options(AdamWOptions(0.25));
  std::string name = "w";
  bool with_module = false;
};

void write(const std::string& directory, const Saved& saved) {
  const std::vector<int64_t> shape{4};
  CheckpointIndex index;
  index.parameters.push_back({.name = saved.name, .shape = shape, .dtype = saved.param_dtype});
  index.param_groups.push_back({saved.options, {0}});
  index.state[0] = {"step", "exp_avg", "exp_avg_sq"};
  auto declare = [&](const std::string& name, at::ScalarType dtype, std::vector<int64_t> sizes) {
    index.tensors[name] = {.dtype = dtype, .shape = std::move(sizes), .order = {}, .parts = {}};
  };
  declare("state.0.step", at::kFloat, {});
  declare("state.0.exp_avg", saved.state_dtype, shape);
  declare("state.0.exp_avg_sq", saved.state_dtype, shape);
  if (saved.with_module) declare("module." + saved.name, saved.param_dtype, shape);
  CheckpointWriter writer(directory, index);
  for (const auto& [name, tensor] : index.tensors) {
    // More digits than bfloat16 has, but for the step counter.
    const double value = name.ends_with(".step") ? 1 : 1.0009765625;
    writer.write(name, torch::full(tensor.shape, value, tensor.dtype));
  }
  writer.commit();
}

void load(const std::string& directory, at::ScalarType dtype, const AdamWOptions& defaults,
          const std::function<void(ZeroRedundancyOptimizer&)>& check) {
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    run_ranks(1, [&](const ProcessGroupPtr& group) {
      std::vector<at::Tensor> params{torch::zeros({4}, dtype).requires_grad_()};
      ZeroRedundancyOptimizer zero(params, defaults,
                                   ZeroOptions().process_group(group).sharding(sharding));
      zero.load_checkpoint(directory);
      check(zero);
    });
  }
}

at::Tensor loaded_mean(ZeroRedundancyOptimizer& zero) {
  auto& state = *zero.optim().state().begin()->second;
  return static_cast<AdamWParamState&>(state).exp_avg();
}

TEST(CheckpointLoading, StateKeepsADtypeOfItsOwn) {
  const Folder folder;
  write(folder / "c", {.param_dtype = at::kBFloat16, .state_dtype = at::kFloat});
  load(folder / "c", at::kBFloat16, AdamWOptions(0.5), [](ZeroRedundancyOptimizer& zero) {
    EXPECT_EQ(loaded_mean(zero).scalar_type(), at::kFloat);
    EXPECT_EQ(loaded_mean(zero)[0].item<double>(), 1.0009765625);
  });
}

TEST(CheckpointLoading, StateOfTheParametersDtypeFollowsTheParameter) {
  const Folder folder;
  write(folder / "c", {.param_dtype = at::kFloat, .state_dtype = at::kFloat});
  load(folder / "c", at::kBFloat16, AdamWOptions(0.5), [](ZeroRedundancyOptimizer& zero) {
    EXPECT_EQ(loaded_mean(zero).scalar_type(), at::kBFloat16);
  });
}

TEST(CheckpointLoading, OptionsThatTheSaverLackedTakeTheDefaults) {
  const Folder folder;
  NamedValues options;
  options.insert("lr", 0.25);
  options.insert("betas", std::make_tuple(0.5, 0.75));
  options.insert("weight_decay", 0.0);
  write(folder / "c", {.options = options});
  const auto defaults = AdamWOptions(0.5).amsgrad(true).eps(0.125).weight_decay(0.5);
  load(folder / "c", at::kFloat, defaults, [](ZeroRedundancyOptimizer& zero) {
    const auto& found = static_cast<AdamWOptions&>(zero.param_groups()[0].options());
    EXPECT_EQ(found.lr(), 0.25);
    EXPECT_EQ(found.weight_decay(), 0.0);
    EXPECT_EQ(found.eps(), 0.125);
    EXPECT_TRUE(found.amsgrad());
  });
}

struct NamedWeightImpl : torch::nn::Module {
  explicit NamedWeightImpl(const at::Tensor& value) { w = register_parameter("w", value); }
  at::Tensor w;
};
TORCH_MODULE(NamedWeight);

TEST(CheckpointLoading, NamesDoNotDependOnWrappers) {
  for (const auto* name : {"w", "module.w", "_orig_mod.w", "module._orig_mod.w"}) {
    const Folder folder;
    write(folder / "c", {.name = name, .with_module = true});
    run_ranks(1, [&](const ProcessGroupPtr& group) {
      NamedWeight module(torch::zeros({4}));
      ZeroRedundancyOptimizer zero(module->parameters(), AdamWOptions(0.5),
                                   ZeroOptions().process_group(group));
      zero.load_checkpoint(folder / "c", CheckpointOptions().module(module.ptr()));
      EXPECT_EQ(module->w[0].item<double>(), 1.0009765625) << name;
    });
  }
}

TEST(CheckpointLoading, AModuleOnOneRankOnlyIsAnErrorOnAllAndChangesNothing) {
  const Folder folder;
  write(folder / "c", {.with_module = true});
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    NamedWeight module(torch::zeros({4}));
    ZeroRedundancyOptimizer zero(module->parameters(), AdamWOptions(0.5),
                                 ZeroOptions().process_group(group));
    CheckpointOptions options;
    if (group->getRank() == 0) options.module(module.ptr());
    const auto message =
        error_of<c10::ValueError>([&] { zero.load_checkpoint(folder / "c", options); });
    EXPECT_NE(message.find("module.w"), std::string::npos) << message;
    EXPECT_EQ(module->w.abs().max().item<float>(), 0);
  });
}

TEST(CheckpointLoading, ChecksumsAreThoseOfZip) {
  EXPECT_EQ(detail::crc32("123456789", 9), 0xcbf43926u);
  EXPECT_EQ(detail::crc32("", 0), 0u);
  const std::vector<char> text(1 << 16, 'x');
  // At any place in memory.
  for (size_t at = 0; at < 16; ++at) {
    EXPECT_EQ(detail::crc32(text.data() + at, 4096), detail::crc32(text.data(), 4096));
  }
}

}  // namespace
}  // namespace shardstep::test
