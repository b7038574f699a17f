#include "text.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "options.h"

namespace gpt {
namespace {

std::string read_file(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) {
    throw UsageError("--text: expected a file that can be read, got '" + file +
                     "': " + std::strerror(errno));
  }
  std::ostringstream content;
  content << in.rdbuf();
  return content.str();
}

}  // namespace

Text::Text(const std::string& file, int64_t context) {
  const std::string content = read_file(file);
  const auto length = static_cast<int64_t>(content.size());
  if (length < context + 1) {
    throw UsageError("--text: expected at least --context + 1 = " + std::to_string(context + 1) +
                     " characters, got " + std::to_string(length) + " in '" + file + "'");
  }
  const std::set<char> characters(content.begin(), content.end());
  vocabulary_.assign(characters.begin(), characters.end());
  tokens_ = torch::empty({length}, torch::kInt64);
  auto* out = tokens_.data_ptr<int64_t>();
  for (char c : content) *out++ = static_cast<int64_t>(vocabulary_.find(c));
}

std::string Text::decode(const at::Tensor& tokens) const {
  std::string out;
  auto values = tokens.accessor<int64_t, 1>();
  for (int64_t i = 0; i < values.size(0); ++i) out += vocabulary_.at(values[i]);
  return out;
}

BatchSampler::BatchSampler(const Text& text, int64_t context, int64_t batch, uint64_t seed,
                           int rank, int world_size)
    : tokens_(text.tokens()),
      context_(context),
      batch_(batch),
      rows_(batch / world_size),
      first_row_(rank * rows_),
      generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

Batch BatchSampler::next() {
  auto starts = torch::randint(tokens_.size(0) - context_, {batch_}, generator_, torch::kInt64)
                    .narrow(0, first_row_, rows_);
  auto rows = tokens_.index({starts.unsqueeze(1) + torch::arange(context_ + 1)});
  return {rows.narrow(1, 0, context_), rows.narrow(1, 1, context_)};
}

}  // namespace gpt
