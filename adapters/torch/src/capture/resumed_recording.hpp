// SPDX-License-Identifier: Apache-2.0
/// @file
/// Begins a recording in the middle of a forward. Private to the adapter.
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

/// Records a step whose forward has left all recorded ones. It takes the common calls from a recorded forward, without running
/// them, and records all further calls.
class resumed_recording {
 public:
  /// @param common   candidate with the same calls so far, which are in `log`
  /// @param versions versions before the forward of tensors from outside that these calls may have written
  /// @return null if the step cannot be recorded now; nothing has changed then
  static std::unique_ptr<resumed_recording> begin(const step_request& request, const std::vector<at::Tensor>& inputs,
                                                  const candidate& common, const std::shared_ptr<call_log>& log,
                                                  const std::vector<std::pair<at::Tensor, int64_t>>& versions);
  ~resumed_recording();

  void call(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);
  /// Call this in a handler: the forward has thrown. @throws cannot_capture if the cause is a call that cannot be recorded
  void note_exception();
  /// Records the backward.
  /// @throws cannot_capture if the step cannot be recorded
  trace finish(const std::vector<at::Tensor>& returned);
  /// Hands over the forward.
  step_run take();

 private:
  struct state;
  explicit resumed_recording(std::unique_ptr<state> s);
  std::unique_ptr<state> state_;
};

}  // namespace remat::pytorch::detail
