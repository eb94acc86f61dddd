// SPDX-License-Identifier: Apache-2.0
/// @file
/// Small modules with the features of real training code: dropout, normalisation, in-place activations, slices written in place,
/// concatenation, tied and frozen weights, recurrent layers, several outputs.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "devices.hpp"

namespace models {

namespace nn = ::torch::nn;
using at::Tensor;

/// A module, a way to call it, and a batch.
struct sample {
  std::string name;
  std::shared_ptr<nn::Module> module;
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> forward;
  std::vector<Tensor> inputs;
};

/// Linear - GELU - dropout, `depth` times.
struct mlp_net : nn::Module {
  mlp_net(int64_t width, int depth, double p) : p_(p) {
    for (int i = 0; i < depth; ++i)
      layers_.push_back(register_module("layer" + std::to_string(i), nn::Linear(width, i + 1 < depth ? width : 10)));
  }
  Tensor forward(Tensor x) {
    for (std::size_t i = 0; i + 1 < layers_.size(); ++i) x = ::torch::dropout(::torch::gelu(layers_[i](x)), p_, true);
    return layers_.back()(x);
  }

 private:
  double p_;
  std::vector<nn::Linear> layers_;
};

/// Convolution - batch norm - in-place ReLU blocks with a residual sum in place, dropout, a slice scaled in place.
struct conv_net : nn::Module {
  explicit conv_net(int64_t channels) {
    first_ = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, channels, 3).padding(1)));
    norm1_ = register_module("norm1", nn::BatchNorm2d(channels));
    second_ = register_module("second", nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)));
    norm2_ = register_module("norm2", nn::BatchNorm2d(channels));
    last_ = register_module("last", nn::Linear(channels * 4, 10));
  }
  Tensor forward(Tensor x) {
    x = norm1_(first_(x));
    ::torch::relu_(x);
    auto y = norm2_(second_(x));
    y.add_(x);
    ::torch::relu_(y);
    y = ::torch::dropout(y, 0.2, true);
    y.slice(1, 0, 2).mul_(2.0);
    y = ::torch::adaptive_avg_pool2d(::torch::max_pool2d(y, 2), {2, 2}).flatten(1);
    return ::torch::log_softmax(last_(y), 1);
  }

 private:
  nn::Conv2d first_{nullptr}, second_{nullptr};
  nn::BatchNorm2d norm1_{nullptr}, norm2_{nullptr};
  nn::Linear last_{nullptr};
};

/// Pre-norm transformer block. Attention is the fused operator or written out.
struct block_net : nn::Module {
  block_net(int64_t width, int64_t heads, double p, bool fused) : heads_(heads), p_(p), fused_(fused) {
    norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv_ = register_module("qkv", nn::Linear(width, 3 * width));
    proj_ = register_module("proj", nn::Linear(width, width));
    up_ = register_module("up", nn::Linear(width, 4 * width));
    down_ = register_module("down", nn::Linear(4 * width, width));
  }
  Tensor forward(Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    auto parts = qkv_(norm1_(x)).chunk(3, 2);
    auto split = [&](const Tensor& t) { return t.view({batch, length, heads_, width / heads_}).transpose(1, 2); };
    auto q = split(parts[0]), k = split(parts[1]), v = split(parts[2]);
    Tensor a;
    if (fused_) {
      a = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
    } else {
      auto scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads_));
      auto mask = ::torch::ones({length, length}, x.options().dtype(::torch::kBool)).tril();
      scores = scores.masked_fill(mask.logical_not(), -1e9);
      a = ::torch::dropout(scores.softmax(-1), p_, p_ > 0).matmul(v);
    }
    a = a.transpose(1, 2).reshape({batch, length, width});
    x = x + ::torch::dropout(proj_(a), p_, p_ > 0);
    return x + ::torch::dropout(down_(::torch::gelu(up_(norm2_(x)))), p_, p_ > 0);
  }

 private:
  int64_t heads_;
  double p_;
  bool fused_;
  nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  nn::Linear qkv_{nullptr}, proj_{nullptr}, up_{nullptr}, down_{nullptr};
};

