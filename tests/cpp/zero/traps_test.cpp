// Code that knows nothing about sharding gets the plain optimizer's result, or a clear error on
// every rank.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <limits>

#include "shard/shard_engine.h"
#include "shardstep/shardstep.h"
#include "support/ddp_support.h"
#include "support/folder.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::traps {
namespace {

using Tensors = std::vector<at::Tensor>;
using test::error_of;
using test::run_ranks;

constexpr ExchangeKind kExchanges[] = {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory,
                                       ExchangeKind::kNative};
constexpr Sharding kShardings[] = {Sharding::kParameter, Sharding::kElement};

Tensors make_params() {
  const auto random = test::generator(3);
  Tensors params;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{40, 5}, {4, 3, 3, 3}, {33}}) {
    params.push_back(torch::randn(sizes, random).requires_grad_());
  }
  return params;
}

void backward(const Tensors& params) {
  auto loss = torch::zeros({}, at::kDouble);
  for (const auto& param : params) {
    if (param.requires_grad()) loss = loss + param.square().sum().to(at::kDouble);
  }
  loss.backward();
}

void iterate(ZeroRedundancyOptimizer& zero, const Tensors& params) {
  zero.zero_grad();
  backward(params);
  zero.step();
}

void expect_names(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_NE(message.find("(rank "), std::string::npos) << message;
}

struct Change {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> of;
};

const Change kToBFloat16{"bfloat16", [](const at::Tensor& t) { return t.to(at::kBFloat16); }};
const Change kToDouble{"double", [](const at::Tensor& t) { return t.to(at::kDouble); }};
const Change kReshape{"shape", [](const at::Tensor& t) { return t.flatten(); }};
const Change kGrow{"more elements", [](const at::Tensor& t) { return at::cat({t, t}); }};
const Change kOrder{"memory order", [](const at::Tensor& t) {
                      return t.contiguous(at::MemoryFormat::ChannelsLast);
                    }};

void apply(const Change& change, const at::Tensor& param) {
  at::Tensor(param).set_data(change.of(param.detach()));
}

// One step, then the change, on all ranks or on rank 1 only; the next step is an error on every
// rank.
void expect_refused(const ZeroOptions& options, const Change& change, bool on_all_ranks) {
  SCOPED_TRACE(c10::str(change.name, ", stage ", options.stage(), ", sharding ",
                        static_cast<int>(options.sharding()), ", exchange ",
                        static_cast<int>(options.exchange()), ", all ranks ", on_all_ranks));
  run_ranks(
      2,
      [&](const ProcessGroupPtr& group) {
        const auto params = make_params();
        ZeroRedundancyOptimizer zero(params, torch::optim::AdamOptions(1e-2),
                                     ZeroOptions(options).process_group(group));
        backward(params);
        zero.step();
        zero.zero_grad();
        if (on_all_ranks || group->getRank() == 1) apply(change, params[1]);
        try {
          backward(params);
        } catch (const c10::Error&) {  // autograd may notice that sizes have changed
        }
        expect_names(error_of<c10::ValueError>([&] { zero.step(); }), "parameter 1");
      },
      std::chrono::seconds(60), std::chrono::seconds(10));
}

TEST(ChangedParameters, AreRefusedInStage2) {
  for (auto exchange : kExchanges) {
    for (auto sharding : kShardings) {
      const auto options = ZeroOptions().stage(2).exchange(exchange).sharding(sharding);
      for (const auto& change : {kToBFloat16, kToDouble, kReshape, kGrow}) {
        expect_refused(options, change, true);
        expect_refused(options, change, false);
      }
    }
  }
}

TEST(ChangedParameters, AreRefusedByElement) {
  for (int stage : {1, 2}) {
    const auto options = ZeroOptions().stage(stage).sharding(Sharding::kElement);
    for (const auto& change : {kToBFloat16, kToDouble, kGrow, kOrder}) {
      expect_refused(options, change, true);
      expect_refused(options, change, false);
    }
  }
}

