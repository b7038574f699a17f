#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/ddp_support.h"
#include "support/torch.h"

namespace shardstep::test {
namespace {

using Options = DistributedDataParallelOptions;

// Uneven in every way: rank 0 first or last, a rank without any, all the same.
std::vector<std::vector<int>> uneven_inputs(int world) {
  if (world == 1) return {{0}, {3}};
  if (world == 2) return {{3, 6}, {6, 3}, {0, 4}, {4, 0}, {3, 3}};
  if (world == 3) return {{1, 5, 3}, {5, 0, 2}};
  return {{4, 1, 0, 6}};
}

constexpr double kMaxNorm = 0.01;  // far less than the gradients of Net have

// Any number of collective calls of a kind of its own.
class Counter : public Joinable {
 public:
  explicit Counter(ProcessGroupPtr group, at::Device device = test::device())
      : group_(std::move(group)), device_(device) {}

  // Adds up over the ranks that still call it.
  int64_t add(int64_t value) {
    Join::notify_join_context(*this);
    return sum(value);
  }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    return std::make_unique<Hook>(*this);
  }
  at::Device join_device() const override { return device_; }
  ProcessGroupPtr join_process_group() const override { return group_; }

  int shadowed = 0;
  std::vector<bool> ends;

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(Counter& counter) : counter_(counter) {}
    void main_hook() override {
      ++counter_.shadowed;
      counter_.sum(0);
    }
    void post_hook(bool is_last_joiner) override { counter_.ends.push_back(is_last_joiner); }

   private:
    Counter& counter_;
  };

  int64_t sum(int64_t value) {
    std::vector<at::Tensor> tensors{on_device(at::full({1}, value, at::kLong))};
    group_->allreduce(tensors)->wait();
    return tensors[0].item<int64_t>();
  }

  ProcessGroupPtr group_;
  at::Device device_;
};

TEST(JoinTest, JoinableOfAUser) {
  for (int world : {1, 2, 3, 4}) {
    for (const auto& inputs : uneven_inputs(world)) {
      run_ranks(world, [&](const ProcessGroupPtr& group) {
        const int rank = group->getRank();
        const int most = *std::max_element(inputs.begin(), inputs.end());
        Counter one(group), two(group);
        Join join({one, two});
        for (int step = 0; step < inputs[rank]; ++step) {
          int64_t active = 0;
          for (int count : inputs) active += step < count;
          // Neither in the list's order, nor equally often.
          EXPECT_EQ(two.add(1), active);
          EXPECT_EQ(one.add(10), 10 * active);
          EXPECT_EQ(two.add(100), 100 * active);
        }
        join.finish();
        EXPECT_EQ(one.shadowed, most - inputs[rank]);
        EXPECT_EQ(two.shadowed, 2 * (most - inputs[rank]));
        EXPECT_EQ(one.ends, std::vector<bool>{inputs[rank] == most});
      });
    }
  }
}

TEST(JoinTest, DdpWithAPlainOptimizer) {
  for (int world : {1, 2, 3, 4}) {
    for (const auto& inputs : uneven_inputs(world)) {
      for (bool divide_by_active : {false, true}) {
        const auto expected = reference(inputs, make_adam, divide_by_active);
        for (bool view : {false, true}) {
          for (bool unused : {false, true}) {
            run_ranks(world, [&](const ProcessGroupPtr& group) {
              DistributedDataParallel ddp(Net(), Options()
                                                     .process_group(group)
                                                     .bucket_cap_mb(0.0001)
                                                     .gradient_as_bucket_view(view)
                                                     .find_unused_parameters(unused));
              auto optimizer = make_adam(ddp.parameters());
              Join join({ddp}, JoinOptions().divide_by_initial_world_size(!divide_by_active));
              for (int step = 0; step < inputs[group->getRank()]; ++step) {
                optimizer->zero_grad();
                loss_of(ddp(input_of(group->getRank(), step))).backward();
                optimizer->step();
              }
              join.finish();
              expect_parity(ddp.parameters(), expected, world);
            });
          }
        }
      }
    }
  }
}

