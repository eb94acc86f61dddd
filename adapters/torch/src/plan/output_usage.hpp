// SPDX-License-Identifier: Apache-2.0
/// @file
/// How losses use the outputs of a module. Private to the adapter.
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

/// True if every used output is used under the autocast that the step was captured for.
inline bool same_autocast(const std::vector<output_use>& expected, const std::vector<output_use>& seen) {
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i].used && seen[i].autocast != (i < expected.size() ? expected[i].autocast : std::nullopt)) return false;
  return true;
}

/// How the last loss used the outputs of one kind of calls. The next loss is expected to use them in the same way.
class output_usage {
 public:
  /// @param leave hooks are known to free gradients
  output_usage(std::size_t n, bool leave) : number(n), leave_(leave ? 1 : 0) {}

  const std::size_t number;       ///< identifies it in its session
  bool without_gradient = false;  ///< no output needs a gradient, so there is nothing to plan
  std::string refused = {};       ///< why these calls are not planned; empty: they are planned
  bool for_good = false;          ///< these calls will never be planned
  std::size_t plain = 0;          ///< calls that ran plain since the refusal
  std::size_t other_code = 0;     ///< backwards whose code differed from the recording
  bool hooks_inside = false;      ///< there are steps with hooks inside of the forward

  std::vector<output_use> now() const {
    std::lock_guard lock(mutex_);
    return uses_;
  }
  /// Learns how the loss of a step has used the outputs.
  /// @param step     the program that has run
  /// @param expected the uses that `step` was captured for
  /// @param seen     the uses by this loss. On entry, strides are set only for gradients whose strides differ from those of the
  ///                 program. On return, all strides are set, so that a program can be captured for these uses
  /// @return true if `step` is the right program for these uses
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
      bool all_planned = casts;  // except outputs that the module keeps
      for (std::size_t i = 0; i < seen.size(); ++i) all_planned = all_planned && (!seen[i].used || step.output_grads[i] != none);
      if (all_planned) seen.clear();
      return all_planned;
    }
    if (!same) uses_ = seen;
    return same;
  }
  /// True if hooks are expected to free each gradient of the next backward as soon as they get it.
  bool gradients_leave() const { return leave_ > 0; }
  /// @param seen whether hooks did so. Once seen, it is expected again; a failure after that ends the expectation for good
  void learn_gradients_leave(bool seen) {
    int before = seen ? 0 : 1;
    leave_.compare_exchange_strong(before, seen ? 1 : -1);
  }
  /// True if no other graph is expected to bring gradients to the parameters. Gradients may then be added to existing ones.
  bool alone() const { return alone_; }
  /// @param seen no other graph led to the parameters in a step that was to add gradients
  void learn_alone(bool seen) { alone_ = seen; }
  /// True if gradients are returned as summands. This is needed where other graphs lead to a leaf that several edges of the
  /// module reach.
  bool in_summands() const { return summands_ > 0; }
  /// @param fit whether the plan with summands fits; a plan that did not fit is never expected again
  void expect_summands(bool fit) {
    int before = fit ? 0 : 1;
    summands_.compare_exchange_strong(before, fit ? 1 : -1);
  }
  /// @param held in one step, the values were zero as the backward assumes
  /// @return true if the assumption has failed more often than it has held, by more than two steps
  bool learn_assumption(bool held) {
    const auto before = not_as_assumed_.load();
    return (not_as_assumed_ = held ? std::max(before - 1, 0) : before + 1) > 2;
  }
  /// True until a loss has been seen.
  bool unseen() const {
    std::lock_guard lock(mutex_);
    return !seen_;
  }
  /// Sets the expected uses for the first loss. Does nothing once a loss has been seen.
  void guess(std::vector<output_use> uses) {
    std::lock_guard lock(mutex_);
    if (!seen_) uses_ = std::move(uses);
  }
  /// Expects that all outputs are used, from now on.
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
  std::atomic<int> not_as_assumed_ = 0;  ///< number of steps in which it failed, less those in which it held; at least 0
  std::atomic<int> summands_ = 0;        ///< -1: no, 0: not needed so far, 1: yes
  std::atomic<int> leave_ = 0;           ///< -1: no, 0: not seen, 1: yes
};

}  // namespace remat::pytorch
