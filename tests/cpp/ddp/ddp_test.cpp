#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "support/ddp_support.h"
#include "support/torch.h"

namespace shardstep::test {

using Options = DistributedDataParallelOptions;

// A user-defined type, and one that cannot be searched for tensors.
struct Output {
  at::Tensor logits;
  std::vector<at::Tensor> states;
  int64_t count = 0;
};
template <class Visit>
void visit_tensors(Output& output, Visit&& visit) {
  visit(output.logits);
  visit(output.states);
  visit(output.count);
}
struct Opaque {
  at::Tensor tensor;
};

namespace {

// Everything that two parts of a model need: a common one, and two that a call may leave out.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl()
      : stem(register_module("stem", Linear(6, 4))),
        left(register_module("left", Linear(4, 2))),
        right(register_module("right", Linear(4, 2))) {
    fill(*this, 5);
  }
  at::Tensor forward(const at::Tensor& input, bool use_left, bool use_right) {
    auto output = stem(input).sum(1, true);
    if (use_left) output = output + left(stem(input));
    if (use_right) output = output + right(stem(input));
    return output;
  }
  Linear stem, left, right;
};
TORCH_MODULE(Branches);

std::vector<at::Tensor> train(
    const ProcessGroupPtr& group, const Options& options, int steps,
    const std::function<void(DistributedDataParallelBase&)>& prepare = {}) {
  // Other numbers on other ranks, until rank 0's arrive.
  DistributedDataParallel ddp(Net(group->getRank() + 1), Options(options).process_group(group));
  if (prepare) prepare(ddp);
  auto optimizer = make_adam(ddp.parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    loss_of(ddp(input_of(group->getRank(), step))).backward();
    optimizer->step();
  }
  return clones(ddp.parameters());
}

TEST(DdpTest, EqualsOneProcessWithEveryOption) {
  for (int world : {1, 2, 3, 4}) {
    const auto expected = reference(std::vector<int>(world, 10));
    run_ranks(world, [&](const ProcessGroupPtr& group) {
      for (bool view : {false, true}) {
        for (bool fixed : {false, true}) {
          for (bool unused : {false, true}) {
            for (bool small : {false, true}) {
              auto options = Options()
                                 .gradient_as_bucket_view(view)
                                 .static_graph(fixed)
                                 .find_unused_parameters(unused);
              if (small) options.bucket_cap_mb(0.0001);
              expect_parity(train(group, options, 10), expected, world,
                            c10::str("world ", world, " view ", view, " static ", fixed, " unused ",
                                     unused, " small ", small));
            }
          }
        }
      }
    });
  }
}

TEST(DdpTest, EqualsOneProcessOnTheConcatenatedBatch) {
  for (int world : {1, 2, 3, 4}) {
    Net net;
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < world; ++rank) inputs.push_back(input_of(rank, 0));
    loss_of(net(torch::cat(inputs))).backward();
    run_ranks(world, [&](const ProcessGroupPtr& group) {
      DistributedDataParallel ddp(Net(), Options().process_group(group));
      loss_of(ddp(input_of(group->getRank(), 0))).backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        // Rows are summed in another order.
        EXPECT_TRUE(near(ddp.parameters()[i].grad(), net->parameters()[i].grad(), 1e-5, 1e-6));
      }
    });
  }
}

TEST(DdpTest, TakesHoldersPointersAndSequential) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel holder(Net(), Options().process_group(group));
    DistributedDataParallel pointer(std::make_shared<NetImpl>(), Options().process_group(group));
    DistributedDataParallel sequential(torch::nn::Sequential(Linear(6, 3), torch::nn::ReLU()),
                                       Options().process_group(group));
    const auto input = input_of(0, 0);
    EXPECT_TRUE(same(holder(input), pointer.forward(input)));
    EXPECT_EQ(sequential(input).sizes(), (std::vector<int64_t>{4, 3}));
    EXPECT_EQ(holder.module()->last->weight.size(0), 3);
    EXPECT_EQ(holder.named_parameters()["last.bias"].numel(), 3);
    holder.eval();
    EXPECT_FALSE(holder.module()->is_training());
  });
}