TEST(JoinTest, DdpAndZeroInAnyOrder) {
  for (int world : {1, 2, 3, 4}) {
    for (const auto& inputs : uneven_inputs(world)) {
      const auto expected = reference(inputs);
      for (const auto sharding : {Sharding::kParameter, Sharding::kElement}) {
        for (bool zero_first : {false, true}) {
          for (bool view : {false, true}) {
            run_ranks(world, [&](const ProcessGroupPtr& group) {
              DistributedDataParallel ddp(
                  Net(), Options().process_group(group).gradient_as_bucket_view(view));
              ZeroRedundancyOptimizer optimizer(
                  ddp.parameters(), torch::optim::AdamOptions(0.01),
                  ZeroOptions().process_group(group).sharding(sharding));
              Joinables joinables{ddp, optimizer};
              if (zero_first) joinables = {optimizer, ddp};
              join_uneven(joinables, {}, [&] {
                for (int step = 0; step < inputs[group->getRank()]; ++step) {
                  optimizer.zero_grad();
                  loss_of(ddp(input_of(group->getRank(), step))).backward();
                  optimizer.step();
                }
              });
              expect_parity(ddp.parameters(), expected, world);
            });
          }
        }
      }
    }
  }
}

// A joined rank learns the gradients and updates what it owns: no rank's parameters wait for the
// end.
TEST(JoinTest, JoinedRankHasTheGradientsOfTheOthers) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    for (const bool rebuilt : {false, true}) {
      DistributedDataParallel ddp(Net(), Options().process_group(group).bucket_cap_mb(0.0001));
      if (rebuilt) {
        for (int step = 0; step < 2; ++step) loss_of(ddp(input_of(0, step))).backward();
      }
      ddp.zero_grad();
      join_uneven({ddp}, {}, [&] {
        if (group->getRank() == 0) return;
        for (int step = 0; step < 3; ++step) {
          ddp.zero_grad();
          loss_of(ddp(input_of(1, step))).backward();
        }
      });
      Net net;
      (loss_of(net(input_of(1, 2))) / 2).backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(same(ddp.parameters()[i].grad(), net->parameters()[i].grad()));
      }
    }
  });
}

struct MaybeImpl : torch::nn::Module {
  MaybeImpl()
      : always(register_module("always", Linear(6, 3))),
        never(register_module("never", Linear(6, 3))),
        at_times(register_module("at_times", Linear(6, 3))) {
    fill(*this, 2);
  }
  at::Tensor forward(const at::Tensor& input, bool all) {
    return all ? always(input) + at_times(input) : always(input);
  }
  Linear always, never, at_times;
};
TORCH_MODULE(Maybe);

TEST(JoinTest, UnusedParametersAreNotUpdatedByAJoinedOwner) {
  for (int world : {2, 3}) {
    run_ranks(world, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      DistributedDataParallel ddp(Maybe(),
                                  Options().process_group(group).find_unused_parameters(true));
      ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(0.01),
                                        ZeroOptions().process_group(group));
      Maybe alone;
      auto plain = make_adam(alone->parameters());
      const auto uses = [](int step) { return step % 2 == 0; };
      join_uneven({ddp, optimizer}, {}, [&] {
        for (int step = 0; step < (rank == world - 1 ? 5 : 1); ++step) {
          optimizer.zero_grad();
          loss_of(ddp(input_of(rank, step), uses(step))).backward();
          optimizer.step();
        }
      });
      for (int step = 0; step < 5; ++step) {
        plain->zero_grad();
        for (int r = 0; r < world; ++r) {
          if (step >= (r == world - 1 ? 5 : 1)) continue;
          (loss_of(alone(input_of(r, step), uses(step))) / world).backward();
        }
        plain->step();
      }
      expect_parity(ddp.parameters(), alone->parameters(), 3);
    });
  }
}

TEST(JoinTest, StaticGraphs) {
  const std::vector<int> inputs{2, 5, 1};
  const auto expected = reference(inputs);
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Net(), Options().process_group(group).static_graph(true));
    ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(0.01),
                                      ZeroOptions().process_group(group));
    join_uneven({ddp, optimizer}, {}, [&] {
      for (int step = 0; step < inputs[group->getRank()]; ++step) {
        optimizer.zero_grad();
        loss_of(ddp(input_of(group->getRank(), step))).backward();
        optimizer.step();
      }
    });
    expect_parity(ddp.parameters(), expected, 3);
    // The first iteration shows the graph; a rank that has none is an error on every rank.
    DistributedDataParallel other(Net(), Options().process_group(group).static_graph(true));
    expect_contains(error_of([&] {
                      join_uneven({other}, {}, [&] {
                        if (group->getRank() > 0) loss_of(other(input_of(0, 0))).backward();
                      });
                    }),
                    "static graph");
  });
}

