// hook_with_zero_step and its interleaved variant: parity with DDP followed by the plain optimizer.

#include "shardstep/zero_hooks.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "shard/shard_engine.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using test::error_of;
using test::run_ranks;
using torch::optim::AdamWOptions;

// Five layers of different sizes, one of them unused if `skip` says so.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(uint64_t seed) {
    const auto random = test::generator(seed);
    for (int i = 0; i < 5; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), test::Linear(12 + i, 13 + i)));
    }
    at::NoGradGuard no_grad;
    // One weight in another memory order.
    layers[2]->weight.set_data(layers[2]->weight.t().contiguous().t());
    for (auto& param : parameters()) param.copy_(test::randn(param.sizes(), random) / 4);
  }
  at::Tensor forward(at::Tensor x, int skip = -1) {
    for (int i = 0; i < 5; ++i) {
      // A skipped layer's place is taken by padding.
      x = i == skip ? torch::constant_pad_nd(x, {0, 1}) : layers[i]->forward(x).tanh();
    }
    return x;
  }
  std::vector<test::Linear> layers;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) {
  return test::randn({6, 12}, test::generator(100 * rank + step));
}

using HookMaker = CommHook (*)(CommHook, DistributedDataParallelBase&, ZeroRedundancyOptimizer&,
                               bool);
const std::vector<HookMaker> kHooks{hook_with_zero_step, hook_with_zero_step_interleaved};

enum class Reduce { kToAll, kToOwners };
const std::vector<Reduce> kReductions{Reduce::kToAll, Reduce::kToOwners};

struct Setting {
  bool view = false;
  bool static_graph = false;
  bool shard_buckets = false;
  bool find_unused = false;
  HookMaker hook = hook_with_zero_step;
  Sharding sharding = Sharding::kParameter;
  Reduce reduce = Reduce::kToAll;
  ExchangeKind exchange = ExchangeKind::kAuto;
};

DistributedDataParallelOptions ddp_options(const ProcessGroupPtr& group, const Setting& setting) {
  return DistributedDataParallelOptions()
      .process_group(group)
      .gradient_as_bucket_view(setting.view)
      .static_graph(setting.static_graph)
      .find_unused_parameters(setting.find_unused)
      .bucket_cap_mb(0.001);  // several buckets, which are rebuilt after the first iteration
}

ZeroOptions zero_options(const ProcessGroupPtr& group, const Setting& setting) {
  return ZeroOptions()
      .process_group(group)
      .sharding(setting.sharding)
      .exchange(setting.exchange)
      .overlap_with_ddp(true);
}

CommHook reduction(const Setting& setting, DistributedDataParallelBase& ddp,
                   ZeroRedundancyOptimizer& zero) {
  return setting.reduce == Reduce::kToOwners ? reduce_to_owners_hook(ddp, zero)
                                             : allreduce_hook(ddp.process_group());
}

void register_hook(const Setting& setting, DistributedDataParallelBase& ddp,
                   ZeroRedundancyOptimizer& zero) {
  ddp.register_comm_hook(
      setting.hook(reduction(setting, ddp, zero), ddp, zero, setting.shard_buckets));
}

std::vector<torch::optim::OptimizerParamGroup> two_groups(const std::vector<at::Tensor>& params,
                                                          const LocalOptimizer& local) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(params.begin(), params.begin() + 3));
  auto options = local.defaults->clone();
  options->set_lr(options->get_lr() * 3);
  groups.emplace_back(std::vector<at::Tensor>(params.begin() + 3, params.end()),
                      std::move(options));
  return groups;
}

// At two ranks every sum has two terms and halving is exact, so the bits agree. At more, DDP
// without a hook divides before it adds up, and our hooks may add in another order: a relative
// difference of some 1e-6 per step, which Adam's division can enlarge.
void expect_like_plain(const Net& got, const Net& expected, int world_size) {
  const auto a = got->parameters(), b = expected->parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    if (world_size <= 2) {
      EXPECT_TRUE(at::equal(a[i], b[i]))
          << "parameter " << i << " differs by " << (a[i] - b[i]).abs().max().item<double>();
    } else {
      EXPECT_TRUE(at::allclose(a[i], b[i], 1e-4, 1e-5))
          << "parameter " << i << " differs by " << (a[i] - b[i]).abs().max().item<double>();
    }
  }
}

