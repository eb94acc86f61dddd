// SPDX-License-Identifier: Apache-2.0
/// @file
/// States of generators. Generators of accelerators count their draws: a state is a seed and an offset. Private to the adapter.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace remat::pytorch {

inline at::Tensor state_of(at::Generator g) {
  const std::lock_guard lock(g.mutex());
  return g.get_state();
}
inline void set_state(at::Generator g, const at::Tensor& state) {
  const std::lock_guard lock(g.mutex());
  g.set_state(state);
}

/// The number of draws of a generator like `like` between two states; nothing if the states are not of one sequence.
inline std::optional<std::uint64_t> counted_draws(const at::Generator& like, const at::Tensor& from, const at::Tensor& to) {
  auto a = like.clone(), b = like.clone();
  a.set_state(from);
  b.set_state(to);
  if (a.current_seed() != b.current_seed() || b.get_offset() < a.get_offset()) return std::nullopt;
  return b.get_offset() - a.get_offset();
}

/// The state after `draws` further draws.
inline at::Tensor after_counted_draws(const at::Generator& like, const at::Tensor& state, std::uint64_t draws) {
  auto g = like.clone();
  g.set_state(state);
  g.set_offset(g.get_offset() + draws);
  return g.get_state();
}

}  // namespace remat::pytorch
