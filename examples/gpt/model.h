#pragma once

// A small GPT: token and position embeddings, pre-norm blocks, and a head tied to the embedding.
// The embedding of a position includes the few characters before it, so that one block learns what
// would otherwise take two.

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <vector>

namespace gpt {

struct GptOptions {
  int64_t vocabulary_size;
  int64_t layers;
  int64_t width;
  int64_t heads;
  int64_t context;
};

// x + attention(norm(x)), then x + mlp(norm(x)). No biases in the matrices.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  at::Tensor attention(const at::Tensor& x);

  int64_t heads_;
  torch::nn::LayerNorm attention_norm_{nullptr}, mlp_norm_{nullptr};
  torch::nn::Linear query_key_value_{nullptr}, mix_{nullptr}, widen_{nullptr}, narrow_{nullptr};
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  // Weights are drawn from torch's default generator: use the same seed on all ranks.
  explicit GptImpl(const GptOptions& options);

  // Scores of the next character, rows x length x vocabulary. REQUIRES: length <= context.
  at::Tensor forward(const at::Tensor& tokens);

  // `prompt` (1-D) followed by `count` characters drawn from the model's own predictions.
  at::Tensor generate(const at::Tensor& prompt, int64_t count, at::Generator generator,
                      double temperature);

 private:
  int64_t vocabulary_size_, context_;
  torch::nn::Embedding token_{nullptr}, before_{nullptr}, position_{nullptr};
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Gpt);

}  // namespace gpt
