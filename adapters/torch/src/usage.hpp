// SPDX-License-Identifier: Apache-2.0
/// @file
/// What losses make of the outputs of a module. Private to the adapter.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <remat/pytorch/capture.hpp>

namespace remat::pytorch {

/// What the last loss made of the outputs: the next one is expected to do the same.
class usage {
 public:
  explicit usage(std::size_t n) : number(n) {}

  const std::size_t number;       ///< tells it from others of a session
  bool without_gradient = false;  ///< no output needs one: there is nothing to plan

  std::vector<output_use> now() const {
    std::lock_guard lock(mutex_);
    return uses_;
  }
  /// @param seen what this loss makes of them
  /// @return is `step` the program for that?
  bool learn(const program& step, std::vector<output_use> seen) {
    std::lock_guard lock(mutex_);
    bool same = true;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const bool planned = step.output_grads[i] != none;
      const auto before = i < uses_.size() ? uses_[i].strides : std::vector<int64_t>();
      same = same && (!step.differentiable[i] || (planned == seen[i].used && seen[i].strides.empty()));
      if (planned && seen[i].used && seen[i].strides.empty()) seen[i].strides = before;  // as planned
    }
    settled_ = settled_ || same;
    if (same || all_) return true;
    uses_ = std::move(seen);
    return false;
  }
  /// A loss has done as expected.
  bool settled() const {
    std::lock_guard lock(mutex_);
    return settled_;
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
  bool all_ = false, settled_ = false;
};

}  // namespace remat::pytorch