TEST(ChangedParameters, AreRefusedByClipping) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto params = make_params();
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                 ZeroOptions().stage(2).process_group(group));
    for (const auto& param : params) apply(kToDouble, param);
    backward(params);
    expect_names(error_of<c10::ValueError>([&] { zero.clip_grad_norm_(1); }), "parameter 0");
  });
}

// The gradient that was lost cannot be made up for.
TEST(ChangedParameters, AreRefusedThoughTheyAreChangedBackBeforeTheStep) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto params = make_params();
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                 ZeroOptions().stage(2).process_group(group));
    const auto before = params[1].detach();
    if (group->getRank() == 1) apply(kToDouble, params[1]);
    backward(params);
    if (group->getRank() == 1) at::Tensor(params[1]).set_data(before);
    expect_names(error_of<c10::ValueError>([&] { zero.step(); }), "parameter 1");
    iterate(zero, params);
  });
}

// As the plain optimizer follows them.
TEST(ChangedParameters, AreFollowedByParameterInStage1) {
  for (auto exchange : kExchanges) {
    for (const auto& change : {kToDouble, kOrder}) {
      run_ranks(2, [&](const ProcessGroupPtr& group) {
        const auto params = make_params(), plain_params = make_params();
        const auto sgd = torch::optim::SGDOptions(1e-2).momentum(0.9);
        ZeroRedundancyOptimizer zero(params, sgd,
                                     ZeroOptions().exchange(exchange).process_group(group));
        torch::optim::SGD plain(plain_params, sgd);
        for (int step = 0; step < 3; ++step) {
          if (step == 1) {
            apply(change, params[1]);
            apply(change, plain_params[1]);
          }
          zero.zero_grad();
          plain.zero_grad();
          backward(params);
          backward(plain_params);
          zero.step();
          plain.step();
          for (size_t i = 0; i < params.size(); ++i) {
            EXPECT_EQ(params[i].scalar_type(), plain_params[i].scalar_type());
            EXPECT_TRUE(torch::allclose(params[i], plain_params[i], 1e-5, 1e-7)) << change.name;
          }
        }
      });
      expect_refused(ZeroOptions().exchange(exchange), change, false);
    }
  }
}

TEST(FrozenParameters, WithAGradientOnOneRankAreAnErrorOnAll) {
  for (auto exchange : kExchanges) {
    for (int stage : {1, 2}) {
      run_ranks(
          2,
          [&](const ProcessGroupPtr& group) {
            const auto params = make_params();
            at::Tensor(params[2]).set_requires_grad(false);
            ZeroRedundancyOptimizer zero(
                params, torch::optim::SGDOptions(1e-2),
                ZeroOptions().stage(stage).exchange(exchange).process_group(group));
            backward(params);
            if (group->getRank() == 1) {
              at::Tensor(params[2]).mutable_grad() = torch::ones_like(params[2]);
            }
            expect_names(error_of<c10::ValueError>([&] { zero.step(); }), "parameter 2");
          },
          std::chrono::seconds(60), std::chrono::seconds(10));
    }
  }
}

TEST(FrozenParameters, OnOneRankOnlyAreAnErrorOnAll) {
  for (int stage : {1, 2}) {
    run_ranks(
        2,
        [&](const ProcessGroupPtr& group) {
          const auto params = make_params();
          ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                       ZeroOptions().stage(stage).process_group(group));
          if (group->getRank() == 1) at::Tensor(params[2]).set_requires_grad(false);
          backward(params);
          expect_names(error_of<c10::ValueError>([&] { zero.step(); }), "parameter 2");
        },
        std::chrono::seconds(60), std::chrono::seconds(10));
  }
}

TEST(FrozenParameters, DoNotCountInTheDivisionOfWorkInStage2) {
  for (auto sharding : kShardings) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      Tensors params{torch::zeros({1000000})};
      for (int i = 0; i < 8; ++i) params.push_back(torch::zeros({10000}).requires_grad_());
      ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                   ZeroOptions().stage(2).sharding(sharding).process_group(group));
      int64_t trainable = 0;
      for (const auto& local : zero.engine().local_params(0)) {
        if (local.tensor.requires_grad()) trainable += local.elements.size();
      }
      EXPECT_NEAR(static_cast<double>(trainable), 40000, 64);
    });
  }
}