struct BuffersImpl : torch::nn::Module {
  explicit BuffersImpl(double value) {
    const auto full = [&](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
      return on_device(torch::full(sizes, value, dtype));
    };
    scale = register_buffer("scale", full({3}));
    count = register_buffer("count", full({}, at::kLong));
    weight = register_parameter("weight", full({3}));
    frozen = register_parameter("frozen", full({2}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& input) { return scale * weight * input; }
  at::Tensor scale, count, weight, frozen;
};
TORCH_MODULE(Buffers);

TEST(DdpTest, StartsWithParametersAndBuffersOfRankZero) {
  for (int world : {1, 2, 3, 4}) {
    run_ranks(world, [](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      DistributedDataParallel ddp(Buffers(7 + rank), Options().process_group(group));
      auto& module = *ddp.module();
      for (const auto& tensor : {module.scale, module.count, module.weight, module.frozen}) {
        EXPECT_TRUE(tensor.eq(7).all().item<bool>()) << tensor;
      }
      DistributedDataParallel apart(Buffers(7 + rank),
                                    Options().process_group(group).init_sync(false));
      EXPECT_TRUE(apart.module()->weight.eq(7 + rank).all().item<bool>());
    });
  }
}

TEST(DdpTest, BroadcastsBuffersBeforeForward) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (bool on : {false, true}) {
      DistributedDataParallel ddp(Buffers(1), Options().process_group(group).broadcast_buffers(on));
      const auto input = ones({3});
      const auto set = [&] {
        torch::NoGradGuard no_grad;
        ddp.module()->scale.fill_(10 + rank);
      };
      set();
      ddp(input).sum().backward();
      EXPECT_EQ(ddp.module()->scale[0].item<float>(), on ? 10 : 10 + rank);
      // Not after a forward that was not synchronised, as in torch.
      {
        const auto guard = ddp.no_sync();
        ddp(input).sum().backward();
      }
      set();
      ddp(input).sum().backward();
      EXPECT_EQ(ddp.module()->scale[0].item<float>(), 10 + rank);
    }
  });
}

TEST(DdpTest, BroadcastOfBuffersLeavesEarlierGraphsUsable) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Buffers(2), Options().process_group(group));
    const auto input = ones({3});
    // What the first forward saved of `scale` must count as unchanged.
    const auto loss = ddp(input).sum() + ddp(input).sum();
    loss.backward();
    EXPECT_EQ(ddp.module()->weight.grad()[0].item<float>(), 4);
  });
}

TEST(DdpTest, NoSyncAccumulatesAndTheNextBackwardReducesTheSum) {
  for (int world : {1, 2, 3, 4}) {
    for (bool view : {false, true}) {
      for (bool fixed : {false, true}) {
        Net net;
        for (int rank = 0; rank < world; ++rank) {
          for (int step = 0; step < 3; ++step) {
            (loss_of(net(input_of(rank, step))) / world).backward();
          }
        }
        run_ranks(world, [&](const ProcessGroupPtr& group) {
          const int rank = group->getRank();
          DistributedDataParallel ddp(
              Net(),
              Options().process_group(group).gradient_as_bucket_view(view).static_graph(fixed));
          for (int round = 0; round < 3; ++round) {
            ddp.zero_grad();
            {
              const auto guard = ddp.no_sync();
              for (int step : {0, 1}) loss_of(ddp(input_of(rank, step))).backward();
            }
            Net local;
            for (int step : {0, 1}) loss_of(local(input_of(rank, step))).backward();
            const auto what =
                c10::str("world ", world, " view ", view, " static ", fixed, " round ", round);
            EXPECT_TRUE(same(local->last->weight.grad(), ddp.module()->last->weight.grad()))
                << what;
            loss_of(ddp(input_of(rank, 2))).backward();
            for (size_t i = 0; i < net->parameters().size(); ++i) {
              EXPECT_TRUE(near(ddp.parameters()[i].grad(), net->parameters()[i].grad(), 1e-5, 1e-6))
                  << what << " parameter " << i;
            }
          }
        });
      }
    }
  }
}

TEST(DdpTest, NoSyncEndsWithItsScope) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Net(), Options().process_group(group));
    try {
      const auto outer = ddp.no_sync();
      {
        const auto inner = ddp.no_sync();
      }
      throw std::runtime_error("from the scope");
    } catch (const std::runtime_error&) {
    }
    loss_of(ddp(input_of(group->getRank(), 0))).backward();
    std::vector<at::Tensor> sum{ddp.module()->last->bias.grad().clone()};
    group->allreduce(sum)->wait();
    EXPECT_TRUE(same(sum[0], ddp.module()->last->bias.grad() * 2));
  });
}