void run_parity(
    const ProcessGroupPtr& group, const Setting& setting, const LocalOptimizer& local,
    const std::function<int(int)>& skip = [](int) { return -1; }) {
  Net net(1), plain_net(1);
  DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
  DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
  ZeroRedundancyOptimizer zero(two_groups(net->parameters(), local), local,
                               zero_options(group, setting));
  auto plain = local.make(two_groups(plain_net->parameters(), local));
  register_hook(setting, ddp, zero);
  for (int step = 0; step < 10; ++step) {
    const auto batch = input(group->getRank(), step);
    zero.zero_grad();
    ddp(batch, skip(step)).square().mean().backward();
    plain->zero_grad();
    plain_ddp(batch, skip(step)).square().mean().backward();
    plain->step();
    if (step < 3 || step == 9) {
      zero.wait();
      expect_like_plain(net, plain_net, group->getSize());
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "at step " << step;
        return;
      }
    }
  }
}

class ZeroHooksWorld : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ZeroHooks, ZeroHooksWorld, testing::Values(1, 2, 3, 4));

TEST_P(ZeroHooksWorld, EqualDdpAndThePlainOptimizerInEveryCombination) {
  run_ranks(GetParam(), [](const ProcessGroupPtr& group) {
    for (int bits : test::sample(64, group->getSize() > 2 ? 6 : 12)) {
      run_parity(group,
                 {.view = (bits & 1) != 0,
                  .static_graph = (bits & 2) != 0,
                  .shard_buckets = (bits & 4) != 0,
                  .hook = kHooks[(bits >> 3) & 1],
                  .sharding = (bits & 16) != 0 ? Sharding::kElement : Sharding::kParameter,
                  .reduce = kReductions[bits >> 5]},
                 local_optimizer(AdamWOptions(0.01)));
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "combination " << bits;
        return;
      }
    }
  });
}

TEST(ZeroHooks, ToOwnersByEveryExchange) {
  const auto exchanges = test::exchanges({ExchangeKind::kSharedMemory, ExchangeKind::kNative});
  for (int bits : test::sample(16, 6)) {
    run_ranks(2 + (bits & 1), [&](const ProcessGroupPtr& group) {
      run_parity(group,
                 {.view = (bits & 2) != 0,
                  .hook = kHooks[(bits >> 2) & 1],
                  .sharding = (bits & 2) != 0 ? Sharding::kElement : Sharding::kParameter,
                  .reduce = Reduce::kToOwners,
                  .exchange = exchanges[(bits >> 3) % exchanges.size()]},
                 local_optimizer(AdamWOptions(0.01)));
    });
  }
}

// They want one order on every rank, whenever a rank's reductions happen to be done.
TEST(ZeroHooks, EqualDdpOnTheBackendsOwnCollectives) {
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](const ProcessGroupPtr& group) {
      for (int bits : test::sample(32, 4)) {
        run_parity(group,
                   {.view = (bits & 1) != 0,
                    .static_graph = (bits & 2) != 0,
                    .hook = kHooks[(bits >> 2) & 1],
                    .sharding = (bits & 8) != 0 ? Sharding::kElement : Sharding::kParameter,
                    .reduce = kReductions[bits >> 4],
                    .exchange = ExchangeKind::kNative},
                   local_optimizer(AdamWOptions(0.01)));
        if (testing::Test::HasFailure()) {
          ADD_FAILURE() << "combination " << bits;
          return;
        }
      }
    });
  }
}

TEST(ZeroHooks, EveryOptimizer) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    for (const auto& local : {local_optimizer(torch::optim::AdamOptions(0.01).amsgrad(true)),
                              local_optimizer(torch::optim::SGDOptions(0.1).momentum(0.9)),
                              local_optimizer(torch::optim::SGDOptions(0.1)),
                              local_optimizer(torch::optim::AdagradOptions(0.1)),
                              local_optimizer(torch::optim::RMSpropOptions(0.01))}) {
      for (auto hook : kHooks) {
        for (auto reduce : kReductions) run_parity(group, {.hook = hook, .reduce = reduce}, local);
      }
    }
  });
}