struct CountsForwardsImpl : torch::nn::Module {
  CountsForwardsImpl() {
    seen = register_buffer("seen", zeros({1}));
    weight = register_parameter("weight", ones({3}));
  }
  at::Tensor forward(const at::Tensor& input) {
    torch::NoGradGuard no_grad;
    seen += 1;
    torch::AutoGradMode grad(true);
    return input * weight;
  }
  at::Tensor seen, weight;
};
TORCH_MODULE(CountsForwards);

TEST(JoinTest, BuffersComeFromARankThatHasInputs) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (const auto& inputs : std::vector<std::vector<int>>{{1, 4, 6}, {6, 2, 0}}) {
      DistributedDataParallel ddp(CountsForwards(), Options().process_group(group));
      join_uneven({ddp}, {}, [&] {
        for (int step = 0; step < inputs[rank]; ++step) {
          ddp(ones({3})).sum().backward();
        }
      });
      EXPECT_EQ(ddp.module()->seen.item<float>(), 6);
    }
  });
}

TEST(JoinTest, AccumulationAndEvaluationInside) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    DistributedDataParallel ddp(Net(), Options().process_group(group));
    ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(0.01),
                                      ZeroOptions().process_group(group));
    const auto inputs = [](int of) { return of == 0 ? 2 : 5; };
    join_uneven({optimizer, ddp}, {}, [&] {
      for (int step = 0; step < inputs(rank); ++step) {
        optimizer.zero_grad();
        {
          const auto guard = ddp.no_sync();
          loss_of(ddp(input_of(rank, 100 + step))).backward();
        }
        loss_of(ddp(input_of(rank, step))).backward();
        optimizer.step();
        torch::NoGradGuard no_grad;
        ddp(input_of(rank, step));
      }
    });
    Net net;
    auto plain = make_adam(net->parameters());
    for (int step = 0; step < 5; ++step) {
      plain->zero_grad();
      for (int r : {0, 1}) {
        if (step >= inputs(r)) continue;
        (loss_of(net(input_of(r, 100 + step))) / 2).backward();
        (loss_of(net(input_of(r, step))) / 2).backward();
      }
      plain->step();
    }
    expect_parity(ddp.parameters(), net->parameters(), 3);
  });
}

TEST(JoinTest, ClosuresOfZeroInside) {
  const std::vector<int> inputs{1, 4};
  const auto expected = reference(inputs);
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Net(), Options().process_group(group));
    ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(0.01),
                                      ZeroOptions().process_group(group));
    join_uneven({ddp, optimizer}, {}, [&] {
      for (int step = 0; step < inputs[group->getRank()]; ++step) {
        optimizer.step([&] {
          optimizer.zero_grad();
          auto loss = loss_of(ddp(input_of(group->getRank(), step)));
          loss.backward();
          return loss;
        });
      }
    });
    expect_equal(ddp.parameters(), expected);
  });
}

// Several epochs; the last one even, outside of a Join.
TEST(JoinTest, EpochAfterEpoch) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (bool divide_by_initial : {false, true}) {
      DistributedDataParallel ddp(Net(), Options().process_group(group).bucket_cap_mb(0.0001));
      auto optimizer = std::make_unique<torch::optim::SGD>(ddp.parameters(), 0.1);
      Net net;
      torch::optim::SGD plain(net->parameters(), 0.1);
      const auto train = [&](int first, std::array<int, 2> counts) {
        for (int step = first; step < first + counts[rank]; ++step) {
          optimizer->zero_grad();
          loss_of(ddp(input_of(rank, step))).backward();
          optimizer->step();
        }
        for (int step = first; step < first + std::max(counts[0], counts[1]); ++step) {
          const int active = (step < first + counts[0]) + (step < first + counts[1]);
          plain.zero_grad();
          for (int r : {0, 1}) {
            if (step >= first + counts[r]) continue;
            (loss_of(net(input_of(r, step))) / (divide_by_initial ? 2 : active)).backward();
          }
          plain.step();
        }
      };
      const auto options = JoinOptions().divide_by_initial_world_size(divide_by_initial);
      join_uneven({ddp}, options, [&] { train(0, {0, 2}); });
      join_uneven({ddp}, options, [&] { train(10, {3, 1}); });
      train(20, {2, 2});
      join_uneven({ddp}, options, [&] { train(30, {1, 2}); });
      train(40, {2, 2});
      expect_parity(ddp.parameters(), net->parameters(), 3);
    }
  });
}