TEST(ComplexParameters, AreClippedByTheirWholeNorm) {
  for (auto exchange : {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory}) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const Tensors params{torch::zeros({7}, at::kComplexFloat).requires_grad_()};
      ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                   ZeroOptions().stage(2).exchange(exchange).process_group(group));
      for (int step = 0; step < 3; ++step) {
        zero.zero_grad();
        const auto factor = torch::full({7}, c10::complex<float>(3, 4), at::kComplexFloat);
        at::real(params[0] * factor).sum().backward();
        EXPECT_NEAR(zero.clip_grad_norm_(1), 5 * std::sqrt(7), 1e-4) << step;
        zero.step();
      }
    });
  }
}

// A float32 moment of a bfloat16 parameter, as an optimizer may keep it.
TEST(StateDtype, ReachesTheLocalOptimizer) {
  for (auto sharding : kShardings) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const auto make = [] { return torch::zeros({100}, at::kBFloat16).requires_grad_(); };
      const auto local = local_optimizer(torch::optim::AdamOptions(1e-2));
      const auto plain_param = make();
      const auto plain = local.make(test::one_group({plain_param}));
      at::Tensor(plain_param).mutable_grad() = torch::ones({100}, at::kBFloat16);
      plain->step();
      const auto moment = torch::rand({100}, test::generator(3));
      auto dict = test::plain_state_dict(local, *plain);
      dict.state.at(0)["exp_avg"] = moment;

      ZeroRedundancyOptimizer zero(Tensors{make()}, local,
                                   ZeroOptions().sharding(sharding).process_group(group));
      zero.load_state_dict(dict);
      const auto again = zero.consolidate_state_dict(0);
      if (!again) return;
      const auto loaded = again->state.at(0)["exp_avg"].toTensor();
      EXPECT_EQ(loaded.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(loaded, moment));
    });
  }
}

// The median of a few backward passes of a model with 20 experts, in a bucket each.
double backward_seconds(ExchangeKind exchange, bool different_experts) {
  std::vector<double> seconds;
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    Tensors experts;
    for (int i = 0; i < 40; ++i) experts.push_back(torch::randn({300, 300}).requires_grad_());
    ZeroRedundancyOptimizer zero(
        experts, torch::optim::SGDOptions(1e-3),
        ZeroOptions().stage(2).exchange(exchange).bucket_cap_mb(0.1).process_group(group));
    for (int pass = 0; pass < 7; ++pass) {
      zero.zero_grad();
      auto x = torch::ones({8, 300});
      for (size_t i = 0; i < experts.size(); ++i) {
        const int user = different_experts ? static_cast<int>(i % 2) : group->getRank();
        if (user == group->getRank()) x = at::tanh(x.matmul(experts[i]));
      }
      group->barrier()->wait();
      const auto begin = std::chrono::steady_clock::now();
      x.sum().backward();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      zero.step();
      if (group->getRank() == 0) seconds.push_back(took.count());
    }
  });
  std::nth_element(seconds.begin(), seconds.begin() + 3, seconds.end());
  return seconds[3];
}

TEST(Experts, ThatDifferBetweenRanksAreNotWaitedFor) {
  for (auto exchange : {ExchangeKind::kSharedMemory, ExchangeKind::kPairwise}) {
    const double same = backward_seconds(exchange, false);
    const double different = backward_seconds(exchange, true);
    // Half as much is computed; 20 hooks that wait 50 ms each would take a second.
    EXPECT_LT(different, 5 * same + 0.05);
  }
}

