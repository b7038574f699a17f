#include "options.h"

#include <getopt.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <iomanip>
#include <limits>
#include <sstream>
#include <vector>

namespace gpt {
namespace {

struct Option {
  std::string name;
  std::string value;  // what --help calls the value; empty: the option takes none
  std::string help;
  std::function<void(Options&, const std::string&)> set;
};

[[noreturn]] void reject(const std::string& name, const std::string& expected,
                         const std::string& got) {
  throw UsageError("--" + name + ": expected " + expected + ", got '" + got + "'");
}

template <typename T>
T parse_number(const std::string& name, const std::string& text, const std::string& expected, T low,
               T high = std::numeric_limits<T>::max()) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || !(value >= low && value <= high)) reject(name, expected, text);
  return value;
}

Option count(const std::string& name, int64_t Options::* field, const std::string& help) {
  const Options defaults;
  return {name, "N", help + " (default " + std::to_string(defaults.*field) + ")",
          [=](Options& options, const std::string& text) {
            options.*field =
                parse_number<int64_t>(name, text, "a whole number from 1 to 1000000", 1, 1'000'000);
          }};
}

Option choice(const std::string& name, std::string Options::* field,
              const std::vector<std::string>& choices, const std::string& help) {
  std::string list;
  for (const auto& word : choices) list += (list.empty() ? "" : ", ") + word;
  const Options defaults;
  return {name, "NAME", help + ": " + list + " (default " + defaults.*field + ")",
          [=](Options& options, const std::string& text) {
            bool known = std::find(choices.begin(), choices.end(), text) != choices.end();
            if (!known) reject(name, "one of " + list, text);
            options.*field = text;
          }};
}

Option path(const std::string& name, std::string Options::* field, const std::string& help,
            const std::string& value = "FILE") {
  return {name, value, help, [=](Options& options, const std::string& text) {
            if (text.empty()) reject(name, "a path", text);
            options.*field = text;
          }};
}

const std::vector<Option>& all_options() {
  static const std::vector<Option> options = {
      count("layers", &Options::layers, "transformer blocks"),
      count("width", &Options::width, "features of a position, a multiple of --heads"),
      count("heads", &Options::heads, "attention heads of a block"),
      count("context", &Options::context, "characters the model sees at once"),
      count("batch", &Options::batch, "sequences a step over all ranks, a multiple of --ranks"),
      count("steps", &Options::steps, "optimizer steps"),
      {"ranks", "N", "processes to start (default 2; under torchrun, mpirun or srun: theirs)",
       [](Options& options, const std::string& text) {
         options.ranks = parse_number<int>("ranks", text, "a whole number from 1 to 1024", 1, 1024);
       }},
      choice("optimizer", &Options::optimizer, {"adamw", "adam", "sgd", "adagrad", "rmsprop"},
             "local optimizer"),
      {"lr", "X", "learning rate (default: one that suits the optimizer)",
       [](Options& options, const std::string& text) {
         options.lr = parse_number<double>("lr", text, "a positive number",
                                           std::numeric_limits<double>::min());
       }},
      {"seed", "N", "seed of weights, batches and sample (default 1)",
       [](Options& options, const std::string& text) {
         options.seed = parse_number<uint64_t>("seed", text, "a whole number, not negative", 0);
       }},
      path("text", &Options::text, "text to learn (default: a lighthouse keeper's log)"),
      choice("sharding", &Options::sharding, {"parameter", "element"},
             "how the optimizer state is cut between ranks"),
      path("log", &Options::log, "write step,loss to this CSV file"),
      path("checkpoint", &Options::checkpoint,
           "save to this directory, and go on from what is there", "DIR"),
      count("every", &Options::every, "steps from one checkpoint to the next"),
      {"help", "", "show this and exit",
       [](Options& options, const std::string&) { options.help = true; }},
  };
  return options;
}

void check(const Options& options) {
  if (options.width % options.heads != 0) {
    throw UsageError("--width: expected a multiple of --heads " + std::to_string(options.heads) +
                     ", got '" + std::to_string(options.width) + "'");
  }
}

}  // namespace

Options parse_options(int argc, char** argv) {
  const auto& known = all_options();
  std::vector<option> table;
  for (const auto& entry : known) {
    table.push_back(
        {entry.name.c_str(), entry.value.empty() ? no_argument : required_argument, nullptr, 0});
  }
  table.push_back({nullptr, 0, nullptr, 0});

  Options options;
  opterr = 0;
  for (;;) {
    int index = -1;
    // The leading ':' tells a missing value (':') from an unknown option ('?').
    int code = getopt_long(argc, argv, ":", table.data(), &index);
    if (code == -1) break;
    const std::string word = argv[optind - 1];
    if (code == ':') throw UsageError(word + ": expected a value after it");
    if (code == '?') throw UsageError("expected one of the options in --help, got '" + word + "'");
    known[index].set(options, optarg != nullptr ? optarg : "");
  }
  if (optind < argc) {
    throw UsageError(std::string("expected only options, got '") + argv[optind] + "'");
  }
  check(options);
  return options;
}

std::string usage() {
  std::ostringstream out;
  out << "Trains a small character-level transformer with a sharded optimizer.\n\n"
         "  train_gpt [options]                                            starts its own ranks\n"
         "  torchrun --no-python --nproc-per-node 2 -- train_gpt [options] uses torchrun's\n\n";
  for (const auto& entry : all_options()) {
    std::string left = "--" + entry.name + (entry.value.empty() ? "" : " " + entry.value);
    out << "  " << std::left << std::setw(18) << left << entry.help << "\n";
  }
  return out.str();
}

}  // namespace gpt
