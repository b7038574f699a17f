#pragma once

// The command line of train_gpt. Mistakes in it are found before the ranks connect.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace gpt {

// A mistake on the command line; main prints it and exits with 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  int64_t layers = 1;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t context = 64;
  int64_t batch = 16;
  int64_t steps = 1600;
  std::string optimizer = "adamw";
  std::optional<double> lr;
  std::string dtype = "fp32";
  std::string master = "none";
  std::string rounding = "nearest";
  std::string autocast = "none";
  uint64_t seed = 1;
  std::string text;
  int64_t stage = 2;
  std::string gradients = "full";
  std::string sharding = "element";
  std::string log;
  std::string memory;
  std::string checkpoint;
  int64_t every = 100;
  std::string help;  // what --help prints, if given
};

// Throws UsageError, which says what was expected.
Options parse_options(int argc, char** argv);

}  // namespace gpt