TEST(ParamGroups, WithParametersTakenOutOrPutInAreAnErrorOnAll) {
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  const std::vector<std::function<void(Groups&)>> changes = {
      [](Groups& groups) { groups.pop_back(); },
      [](Groups& groups) { groups.erase(groups.begin()); },
      [](Groups& groups) { groups[0].params().pop_back(); },
      [](Groups& groups) { groups[1].params().push_back(torch::zeros({3})); },
      [](Groups& groups) { std::swap(groups[0].params()[0], groups[0].params()[1]); },
      [](Groups& groups) {  // over the border, so that their order stays
        auto& next = groups[1].params();
        next.insert(next.begin(), groups[0].params().back());
        groups[0].params().pop_back();
      },
  };
  for (int stage : {1, 2}) {
    for (const auto& change : changes) {
      for (bool on_one_rank : {false, true}) {
        run_ranks(
            2,
            [&](const ProcessGroupPtr& group) {
              const auto params = make_params();
              const std::vector<at::Tensor> first(params.begin(), params.begin() + 2),
                  rest(params.begin() + 2, params.end());
              ZeroRedundancyOptimizer zero(Groups{{first}, {rest}}, torch::optim::SGDOptions(1e-2),
                                           ZeroOptions().stage(stage).process_group(group));
              iterate(zero, params);
              EXPECT_TRUE(zero.state().empty());  // docs/limitations.md
              if (!on_one_rank || group->getRank() == 1) change(zero.param_groups());
              backward(params);
              const auto message = error_of<c10::Error>([&] { zero.step(); });
              expect_names(message, "to keep the parameters that they were given");
            },
            std::chrono::seconds(60), std::chrono::seconds(10));
      }
    }
  }
}

// tests/python/traps/test_passes_without_synchronization.py has the other cases.
TEST(NoSync, ChangesBesideTheSumOfTheLastStepAreAnErrorOnAll) {
  for (auto exchange : kExchanges) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      const auto params = make_params();
      ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                   ZeroOptions().stage(2).exchange(exchange).process_group(group));
      iterate(zero, params);
      {
        const auto guard = zero.no_sync();
        backward(params);
      }
      if (group->getRank() == 1) params[1].mutable_grad().mul_(0.5);
      backward(params);
      const auto message = error_of([&] { zero.step(); });
      expect_names(message, "got a change to that of parameter 1");
      iterate(zero, params);  // zero_grad() and on
    });
  }
}

TEST(OverlapForward, ClippingWorksForARankWithoutABatch) {
  for (auto exchange : kExchanges) {
    for (bool by_value : {false, true}) {
      run_ranks(
          2,
          [&](const ProcessGroupPtr& group) {
            const auto params = make_params();
            ZeroRedundancyOptimizer zero(
                params, torch::optim::SGDOptions(1e-2),
                ZeroOptions().stage(2).exchange(exchange).overlap_forward(true).process_group(
                    group));
            for (int step = 0; step < 4; ++step) {
              if (step % 2 != group->getRank()) {
                zero.wait();
                backward(params);
              }
              if (by_value) {
                zero.clip_grad_value_(0.1);
              } else {
                EXPECT_GT(zero.clip_grad_norm_(0.1), 0);
              }
              zero.step();
              zero.zero_grad();
            }
            zero.wait();
          },
          std::chrono::seconds(60), std::chrono::seconds(10));
    }
  }
}

TEST(Closure, IsTheOnlyRoundOfItsStep) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto options =
        ZeroOptions().stage(2).exchange(ExchangeKind::kPairwise).process_group(group);
    const auto params = make_params(), others = make_params();
    ZeroRedundancyOptimizer with(params, torch::optim::SGDOptions(1e-2), options);
    ZeroRedundancyOptimizer without(others, torch::optim::SGDOptions(1e-2), options);
    for (int step = 0; step < 3; ++step) {
      with.step([&] {
        with.zero_grad();
        backward(params);
        return torch::ones({});
      });
      without.zero_grad();
      backward(others);
      without.step();
    }
    test::expect_equal(params, others);
    EXPECT_EQ(with.engine().traffic().bytes_sent, without.engine().traffic().bytes_sent);
  });
}

TEST(Consolidating, AnErrorOnOneRankIsAnErrorOnAll) {
  run_ranks(
      3,
      [](const ProcessGroupPtr& group) {
        auto local = local_optimizer(torch::optim::AdamOptions(1e-2));
        if (group->getRank() == 1) {
          local.read_state = [](const torch::optim::OptimizerParamState&) -> NamedValues {
            throw std::runtime_error("cannot be saved");
          };
        }
        const auto params = make_params();
        ZeroRedundancyOptimizer zero(params, local, ZeroOptions().process_group(group));
        test::set_gradients(params, 0);
        zero.step();
        const auto message = error_of<std::exception>([&] { zero.consolidate_state_dict(0); });
        EXPECT_NE(message.find("cannot be saved"), std::string::npos) << message;
      },
      std::chrono::seconds(60), std::chrono::seconds(10));
}

class PickySGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    if (closure) closure();
    TORCH_CHECK(!refuses, "not today");
    return SGD::step();
  }
  static thread_local bool refuses;
};
thread_local bool PickySGD::refuses = false;

LocalOptimizer picky_sgd() {
  auto local = local_optimizer(torch::optim::SGDOptions(1e-2));
  local.make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<PickySGD>(std::move(groups), torch::optim::SGDOptions(1e-2));
  };
  return local;
}

// The update throws on rank 1 in `step`; `hear` is where the others throw, within seconds.
void expect_failure_everywhere(const ProcessGroupPtr& group, const std::function<void()>& step,
                               const std::function<void()>& hear) {
  step();
  PickySGD::refuses = group->getRank() == 1;
  if (group->getRank() == 1) {
    EXPECT_TRUE(error_of(step).starts_with("not today"));
    hear();
  } else {
    step();
    expect_names(error_of(hear), "rank 1 failed in its update with: not today");
  }
  PickySGD::refuses = false;
  group->barrier()->wait();
  step();
}

void expect_same_everywhere(const ProcessGroupPtr& group, const Tensors& params) {
  for (const auto& param : params) {
    Tensors whole{param.detach().clone()};
    group->broadcast(whole, {})->wait();
    EXPECT_TRUE(at::equal(whole[0], param));
  }
}

TEST(Step, AnUpdateThatThrowsOnOneRankIsAnErrorOnAllInThatStep) {
  for (const auto exchange : kExchanges) {
    for (const auto sharding : kShardings) {
      for (int stage : {1, 2}) {
        SCOPED_TRACE(c10::str("exchange ", static_cast<int>(exchange), ", stage ", stage));
        run_ranks(
            3,
            [&](const ProcessGroupPtr& group) {
              const auto params = make_params();
              ZeroRedundancyOptimizer zero(
                  params, picky_sgd(),
                  ZeroOptions().stage(stage).sharding(sharding).exchange(exchange).process_group(
                      group));
              const auto step = [&] { iterate(zero, params); };
              step();
              PickySGD::refuses = group->getRank() == 1;
              const auto message = error_of(step);
              PickySGD::refuses = false;
              EXPECT_NE(message.find("not today"), std::string::npos) << message;
              if (group->getRank() != 1) expect_names(message, "rank 1 failed in its update");
              step();
              expect_same_everywhere(group, params);
            },
            std::chrono::seconds(60), std::chrono::seconds(10));
      }
    }
  }
}

TEST(Step, AnUpdateThatThrowsIsHeardWithSharedParameters) {
  run_ranks(
      2,
      [&](const ProcessGroupPtr& group) {
        const auto params = make_params();
        ZeroRedundancyOptimizer zero(
            params, picky_sgd(),
            ZeroOptions().stage(2).share_parameters(true).process_group(group));
        const auto step = [&] { iterate(zero, params); };
        step();
        PickySGD::refuses = group->getRank() == 1;
        EXPECT_NE(error_of(step).find("not today"), std::string::npos);
        PickySGD::refuses = false;
        step();
      },
      std::chrono::seconds(60), std::chrono::seconds(10));
}

TEST(Step, AnUpdateThatThrowsIsHeardWhenParametersAreWaitedFor) {
  for (const auto exchange : kExchanges) {
    run_ranks(
        2,
        [&](const ProcessGroupPtr& group) {
          const auto params = make_params();
          ZeroRedundancyOptimizer zero(
              params, picky_sgd(),
              ZeroOptions().stage(2).overlap_forward(true).exchange(exchange).process_group(group));
          const auto step = [&] {
            zero.wait();  // before the forward pass reads parameters
            iterate(zero, params);
          };
          expect_failure_everywhere(group, step, [&] { zero.wait(); });
          zero.wait();
          expect_same_everywhere(group, params);
        },
        std::chrono::seconds(60), std::chrono::seconds(10));
  }
}