TEST(DdpTest, SeveralBackwardPassesAddUp) {
  for (int world : {1, 2, 3}) {
    Net net;
    for (int rank = 0; rank < world; ++rank) {
      for (int step = 0; step < 3; ++step) {
        (loss_of(net(input_of(rank, step))) / world).backward();
      }
    }
    for (bool view : {false, true}) {
      run_ranks(world, [&](const ProcessGroupPtr& group) {
        DistributedDataParallel ddp(Net(),
                                    Options().process_group(group).gradient_as_bucket_view(view));
        // Each forward with its backward, then two forwards with one.
        loss_of(ddp(input_of(group->getRank(), 0))).backward();
        const auto one = loss_of(ddp(input_of(group->getRank(), 1)));
        const auto other = loss_of(ddp(input_of(group->getRank(), 2)));
        (one + other).backward();
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          EXPECT_TRUE(near(ddp.parameters()[i].grad(), net->parameters()[i].grad(), 1e-5, 1e-6));
        }
      });
    }
  }
}

// Which branches rank r takes in step s.
bool takes_left(int rank, int step) { return (rank + step) % 3 == 0; }

TEST(DdpTest, FindsUnusedParameters) {
  for (int world : {1, 2, 3, 4}) {
    for (bool view : {false, true}) {
      run_ranks(world, [&](const ProcessGroupPtr& group) {
        DistributedDataParallel ddp(
            Branches(),
            Options().process_group(group).find_unused_parameters(true).gradient_as_bucket_view(
                view));
        for (int step = 0; step < 6; ++step) {
          ddp.zero_grad();
          Branches all;
          bool anyone = false;
          for (int rank = 0; rank < world; ++rank) {
            anyone = anyone || takes_left(rank, step);
            (all(input_of(rank, step), takes_left(rank, step), false).sum() / world).backward();
          }
          ddp(input_of(group->getRank(), step), takes_left(group->getRank(), step), false)
              .sum()
              .backward();
          const auto got = ddp.parameters(), expected = all->parameters();
          for (size_t i = 0; i < got.size(); ++i) {
            ASSERT_EQ(got[i].grad().defined(), expected[i].grad().defined()) << i << " " << step;
            if (!expected[i].grad().defined()) continue;
            EXPECT_TRUE(near(got[i].grad(), expected[i].grad(), 1e-5, 1e-6));
          }
          EXPECT_EQ(ddp.module()->left->weight.grad().defined(), anyone);
          EXPECT_FALSE(ddp.module()->right->weight.grad().defined());
        }
      });
    }
  }
}

TEST(DdpTest, UnusedParametersAreAnErrorUnlessLookedFor) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Branches(), Options().process_group(group));
    ddp(input_of(0, 0), false, true).sum().backward();
    expect_contains(error_of([&] { ddp(input_of(0, 1), false, true); }), "find_unused_parameters");
  });
}

TEST(DdpTest, WhatAccumulatedIsReducedThoughTheLastGraphDoesNotHoldIt) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    DistributedDataParallel ddp(Branches(),
                                Options().process_group(group).find_unused_parameters(true));
    for (int round = 0; round < 2; ++round) {
      ddp.zero_grad();
      {
        const auto guard = ddp.no_sync();
        ddp(input_of(rank, 0), true, false).sum().backward();
      }
      ddp(input_of(rank, 1), false, true).sum().backward();
      Branches all;
      for (int r : {0, 1}) (all(input_of(r, 0), true, false).sum() / 2).backward();
      EXPECT_TRUE(near(ddp.module()->left->weight.grad(), all->left->weight.grad()));
    }
  });
}

// A module that returns whatever it is told to.
template <class Out>
struct ReturnsImpl : torch::nn::Module {
  explicit ReturnsImpl(std::function<Out(at::Tensor, at::Tensor)> make_in)
      : one(register_module("one", Linear(6, 2))),
        two(register_module("two", Linear(6, 2))),
        unused(register_module("unused", Linear(6, 2))),
        make(std::move(make_in)) {
    fill(*this, 3);
  }
  Out forward(const at::Tensor& input) { return make(one(input), two(input)); }
  Linear one, two, unused;
  std::function<Out(at::Tensor, at::Tensor)> make;
};

