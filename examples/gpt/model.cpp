#include "model.h"

#include <torch/nn/functional/linear.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <cmath>

namespace gpt {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr int64_t kBefore = 7;  // characters before its own that a position's embedding includes

nn::Linear matrix(int64_t in, int64_t out) {
  return nn::Linear(nn::LinearOptions(in, out).bias(false));
}

nn::LayerNorm layer_norm(int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

}  // namespace

BlockImpl::BlockImpl(const GptOptions& options) : heads_(options.heads) {
  const int64_t width = options.width;
  attention_norm_ = register_module("attention_norm", layer_norm(width));
  query_key_value_ = register_module("query_key_value", matrix(width, 3 * width));
  mix_ = register_module("mix", matrix(width, width));
  mlp_norm_ = register_module("mlp_norm", layer_norm(width));
  widen_ = register_module("widen", matrix(width, 4 * width));
  narrow_ = register_module("narrow", matrix(4 * width, width));

  // The more blocks add to the residual stream, the smaller their weights start.
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers));
  nn::init::normal_(query_key_value_->weight, 0, 0.02);
  nn::init::normal_(mix_->weight, 0, residual);
  nn::init::normal_(widen_->weight, 0, 0.02);
  nn::init::normal_(narrow_->weight, 0, residual);
}

at::Tensor BlockImpl::attention(const at::Tensor& x) {
  const auto rows = x.size(0), length = x.size(1), width = x.size(2);
  auto split =
      query_key_value_(x).view({rows, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  auto mixed = at::scaled_dot_product_attention(split[0], split[1], split[2], /*attn_mask=*/{},
                                                /*dropout_p=*/0.0, /*is_causal=*/true);
  return mix_(mixed.transpose(1, 2).reshape({rows, length, width}));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x + attention(attention_norm_(x));
  return x + narrow_(at::gelu(widen_(mlp_norm_(x)), "tanh"));
}

GptImpl::GptImpl(const GptOptions& options)
    : vocabulary_size_(options.vocabulary_size), context_(options.context) {
  token_ = register_module("token", nn::Embedding(vocabulary_size_, options.width));
  before_ = register_module("before", nn::Embedding(kBefore * vocabulary_size_, options.width));
  position_ = register_module("position", nn::Embedding(options.context, options.width));
  nn::init::normal_(token_->weight, 0, 0.02);
  nn::init::normal_(before_->weight, 0, 0.02);
  nn::init::normal_(position_->weight, 0, 0.02);
  const auto blocks =
      register_module("blocks", nn::ModuleList());  // for the same names as in Python
  for (int64_t i = 0; i < options.layers; ++i) {
    blocks_.emplace_back(options);
    blocks->push_back(blocks_.back());
  }
  norm_ = register_module("norm", layer_norm(options.width));
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  auto x = token_(tokens) + position_->weight.narrow(0, 0, length);
  for (int64_t distance = 1; distance <= std::min(kBefore, length - 1); ++distance) {
    const auto before = tokens.narrow(1, 0, length - distance) + (distance - 1) * vocabulary_size_;
    x.narrow(1, distance, length - distance) += before_(before);
  }
  for (auto& block : blocks_) x = block(x);
  return F::linear(norm_(x), token_->weight);
}

at::Tensor GptImpl::generate(const at::Tensor& prompt, int64_t count, at::Generator generator,
                             double temperature) {
  torch::NoGradGuard no_grad;
  auto tokens = prompt.unsqueeze(0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = std::min(tokens.size(1), context_);
    auto scores = forward(tokens.narrow(1, tokens.size(1) - length, length))
                      .select(1, length - 1)
                      .to(at::kFloat);
    auto next = at::multinomial(at::softmax(scores / temperature, -1), 1, false, generator);
    tokens = at::cat({tokens, next}, 1);
  }
  return tokens.squeeze(0);
}

}  // namespace gpt
