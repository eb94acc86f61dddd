// SPDX-License-Identifier: Apache-2.0
/// @file
/// What losses make of the outputs of a module. Private to the adapter.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <remat/pytorch/capture.hpp>

namespace remat::pytorch {

/// Was the step captured for a backward under the autocast that is seen?
inline bool same_autocast(const std::vector<output_use>& expected, const std::vector<output_use>& seen) {
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i].used && seen[i].autocast != (i < expected.size() ? expected[i].autocast : std::nullopt)) return false;
  return true;
}

/// What the last loss made of the outputs: the next one is expected to do the same.
class usage {
 public:
  /// @param leave hooks are known to free gradients
  usage(std::size_t n, bool leave) : number(n), leave_(leave ? 1 : 0) {}

  const std::size_t number;       ///< tells it from others of a session
  bool without_gradient = false;  ///< no output needs one: there is nothing to plan
  std::string refused = {};       ///< why such calls are not planned; empty: they are
  bool for_good = false;          ///< they never will be
  std::size_t plain = 0;          ///< such calls that ran as they are since then
  std::size_t other_code = 0;     ///< backwards whose code did something else than when it was recorded

  std::vector<output_use> now() const {
    std::lock_guard lock(mutex_);
    return uses_;
  }
  /// Learns how the loss of a step has used the outputs.
  /// @param step     the program that has run
  /// @param expected the uses that `step` was captured for
  /// @param seen     the uses by this loss, with strides only where those of a gradient differ from the program's; gets all
  ///                 strides, so that a program can be captured for these uses
  /// @return true if `step` is the program for these uses
  bool learn(const program& step, const std::vector<output_use>& expected, std::vector<output_use>& seen) {
    std::lock_guard lock(mutex_);
    seen_ = true;
    const bool casts = same_autocast(expected, seen);
    bool same = casts;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const bool planned = step.output_grads[i] != none;
      same = same && (!step.differentiable[i] || (planned == seen[i].used && seen[i].strides.empty()));
      if (planned && seen[i].used && seen[i].strides.empty() && i < expected.size()) seen[i].strides = expected[i].strides;
    }
    if (all_) {
      bool all_planned = casts;  // but for what the module keeps
      for (std::size_t i = 0; i < seen.size(); ++i) all_planned = all_planned && (!seen[i].used || step.output_grads[i] != none);
      if (all_planned) seen.clear();
      return all_planned;
    }
    if (!same) uses_ = seen;
    return same;
  }
  /// Do hooks free each gradient when they are told of it? That is expected of the next backward.
  bool gradients_leave() const { return leave_ > 0; }
  /// @param seen they have: what was seen once is expected, and what has failed once is not expected again
  void learn_gradients_leave(bool seen) {
    int before = seen ? 0 : 1;
    leave_.compare_exchange_strong(before, seen ? 1 : -1);
  }
  /// Is nothing else expected to bring gradients to the parameters, so that they can be added to those that are there?
  bool alone() const { return alone_; }
  /// @param seen nothing else led to them when gradients were to be added
  void learn_alone(bool seen) { alone_ = seen; }
  /// Are gradients handed out as summands? Other graphs lead where several edges of the module do.
  bool in_summands() const { return summands_ > 0; }
  /// @param fit the plan that does so; one that has not fitted once is not expected again
  void expect_summands(bool fit) {
    int before = fit ? 0 : 1;
    summands_.compare_exchange_strong(before, fit ? 1 : -1);
  }
  /// @param held what the backward assumes of values was so, in a step
  /// @return more often than not it was not so
  bool learn_assumption(bool held) {
    const auto before = not_as_assumed_.load();
    return (not_as_assumed_ = held ? std::max(before - 1, 0) : before + 1) > 2;
  }
  /// No loss has been seen so far.
  bool unseen() const {
    std::lock_guard lock(mutex_);
    return !seen_;
  }
  /// Expects this of the first loss. Nothing if a loss has been seen.
  void guess(std::vector<output_use> uses) {
    std::lock_guard lock(mutex_);
    if (!seen_) uses_ = std::move(uses);
  }
  /// Expects all outputs from now on.
  void expect_all() {
    std::lock_guard lock(mutex_);
    uses_.clear();
    all_ = true;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<output_use> uses_;
  bool seen_ = false, all_ = false;
  std::atomic<bool> alone_ = true;
  std::atomic<int> not_as_assumed_ = 0;  ///< steps, less those that were
  std::atomic<int> summands_ = 0;        ///< -1: no, 0: not needed so far, 1: yes
  std::atomic<int> leave_ = 0;           ///< -1: no, 0: not seen, 1: yes
};

}  // namespace remat::pytorch
