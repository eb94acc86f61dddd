// SPDX-License-Identifier: Apache-2.0
/// @file
/// A training step as it was called: what the recorder writes and `lower` turns into a program. Private to the adapter.
#pragma once

#include <remat/torch/capture.hpp>
#include <remat/torch/program.hpp>

namespace remat::torch::detail {

/// A tensor of a call. In a trace, `view.value` is a storage of the trace: views are told by storage and geometry.
struct traced_tensor {
  int at = 0, element = -1;  ///< see `operand`
  tensor_view view;
  bool written = false;  ///< the call writes its storage
};

/// A `generator_origin` in terms of calls.
struct draw_origin {
  generator_origin::kind from = generator_origin::next;
  std::size_t call = 0;
  at::Tensor state;
};

/// One call, arguments without their tensors.
struct traced_call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<traced_tensor> operands, results;
  bool grad_mode = false;
  std::vector<int> statistics;       ///< arguments written behind the schema's back, and not read by the results
  std::optional<draw_origin> draws;  ///< where its draw starts, if it draws
};

/// A recorded step. Views name storages of the trace.
struct trace {
  std::vector<storage_value> storages;
  std::vector<traced_call> calls;
  std::size_t backward = 0;  ///< first call after the forward
  std::vector<at::Tensor> parameters;
  std::vector<tensor_view> parameter_grads;
  std::vector<tensor_view> outputs;
  std::vector<int64_t> output_versions;
  std::vector<bool> differentiable;
  std::vector<std::optional<tensor_view>> output_grads, input_grads;
  std::vector<std::size_t> results;
  std::vector<std::vector<bool>> parameter_sources, input_sources;
  draw_origin after_forward, after_backward;
  std::vector<written_tensor> written;
};

/// Runs and records a step; parameters as for `capture`.
trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names, const std::vector<output_use>& uses);

/// Storage versions and nodes of a recorded step.
program lower(const trace& recorded);

}  // namespace remat::torch::detail
