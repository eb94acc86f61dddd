// SPDX-License-Identifier: Apache-2.0
/// @file
/// Training graphs that are not chains.
#pragma once

#include <utility>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat::testing {

/// A network whose layers may read any earlier activations, with its backward. The backward of a layer reads the gradient of its
/// output and its inputs, and adds to the gradients of the inputs.
class network {
 public:
  value_id input(bytes_t bytes) { return add(bytes, true); }
  value_id layer(std::vector<value_id> inputs, bytes_t bytes, double seconds) {
    const auto out = add(bytes, false);
    operations_.push_back({"forward", inputs, {out}, seconds});
    layers_.push_back({std::move(inputs), out, seconds});
    return out;
  }
  problem training() && {
    std::vector<value_id> gradient(values_.size(), none), targets;
    const auto last = layers_.back().output;
    gradient[last] = add(values_[last].bytes, false);
    operations_.push_back({"loss", {last}, {gradient[last]}, 1});
    for (auto i = layers_.size(); i-- > 0;) {
      const auto l = layers_[i];
      operation back{"backward", l.inputs, {}, 2 * l.seconds};
      back.inputs.push_back(gradient[l.output]);
      for (auto v : l.inputs) {
        if (v < values_.size() && values_[v].held) continue;
        const auto d = add(values_[v].bytes, false);
        back.outputs.push_back(d);
        if (gradient[v] == none) {
          gradient[v] = d;
        } else {
          const auto sum = add(values_[v].bytes, false);
          sums_.push_back({"add", {gradient[v], d}, {sum}, 0.1});
          gradient[v] = sum;
        }
      }
      targets.push_back(add(1, false));  // the gradient of the weights
      back.outputs.push_back(targets.back());
      operations_.push_back(std::move(back));
      operations_.insert(operations_.end(), sums_.begin(), sums_.end());
      sums_.clear();
    }
    return problem("network", std::move(values_), std::move(operations_), std::move(targets));
  }

 private:
  struct one {
    std::vector<value_id> inputs;
    value_id output;
    double seconds;
  };
  value_id add(bytes_t bytes, bool held) {
    values_.push_back({"", bytes, held});
    return static_cast<index_t>(values_.size() - 1);
  }
  std::vector<value> values_;
  std::vector<operation> operations_, sums_;
  std::vector<one> layers_;
};

/// Encoder and decoder with a skip connection at each level.
inline problem u_net(std::size_t depth, std::size_t layers) {
  network n;
  auto x = n.input(64);
  std::vector<value_id> skips;
  bytes_t bytes = bytes_t{64} << depth;
  for (std::size_t d = 0; d < depth; ++d, bytes /= 2) {
    for (std::size_t i = 0; i < layers; ++i) x = n.layer({x}, bytes, 4);
    skips.push_back(x);
    x = n.layer({x}, bytes / 2, 1);
  }
  for (std::size_t i = 0; i < layers; ++i) x = n.layer({x}, bytes, 4);
  for (std::size_t d = depth; d-- > 0;) {
    bytes *= 2;
    x = n.layer({x, skips[d]}, bytes, 5);
    for (std::size_t i = 0; i < layers; ++i) x = n.layer({x}, bytes, 4);
  }
  return std::move(n).training();
}

/// Blocks in which each layer reads all earlier layers of the block.
inline problem dense_net(std::size_t blocks, std::size_t layers) {
  network n;
  auto x = n.input(32);
  for (std::size_t b = 0; b < blocks; ++b) {
    std::vector<value_id> all = {x};
    for (std::size_t i = 0; i < layers; ++i)
      all.push_back(n.layer({n.layer(all, 8 * static_cast<bytes_t>(all.size()), 1)}, 8, 6));
    x = n.layer(all, 24, 2);
  }
  return std::move(n).training();
}

/// Operations that read all earlier values.
inline problem uncuttable(index_t operations) {
  std::vector<value> values = {{"x", 1, true}};
  std::vector<operation> ops;
  for (index_t i = 1; i <= operations; ++i) {
    values.push_back({"v", 100, false});
    std::vector<value_id> all(i);
    for (index_t k = 0; k < i; ++k) all[k] = k;
    ops.push_back({"o", all, {i}, 1});
  }
  return problem("uncuttable", values, ops, {operations});
}

/// Parallel towers that are joined at their ends, several times in a row.
inline problem branches(std::size_t times, std::size_t towers, std::size_t layers) {
  network n;
  auto x = n.input(16);
  for (std::size_t t = 0; t < times; ++t) {
    std::vector<value_id> ends;
    for (std::size_t k = 0; k < towers; ++k) {
      auto y = x;
      for (std::size_t i = 0; i < layers; ++i) y = n.layer({y}, 16, 3);
      ends.push_back(y);
    }
    x = n.layer(ends, 16, 1);
  }
  return std::move(n).training();
}

}  // namespace remat::testing