TEST(Step, AnUpdateInsideTheBackwardPassThatThrowsIsAnErrorOnAll) {
  for (const auto exchange : kExchanges) {
    for (const auto hook : {hook_with_zero_step, hook_with_zero_step_interleaved}) {
      run_ranks(
          2,
          [&](const ProcessGroupPtr& group) {
            test::Net net(1);
            DistributedDataParallel<test::Net> ddp(
                net, DistributedDataParallelOptions().process_group(group).bucket_cap_mb(1e-4));
            ZeroRedundancyOptimizer zero(
                net->parameters(), picky_sgd(),
                ZeroOptions().overlap_with_ddp(true).exchange(exchange).process_group(group));
            ddp.register_comm_hook(hook(allreduce_hook(group), ddp, zero, false));
            const auto step = [&] {
              ddp.forward(test::input_of(group->getRank(), 0)).square().sum().backward();
              zero.wait();
            };
            step();
            PickySGD::refuses = group->getRank() == 1;
            const auto message = error_of(step);
            PickySGD::refuses = false;
            EXPECT_NE(message.find("not today"), std::string::npos) << message;
            step();
            expect_same_everywhere(group, net->parameters());
          },
          std::chrono::seconds(60), std::chrono::seconds(10));
    }
  }
}

// An optimizer that looks at the loss twice in a step.
class TwiceSGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    if (!closure) return SGD::step();
    closure();
    SGD::step();
    return closure();
  }
};

TEST(Step, ASecondClosureThatThrowsOnOneRankIsAnErrorOnAll) {
  for (int stage : {1, 2}) {
    run_ranks(
        2,
        [&](const ProcessGroupPtr& group) {
          auto local = local_optimizer(torch::optim::SGDOptions(1e-2));
          local.make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
            return std::make_unique<TwiceSGD>(std::move(groups), torch::optim::SGDOptions(1e-2));
          };
          const auto params = make_params();
          ZeroRedundancyOptimizer zero(params, local,
                                       ZeroOptions().stage(stage).process_group(group));
          int calls = 0;
          const auto message = error_of([&] {
            zero.step([&] {
              TORCH_CHECK(++calls < 2 || group->getRank() == 0, "once is enough");
              zero.zero_grad();
              backward(params);
              return torch::ones({});
            });
          });
          EXPECT_NE(message.find("once is enough"), std::string::npos) << message;
        },
        std::chrono::seconds(60), std::chrono::seconds(10));
  }
}

TEST(Step, AClosureThatThrowsOnOneRankIsAnErrorOnAll) {
  for (int stage : {1, 2}) {
    run_ranks(
        2,
        [&](const ProcessGroupPtr& group) {
          const auto params = make_params();
          ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2),
                                       ZeroOptions().stage(stage).process_group(group));
          const auto message = error_of([&] {
            zero.step([&] {
              TORCH_CHECK(group->getRank() == 0, "no batch for you");
              backward(params);
              return torch::ones({});
            });
          });
          EXPECT_NE(message.find("no batch for you"), std::string::npos) << message;
        },
        std::chrono::seconds(60), std::chrono::seconds(10));
  }
}