// `pick` takes the first tensor out of the output; the second stays out of the loss.
template <class Out>
void expect_seen_through(std::function<Out(at::Tensor, at::Tensor)> make,
                         std::function<at::Tensor(Out&)> pick) {
  for (bool fixed : {false, true}) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      DistributedDataParallel ddp(
          std::make_shared<ReturnsImpl<Out>>(make),
          Options().process_group(group).find_unused_parameters(true).static_graph(fixed));
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        auto output = ddp(input_of(group->getRank(), step));
        static_assert(std::is_same_v<decltype(output), Out>);
        pick(output).sum().backward();
        auto& module = *ddp.module();
        std::vector<at::Tensor> mean{input_of(group->getRank(), step).sum(0)};
        group->allreduce(mean)->wait();
        EXPECT_TRUE(near(module.one->weight.grad()[0], mean[0] / 2, 1e-5, 1e-6));
        EXPECT_FALSE(module.two->weight.grad().defined());
        EXPECT_FALSE(module.unused->weight.grad().defined());
      }
    });
  }
}

TEST(DdpTest, SeesThroughEveryKindOfOutput) {
  using at::Tensor;
  expect_seen_through<Tensor>([](Tensor a, Tensor) { return a; }, [](Tensor& out) { return out; });
  expect_seen_through<std::tuple<Tensor, std::tuple<Tensor, int>>>(
      [](Tensor a, Tensor b) { return std::tuple(a, std::tuple(b, 1)); },
      [](auto& out) { return std::get<0>(out); });
  expect_seen_through<std::pair<Tensor, Tensor>>([](Tensor a, Tensor b) { return std::pair(a, b); },
                                                 [](auto& out) { return out.first; });
  expect_seen_through<std::vector<Tensor>>([](Tensor a, Tensor b) { return std::vector{a, b}; },
                                           [](auto& out) { return out[0]; });
  expect_seen_through<std::array<Tensor, 2>>([](Tensor a, Tensor b) { return std::array{a, b}; },
                                             [](auto& out) { return out[0]; });
  expect_seen_through<std::map<std::string, std::optional<Tensor>>>(
      [](Tensor a, Tensor b) {
        return std::map<std::string, std::optional<Tensor>>{
            {"a", a}, {"b", b}, {"none", std::nullopt}};
      },
      [](auto& out) { return *out["a"]; });
  expect_seen_through<std::variant<std::string, Tensor>>(
      [](Tensor a, Tensor) { return a; }, [](auto& out) { return std::get<1>(out); });
  expect_seen_through<std::shared_ptr<std::vector<Tensor>>>(
      [](Tensor a, Tensor b) { return std::make_shared<std::vector<Tensor>>(std::vector{a, b}); },
      [](auto& out) { return out->at(0); });
  expect_seen_through<Output>([](Tensor a, Tensor b) { return Output{a, {b}, 1}; },
                              [](auto& out) { return out.logits; });
}

TEST(DdpTest, OutputThatCannotBeSeenThrough) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto make = [] {
      return std::make_shared<ReturnsImpl<Opaque>>(
          [](at::Tensor a, at::Tensor b) { return Opaque{a + b}; });
    };
    DistributedDataParallel ddp(make(),
                                Options().process_group(group).find_unused_parameters(true));
    expect_contains(error_of<c10::TypeError>([&] { ddp(input_of(0, 0)); }), "visit_tensors");
    // Where the tensors are not needed, any type works.
    struct AllUsed : torch::nn::Module {
      AllUsed() : layer(register_module("layer", Linear(6, 2))) {}
      Opaque forward(at::Tensor input) { return {layer(input)}; }
      Linear layer;
    };
    DistributedDataParallel plain(std::make_shared<AllUsed>(), Options().process_group(group));
    plain(input_of(0, 0)).tensor.sum().backward();
    EXPECT_TRUE(plain.parameters()[0].grad().defined());
  });
}

struct NoOutputImpl : torch::nn::Module {
  NoOutputImpl() : layer(register_module("layer", Linear(6, 2))) {}
  void forward(const at::Tensor& input, std::unique_ptr<int> moved, at::Tensor& loss) {
    loss = layer(input).sum() * *moved;
  }
  Linear layer;
};

TEST(DdpTest, ForwardTakesAnyArgumentsAndMayReturnNothing) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(std::make_shared<NoOutputImpl>(), Options().process_group(group));
    at::Tensor loss;
    ddp(input_of(group->getRank(), 0), std::make_unique<int>(2), loss);
    loss.backward();
    EXPECT_EQ(ddp.module()->layer->bias.grad()[0].item<float>(), 8);
  });
}

