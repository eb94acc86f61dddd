// SPDX-License-Identifier: Apache-2.0
/// @file
/// Measures time and memory of training steps of a GPT-2-like model: eager mode, checkpointing of every block, wrapped modules.
///
/// All contestants take one step per round, in rotating order. A time ratio is the median over rounds of (time / eager time of
/// the same round). Peaks are measured in bytes, beyond the bytes that are live at the start of a step.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <remat/io/bytes.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>

#include "../adapters/torch/tests/models.hpp"

namespace {

namespace nn = torch::nn;

/// Runs a block without keeping its activations. The backward runs the block again.
struct checkpoint : torch::autograd::Function<checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, models::block_net* block) {
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    context->saved_data["generator"] = at::detail::getDefaultCPUGenerator().get_state();
    context->save_for_backward({x});
    at::NoGradGuard no_grad;
    return block->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto* block = reinterpret_cast<models::block_net*>(context->saved_data["block"].toInt());
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const auto state = generator.get_state();
    generator.set_state(context->saved_data["generator"].toTensor());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    at::Tensor y;
    {
      at::AutoGradMode on(true);
      y = block->forward(x);
    }
    generator.set_state(state);
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), {}};
  }
};

struct gpt : nn::Module {
  gpt(int layers, int64_t width, int64_t length, double p, bool checkpoints) : p_(p), checkpoints_(checkpoints) {
    tokens_ = register_module("tokens", nn::Embedding(vocabulary, width));
    places_ = register_module("places", nn::Embedding(length, width));
    for (int i = 0; i < layers; ++i)
      blocks_.push_back(
          register_module("block" + std::to_string(i), std::make_shared<models::block_net>(width, width / 32, p, true)));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    head_ = register_module("head", nn::Linear(nn::LinearOptions(width, vocabulary).bias(false)));
  }
  at::Tensor forward(at::Tensor ids, at::Tensor target) {
    auto x = torch::dropout(tokens_(ids) + places_(torch::arange(ids.size(1))), p_, p_ > 0);
    for (auto& b : blocks_) x = checkpoints_ ? checkpoint::apply(x, b.get()) : b->forward(x);
    return torch::cross_entropy_loss(head_(norm_(x)).view({-1, vocabulary}), target.view({-1}));
  }

 private:
  static constexpr int64_t vocabulary = 512;
  double p_;
  bool checkpoints_;
  nn::Embedding tokens_{nullptr}, places_{nullptr};
  std::vector<std::shared_ptr<models::block_net>> blocks_;
  nn::LayerNorm norm_{nullptr};
  nn::Linear head_{nullptr};
};

struct contestant {
  std::string name;
  std::shared_ptr<nn::Module> module;
  std::function<at::Tensor()> forward;
  std::vector<double> seconds = {};
  remat::bytes_t peak = 0, arena = 0;
  double loss = 0;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int layers = 6, rounds = 20, threads = at::get_num_threads();
  int64_t width = 256, batch = 8, length = 128;
  double dropout = 0.1, seconds = 20;
  std::vector<std::string> budgets = {"100%", "50%"};
  CLI::App app("Time and memory of training steps");
  app.add_option("--layers", layers);
  app.add_option("--width", width);
  app.add_option("--batch", batch);
  app.add_option("--length", length);
  app.add_option("--dropout", dropout);
  app.add_option("--rounds", rounds);
  app.add_option("--threads", threads);
  app.add_option("--seconds", seconds, "limit of a search for a schedule");
  app.add_option("--budgets", budgets, "of the wrapped modules");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);
  remat::pytorch::meter::install();

  auto ids = torch::randint(512, {batch, length}), target = torch::randint(512, {batch, length});
  auto make = [&](bool checkpoints) {
    torch::manual_seed(1);
    return std::make_shared<gpt>(layers, width, length, dropout, checkpoints);
  };
  std::vector<contestant> all;
  for (bool checkpoints : {false, true}) {
    auto m = make(checkpoints);
    all.push_back({checkpoints ? "eager, every block checkpointed" : "eager", m, [=] { return m->forward(ids, target); }});
  }
  for (const auto& b : budgets) {
    remat::pytorch::wrap_options o;
    o.budget = b;
    o.limits.seconds = seconds;
    o.cache = remat::pytorch::plan_cache("");  // no cache: search for every plan
    o.log = [](const std::string& text) { std::cerr << text << "\n"; };
    auto m = remat::pytorch::wrap(make(false), std::tuple(ids, target), o);
    std::cerr << m->report().text() << "\n";
    all.push_back({"wrapped, " + b, m, [=] { return m->forward(ids, target); }, {}, 0, m->report().arena});
  }

  for (int round = -2; round < rounds; ++round)
    for (std::size_t k = 0; k < all.size(); ++k) {
      auto& c = all[(k + static_cast<std::size_t>(round + 2)) % all.size()];
      torch::manual_seed(static_cast<std::uint64_t>(round + 2));
      const auto before = remat::pytorch::meter::live();
      remat::pytorch::meter::reset_peak();
      const auto begin = std::chrono::steady_clock::now();
      {
        auto loss = c.forward();
        loss.backward();
        c.loss = loss.item<double>();
      }
      if (round >= 0) c.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      c.peak = std::max(c.peak, remat::pytorch::meter::peak() - before + c.arena);
      c.module->zero_grad();
    }

  std::printf("| %d layers, width %ld, batch %ld x %ld, %d threads | time / eager | peak / eager | peak |\n|---|---|---|---|\n",
              layers, static_cast<long>(width), static_cast<long>(batch), static_cast<long>(length), threads);
  for (const auto& c : all) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < c.seconds.size(); ++i) ratios.push_back(c.seconds[i] / all[0].seconds[i]);
    std::printf("| %s | %.3f | %.3f | %s |%s\n", c.name.c_str(), median(ratios),
                static_cast<double>(c.peak) / static_cast<double>(all[0].peak), remat::format_bytes(c.peak).c_str(),
                c.loss == all[0].loss ? "" : " loss differs");
  }
}
