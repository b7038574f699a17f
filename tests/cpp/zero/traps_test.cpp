// What code that knows nothing of sharding does to a model and its optimizer: the plain result, or
// a clear error on every rank.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <limits>

#include "shard/shard_engine.h"
#include "shardstep/shardstep.h"
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

// One step, then the change, on all ranks or on rank 1 only; the next step is an error everywhere.
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
    zero.zero_grad();
    backward(params);
    zero.step();
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
              if (step % 2 != group->getRank()) zero.zero_grad();
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

// The other ranks finish their step, and hear of it in the next one.
TEST(Step, AnUpdateThatThrowsOnOneRankLeavesNobodyWaiting) {
  for (auto exchange : kExchanges) {
    for (int stage : {1, 2}) {
      run_ranks(
          2,
          [&](const ProcessGroupPtr& group) {
            auto local = local_optimizer(torch::optim::SGDOptions(1e-2));
            local.make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
              return std::make_unique<PickySGD>(std::move(groups), torch::optim::SGDOptions(1e-2));
            };
            const auto params = make_params();
            ZeroRedundancyOptimizer zero(
                params, local, ZeroOptions().stage(stage).exchange(exchange).process_group(group));
            const auto step = [&] {
              zero.zero_grad();
              backward(params);
              zero.step();
            };
            step();
            PickySGD::refuses = group->getRank() == 1;
            if (group->getRank() == 1) {
              EXPECT_NE(error_of(step).find("not today"), std::string::npos);
            } else {
              step();
            }
            PickySGD::refuses = false;
            EXPECT_NE(error_of(step).find("not today"), std::string::npos);
            step();
          },
          std::chrono::seconds(60), std::chrono::seconds(10));
    }
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

// Room for shared memory runs out when the second group is added.
TEST(AddParamGroup, ThatFailsAddsNothing) {
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
        backward(params);
        zero.step();
        group->barrier()->wait();
        rlimit small = unlimited;
        small.rlim_cur = 1 << 20;
        if (group->getRank() == 0) setrlimit(RLIMIT_FSIZE, &small);
        group->barrier()->wait();
        EXPECT_THROW(zero.add_param_group(torch::optim::OptimizerParamGroup({more})),
                     std::exception);
        EXPECT_EQ(zero.param_groups().size(), 1u);
        EXPECT_EQ(zero.engine().param_count(), 3);
        group->barrier()->wait();
        if (group->getRank() == 0) setrlimit(RLIMIT_FSIZE, &unlimited);
        group->barrier()->wait();
        // Ranks that ran out of shared memory cannot go on together, and say so.
        const auto message = error_of([&] {
          zero.zero_grad();
          backward(params);
          zero.step();
        });
        EXPECT_NE(message.find("expected room for"), std::string::npos) << message;
      },
      std::chrono::seconds(60), std::chrono::seconds(20));
}

}  // namespace
}  // namespace shardstep::traps
