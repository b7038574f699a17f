#pragma once

// The command line of train_gpt. What is wrong with it is found before any rank starts.

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
  int64_t layers = 4;
  int64_t width = 256;
  int64_t heads = 4;
  int64_t context = 64;
  int64_t batch = 8;
  int64_t steps = 1000;
  std::optional<int> ranks;
  std::string optimizer = "adamw";
  std::optional<double> lr;
  uint64_t seed = 1;
  std::string text;
  std::string sharding = "element";
  std::string log;
  std::string checkpoint;
  int64_t every = 100;
  bool help = false;
};

// Throws UsageError, which says what was expected.
Options parse_options(int argc, char** argv);

std::string usage();

}  // namespace gpt
