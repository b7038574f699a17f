// Trains a small character-level transformer on the ranks that torchrun (or mpirun, or srun)
// started, or on ranks it starts itself. Every rank keeps only its share of the optimizer's state.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>

#include "gpt/launch.h"
#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/progress.h"
#include "gpt/standin.h"
#include "gpt/text.h"

namespace {

using gpt::Options;

volatile std::sig_atomic_t interrupted = 0;

void average(at::Tensor& tensor, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> tensors{tensor};
  group.allreduce(tensors)->wait();
  tensor.div_(group.getSize());
}

// Every rank's gradients become their mean over the ranks. Collective.
void average_gradients(const torch::nn::Module& model, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters()) gradients.push_back(parameter.grad());
  auto flat = at::flatten_dense_tensors(gradients);
  average(flat, group);
  at::_foreach_copy_(gradients, at::unflatten_dense_tensors(flat, gradients));
}

shardstep::LocalOptimizer local_optimizer(const Options& options) {
  using namespace torch::optim;
  using shardstep::local_optimizer;
  const auto& name = options.optimizer;
  const auto lr = [&](double suitable) { return options.lr.value_or(suitable); };
  if (name == "adamw") return local_optimizer(AdamWOptions(lr(1e-3)));
  if (name == "adam") return local_optimizer(AdamOptions(lr(1e-3)));
  if (name == "sgd") return local_optimizer(SGDOptions(lr(0.1)).momentum(0.9));
  if (name == "adagrad") return local_optimizer(AdagradOptions(lr(1e-2)));
  return local_optimizer(RMSpropOptions(lr(5e-4)));
}

// The learning rate rises over the first twentieth of the steps, then falls to a tenth.
class WarmUpAndDecay : public torch::optim::LRScheduler {
 public:
  WarmUpAndDecay(torch::optim::Optimizer& optimizer, int64_t steps)
      : LRScheduler(optimizer), peaks_(get_current_lrs()), steps_(static_cast<double>(steps)) {}

 private:
  std::vector<double> get_lrs() override {
    const double done = step_count_ / steps_;
    const double factor = std::min((step_count_ + 1) / (0.05 * steps_), 1 - 0.9 * done);
    auto lrs = peaks_;
    for (auto& lr : lrs) lr *= factor;
    return lrs;
  }

  std::vector<double> peaks_;
  double steps_;
};

shardstep::Sharding sharding(const Options& options) {
  return options.sharding == "element" ? shardstep::Sharding::kElement
                                       : shardstep::Sharding::kParameter;
}

// Every rank's memory. Collective.
std::vector<gpt::Memory> gather_memory(const gpt::Memory& mine, c10d::ProcessGroup& group) {
  auto row = torch::tensor({mine.optimizer_state, mine.parameters, mine.gradients, mine.peak});
  std::vector<at::Tensor> inputs{row};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) outputs[0].push_back(torch::empty_like(row));
  group.allgather(outputs, inputs)->wait();
  std::vector<gpt::Memory> all;
  for (const auto& output : outputs[0]) {
    auto value = output.accessor<int64_t, 1>();
    all.push_back({value[0], value[1], value[2], value[3]});
  }
  return all;
}

gpt::Memory memory_of(const torch::nn::Module& model, int64_t optimizer_state) {
  gpt::Memory memory{.optimizer_state = optimizer_state, .peak = gpt::peak_memory()};
  for (const auto& parameter : model.parameters()) {
    memory.parameters += static_cast<int64_t>(parameter.nbytes());
    if (parameter.grad().defined()) {
      memory.gradients += static_cast<int64_t>(parameter.grad().nbytes());
    }
  }
  return memory;
}

// Not measured: two moments an element for Adam and AdamW, one for the others.
gpt::Memory replicated_memory(const Options& options, const gpt::Memory& rank) {
  const bool two = options.optimizer == "adam" || options.optimizer == "adamw";
  return {.optimizer_state = (two ? 2 : 1) * rank.parameters,
          .parameters = rank.parameters,
          .gradients = rank.gradients};
}

void print_sample(gpt::Gpt& model, const gpt::Text& text, const Options& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  auto sample = model->generate(text.tokens().narrow(0, 0, 1), 300, generator, 0.7);
  std::printf("\nA sample of what the model writes now:\n\n%s\n", text.decode(sample).c_str());
}