TEST(DdpTest, OutputsMayChangeInPlace) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Branches(),
                                Options().process_group(group).find_unused_parameters(true));
    auto output = ddp(input_of(group->getRank(), 0), true, false);
    output.mul_(2);
    output.sum().backward();
    Branches all;
    for (int r : {0, 1}) all(input_of(r, 0), true, false).sum().backward();
    EXPECT_TRUE(near(ddp.module()->left->weight.grad(), all->left->weight.grad()));
  });
}

// Uses its layer twice.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl()
      : layer(register_module("layer", Linear(6, 6))),
        unused(register_module("unused", Linear(6, 6))) {
    fill(*this, 4);
  }
  at::Tensor forward(const at::Tensor& input) { return layer(torch::tanh(layer(input))); }
  Linear layer, unused;
};

TEST(DdpTest, StaticGraphFindsUnusedParametersOnce) {
  for (bool view : {false, true}) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      DistributedDataParallel ddp(
          std::make_shared<TwiceImpl>(),
          Options().process_group(group).static_graph(true).gradient_as_bucket_view(view));
      // A forward without a backward is not the one to learn from.
      ddp(input_of(0, 0));
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        loss_of(ddp(input_of(group->getRank(), step))).backward();
        auto all = std::make_shared<TwiceImpl>();
        for (int r : {0, 1}) (loss_of(all->forward(input_of(r, step))) / 2).backward();
        EXPECT_TRUE(
            near(ddp.module()->layer->weight.grad(), all->layer->weight.grad(), 1e-5, 1e-6));
        EXPECT_FALSE(ddp.module()->unused->weight.grad().defined());
      }
      EXPECT_TRUE(ddp.has_rebuilt_buckets());
    });
  }
}

TEST(DdpTest, GradientsAsBucketViewsShareMemory) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    for (bool view : {false, true}) {
      DistributedDataParallel ddp(Net(),
                                  Options().process_group(group).gradient_as_bucket_view(view));
      for (int step = 0; step < 3; ++step) {
        loss_of(ddp(input_of(group->getRank(), step))).backward();
        const auto params = ddp.parameters();
        for (const auto& param : params) {
          EXPECT_EQ(param.grad().is_alias_of(params[0].grad()), view || param.is_same(params[0]));
        }
      }
    }
  });
}

TEST(DdpTest, BucketsFollowTheOrderOfGradients) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    for (bool unused : {false, true}) {
      DistributedDataParallel ddp(
          Net(), Options().process_group(group).find_unused_parameters(unused).bucket_cap_mb(1e-5));
      const size_t all = ddp.parameters().size();
      // One bucket before the order is known, unless parameters may be missing from it.
      EXPECT_EQ(ddp.buckets().size(), unused ? all : 1);
      loss_of(ddp(input_of(group->getRank(), 0))).backward();
      EXPECT_FALSE(ddp.has_rebuilt_buckets());
      loss_of(ddp(input_of(group->getRank(), 1))).backward();
      EXPECT_EQ(ddp.has_rebuilt_buckets(), !unused);
      const auto buckets = ddp.buckets();
      ASSERT_EQ(buckets.size(), all);
      EXPECT_TRUE(buckets.front()[0].is_same(ddp.module()->last->bias) ||
                  buckets.front()[0].is_same(ddp.module()->last->weight));
      EXPECT_TRUE(buckets.back()[0].is_same(ddp.module()->first->bias) ||
                  buckets.back()[0].is_same(ddp.module()->first->weight));
    }
  });
}

TEST(DdpTest, FirstBucketIsSmallUnlessACapIsGiven) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    // Five parameters of 1 MiB.
    const auto make = [] {
      torch::nn::Sequential model;
      for (int i = 0; i < 5; ++i) {
        model->push_back(Linear(512, 512, /*bias=*/false));
      }
      return model;
    };
    const auto sizes = [&](const Options& options) {
      DistributedDataParallel ddp(make(), options);
      for (int step = 0; step < 2; ++step) ddp(ones({1, 512})).sum().backward();
      std::vector<size_t> counts;
      for (const auto& bucket : ddp.buckets()) counts.push_back(bucket.size());
      return counts;
    };
    EXPECT_EQ(sizes(Options().process_group(group)), (std::vector<size_t>{1, 4}));
    EXPECT_EQ(sizes(Options().process_group(group).bucket_cap_mb(2)),
              (std::vector<size_t>{2, 2, 1}));
  });
}

