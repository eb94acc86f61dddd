// SPDX-License-Identifier: Apache-2.0
/// @file
/// Trains a GPT-2-like model on a book inside half of its activation memory, next to the plain model from the same seed, and
/// compares losses, gradients, memory and time at every step.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <remat/io/bytes.hpp>
#include <remat/io/file.hpp>
#include <remat/io/timeline.hpp>
#include <remat/torch/memory.hpp>
#include <remat/torch/module.hpp>

#include "gpt.hpp"

namespace {

/// The text as token numbers, one per character, with batches drawn from it.
struct corpus {
  explicit corpus(const std::string& file) {
    std::ifstream in(file);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    if (text.empty()) throw std::runtime_error("cannot read " + file);
    std::map<char, int64_t> number;
    for (char c : text) number.emplace(c, 0);
    for (auto& [c, n] : number) n = vocabulary++;
    for (char c : text) tokens.push_back(number[c]);
  }

  /// {tokens, next tokens}, each (batch, length)
  std::pair<torch::Tensor, torch::Tensor> batch(int64_t batch, int64_t length, std::mt19937_64& random) const {
    auto x = torch::empty({batch, length}, torch::kLong), y = torch::empty_like(x);
    for (int64_t b = 0; b < batch; ++b) {
      const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(random() % (tokens.size() - static_cast<std::size_t>(length) - 1));
      std::copy_n(from, length, x[b].data_ptr<int64_t>());
      std::copy_n(from + 1, length, y[b].data_ptr<int64_t>());
    }
    return {x, y};
  }

  std::vector<int64_t> tokens;
  int64_t vocabulary = 0;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) { return (a.detach() - b.detach()).abs().max().item<double>(); }

}  // namespace