void train(const Options& options, const gpt::Text& text) {
  auto group = shardstep::init_process_group();
  const bool first = group->getRank() == 0;

  torch::manual_seed(options.seed);
  gpt::Gpt model(gpt::GptOptions{.vocabulary_size = text.vocabulary_size(),
                                 .layers = options.layers,
                                 .width = options.width,
                                 .heads = options.heads,
                                 .context = options.context});
  shardstep::ZeroRedundancyOptimizer optimizer(
      model->parameters(), local_optimizer(options),
      shardstep::ZeroOptions().process_group(group).sharding(sharding(options)));
  WarmUpAndDecay schedule(optimizer, options.steps);
  gpt::BatchSampler batches(text, options.context, options.batch, options.seed, group->getRank(),
                            group->getSize());

  std::optional<gpt::Progress> progress;
  std::ofstream log;
  if (first) {
    int64_t elements = 0;
    for (const auto& parameter : model->parameters()) elements += parameter.numel();
    std::printf("%lld parameters, %lld characters of text, %s sharded by %s over %d ranks\n",
                static_cast<long long>(elements), static_cast<long long>(text.tokens().numel()),
                options.optimizer.c_str(), options.sharding.c_str(), group->getSize());
    progress.emplace(options.steps, options.batch * options.context);
    if (!options.log.empty()) (log = std::ofstream(options.log)) << "step,loss\n";
    log.precision(9);
  }

  for (int64_t step = 1; step <= options.steps; ++step) {
    auto [input, target] = batches.next();
    schedule.step();
    optimizer.zero_grad();
    auto scores = model->forward(input);
    auto loss = at::cross_entropy_loss(scores.flatten(0, 1), target.flatten());
    loss.backward();
    average_gradients(*model, *group);
    optimizer.step();

    // The interrupt travels with the loss, so that all ranks stop after the same step.
    auto status = torch::tensor({loss.item<double>(), interrupted ? 1.0 : 0.0}, torch::kFloat64);
    average(status, *group);
    if (first) {
      progress->update(step, status[0].item<double>());
      log << step << ',' << status[0].item<double>() << std::endl;
    }
    if (status[1].item<double>() > 0) break;
  }
  progress.reset();

  auto mine = memory_of(*model, optimizer.local_state_bytes());
  auto memory = gather_memory(mine, *group);
  if (!first) return;
  if (interrupted) {
    std::printf("\nInterrupted.\n");
  } else {
    print_sample(model, text, options);
  }
  std::printf("\n%s", gpt::memory_table(memory, replicated_memory(options, mine)).c_str());
}

// REQUIRES: world_size > 0.
void check_world(const Options& options, int world_size) {
  if (options.batch % world_size != 0) {
    throw gpt::UsageError("--batch: expected a multiple of the " + std::to_string(world_size) +
                          " ranks, got '" + std::to_string(options.batch) + "'");
  }
  if (options.ranks && *options.ranks != world_size) {
    throw gpt::UsageError("--ranks: expected what the launcher started, " +
                          std::to_string(world_size) + ", got '" + std::to_string(*options.ranks) +
                          "'");
  }
}

void check_log(const Options& options) {
  if (options.log.empty()) return;
  if (!std::ofstream(options.log, std::ios::app)) {
    throw gpt::UsageError("--log: expected a file that can be written, got '" + options.log + "'");
  }
}

int run(int argc, char** argv) {
  auto options = gpt::parse_options(argc, argv);
  if (options.help) {
    std::cout << gpt::usage();
    return 0;
  }
  if (options.text.empty()) options.text = TRAIN_GPT_TEXT;
  const gpt::Text text(options.text, options.context);
  const auto launched = gpt::launched_world_size();
  const int world_size = launched.value_or(options.ranks.value_or(2));
  if (world_size > 0) check_world(options, world_size);
  check_log(options);

  if (!launched && world_size > 1) return gpt::launch_ranks(world_size, argv);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) at::set_num_threads(1);
  std::signal(SIGINT, [](int) { interrupted = 1; });
  train(options, text);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const gpt::UsageError& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 2;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
  }
  return 1;
}