/// GPT-2-like language model. The forward returns the loss, or the logits without a target. `tied` shares embedding and head.
struct gpt_net : nn::Module {
  gpt_net(int layers, int64_t width, int64_t vocabulary, int64_t length, double p, bool fused, bool tied) : p_(p), tied_(tied) {
    tokens_ = register_module("tokens", nn::Embedding(vocabulary, width));
    places_ = register_module("places", nn::Embedding(length, width));
    for (int i = 0; i < layers; ++i)
      blocks_.push_back(register_module("block" + std::to_string(i), std::make_shared<block_net>(width, width / 16, p, fused)));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    if (!tied) head_ = register_module("head", nn::Linear(nn::LinearOptions(width, vocabulary).bias(false)));
  }
  Tensor forward(Tensor ids, Tensor target = {}) {
    auto x = ::torch::dropout(tokens_(ids) + places_(::torch::arange(ids.size(1), ids.options())), p_, p_ > 0);
    for (auto& b : blocks_) x = b->forward(x);
    x = norm_(x);
    auto logits = tied_ ? ::torch::matmul(x, tokens_->weight.t()) : head_(x);
    if (!target.defined()) return logits;
    return ::torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}), target.view({-1}));
  }

 private:
  double p_;
  bool tied_;
  nn::Embedding tokens_{nullptr}, places_{nullptr};
  std::vector<std::shared_ptr<block_net>> blocks_;
  nn::LayerNorm norm_{nullptr};
  nn::Linear head_{nullptr};
};

/// U-Net of depth two: group norm, SiLU, strided convolutions, upsampling, concatenation, residual sums, a slice written in
/// place.
struct unet_net : nn::Module {
  explicit unet_net(int64_t c) {
    auto conv = [](int64_t in, int64_t out, int64_t stride) {
      return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1));
    };
    enter_ = register_module("enter", conv(3, c, 1));
    norm1_ = register_module("norm1", nn::GroupNorm(2, c));
    down_ = register_module("down", conv(c, 2 * c, 2));
    norm2_ = register_module("norm2", nn::GroupNorm(2, 2 * c));
    middle_ = register_module("middle", conv(2 * c, 2 * c, 1));
    up_ = register_module("up", conv(3 * c, c, 1));
    leave_ = register_module("leave", conv(c, 3, 1));
  }
  Tensor forward(Tensor x) {
    auto a = ::torch::silu(norm1_(enter_(x)));
    auto b = norm2_(down_(a));
    ::torch::silu_(b);
    b = b + ::torch::dropout(middle_(b), 0.1, true);
    auto wide = ::torch::upsample_nearest2d(b, at::IntArrayRef{x.size(2), x.size(3)});
    auto joined = ::torch::cat({wide, a}, 1);
    joined.select(1, 0).copy_(x.select(1, 0));
    return leave_(::torch::silu(up_(joined)));
  }

 private:
  nn::Conv2d enter_{nullptr}, down_{nullptr}, middle_{nullptr}, up_{nullptr}, leave_{nullptr};
  nn::GroupNorm norm1_{nullptr}, norm2_{nullptr};
};

/// LSTM layers with dropout between them.
struct lstm_net : nn::Module {
  explicit lstm_net(int64_t width) {
    layers_ = register_module("layers", nn::LSTM(nn::LSTMOptions(width, width).num_layers(2).dropout(0.2).batch_first(true)));
    last_ = register_module("last", nn::Linear(width, 4));
  }
  Tensor forward(const Tensor& x) { return last_(std::get<0>(layers_->forward(x)).select(1, -1)); }

 private:
  nn::LSTM layers_{nullptr};
  nn::Linear last_{nullptr};
};

/// A weight that the forward clamps in place before each of its two uses. The backward reads the last version, once the gradient
/// of the weight is complete.
struct clamped_net : nn::Module {
  explicit clamped_net(int64_t width) {
    first_ = register_module("first", nn::Linear(width, width));
    weight_ = register_parameter("weight", ::torch::rand({width, width}) * 0.2 - 0.1);
  }
  Tensor forward(Tensor x) {
    clamp(0.2);
    x = first_(x) + weight_.detach();
    clamp(0.1);
    return ::torch::matmul(weight_, ::torch::relu(x));
  }

 private:
  void clamp(double most) {
    const ::torch::NoGradGuard no_grad;
    weight_.clamp_(-most, most);
  }
  nn::Linear first_{nullptr};
  Tensor weight_;
};

