// SPDX-License-Identifier: Apache-2.0
/// @file
/// A recording that begins in the middle of a forward. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "call_log.hpp"
#include "follower.hpp"
#include "step_run.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

/// Goes on with the recording of a step whose forward has left those that were recorded before: takes their common calls, whose
/// results the module has already, and records what comes then.
class resumed_recording {
 public:
  /// @param common   has made the same calls until now, which are in `log`
  /// @param versions of tensors from outside that these may have written, before the forward
  /// @return null: nothing has changed, and the step cannot be recorded now
  static std::unique_ptr<resumed_recording> begin(const step_request& what, const std::vector<at::Tensor>& inputs,
                                                  const candidate& common, const std::shared_ptr<call_log>& log,
                                                  const std::vector<std::pair<at::Tensor, int64_t>>& versions);
  ~resumed_recording();

  void call(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);
  /// In a handler: the forward has thrown. @throws cannot_capture if it did so because of what cannot be recorded
  void stopped();
  /// Records the backward.
  /// @throws cannot_capture
  trace finish(const std::vector<at::Tensor>& returned);
  /// What has become of the forward.
  step_run take();

 private:
  struct state;
  explicit resumed_recording(std::unique_ptr<state> s);
  std::unique_ptr<state> state_;
};

}  // namespace remat::pytorch::detail
