// SPDX-License-Identifier: Apache-2.0
/// @file
/// A GPT-2-like language model in plain `torch::nn`. The model knows nothing of remat.
#pragma once

#include <torch/torch.h>

/// Sizes of the model.
struct gpt_options {
  int64_t vocabulary = 256, context = 128, layers = 6, heads = 8, width = 256;
  double dropout = 0.1;
};

/// Pre-norm transformer block: attention and a feed-forward network, each with dropout and a residual connection.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const gpt_options& o)
      : heads(o.heads),
        dropout(o.dropout),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        qkv(register_module("qkv", torch::nn::Linear(o.width, 3 * o.width))),
        projection(register_module("projection", torch::nn::Linear(o.width, o.width))),
        up(register_module("up", torch::nn::Linear(o.width, 4 * o.width))),
        down(register_module("down", torch::nn::Linear(4 * o.width, o.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm1(x)).chunk(3, 2);
    auto split = [&](const torch::Tensor& t) { return t.view({batch, length, heads, width / heads}).transpose(1, 2); };
    auto a =
        at::scaled_dot_product_attention(split(parts[0]), split(parts[1]), split(parts[2]), {}, is_training() ? dropout : 0.0,
                                         /*is_causal=*/true);
    a = a.transpose(1, 2).reshape({batch, length, width});
    x = x + torch::dropout(projection(a), dropout, is_training());
    return x + torch::dropout(down(torch::gelu(up(norm2(x)))), dropout, is_training());
  }

  int64_t heads;
  double dropout;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, projection, up, down;
};
TORCH_MODULE(Block);

/// Token and position embeddings, blocks, final norm and head; `forward(tokens, next)` is the mean cross entropy.
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const gpt_options& o)
      : options(o),
        token(register_module("token", torch::nn::Embedding(o.vocabulary, o.width))),
        position(register_module("position", torch::nn::Embedding(o.context, o.width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(o.width, o.vocabulary).bias(false)))) {
    for (int64_t i = 0; i < o.layers; ++i) blocks->push_back(Block(o));
    register_module("blocks", blocks);
  }

  /// @param tokens (batch, length) int64
  /// @param next   (batch, length) int64, the tokens to predict
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor next) {
    auto x = token(tokens) + position(torch::arange(tokens.size(1)));
    x = torch::dropout(x, options.dropout, is_training());
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    const auto logits = head(norm(x));
    return torch::cross_entropy_loss(logits.view({-1, options.vocabulary}), next.view({-1}));
  }

  gpt_options options;
  torch::nn::Embedding token, position;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Gpt);
