#pragma once

// A text as numbers: its distinct characters, sorted, are the vocabulary. Bytes, not Unicode code
// points.

#include <torch/types.h>

#include <string>

namespace gpt {

class Text {
 public:
  // Throws UsageError if the file cannot be read, or is too short for a sequence of `context`
  // characters and the one after it.
  Text(const std::string& file, int64_t context);

  int64_t vocabulary_size() const { return static_cast<int64_t>(vocabulary_.size()); }
  // The whole text, one number per character.
  const at::Tensor& tokens() const { return tokens_; }
  std::string decode(const at::Tensor& tokens) const;

 private:
  std::string vocabulary_;
  at::Tensor tokens_;
};

struct Batch {
  at::Tensor input;   // rows x context
  at::Tensor target;  // the same, one character later
};

// Random batches of a text. Every rank draws the starts of the whole batch from the same seed and
// takes its own rows, so the union over ranks does not depend on their number.
class BatchSampler {
 public:
  // REQUIRES: batch is a multiple of world_size.
  BatchSampler(const Text& text, int64_t context, int64_t batch, uint64_t seed, int rank,
               int world_size);
  Batch next();

 private:
  at::Tensor tokens_;
  int64_t context_, batch_, rows_, first_row_;
  at::Generator generator_;
};

}  // namespace gpt
