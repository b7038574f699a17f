// Trains a small character-level transformer on the ranks that torchrun, mpirun or srun started;
// started alone, it trains in one process. Each rank keeps only its share of the optimizer state
// and, in stage 2, of the gradients.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <shardstep/shardstep.h>
#include <torch/optim.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gpt/memory.h"
#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/picture.h"
#include "gpt/progress.h"
#include "gpt/schedule.h"
#include "gpt/text.h"

namespace {

using gpt::Options;

volatile std::sig_atomic_t interrupted = 0;

void average(at::Tensor& tensor, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> tensors{tensor};
  group.allreduce(tensors)->wait();
  tensor.div_(group.getSize());
}

// Stage 1: averages the gradients over the ranks. Collective.
void average_gradients(const torch::nn::Module& model, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters()) gradients.push_back(parameter.grad());
  auto flat = at::flatten_dense_tensors(gradients);
  average(flat, group);
  at::_foreach_copy_(gradients, at::unflatten_dense_tensors(flat, gradients));
}

// As Python's torch.autocast("cpu", torch.bfloat16), while it exists.
class Autocast {
 public:
  explicit Autocast(bool enabled) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

// What Muon updates: the matrices inside the blocks. The output layer is the embedding.
bool is_hidden_matrix(const std::string& name, const at::Tensor& parameter) {
  return name.starts_with("blocks.") && parameter.dim() == 2;
}

std::vector<torch::optim::OptimizerParamGroup> param_groups(const gpt::Gpt& model,
                                                            const Options& options) {
  std::vector<at::Tensor> hidden, rest;
  for (const auto& item : model->named_parameters()) {
    const bool by_muon = options.optimizer == "muon" && is_hidden_matrix(item.key(), item.value());
    (by_muon ? hidden : rest).push_back(item.value());
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (!hidden.empty()) {
    const auto muon = shardstep::optim::MuonOptions(options.lr.value_or(0.02));
    groups.emplace_back(hidden, std::make_unique<shardstep::optim::MuonOptions>(muon));
  }
  groups.emplace_back(rest);
  return groups;
}

shardstep::LocalOptimizer local_optimizer(const Options& options) {
  using namespace torch::optim;
  using shardstep::local_optimizer;
  const auto& name = options.optimizer;
  const auto lr = [&](double suitable) { return options.lr.value_or(suitable); };
  const auto betas = std::make_tuple(0.9, 0.95);  // short memory for a short run
  if (name == "adamw") return local_optimizer(AdamWOptions(lr(5e-3)).betas(betas));
  if (name == "muon") return local_optimizer(AdamWOptions(5e-3).betas(betas));  // for the rest
  if (name == "adam") return local_optimizer(AdamOptions(lr(5e-3)).betas(betas));
  if (name == "sgd") return local_optimizer(SGDOptions(lr(0.1)).momentum(0.9));
  if (name == "adagrad") return local_optimizer(AdagradOptions(lr(1e-2)));
  return local_optimizer(RMSpropOptions(lr(5e-4)));
}

shardstep::Sharding sharding(const Options& options) {
  return options.sharding == "element" ? shardstep::Sharding::kElement
                                       : shardstep::Sharding::kParameter;
}

void print_header(const gpt::Gpt& model, const gpt::Text& text, const Options& options, int ranks) {
  int64_t elements = 0;
  for (const auto& parameter : model->parameters()) elements += parameter.numel();
  std::cout << elements << " parameters, " << text.tokens().numel() << " characters of text, "
            << options.optimizer << ", stage " << options.stage << ", sharded by "
            << options.sharding << " over " << ranks << (ranks == 1 ? " rank" : " ranks")
            << std::endl;
}

void print_sample(gpt::Gpt& model, const gpt::Text& text, const Options& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  auto sample = model->generate(text.tokens().narrow(0, 0, 1), 300, generator, 0.3);
  std::cout << "\nA sample of what the model writes now:\n\n" << text.decode(sample) << "\n";
}

void print_pictures(const std::vector<double>& losses, int64_t first,
                    const std::vector<gpt::NamedMemory>& memory) {
  std::cout << "\n"
            << gpt::loss_curve(losses, first) << "\n"
            << gpt::memory_bars(memory) << "\n"
            << gpt::memory_table(memory);
}

// What this rank holds after a step.
gpt::Memory memory_of(const gpt::Gpt& model, const shardstep::ZeroRedundancyOptimizer& optimizer,
                      const Options& options) {
  const auto stats = optimizer.stats();
  const auto parameters = gpt::parameter_bytes(*model);
  const bool divided = options.stage == 2 && optimizer.world_size() > 1;
  return {stats.state_bytes, parameters, divided ? stats.gradient_bytes : parameters};
}

// Bytes of the optimizer's whole state: two values per element for Adam and AdamW, one for the
// others, and masters.
int64_t whole_state(const gpt::Gpt& model, const Options& options) {
  const auto& optimizer = options.optimizer;
  int64_t bytes = 0;
  for (const auto& item : model->named_parameters()) {
    const bool by_muon = optimizer == "muon" && is_hidden_matrix(item.key(), item.value());
    const bool two = (optimizer.starts_with("adam") || optimizer == "muon") && !by_muon;
    const int64_t values = two ? 2 : 1, numel = item.value().numel();
    const bool wide = options.master != "none" || options.rounding != "nearest";
    bytes += values * numel * (wide ? 4 : item.value().element_size());
    if (options.master != "none") bytes += 4 * numel;
  }
  return bytes;
}

void check_world(const Options& options, int world_size) {
  if (options.batch % world_size != 0) {
    throw gpt::UsageError("--batch: expected a multiple of the " + std::to_string(world_size) +
                          " ranks, got '" + std::to_string(options.batch) + "'");
  }
}

bool has_checkpoint(const std::string& directory) {
  return !directory.empty() && std::filesystem::exists(directory + "/index.json");
}

// Written in the background.
void save(shardstep::ZeroRedundancyOptimizer& optimizer, const gpt::Gpt& model,
          const std::string& directory, int64_t step) {
  shardstep::NamedValues extra;
  extra.insert("step", step);
  optimizer.save_checkpoint(
      directory,
      shardstep::CheckpointOptions().module(model.ptr()).extra(extra).asynchronous(true));
}

// Returns how many steps earlier runs made.
int64_t resume(shardstep::ZeroRedundancyOptimizer& optimizer, const gpt::Gpt& model,
               const std::string& directory) {
  const auto extra =
      optimizer.load_checkpoint(directory, shardstep::CheckpointOptions().module(model.ptr()));
  return extra["step"].toInt();
}

void train(const Options& options, const gpt::Text& text) {
  auto group = shardstep::init_process_group();
  check_world(options, group->getSize());

  torch::manual_seed(options.seed);
  gpt::Gpt model(gpt::GptOptions{.vocabulary_size = text.vocabulary_size(),
                                 .layers = options.layers,
                                 .width = options.width,
                                 .heads = options.heads,
                                 .context = options.context});
  if (options.dtype == "bf16") model->to(at::kBFloat16);
  auto how = shardstep::ZeroOptions()
                 .process_group(group)
                 .stage(static_cast<int>(options.stage))
                 .sharding(sharding(options));
  if (options.gradients == "bf16") how.gradient_dtype(at::kBFloat16);
  if (options.gradients == "int8") how.gradient_dtype(at::kChar);
  if (options.master == "fp32") how.master_dtype(at::kFloat);
  if (options.rounding == "stochastic") how.rounding(shardstep::Rounding::kStochastic);
  shardstep::ZeroRedundancyOptimizer optimizer(param_groups(model, options),
                                               local_optimizer(options), how);
  gpt::WarmUpAndDecay schedule(optimizer, options.steps);
  gpt::BatchSampler batches(text, options.context, options.batch, options.seed, group->getRank(),
                            group->getSize());

  int64_t done = 0;
  if (has_checkpoint(options.checkpoint)) {
    done = resume(optimizer, model, options.checkpoint);
    schedule.resume(done);
    for (int64_t step = 0; step < done; ++step) batches.next();
  }

  std::optional<gpt::Progress> progress;  // on rank 0 only
  if (group->getRank() == 0) {
    print_header(model, text, options, group->getSize());
    if (done > 0) std::cout << "resuming after step " << done << std::endl;
    progress.emplace(options.steps, options.batch * options.context, options.log, done);
  }

  bool stopped = false;
  for (int64_t step = done + 1; step <= options.steps && !stopped; ++step) {
    auto [input, target] = batches.next();
    schedule.step();
    optimizer.zero_grad();
    auto scores = [&] {
      const Autocast autocast(options.autocast == "bf16");
      return model->forward(input).to(at::kFloat);
    }();
    auto loss = at::cross_entropy_loss(scores.flatten(0, 1), target.flatten());
    loss.backward();
    if (options.stage == 1) average_gradients(*model, *group);
    optimizer.step();

    // The interrupt is sent along with the loss, so that all ranks stop after the same step.
    auto status = torch::tensor({loss.item<double>(), interrupted ? 1.0 : 0.0}, torch::kFloat64);
    average(status, *group);
    if (progress) progress->update(step, status[0].item<double>());
    stopped = status[1].item<double>() > 0;
    const bool due = step % options.every == 0 || step == options.steps || stopped;
    if (due && !options.checkpoint.empty()) save(optimizer, model, options.checkpoint, step);
  }
  optimizer.wait_checkpoint();
  auto memory = gpt::gather_memory(memory_of(model, optimizer, options), *group);
  if (!progress) return;
  progress->finish();
  if (stopped) {
    std::cout << "\nInterrupted.\n";
  } else {
    print_sample(model, text, options);
  }
  for (auto& way : gpt::other_ways(memory[0].memory.parameters, whole_state(model, options),
                                   static_cast<int>(options.stage), group->getSize())) {
    memory.push_back(std::move(way));
  }
  print_pictures(progress->losses(), done + 1, memory);
  if (!options.memory.empty()) gpt::write_memory(options.memory, memory);
}

int run(int argc, char** argv) {
  auto options = gpt::parse_options(argc, argv);
  if (!options.help.empty()) {
    std::cout << options.help;
    return 0;
  }
  if (options.text.empty()) options.text = TRAIN_GPT_TEXT;
  const gpt::Text text(options.text, options.context);
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
    std::cerr << "train_gpt: " << error.what() << "\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "train_gpt: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << "\n";
  }
  return 1;
}