TEST(ZeroHooks, UnusedParametersAreLeftAlone) {
  for (int bits : test::sample(8, 3)) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      Setting setting{.view = (bits & 1) != 0,
                      .find_unused = true,
                      .hook = kHooks[(bits >> 1) & 1],
                      .reduce = kReductions[bits >> 2]};
      const auto local = local_optimizer(AdamWOptions(0.01));
      // Another layer is left out each time; all ranks agree on it.
      run_parity(group, setting, local, [](int step) { return step % 6 - 1; });
      // Each rank leaves out another one: what one of them uses is updated.
      run_parity(group, setting, local, [&](int step) { return (step + group->getRank()) % 5; });
      // In a static graph it is always the same one.
      setting.find_unused = false;
      setting.static_graph = true;
      run_parity(group, setting, local, [](int) { return 2; });
    });
  }
}

TEST(ZeroHooks, FrozenUnfrozenAndAddedParameters) {
  for (int bits = 0; bits < 4; ++bits) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(AdamWOptions(0.01));
      const Setting setting{
          .find_unused = true, .hook = kHooks[bits & 1], .reduce = kReductions[bits >> 1]};
      Net net(1), plain_net(1);
      DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
      DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
      // The last layer comes later.
      auto params = net->parameters(), plain_params = plain_net->parameters();
      const std::vector<at::Tensor> last(params.end() - 2, params.end());
      const std::vector<at::Tensor> plain_last(plain_params.end() - 2, plain_params.end());
      params.resize(8);
      plain_params.resize(8);
      ZeroRedundancyOptimizer zero(params, local, zero_options(group, setting));
      auto plain = local.make(test::one_group(plain_params));
      register_hook(setting, ddp, zero);
      for (int step = 0; step < 9; ++step) {
        for (auto* one : {&net, &plain_net}) {
          if (step == 2) (*one)->layers[1]->weight.set_requires_grad(false);
          if (step == 5) (*one)->layers[1]->weight.set_requires_grad(true);
        }
        if (step == 3) {
          // Through the base class, which cannot tell the others.
          static_cast<torch::optim::Optimizer&>(zero).add_param_group(
              torch::optim::OptimizerParamGroup(last));
          plain->add_param_group(torch::optim::OptimizerParamGroup(plain_last));
        }
        const auto batch = input(group->getRank(), step);
        ddp.zero_grad();
        ddp(batch).square().mean().backward();
        plain_ddp.zero_grad();
        plain_ddp(batch).square().mean().backward();
        plain->step();
        zero.wait();
        expect_like_plain(net, plain_net, 2);
      }
    });
  }
}

TEST(ZeroHooks, AccumulationAndSchedules) {
  for (int bits = 0; bits < 4; ++bits) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(AdamWOptions(0.02));
      const Setting setting{.hook = kHooks[bits & 1],
                            .sharding = Sharding::kElement,
                            .reduce = kReductions[bits >> 1]};
      Net net(1), plain_net(1);
      DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
      DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
      ZeroRedundancyOptimizer zero(net->parameters(), local, zero_options(group, setting));
      auto plain = local.make(test::one_group(plain_net->parameters()));
      torch::optim::StepLR schedule(zero, 2, 0.5), plain_schedule(*plain, 2, 0.5);
      register_hook(setting, ddp, zero);
      for (int step = 0; step < 6; ++step) {
        auto pass = [&](DistributedDataParallel<Net>& model) {
          model.zero_grad();
          {
            const auto local_only = model.no_sync();
            model(input(group->getRank(), 50 + step)).square().mean().backward();
          }
          model(input(group->getRank(), step)).square().mean().backward();
        };
        pass(ddp);
        pass(plain_ddp);
        plain->step();
        schedule.step();
        plain_schedule.step();
        zero.wait();
        expect_like_plain(net, plain_net, 2);
      }
    });
  }
}

TEST(ZeroHooks, StateConsolidatesAndResumes) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const auto local = local_optimizer(AdamWOptions(0.01));
    const Setting setting{.hook = hook_with_zero_step_interleaved};
    Net net(1);
    DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
    ZeroRedundancyOptimizer zero(net->parameters(), local, zero_options(group, setting));
    register_hook(setting, ddp, zero);
    for (int step = 0; step < 3; ++step) {
      zero.zero_grad();
      ddp(input(group->getRank(), step)).square().mean().backward();
    }
    if (const auto dict = zero.consolidate_state_dict(0)) {
      EXPECT_EQ(dict->state.size(), 10u);
      for (const auto& [index, values] : dict->state) {
        EXPECT_EQ(values["step"].toTensor().item<float>(), 3) << index;
        EXPECT_EQ(values["exp_avg"].toTensor().sizes(), net->parameters()[index].sizes());
      }
      zero.load_state_dict(*dict);
    }
  });
}

