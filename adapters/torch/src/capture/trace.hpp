// SPDX-License-Identifier: Apache-2.0
/// @file
/// A training step as it was called: what the recorder writes and `lower` turns into a program. Private to the adapter.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch::detail {

/// A tensor of a call. In a trace, `view.value` is a storage of the trace: views are told by storage and geometry.
struct traced_tensor {
  int at = 0, element = -1;  ///< see `operand`
  byte_view view;
  bool written = false;        ///< the call writes its storage
  std::size_t tensor = 0;      ///< which tensor it is, in the order in which a trace meets them
  bool requires_grad = false;  ///< as the call finds it
  int64_t raised = 0;          ///< by how much its kernel raises the version, as those of lists do
};

/// A `generator_origin` in terms of calls.
struct draw_origin {
  generator_origin::kind from = generator_origin::next;
  std::size_t call = 0;
  content state = {};
};

/// One call, arguments without their tensors.
struct traced_call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<traced_tensor> operands, results;
  bool grad_mode = false;
  std::vector<int> statistics;       ///< arguments written behind the schema's back, and not read by the results
  std::optional<draw_origin> draws;  ///< where its draw starts, if it draws
  bool constant = false;             ///< makes or writes constants only, which the module may look at
  /// What it gives depends on values of the step, even the size: the calls before it run ahead of the plan, to which its results
  /// are inputs.
  bool ahead = false;
  /// The plan makes another call in its place, in which lists of positions are in the place of masks; null: this one.
  std::shared_ptr<const traced_call> planned = nullptr;
  std::vector<index_t> positions = {};  ///< slots of these lists, where masks are seen for the first time
  bool told = false;                    ///< the masks are known before the step: nothing has to run ahead
  std::string line = {};                ///< see `when_recorded`
  bool assumed = false;                 ///< in the backward: its operand, a value of the forward, is taken for zeros
  std::vector<int> numbers = {};        ///< arguments that may be other numbers in each step: nothing else depends on them
};

/// Tells where the code of the module is that calls an operator; null: nobody knows.
extern std::string (*line_of_caller)();

/// An exception has been caught, and does not go on: see `when_caught`. To be called in its handler, once its text is not needed.
void forget_caught();
/// An exception has been caught in a backward, and goes on: see `when_raised`. To be called in its handler.
void translate_raised();

/// The call raises an error or does nothing, such as `_linalg_check_errors`.
inline bool only_checks(const traced_call& c) {
  return c.op.schema().returns().empty() &&
         std::none_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.written; });
}

/// How much of a trace there was when the forward ended, and what was known of its storages.
struct forward_end {
  std::size_t slots = 0, storages = 0, tensors = 0;
  std::vector<bool> constants;  ///< per storage
};

/// How the gradient of a leaf, or of an input, comes about.
struct summed_gradient {
  std::size_t summands = 0;  ///< edges that lead there from outputs that are used
  std::size_t tensor = 0;    ///< their sum, before autograd lays it out
};

/// Outputs and gradients of a recorded step. Views name storages of the trace.
struct trace_ends {
  std::size_t accumulated = 0;                  ///< first call after autograd has the gradients
  std::optional<at::ScalarType> autocast = {};  ///< of the backward, see `output_use`
  std::vector<index_t> parameters;
  std::vector<byte_view> parameter_grads;
  std::vector<byte_view> outputs;
  std::vector<int64_t> output_versions;
  std::vector<bool> differentiable;
  std::vector<std::optional<byte_view>> output_grads, input_grads;
  std::vector<std::size_t> results;
  std::vector<std::vector<bool>> parameter_sources, input_sources;
  std::vector<summed_gradient> parameter_sums, input_sums;
  std::vector<std::size_t> reached;  ///< parameters, in the order in which their gradients come; those without one are the last
  std::vector<std::size_t> reached_edges,
      input_edges;                          ///< per reached one, and per input: edges that lead there from all outputs
  std::vector<std::size_t> output_tensors;  ///< per output
};

/// A recorded step: its calls, and its ends once it has ended. Slots name storages of the trace, too.
struct trace : trace_ends {
  std::vector<slot> slots;
  std::vector<content> constants;
  std::vector<at::Tensor> found;   ///< for the slots that are `role::found`
  c10::Device device = c10::kCPU;  ///< of the step
  std::vector<storage_value> storages;
  std::vector<traced_call> calls;
  std::size_t backward = 0;  ///< first call after the forward
  draw_origin after_forward, after_backward;
  std::vector<written_tensor> written;
  std::shared_ptr<const questions> asked;
  std::vector<index_t> tensors;  ///< the slot of each tensor; none: a call made it
  forward_end forward;
  std::vector<std::size_t> held;  ///< other tensors that Python holds when the forward has ended, in order
};

/// The number of the tensor that lies in a slot.
inline std::size_t tensor_in(const trace& t, index_t slot) {
  return static_cast<std::size_t>(std::find(t.tensors.begin(), t.tensors.end(), slot) - t.tensors.begin());
}

class step_run;

/// Runs and records a step; parameters as for `capture`.
/// @param run the forward is that of a training step, which goes on whatever comes of the recording; null: it is run for the
///            recording only
trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names, const std::vector<output_use>& uses,
             step_run* run = nullptr);

/// The largest sum of bytes that the calls of a step have alive at a time in eager mode, beyond what is held before it. A tensor
/// lives from the call that makes it to the last one that uses it; gradients and outputs live to the end. Kernels' workspaces,
/// and tensors that Python code holds for longer, do not count. Complexity: O(V + E).
bytes_t plain_peak(const trace& recorded);

/// Storage versions and nodes of a recorded step.
program lower(const trace& recorded);
/// The program of a recorded step, and the tensors of a module for it.
captured captured_from(const trace& recorded, const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers);

}  // namespace remat::pytorch::detail
