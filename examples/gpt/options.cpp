#include "options.h"

#include <CLI/CLI.hpp>

#include <cmath>
#include <fstream>
#include <limits>

namespace gpt {
namespace {

std::string check_rate(const std::string& word) {
  double value = 0;
  const bool good = CLI::detail::lexical_cast(word, value) && value > 0 && std::isfinite(value);
  return good ? "" : "expected a positive number, got '" + word + "'";
}

std::string check_writable(const std::string& file) {
  return std::ofstream(file, std::ios::app)
             ? ""
             : "expected a file that can be written, got '" + file + "'";
}

void declare(CLI::App& app, Options& options) {
  const auto count = [&app](const std::string& name, int64_t& value, const std::string& help) {
    app.add_option(name, value, help)
        ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}).description(""))
        ->type_name("N")
        ->capture_default_str();
  };
  const auto choice = [&app](const std::string& name, std::string& value,
                             std::vector<std::string> choices, const std::string& help) {
    app.add_option(name, value, help)
        ->check(CLI::IsMember(std::move(choices)))
        ->type_name("NAME")
        ->capture_default_str();
  };
  count("--layers", options.layers, "transformer blocks");
  count("--width", options.width, "features per position, a multiple of --heads");
  count("--heads", options.heads, "attention heads per block");
  count("--context", options.context, "characters that the model sees at once");
  count("--batch", options.batch, "sequences per step, over all ranks");
  count("--steps", options.steps, "optimizer steps");
  choice("--optimizer", options.optimizer, {"adamw", "adam", "sgd", "adagrad", "rmsprop", "muon"},
         "local optimizer; muon: for the blocks' matrices, AdamW for the rest");
  app.add_option("--lr", options.lr, "learning rate (default: one that suits the optimizer)")
      ->check(check_rate)
      ->type_name("X");
  choice("--dtype", options.dtype, {"fp32", "bf16"}, "of the parameters");
  choice("--master", options.master, {"none", "fp32"},
         "fp32: update float32 copies of bf16 parameters, divided as the state");
  choice("--rounding", options.rounding, {"nearest", "stochastic"},
         "of bf16 parameters without masters");
  choice("--autocast", options.autocast, {"none", "bf16"}, "bf16: multiply matrices in bfloat16");
  app.add_option("--seed", options.seed, "seed of weights, batches and sample")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--text", options.text, "text to learn (default: a lighthouse keeper's log)")
      ->type_name("FILE");
  app.add_option("--stage", options.stage,
                 "1: divide the optimizer state; 2: divide the gradients too")
      ->check(CLI::IsMember({1, 2}))
      ->type_name("N")
      ->capture_default_str();
  choice("--gradients", options.gradients, {"full", "bf16", "int8"},
         "how wide gradients travel in stage 2; int8: in blocks with a scale");
  choice("--sharding", options.sharding, {"parameter", "element"},
         "how the optimizer state is divided between the ranks");
  app.add_option("--log", options.log, "write step,loss to this CSV file")
      ->check(check_writable)
      ->type_name("FILE");
  app.add_option("--memory", options.memory, "write each rank's memory to this CSV file")
      ->check(check_writable)
      ->type_name("FILE");
  app.add_option("--checkpoint", options.checkpoint,
                 "save to this directory, and resume from what is there")
      ->type_name("DIR");
  count("--every", options.every, "steps from one checkpoint to the next");
}

}  // namespace

Options parse_options(int argc, char** argv) {
  CLI::App app(
      "Trains a small character-level transformer with a sharded optimizer.\n\n"
      "  torchrun --standalone --no-python --nproc-per-node 2 -- train_gpt [options]\n",
      "train_gpt");
  app.option_defaults()->take_last();
  app.set_help_flag("--help", "show this and exit");
  app.get_formatter()->column_width(24);
  Options options;
  declare(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
    return options;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (options.width % options.heads != 0) {
    throw UsageError("--width: expected a multiple of --heads " + std::to_string(options.heads) +
                     ", got '" + std::to_string(options.width) + "'");
  }
  if (options.master != "none" && options.dtype == "fp32") {
    throw UsageError("--master: expected '--dtype bf16', got '--dtype fp32'");
  }
  if (options.gradients != "full" && options.stage == 1) {
    throw UsageError("--gradients: expected '--stage 2', got '--stage 1'");
  }
  if (options.rounding != "nearest" && (options.dtype == "fp32" || options.master != "none")) {
    throw UsageError("--rounding: expected '--dtype bf16', and no --master");
  }
  return options;
}

}  // namespace gpt