TEST(ZeroHooks, ABackwardPassThatThrowsLeavesNothingBehind) {
  for (auto reduce : kReductions) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(AdamWOptions(0.01));
      const Setting setting{.hook = hook_with_zero_step_interleaved, .reduce = reduce};
      Net net(1), plain_net(1);
      DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
      DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
      ZeroRedundancyOptimizer zero(net->parameters(), local, zero_options(group, setting));
      auto plain = local.make(test::one_group(plain_net->parameters()));
      register_hook(setting, ddp, zero);
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {
          // Before the first gradient, on every rank.
          auto output = ddp(input(group->getRank(), 9));
          output.register_hook([](at::Tensor) { throw std::runtime_error("on purpose"); });
          EXPECT_THROW(output.square().mean().backward(), std::runtime_error);
        }
        zero.zero_grad();
        plain->zero_grad();
        ddp(input(group->getRank(), step)).square().mean().backward();
        plain_ddp(input(group->getRank(), step)).square().mean().backward();
        plain->step();
        zero.wait();
        expect_like_plain(net, plain_net, 2);
      }
    });
  }
}

TEST(ZeroHooks, MisuseIsSaid) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    Net net(1);
    DistributedDataParallel<Net> ddp(net, ddp_options(group, {}));
    ZeroRedundancyOptimizer without(net->parameters(), AdamWOptions(),
                                    ZeroOptions().process_group(group));
    for (auto hook : kHooks) {
      const auto message =
          error_of<c10::ValueError>([&] { hook(allreduce_hook(group), ddp, without, false); });
      EXPECT_NE(message.find("overlap_with_ddp"), std::string::npos) << message;
    }
    ZeroRedundancyOptimizer zero(net->parameters(), AdamWOptions(), zero_options(group, {}));
    EXPECT_THROW(hook_with_zero_step(nullptr, ddp, zero), c10::TypeError);
    // step() is not the way to update: it says so, and does nothing.
    struct Recorder : c10::WarningHandler {
      void process(const c10::Warning& warning) override { message = warning.msg(); }
      std::string message;
    } recorder;
    c10::WarningUtils::WarningHandlerGuard guard(&recorder);
    for (auto& param : net->parameters()) param.mutable_grad() = torch::ones_like(param);
    const auto before = net->parameters()[0].detach().clone();
    EXPECT_FALSE(zero.step().defined());
    EXPECT_NE(recorder.message.find("overlap_with_ddp"), std::string::npos);
    EXPECT_TRUE(at::equal(net->parameters()[0], before));
  });
}

// Ranks reach their buckets at different times, in every round other ones: nothing may hang, and
// the result is the same.
void soak(const ProcessGroupPtr& group, const Setting& setting) {
  const int count = test::rounds(40, 200);
  const auto local = local_optimizer(AdamWOptions(0.001));
  Net net(1), plain_net(1);
  DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
  DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
  ZeroRedundancyOptimizer zero(net->parameters(), local, zero_options(group, setting));
  ZeroRedundancyOptimizer plain(plain_net->parameters(), local,
                                zero_options(group, setting).overlap_with_ddp(false));
  std::mt19937 random(17 + group->getRank());
  auto delayed = [&, inner = reduction(setting, ddp, zero)](c10d::GradBucket& bucket) {
    if (random() % 3 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    }
    return inner(bucket);
  };
  ddp.register_comm_hook(setting.hook(delayed, ddp, zero, false));
  plain_ddp.register_comm_hook(reduction(setting, plain_ddp, plain));
  for (int round = 0; round < count; ++round) {
    zero.zero_grad();
    plain.zero_grad();
    const auto batch = input(group->getRank(), round);
    ddp(batch).square().mean().backward();
    plain_ddp(batch).square().mean().backward();
    plain.step();
  }
  zero.wait();
  // Both reduce by the same hook, so the bits agree at any world size.
  expect_like_plain(net, plain_net, 2);
}

TEST(ZeroHooks, SoakWithRandomDelays) {
  Setting setting{.hook = hook_with_zero_step_interleaved, .sharding = Sharding::kElement};
  const auto run = [&] {
    run_ranks(
        3, [&](const ProcessGroupPtr& group) { soak(group, setting); }, std::chrono::seconds(120));
  };
  run();
  setting.reduce = Reduce::kToOwners;
  run();
  if (test::on_sim_device()) return;  // the others take CPU tensors
  setting.exchange = ExchangeKind::kSharedMemory;
  run();
  setting.exchange = ExchangeKind::kHierarchical;
  const test::Hosts hosts("a,a,b");
  run();
}