// Room for shared memory runs out when the second group is added, and is there again later.
TEST(AddParamGroup, ThatFailsAddsNothingAndCanBeTriedAgain) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit unlimited{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  run_ranks(
      2,
      [&](const ProcessGroupPtr& group) {
        const auto params = make_params();
        const auto more = torch::ones({1 << 22}).requires_grad_();
        ZeroRedundancyOptimizer zero(
            Tensors(params), torch::optim::SGDOptions(1e-2),
            ZeroOptions().stage(2).share_parameters(true).process_group(group));
        const auto step = [&](const Tensors& all) { iterate(zero, all); };
        step(params);
        for (int attempt = 0; attempt < 2; ++attempt) {
          group->barrier()->wait();
          rlimit small = unlimited;
          small.rlim_cur = 1 << 20;
          if (group->getRank() == 0) setrlimit(RLIMIT_FSIZE, &small);
          group->barrier()->wait();
          const auto message = error_of<std::exception>(
              [&] { zero.add_param_group(torch::optim::OptimizerParamGroup({more})); });
          EXPECT_NE(message.find("expected room for"), std::string::npos) << message;
          EXPECT_EQ(zero.param_groups().size(), 1u);
          EXPECT_EQ(zero.engine().param_count(), 3);
          group->barrier()->wait();
          if (group->getRank() == 0) setrlimit(RLIMIT_FSIZE, &unlimited);
          group->barrier()->wait();
          step(params);
        }
        zero.add_param_group(torch::optim::OptimizerParamGroup({more}));
        Tensors all = params;
        all.push_back(more);
        step(all);

        const auto plain_params = make_params();
        const auto plain_more = torch::ones({1 << 22}).requires_grad_();
        torch::optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-2));
        for (int step = 0; step < 4; ++step) {
          plain.zero_grad();
          if (step == 3) plain.add_param_group(torch::optim::OptimizerParamGroup({plain_more}));
          backward(plain_params);
          if (step == 3) backward({plain_more});
          plain.step();
        }
        test::expect_equal(params, plain_params);
        test::expect_equal(Tensors{more}, Tensors{plain_more});
      },
      std::chrono::seconds(60), std::chrono::seconds(20));
}

TEST(Construction, AnOptimizerThatCannotBeMadeOnOneRankIsAnErrorOnAll) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto options = ZeroOptions().process_group(group);
    auto local = local_optimizer(torch::optim::SGDOptions(1e-2));
    const auto make = local.make;
    local.make = [make, rank = group->getRank()](auto groups) {
      TORCH_CHECK(rank != 1, "not on this rank");
      return make(std::move(groups));
    };
    const auto message = error_of<std::exception>(
        [&] { ZeroRedundancyOptimizer zero(make_params(), local, options); });
    EXPECT_NE(message.find("not on this rank"), std::string::npos) << message;
    const auto params = make_params();
    ZeroRedundancyOptimizer zero(Tensors(params), torch::optim::SGDOptions(1e-2), options);
    iterate(zero, params);
  });
}

TEST(Construction, OptionsThatAreWrongOnOneRankAreAnErrorOnAll) {
  const std::vector<std::function<void(ZeroOptions&)>> mistakes{
      [](ZeroOptions& options) { options.stage(3); },
      [](ZeroOptions& options) { options.bucket_cap_mb(-1); },
      [](ZeroOptions& options) { options.master_dtype(at::kDouble); },
      [](ZeroOptions& options) { options.stage(2).gradient_dtype(at::kInt); },
      [](ZeroOptions& options) { options.stage(2).overlap_with_ddp(true); },
  };
  run_ranks(
      2,
      [&](const ProcessGroupPtr& group) {
        const torch::optim::SGDOptions sgd(1e-2);
        for (size_t i = 0; i < mistakes.size(); ++i) {
          auto options = ZeroOptions().process_group(group);
          if (group->getRank() == 1) mistakes[i](options);
          EXPECT_NE(error_of<c10::ValueError>(
                        [&] { ZeroRedundancyOptimizer zero(make_params(), sgd, options); }),
                    "")
              << i;
        }
        const auto params = make_params();
        ZeroRedundancyOptimizer zero(Tensors(params), sgd, ZeroOptions().process_group(group));
        iterate(zero, params);
      },
      std::chrono::seconds(60), std::chrono::seconds(20));
}

TEST(Construction, ALocalOptimizerWithoutFunctionsIsRefused) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    EXPECT_THROW(ZeroRedundancyOptimizer(make_params(), LocalOptimizer{},
                                         ZeroOptions().process_group(group)),
                 c10::ValueError);
  });
}

TEST(Construction, InInferenceModeTrainsAsOutsideIt) {
  for (int stage : {1, 2}) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      for (bool view : {false, true}) {
        run_ranks(2, [&](const ProcessGroupPtr& group) {
          const auto options = ZeroOptions()
                                   .process_group(group)
                                   .stage(stage)
                                   .sharding(sharding)
                                   .parameters_as_bucket_view(view);
          const torch::optim::AdamOptions adam(1e-2);
          const auto params = make_params(), expected = make_params();
          std::unique_ptr<ZeroRedundancyOptimizer> zero;
          {
            const c10::InferenceMode on;
            zero = std::make_unique<ZeroRedundancyOptimizer>(Tensors(params), adam, options);
          }
          ZeroRedundancyOptimizer other(Tensors(expected), adam, options);
          for (int step = 0; step < 3; ++step) {
            iterate(*zero, params);
            iterate(other, expected);
          }
          test::expect_equal(params, expected, c10::str(stage, " ", view));
        });
      }
    }
  }
}