// Puts the mean of all ranks' gradients into the parameters: the smallest stand-in for DDP.
class Averager : public Joinable {
 public:
  Averager(std::vector<at::Tensor> params, ProcessGroupPtr group)
      : params_(std::move(params)), group_(std::move(group)) {}
  void average() {
    Join::notify_join_context(*this);
    reduce();
  }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    struct Hook : JoinHook {
      explicit Hook(Averager& of) : averager(of) {}
      void main_hook() override {
        for (auto& param : averager.params_) param.mutable_grad() = at::zeros_like(param);
        averager.reduce();
      }
      Averager& averager;
    };
    return std::make_unique<Hook>(*this);
  }
  at::Device join_device() const override { return device(); }
  ProcessGroupPtr join_process_group() const override { return group_; }

 private:
  void reduce() {
    for (auto& param : params_) {
      std::vector<at::Tensor> sum{param.grad().mul_(1.0 / group_->getSize())};
      group_->allreduce(sum)->wait();
    }
  }
  std::vector<at::Tensor> params_;
  ProcessGroupPtr group_;
};

TEST(JoinTest, ZeroWithAJoinableOfAUser) {
  for (int world : {2, 3, 4}) {
    for (const auto& inputs : uneven_inputs(world)) {
      const auto expected = reference(inputs);
      for (bool zero_first : {false, true}) {
        run_ranks(world, [&](const ProcessGroupPtr& group) {
          Net net;
          Averager averager(net->parameters(), group);
          ZeroRedundancyOptimizer optimizer(net->parameters(), torch::optim::AdamOptions(0.01),
                                            ZeroOptions().process_group(group));
          Join join(zero_first ? Joinables{optimizer, averager} : Joinables{averager, optimizer});
          for (int step = 0; step < inputs[group->getRank()]; ++step) {
            optimizer.zero_grad();
            loss_of(net(input_of(group->getRank(), step))).backward();
            averager.average();
            optimizer.step();
          }
          join.finish();
          expect_parity(net->parameters(), expected, world);
        });
      }
    }
  }
}

// A joined rank has what DDP left there, which nobody has unscaled or clipped.
TEST(JoinTest, JoinedRanksUpdateWithGradientsThatWereUnscaledOrClipped) {
  for (int world : {2, 3}) {
    for (const auto& inputs : uneven_inputs(world)) {
      for (bool scaled : {false, true}) {
        const auto make = [&](std::vector<at::Tensor> params) {
          return std::make_unique<torch::optim::SGD>(std::move(params), 0.125);
        };
        const auto expected = reference(inputs, make, false, scaled ? 0 : kMaxNorm);
        for (const auto sharding : {Sharding::kParameter, Sharding::kElement}) {
          run_ranks(world, [&](const ProcessGroupPtr& group) {
            DistributedDataParallel ddp(Net(), Options().process_group(group));
            ZeroRedundancyOptimizer optimizer(
                ddp.parameters(), torch::optim::SGDOptions(0.125),
                ZeroOptions().process_group(group).sharding(sharding));
            GradScaler scaler(GradScalerOptions().init_scale(1024).enabled(scaled));
            Join join({ddp, optimizer});
            for (int step = 0; step < inputs[group->getRank()]; ++step) {
              optimizer.zero_grad();
              scaler.scale(loss_of(ddp(input_of(group->getRank(), step)))).backward();
              if (!scaled) torch::nn::utils::clip_grad_norm_(ddp.parameters(), kMaxNorm);
              scaler.step(optimizer);
              scaler.update();
            }
            join.finish();
            expect_parity(ddp.parameters(), expected, world);
          });
        }
      }
    }
  }
}