TEST(ZeroHooks, UnevenInputs) {
  for (int bits = 0; bits < 4; ++bits) {
    run_ranks(3, [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(AdamWOptions(0.01));
      const Setting setting{.hook = kHooks[bits & 1], .reduce = kReductions[bits >> 1]};
      Net net(1), plain_net(1);
      DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
      DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
      ZeroRedundancyOptimizer zero(net->parameters(), local, zero_options(group, setting));
      auto plain = local.make(test::one_group(plain_net->parameters()));
      register_hook(setting, ddp, zero);
      plain_ddp.register_comm_hook(allreduce_hook(group));
      const int inputs = 4 + 2 * group->getRank();
      {
        Join join({ddp});
        for (int step = 0; step < inputs; ++step) {
          zero.zero_grad();
          ddp(input(group->getRank(), step)).square().mean().backward();
        }
        join.finish();
      }
      {
        Join join({plain_ddp});
        for (int step = 0; step < inputs; ++step) {
          plain->zero_grad();
          plain_ddp(input(group->getRank(), step)).square().mean().backward();
          plain->step();
        }
        join.finish();
      }
      // DDP gives everyone the last joiner's parameters. Sums to owners are taken in rank order, an
      // all-reduce's are not.
      expect_like_plain(net, plain_net, setting.reduce == Reduce::kToOwners ? 3 : 2);
    });
  }
}

class ReduceToOwners : public testing::TestWithParam<Sharding> {};
INSTANTIATE_TEST_SUITE_P(ZeroHooks, ReduceToOwners,
                         testing::Values(Sharding::kParameter, Sharding::kElement));

// The optimizer has all layers but the last.
std::vector<at::Tensor> without_last_layer(const Net& net) {
  auto params = net->parameters();
  params.resize(8);
  return params;
}

TEST_P(ReduceToOwners, AveragesWhatThisRankOwnsAndSendsNoMore) {
  SHARDSTEP_NEEDS_CPU("the pairwise exchange counts bytes");
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const Setting setting{
          .sharding = GetParam(), .reduce = Reduce::kToOwners, .exchange = ExchangeKind::kPairwise};
      Net net(1), plain_net(1);
      DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
      DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
      ZeroRedundancyOptimizer zero(without_last_layer(net), AdamWOptions(),
                                   zero_options(group, setting));
      ddp.register_comm_hook(reduce_to_owners_hook(ddp, zero));
      const auto batch = input(group->getRank(), 0);
      const int64_t before = zero.engine().traffic().bytes_sent;
      ddp(batch).square().mean().backward();
      plain_ddp(batch).square().mean().backward();

      const auto& partition = zero.engine().partition();
      int64_t elements = 0;
      for (int64_t i = 0; i < partition.param_count(); ++i) {
        const auto got = flat_view(net->parameters()[i].grad());
        const auto average = flat_view(plain_net->parameters()[i].grad());
        elements += got.numel();
        for (const auto& slice : partition.slices(i)) {
          const auto part = [&](const at::Tensor& flat) {
            return flat.narrow(0, slice.elements.begin, slice.elements.size());
          };
          if (slice.rank == group->getRank()) {
            EXPECT_TRUE(at::allclose(part(got), part(average), 1e-5, 1e-7)) << i;
          } else {
            EXPECT_FALSE(at::allclose(part(got), part(average), 1e-5, 1e-7)) << i;
          }
        }
      }
      EXPECT_EQ(zero.engine().traffic().bytes_sent - before,
                4 * (elements - partition.owned_elements(group->getRank())));
      for (size_t i = 8; i < 10; ++i) {
        EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), plain_net->parameters()[i].grad(),
                                 1e-5, 1e-7))
            << i << " is not the optimizer's";
      }
    });
  }
}