TEST(AddParamGroup, AParameterListedTwiceIsAWarning) {
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    const auto params = make_params();
    test::Warnings warnings;
    ZeroRedundancyOptimizer zero(Tensors{params[0], params[1], params[0]},
                                 torch::optim::SGDOptions(1e-2),
                                 ZeroOptions().process_group(group));
    EXPECT_EQ(zero.param_groups()[0].params().size(), 2u);
    EXPECT_TRUE(warnings.any("param group 0 lists 1 parameters more than once"));
    zero.add_param_group(torch::optim::OptimizerParamGroup({params[2]}));
    EXPECT_EQ(warnings.messages.size(), 1u);
  });
}

// -- module= --------------------------------------------------------------------------------------

struct Net : torch::nn::Module {
  Net() {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4)));
    frozen = register_parameter("frozen", torch::randn({4}), /*requires_grad=*/false);
    register_buffer("own", torch::randn({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x) + frozen; }
  torch::nn::Sequential layers{nullptr};
  at::Tensor frozen;
};

TEST(Module, BuffersAreRankZerosBeforeEachForward) {
  for (const bool broadcasts : {true, false}) {
    run_ranks(3, [&](const ProcessGroupPtr& group) {
      torch::manual_seed(group->getRank());
      const auto net = std::make_shared<Net>();
      ZeroRedundancyOptimizer zero(
          net->layers->parameters(), torch::optim::SGDOptions(1e-1),
          ZeroOptions().stage(2).module(net).broadcast_buffers(broadcasts).process_group(group));
      expect_same_everywhere(group, net->buffers());
      expect_same_everywhere(group, net->parameters());
      for (int step = 0; step < 3; ++step) {
        zero.zero_grad();
        net->forward(torch::randn({6, 5}) * (1 + group->getRank())).square().sum().backward();
        Tensors mean{net->buffers()[1].clone()};
        group->broadcast(mean, {})->wait();
        zero.step();
        expect_same_everywhere(group, net->parameters());
        if (broadcasts) {
          expect_same_everywhere(group, net->buffers());
          EXPECT_TRUE(at::equal(net->buffers()[1], mean[0]));
        } else if (group->getRank() > 0) {
          EXPECT_FALSE(at::equal(net->buffers()[1], mean[0]));
        }
      }
    });
  }
}

TEST(Module, NamesAreInErrorsAndCheckpoints) {
  const test::Folder folder;
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto net = std::make_shared<Net>();
    ZeroRedundancyOptimizer zero(net->layers->parameters(), torch::optim::SGDOptions(1e-1),
                                 ZeroOptions().stage(2).module(net).process_group(group));
    zero.save_checkpoint(folder / "c");
    EXPECT_EQ(Checkpoint(folder / "c").index().parameters[1].name, "layers.0.bias");
    const auto bias = net->layers->parameters()[1];
    apply(kToDouble, bias);
    expect_names(error_of([&] { zero.step(); }), "expected parameter 1 (layers.0.bias) to stay");
  });
}

TEST(Module, IsRefusedWhereItDoesNotFit) {
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto net = std::make_shared<Net>();
    const auto make = [&](int stage) {
      ZeroRedundancyOptimizer(net->layers->parameters(), torch::optim::SGDOptions(1e-1),
                              ZeroOptions().stage(stage).module(net).process_group(group));
    };
    EXPECT_NE(error_of([&] { make(1); }).find("expected stage 2 with module"), std::string::npos);
    if (group->getRank() == 1) net->register_buffer("another", torch::zeros({2}));
    expect_names(error_of([&] { make(2); }), "expected the same on every rank");
  });
}

}  // namespace
}  // namespace shardstep::traps