TEST(DdpTest, AllReduceHookEqualsNoHook) {
  for (int world : {1, 2, 3}) {
    run_ranks(world, [&](const ProcessGroupPtr& group) {
      for (bool view : {false, true}) {
        const auto options = Options().gradient_as_bucket_view(view).bucket_cap_mb(0.0001);
        const auto with = train(group, options, 5, [&](DistributedDataParallelBase& ddp) {
          ddp.register_comm_hook(allreduce_hook(group));
        });
        expect_parity(with, reference(std::vector<int>(world, 5)), world);
      }
    });
  }
}

TEST(DdpTest, CompressionHooksSendFewerBits) {
  for (int world : {1, 2, 3}) {
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      std::vector<at::Tensor> sums;
      Net net;
      for (int rank = 0; rank < world; ++rank) {
        const auto gradients =
            torch::autograd::grad({loss_of(net(input_of(rank, 0)))}, net->parameters());
        for (size_t i = 0; i < gradients.size(); ++i) {
          const auto part = gradients[i].to(dtype).div_(world);
          rank == 0 ? sums.push_back(part) : (void)(sums[i] = sums[i] + part);
        }
      }
      run_ranks(world, [&](const ProcessGroupPtr& group) {
        DistributedDataParallel ddp(Net(), Options().process_group(group));
        ddp.register_comm_hook(dtype == torch::kHalf ? fp16_compress_hook(group)
                                                     : bf16_compress_hook(group));
        loss_of(ddp(input_of(group->getRank(), 0))).backward();
        for (size_t i = 0; i < sums.size(); ++i) {
          const auto& gradient = ddp.parameters()[i].grad();
          EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
          if (world <= 2) {
            EXPECT_TRUE(same(gradient, sums[i].to(torch::kFloat)));
          } else {
            EXPECT_TRUE(near(gradient, sums[i].to(torch::kFloat), 2e-2, 1e-3));
          }
        }
      });
    }
  }
}

TEST(DdpTest, HookOfAUser) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Net(), Options().process_group(group).bucket_cap_mb(1e-5));
    std::vector<size_t> seen;
    size_t count = 0;
    // The largest gradient of all ranks, in a tensor of its own.
    ddp.register_comm_hook([&](c10d::GradBucket& bucket) {
      seen.push_back(bucket.getIndex());
      EXPECT_EQ(bucket.isLast(), bucket.getIndex() + 1 == count);
      std::vector<at::Tensor> largest{bucket.getBuffer().clone()};
      return group->allreduce(largest, {.reduceOp = c10d::ReduceOp::MAX})->getFuture();
    });
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      seen.clear();
      const auto loss = loss_of(ddp(input_of(group->getRank(), step)));
      count = ddp.buckets().size();
      loss.backward();
      std::vector<std::vector<at::Tensor>> gradients;
      Net net;
      for (int r : {0, 1}) {
        gradients.push_back(
            torch::autograd::grad({loss_of(net(input_of(r, step)))}, net->parameters()));
      }
      for (size_t i = 0; i < gradients[0].size(); ++i) {
        EXPECT_TRUE(
            same(ddp.parameters()[i].grad(), at::maximum(gradients[0][i], gradients[1][i])));
      }
    }
    EXPECT_EQ(seen, (std::vector<size_t>{0, 1, 2, 3, 4, 5}));
  });
}

TEST(DdpTest, MisuseOfHooks) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Net(), Options().process_group(group));
    expect_contains(error_of<c10::TypeError>([&] { ddp.register_comm_hook({}); }), "empty");
    ddp.register_comm_hook(
        [](c10d::GradBucket&) { return c10::intrusive_ptr<c10::ivalue::Future>(); });
    expect_contains(error_of([&] { ddp.register_comm_hook(allreduce_hook(group)); }), "one comm");
    auto loss = loss_of(ddp(input_of(0, 0)));
    expect_contains(error_of<c10::ValueError>([&] { loss.backward(); }), "future");
    DistributedDataParallel two(Net(), Options().process_group(group));
    two.register_comm_hook([](c10d::GradBucket& bucket) {
      auto future =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(c10::List<at::Tensor>({bucket.getBuffer(), bucket.getBuffer()}));
      return future;
    });
    auto loss_of_two = loss_of(two(input_of(0, 0)));
    expect_contains(error_of<c10::TypeError>([&] { loss_of_two.backward(); }), "a tensor");
    DistributedDataParallel late(Net(), Options().process_group(group));
    loss_of(late(input_of(0, 0))).backward();
    expect_contains(error_of([&] { late.register_comm_hook(allreduce_hook(group)); }),
                    "before the first forward");
  });
}

