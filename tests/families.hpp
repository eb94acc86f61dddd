// SPDX-License-Identifier: Apache-2.0
/// @file
/// Families of training graphs of any size. Each family is hard for some method.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/testing/generators.hpp>

#include "networks.hpp"

namespace remat::testing {

/// A family: makes a problem with about the given number of operations.
struct family {
  std::string name;
  problem (*make)(std::size_t operations);
};

/// One layer after another.
inline problem deep_chain(std::size_t operations) {
  network n;
  auto x = n.input(1024);
  for (std::size_t i = 0; i < operations / 2; ++i)
    x = n.layer({x}, 1024 + static_cast<bytes_t>(i % 7) * 128, 1 + 0.1 * static_cast<double>(i % 5));
  return std::move(n).training();
}

/// An unrolled recurrence with one weight, whose gradient is accumulated step by step.
inline problem recurrence(std::size_t operations) {
  std::vector<value> values;
  std::vector<operation> ops;
  const auto add = [&](bytes_t bytes, bool held) {
    values.push_back({"", bytes, held});
    return value_id(values.size() - 1);
  };
  const auto w = add(4096, true);
  std::vector<value_id> state = {add(1024, true)};
  const auto steps = operations / 2;
  for (std::size_t i = 0; i < steps; ++i) {
    state.push_back(add(1024, false));
    ops.push_back({"step", {state[i], w}, {state.back()}, 1});
  }
  auto gradient = add(1024, false), sum = add(4096, false);
  ops.push_back({"loss", {state.back()}, {gradient, sum}, 1});
  for (auto i = steps; i-- > 0;) {
    const auto to_state = add(1024, false), to_sum = add(4096, false);
    ops.push_back({"back", {gradient, sum, state[i], state[i + 1], w}, {to_state, to_sum}, 2});
    gradient = to_state, sum = to_sum;
  }
  return problem("recurrence", std::move(values), std::move(ops), {sum});
}

/// A square grid of operations; each reads the outputs of its upper and left neighbours.
inline problem grid(std::size_t operations) {
  network n;
  const auto x = n.input(64);
  const auto side = static_cast<std::size_t>(std::sqrt(static_cast<double>(operations) / 3));
  std::vector<value_id> row(side, x);
  for (std::size_t i = 0; i < side; ++i)
    for (std::size_t j = 0; j < side; ++j) {
      std::vector<value_id> reads = {row[j]};
      if (j > 0 && row[j - 1] != row[j]) reads.push_back(row[j - 1]);
      row[j] = n.layer(reads, 64, 1);
    }
  return std::move(n).training();
}

/// A binary tree: the leaves read one input, and pairs are joined.
inline problem tree(std::size_t operations) {
  network n;
  const auto x = n.input(64);
  std::vector<value_id> level;
  for (std::size_t i = 0; i < operations / 4; ++i) level.push_back(n.layer({x}, 64, 1));
  while (level.size() > 1) {
    std::vector<value_id> next;
    for (std::size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(n.layer({level[i], level[i + 1]}, 64, 1));
    if (level.size() % 2 == 1) next.push_back(level.back());
    level = std::move(next);
  }
  return std::move(n).training();
}

/// A chain in which every tenth layer also reads a random earlier layer.
inline problem long_skips(std::size_t operations) {
  network n;
  std::mt19937_64 random(5);
  std::vector<value_id> made = {n.input(256)};
  while (made.size() < operations * 10 / 21) {
    std::vector<value_id> reads = {made.back()};
    if (const auto skip = made[random() % made.size()]; made.size() % 10 == 0 && skip != reads[0]) reads.push_back(skip);
    made.push_back(n.layer(reads, 256, 1));
  }
  return std::move(n).training();
}

/// Short towers side by side, joined at their ends.
inline problem wide(std::size_t operations) { return branches(1, operations / 7, 3); }

/// One layer that all others read, and one layer that reads all others.
inline problem star(std::size_t operations) {
  network n;
  const auto hub = n.layer({n.input(64)}, 4096, 5);
  std::vector<value_id> rays;
  for (std::size_t i = 0; i < operations / 3; ++i) rays.push_back(n.layer({hub}, 64, 1));
  n.layer(rays, 64, 1);
  return std::move(n).training();
}

/// Blocks in which each layer reads all earlier layers of the block.
inline problem dense_skips(std::size_t operations) { return dense_net(operations / 70, 8); }

/// Groups of one to six parallel chains with one to eight layers each, one group after another.
inline problem series_parallel(std::size_t operations) {
  network n;
  std::mt19937_64 random(9);
  auto x = n.input(128);
  for (std::size_t left = operations * 11 / 25; left > 0;) {
    std::vector<value_id> ends;
    for (auto width = 1 + random() % 6; width > 0 && left > 0; --width) {
      auto y = x;
      for (auto length = std::min<std::size_t>(left, 1 + random() % 8); length > 0; --length, --left) y = n.layer({y}, 128, 1);
      ends.push_back(y);
    }
    x = ends.size() == 1 ? ends[0] : n.layer(ends, 128, 1);
  }
  return std::move(n).training();
}

/// All families.
inline std::vector<family> families() {
  return {{"deep chain", deep_chain},
          {"recurrence", recurrence},
          {"grid", grid},
          {"tree", tree},
          {"long skips", long_skips},
          {"wide", wide},
          {"star", star},
          {"dense skips", dense_skips},
          {"series-parallel", series_parallel}};
}

}  // namespace remat::testing