TEST(JoinTest, ZeroAlone) {
  for (int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](const ProcessGroupPtr& group) {
      const auto own = make_params(), plain = make_params();
      ZeroRedundancyOptimizer optimizer(own, torch::optim::AdamOptions(0.01),
                                        ZeroOptions().process_group(group));
      auto alone = make_adam(plain);
      // The gradients of the first step stay where they are for those who join.
      set_gradients(own, 0);
      set_gradients(plain, 0);
      join_uneven({optimizer}, {}, [&] {
        for (int step = 0; step < group->getRank(); ++step) optimizer.step();
      });
      for (int step = 0; step < world - 1; ++step) alone->step();
      expect_equal(own, plain);
    });
  }
}

TEST(JoinTest, EarlyTerminationThrowsOnEveryRank) {
  for (int world : {2, 3, 4}) {
    run_ranks(world, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      const auto options = JoinOptions().throw_on_early_termination(true);
      DistributedDataParallel ddp(Net(), Options().process_group(group));
      ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(0.01),
                                        ZeroOptions().process_group(group));
      int done = 0;
      const auto train = [&](int count) {
        for (int step = 0; step < count; ++step, ++done) {
          optimizer.zero_grad();
          loss_of(ddp(input_of(rank, step))).backward();
          optimizer.step();
        }
      };
      // Even inputs are no reason to throw.
      join_uneven({ddp, optimizer}, options, [&] { train(2); });
      done = 0;
      expect_contains(error_of([&] {
                        join_uneven({optimizer, ddp}, options, [&] { train(rank == 1 ? 2 : 4); });
                      }),
                      "no more inputs");
      EXPECT_EQ(done, 2);
      // All ranks can continue afterwards.
      train(1);
    });
  }
}

TEST(JoinTest, WarnsOfSkew) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Warnings warnings;
    Counter counter(group);
    for (int steps : {1000, 1001}) {
      join_uneven({counter}, {}, [&] {
        if (group->getRank() == 1) {
          for (int step = 0; step < steps; ++step) counter.add(1);
        }
      });
      EXPECT_EQ(warnings.any("uneven inputs"), group->getRank() == 0 && steps > 1000);
    }
    EXPECT_LE(warnings.messages.size(), 1u);
  });
}

TEST(JoinTest, ExceptionsPassThroughWithoutCommunication) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Warnings warnings;
    Counter counter(group);
    if (group->getRank() == 0) {
      EXPECT_THROW(
          join_uneven({counter}, {}, [] { throw std::out_of_range("from the user's loop"); }),
          std::out_of_range);
      EXPECT_TRUE(warnings.messages.empty());
    }
    // Both ranks can continue at once: rank 0 sent nothing that could be mistaken for this.
    EXPECT_EQ(counter.add(1), 2);
  });
}

TEST(JoinTest, DisabledItDoesNothing) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Counter counter(group);
    join_uneven({counter}, JoinOptions().enable(false), [&] { counter.add(1); });
    EXPECT_EQ(counter.shadowed, 0);
    EXPECT_TRUE(counter.ends.empty());
  });
}

TEST(JoinTest, Misuse) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    const auto message = [](const Joinables& joinables) {
      return error_of<c10::ValueError>([&] { Join join(joinables); });
    };
    expect_contains(message({}), "at least one joinable");
    const auto other = make_process_group(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                          ProcessGroupOptions().backend("gloo"));
    Counter one(group), two(group), elsewhere(other), on_another(group, at::Device(at::kCUDA, 1));
    expect_contains(message({one, elsewhere}), "one process group");
    expect_contains(message({one, on_another}), "cuda:1");
    expect_contains(message({one, two, one}), "once");
    {
      Join join({one});
      expect_contains(message({two, one}), "no other Join");
      EXPECT_EQ(one.add(1), 1);
      join.finish();
      expect_contains(error_of([&] { join.finish(); }), "one call");
    }
    Warnings warnings;
    {
      Join forgotten({one, two});
    }
    EXPECT_TRUE(warnings.any("without finish()"));
    Join again({one, two});
    again.finish();
  });
}

}  // namespace
}  // namespace shardstep::test