TEST(DdpTest, ForwardPreHooksRunFirst) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    DistributedDataParallel ddp(Net(), Options().process_group(group));
    int calls = 0;
    ddp.register_forward_pre_hook([&] { ++calls; });
    ddp(input_of(0, 0));
    ddp(input_of(0, 0));
    EXPECT_EQ(calls, 2);
  });
}

TEST(DdpTest, ModulesThatCannotBeTrainedAreRefusedOnEveryRank) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const auto options = Options().process_group(group);
    const bool odd = group->getRank() == 1;
    const auto error = [&](auto module, const Options& with) {
      return error_of<c10::ValueError>([&] { DistributedDataParallel ddp(module, with); });
    };
    expect_contains(error(Net(nullptr), options), "empty holder");
    expect_contains(error(torch::nn::Sequential(torch::nn::ReLU()), options),
                    "requires a gradient");
    Net frozen;
    for (auto& param : frozen->parameters()) param.set_requires_grad(false);
    expect_contains(error(frozen, options), "requires a gradient");
    expect_contains(error(Net(), Options(options).bucket_cap_mb(0)), "bucket_cap_mb");
    Net meta;
    meta->register_buffer("elsewhere", torch::zeros({2}, torch::kMeta));
    expect_contains(error(meta, options), "buffer elsewhere on meta");
    // One rank's mistake is everyone's error.
    expect_contains(error(odd ? frozen : Net(), options), "requires a gradient");
    const auto differs = torch::nn::Sequential(Linear(3, odd ? 2 : 1));
    expect_contains(error(differs, options), "parameter 0.weight");
    expect_contains(error(Net(), Options(options).static_graph(odd)), "static_graph");
    // And the group still works.
    DistributedDataParallel ddp(Net(), options);
    loss_of(ddp(input_of(0, 0))).backward();
  });
}

TEST(DdpTest, TiedFrozenSparseAndStridedParameters) {
  SHARDSTEP_NEEDS_CPU("sim has no sparse tensors");
  struct Mixed : torch::nn::Module {
    Mixed()
        : words(register_module(
              "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)))),
          image(register_module("image", torch::nn::Conv2d(3, 4, 3))),
          one(register_module("one", Linear(4, 4))) {
      fill(*this, 8);
      tied = register_parameter("tied", one->weight);
      one->bias.set_requires_grad(false);
      image->weight.set_data(image->weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
    at::Tensor forward(const at::Tensor& index, const at::Tensor& pixels) {
      return torch::linear(one(words(index) + image(pixels).sum({2, 3})), tied);
    }
    torch::nn::Embedding words;
    torch::nn::Conv2d image;
    Linear one;
    at::Tensor tied;
  };
  const auto index = [](int rank) { return torch::tensor({rank, 4}); };
  const auto pixels = [](int rank) { return torch::randn({2, 3, 5, 5}, generator(rank)); };
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    DistributedDataParallel ddp(std::make_shared<Mixed>(), Options().process_group(group));
    auto all = std::make_shared<Mixed>();
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      all->zero_grad();
      loss_of(ddp(index(rank), pixels(rank))).backward();
      for (int r : {0, 1}) (loss_of(all->forward(index(r), pixels(r))) / 2).backward();
      const auto got = ddp.parameters(), expected = all->parameters();
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i].grad().defined(), expected[i].grad().defined());
        if (!got[i].grad().defined()) continue;
        EXPECT_EQ(got[i].grad().is_sparse(), expected[i].grad().is_sparse());
        EXPECT_TRUE(near(got[i].grad().to_dense(), expected[i].grad().to_dense(), 1e-4, 1e-6))
            << ddp.named_parameters().keys()[i];
      }
    }
    EXPECT_EQ(ddp.trainable_parameters().size(), 4u);
  });
}

}  // namespace
}  // namespace shardstep::test