inline sample mlp(int64_t batch = 8, int64_t width = 32, int depth = 4, double p = 0.1) {
  auto m = std::make_shared<mlp_net>(width, depth, p);
  return {"mlp", m, [m](const auto& in) { return std::vector<Tensor>{m->forward(in[0])}; }, {::torch::randn({batch, width})}};
}

/// An MLP with a frozen first layer and an input that requires a gradient.
inline sample frozen_mlp() {
  auto s = mlp();
  s.name = "frozen mlp";
  for (auto& p : s.module->children()[0]->parameters()) p.requires_grad_(false);
  s.inputs[0].requires_grad_();
  return s;
}

inline sample conv(int64_t batch = 4, int64_t channels = 8, int64_t side = 16) {
  auto m = std::make_shared<conv_net>(channels);
  return {"conv",
          m,
          [m](const auto& in) { return std::vector<Tensor>{m->forward(in[0])}; },
          {::torch::randn({batch, 3, side, side})}};
}

/// Returns the loss.
inline sample gpt(int layers = 2, int64_t batch = 2, int64_t length = 16, int64_t width = 32, double p = 0.1, bool fused = true,
                  bool tied = false) {
  const int64_t vocabulary = 50;
  auto m = std::make_shared<gpt_net>(layers, width, vocabulary, length, p, fused, tied);
  return {std::string("gpt") + (fused ? "" : ", attention written out") + (tied ? ", tied weights" : ""),
          m,
          [m](const auto& in) { return std::vector<Tensor>{m->forward(in[0], in[1])}; },
          {::torch::randint(vocabulary, {batch, length}), ::torch::randint(vocabulary, {batch, length})}};
}

/// Returns the logits and their argmax: a float output with a gradient and an integer output.
inline sample gpt_two_outputs() {
  auto m = std::make_shared<gpt_net>(1, 32, 50, 16, 0.1, true, true);
  return {"gpt, two outputs",
          m,
          [m](const auto& in) {
            auto logits = m->forward(in[0]);
            return std::vector<Tensor>{logits.argmax(-1), logits};
          },
          {::torch::randint(50, {2, 16})}};
}

inline sample unet(int64_t batch = 2, int64_t channels = 4, int64_t side = 16) {
  auto m = std::make_shared<unet_net>(channels);
  return {"unet",
          m,
          [m](const auto& in) { return std::vector<Tensor>{m->forward(in[0])}; },
          {::torch::randn({batch, 3, side, side})}};
}

inline sample lstm() {
  auto m = std::make_shared<lstm_net>(16);
  return {"lstm", m, [m](const auto& in) { return std::vector<Tensor>{m->forward(in[0])}; }, {::torch::randn({3, 5, 16})}};
}

inline sample clamped() {
  auto m = std::make_shared<clamped_net>(8);
  return {"clamped", m, [m](const auto& in) { return std::vector<Tensor>{m->forward(in[0])}; }, {::torch::randn({8, 8})}};
}

/// All models, in training mode, on the tested device.
inline std::vector<sample> all() {
  std::vector<sample> list = {
      mlp(),  frozen_mlp(), conv(),   gpt(), gpt(2, 2, 16, 32, 0.1, false), gpt(1, 2, 16, 32, 0.1, true, true), gpt_two_outputs(),
      unet(), lstm(),       clamped()};
  if (test_device().is_cpu()) return list;
  for (auto& s : list) {
    s.module->to(test_device());
    for (auto& t : s.inputs) t = t.detach().to(test_device()).requires_grad_(t.requires_grad());
  }
  return list;
}

/// Indices in `all()` of the models for long trainings. On a device these are only some models unless REMAT_FULL is 1. Most of
/// the time goes into searches for plans, which do not depend on the device.
inline std::vector<std::size_t> trained() {
  const char* const full = std::getenv("REMAT_FULL");
  if (!test_device().is_cpu() && (full == nullptr || std::string(full) != "1")) return {0, 2, 3, 8, 9};
  std::vector<std::size_t> positions(all().size());
  std::iota(positions.begin(), positions.end(), std::size_t{0});
  return positions;
}

/// A loss that depends on all differentiable outputs.
inline at::Tensor loss_of(const std::vector<at::Tensor>& outputs) {
  at::Tensor loss;
  for (const auto& o : outputs)
    if (o.requires_grad()) loss = loss.defined() ? loss + o.square().mean() : o.square().mean();
  return loss;
}

}  // namespace models
