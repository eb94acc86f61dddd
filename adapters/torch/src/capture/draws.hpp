// SPDX-License-Identifier: Apache-2.0
/// @file
/// The random generator during a capture: where each draw starts. Private to the adapter.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../base/generators.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

bool same_bytes(const at::Tensor& a, const at::Tensor& b);
/// The state of a generator as text.
inline std::string text_of(const at::Tensor& state) { return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()}; }

/// A state of the generator that no program meets by chance; another state for each `i`.
const std::string& unlikely_state(const at::Generator& like, std::size_t i);

/// While it lives, notes whether this thread calls an operator that draws.
class noted_draws {
 public:
  noted_draws();
  ~noted_draws();
  noted_draws(const noted_draws&) = delete;
  noted_draws& operator=(const noted_draws&) = delete;
  bool any() const { return any_; }

 private:
  bool any_ = false;
  bool* before_;
  at::CallbackHandle handle_;
};

/// Describes states of the generator by the draws of the step. The destructor restores the state that the user left, advanced by
/// the draws of other threads.
class draw_log {
 public:
  explicit draw_log(c10::Device device);
  ~draw_log();
  draw_log(const draw_log&) = delete;
  draw_log& operator=(const draw_log&) = delete;

  const at::Generator& generator() const { return generator_; }
  /// The present state of the generator.
  at::Tensor state() const { return state_of(generator_); }
  void set_state(const at::Tensor& s) const { pytorch::set_state(generator_, s); }
  /// Call this before the module reads the state. Before the first draw, the state becomes that of the user.
  /// @return true if it does
  bool show();
  /// Notes a call that draws, whether it was run or not.
  /// @param call   its position
  /// @param before state that the call finds
  /// @param after  state that the call leaves
  /// @return the origin of `before`
  draw_origin note(std::size_t call, const at::Tensor& before, at::Tensor after);
  /// Advances the generator for a draw that does not run. The new state is a function of `before` and `equal`.
  /// @return the new state
  at::Tensor pass(const at::Tensor& before, const std::string& equal);
  /// The origin of the state at the end of a half of the step.
  draw_origin left_behind() { return origin_of(state()); }
  /// Begins a half of the step in an unlikely state, so that states that the module sets are recognised.
  void begin_phase();

 private:
  struct draw {
    std::size_t call;
    at::Tensor before, after;
  };
  draw_origin origin_of(const at::Tensor& now);
  /// How many numbers were drawn between two states; nothing if the second does not follow from the first.
  std::optional<std::uint64_t> draws_between(const at::Tensor& from, const at::Tensor& to) const;
  at::Tensor advanced(const at::Tensor& state, std::uint64_t draws) const;

  at::Generator generator_;
  c10::Device device_;
  at::Tensor start_, expected_;  ///< states: the user's, and after the last draw
  std::uint64_t foreign_ = 0;    ///< count of numbers that other threads have drawn
  std::vector<at::Tensor> phases_;
  std::vector<draw> draws_;
};

}  // namespace remat::pytorch::detail