TEST_P(ReduceToOwners, AScalerSkipsOnEveryRankOrOnNone) {
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    const Setting setting{.sharding = GetParam(), .reduce = Reduce::kToOwners};
    Net net(1);
    DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
    ZeroRedundancyOptimizer zero(net->parameters(), torch::optim::SGDOptions(0.125),
                                 zero_options(group, setting).overlap_with_ddp(false));
    ddp.register_comm_hook(reduce_to_owners_hook(ddp, zero));
    GradScaler scaler(GradScalerOptions().init_scale(1024));
    for (int step = 0; step < 4; ++step) {
      const bool overflows = step == 1;
      ddp.zero_grad();
      auto loss = scaler.scale(ddp(input(group->getRank(), step)).square().mean());
      // Of one rank and one layer: the owners of others have finite sums.
      if (overflows && group->getRank() == 2) {
        loss = loss + net->parameters().front().sum() * std::numeric_limits<double>::infinity();
      }
      loss.backward();
      EXPECT_EQ(scaler.step(zero), !overflows) << step;
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 512);
  });
}

TEST_P(ReduceToOwners, SufficesForStep) {
  for (bool view : {false, true}) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const Setting setting{.view = view, .sharding = GetParam(), .reduce = Reduce::kToOwners};
      Net net(1), plain_net(1);
      DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
      DistributedDataParallel<Net> plain_ddp(plain_net, ddp_options(group, setting));
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(without_last_layer(net), local,
                                   zero_options(group, setting).overlap_with_ddp(false));
      auto plain = local.make(test::one_group(without_last_layer(plain_net)));
      ddp.register_comm_hook(reduce_to_owners_hook(ddp, zero));
      for (int step = 0; step < 4; ++step) {
        const auto batch = input(group->getRank(), step);
        ddp.zero_grad();
        plain_ddp.zero_grad();
        ddp(batch).square().mean().backward();
        plain_ddp(batch).square().mean().backward();
        zero.step();
        plain->step();
        expect_like_plain(net, plain_net, 2);
      }
    });
  }
}

// Rank 0's backward pass begins when rank 1's ends, and rank 1, which does not use the last layer,
// has full buckets long before that: it must not wait for rank 0's.
TEST(ZeroHooks, RanksThatUseOtherParametersDoNotWaitInTheBackwardPass) {
  run_ranks(
      2,
      [](const ProcessGroupPtr& group) {
        const Setting setting{.find_unused = true,
                              .hook = hook_with_zero_step_interleaved,
                              .reduce = Reduce::kToOwners};
        Net net(1);
        DistributedDataParallel<Net> ddp(net, ddp_options(group, setting));
        ZeroRedundancyOptimizer zero(net->parameters(), AdamWOptions(),
                                     zero_options(group, setting));
        register_hook(setting, ddp, zero);
        std::vector<at::Tensor> message{test::zeros({1})};
        auto batch = input(group->getRank(), 0).requires_grad_();
        if (group->getRank() == 1) {
          batch.register_hook([&](at::Tensor) { group->send(message, 0, 1)->wait(); });
        }
        auto output = ddp(batch, group->getRank() == 0 ? -1 : 4);
        if (group->getRank() == 0) {
          output.register_hook([&](at::Tensor) { group->recv(message, 1, 1)->wait(); });
        }
        output.square().mean().backward();
        zero.wait();
      },
      std::chrono::seconds(60), std::chrono::seconds(20));
}

TEST(ZeroHooks, ReduceToOwnersRefusesWhatItCannotDo) {
  SHARDSTEP_NEEDS_CPU("new_group knows gloo and nccl, and sim has no sparse tensors");
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto alone = new_group({0}, {}, group);
    const auto other = new_group({1}, {}, group);
    Net net(1);
    DistributedDataParallel<Net> ddp(net, ddp_options(group, {}));
    ZeroRedundancyOptimizer zero(net->parameters(), AdamWOptions(),
                                 zero_options(alone ? alone : other, {}));
    const auto message = error_of<c10::ValueError>([&] { reduce_to_owners_hook(ddp, zero); });
    EXPECT_NE(message.find("same ranks"), std::string::npos) << message;

    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    DistributedDataParallel<torch::nn::Embedding> sparse(
        table, DistributedDataParallelOptions().process_group(group));
    ZeroRedundancyOptimizer sgd(table->parameters(), torch::optim::SGDOptions(0.1),
                                ZeroOptions().process_group(group));
    sparse.register_comm_hook(reduce_to_owners_hook(sparse, sgd));
    const auto dense =
        error_of<c10::ValueError>([&] { sparse(torch::tensor({1, 2})).sum().backward(); });
    EXPECT_NE(dense.find("dense gradients"), std::string::npos) << dense;
  });
}

}  // namespace
}  // namespace shardstep
