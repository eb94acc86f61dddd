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
/// A state of a generator.
inline std::string text_of(const at::Tensor& state) { return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()}; }

/// A state of the generator that no program has by chance, another one for each `i`.
const std::string& unlikely_state(const at::Generator& like, std::size_t i);

/// Notes whether this thread calls an operator that draws, while it lives.
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

/// Tells states of the generator by the draws of the step. Leaves it as the user had it, but for what other threads draw.
class draw_log {
 public:
  explicit draw_log(c10::Device device);
  ~draw_log();
  draw_log(const draw_log&) = delete;
  draw_log& operator=(const draw_log&) = delete;

  const at::Generator& generator() const { return generator_; }
  at::Tensor state() const { return state_of(generator_); }
  void set_state(const at::Tensor& s) const { pytorch::set_state(generator_, s); }
  /// Somebody is about to look at the state: before the first draw it gets that of the user.
  /// @return it has
  bool show();
  /// A call was run, or is known to draw and was not.
  /// @param call   its position
  /// @param before state that it found
  /// @param after  state that it leaves
  /// @return from where it drew
  draw_origin note(std::size_t call, const at::Tensor& before, at::Tensor after);
  /// Moves the generator on as a draw does, to a state that is the same for `equal` calls in the same state.
  /// @return that state
  at::Tensor pass(const at::Tensor& before, const std::string& equal);
  /// What the half of the step that ends has made of the generator.
  draw_origin left_behind() { return origin_of(state()); }
  /// Each half of the step begins in a state that cannot be met otherwise, so that one set by hand is told from it.
  void begin_phase();

 private:
  struct draw {
    std::size_t call;
    at::Tensor before, after;
  };
  draw_origin origin_of(const at::Tensor& now);
  /// How many numbers were drawn from one state to another, if that can be.
  std::optional<std::uint64_t> draws_between(const at::Tensor& from, const at::Tensor& to) const;
  at::Tensor advanced(const at::Tensor& state, std::uint64_t draws) const;

  at::Generator generator_;
  c10::Device device_;
  at::Tensor start_, expected_;  ///< states: the user's, and after the last draw
  std::uint64_t foreign_ = 0;    ///< numbers that other threads have drawn meanwhile
  std::vector<at::Tensor> phases_;
  std::vector<draw> draws_;
};

}  // namespace remat::pytorch::detail
