// SPDX-License-Identifier: Apache-2.0
/// @file
/// The recorded calls of a training step: the recorder writes them, `lower` makes a program of them. Private to the adapter.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch::detail {

/// A tensor of a call. In a trace, `view.value` is a storage of the trace: storage and geometry identify a view.
struct traced_tensor {
  int at = 0, element = -1;  ///< see `operand`
  byte_view view;
  bool written = false;            ///< the call writes its storage
  std::size_t tensor = 0;          ///< number of the tensor, in the order in which the trace meets tensors
  bool requires_grad = false;      ///< when the call begins
  int64_t version_increments = 0;  ///< by how much the kernel itself increases the version, as kernels on lists do
};

/// A `generator_origin` that names calls instead of nodes.
struct draw_origin {
  generator_origin::kind from = generator_origin::next;
  std::size_t call = 0;
  content state = {};
};

/// One call. Its arguments have undefined tensors in place of tensors.
struct traced_call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<traced_tensor> operands, results;
  bool grad_mode = false;
  std::vector<int> statistics;       ///< arguments that the kernel writes contrary to the schema, and that no result depends on
  std::optional<draw_origin> draws;  ///< state from which the call draws, if it draws
  bool constant = false;             ///< makes or writes only constants, which the module may read
  /// The results, perhaps even their sizes, depend on values of the step: all earlier calls run ahead of the plan, and the
  /// results are inputs of the plan.
  bool ahead = false;
  /// The call that the plan makes instead, with lists of positions in place of masks; null: the plan makes this call.
  std::shared_ptr<const traced_call> replacement = nullptr;
  std::vector<index_t> positions = {};  ///< slots of these lists; empty in the backward, which uses the lists of the forward
  bool masks_known = false;             ///< the masks are known before the step: nothing has to run ahead
  std::string line = {};                ///< line of the module's code, see `set_source_line_callback`
  bool assumes_zero = false;            ///< in the backward: the plan assumes that the operand, a value of the forward, is zero
  std::vector<int> numbers = {};        ///< arguments that may be other numbers in each step; nothing else depends on them
  bool catchable = false;               ///< the module may catch an error of the kernel, which runs ahead of the plan, too
};

/// Returns the line of the module's code that calls an operator; null: not available.
extern std::string (*line_of_caller)();
/// True if the kernel may raise an error for some values, and code of the module may catch it: see `set_handler_query`.
bool may_be_caught(const c10::OperatorHandle& op);

/// Call this in the handler of an exception that is not rethrown, once its text is not needed: see `on_exception_caught`.
void forget_caught();
/// Call this in the handler of an exception of a backward that is rethrown: see `on_backward_exception`.
void translate_raised();

/// True if the call only checks: it raises an error or does nothing, such as `_linalg_check_errors`.
inline bool only_checks(const traced_call& c) {
  return c.op.schema().returns().empty() &&
         std::none_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.written; });
}

/// Sizes of a trace at the end of its forward, and which of its storages were constants.
struct forward_end {
  std::size_t slots = 0, storages = 0, tensors = 0;
  std::vector<bool> constants;  ///< per storage
};

/// How autograd sums up the gradient of a leaf or an input.
struct summed_gradient {
  std::size_t summands = 0;  ///< edges that lead to the leaf from outputs that the loss uses
  std::size_t tensor = 0;    ///< number of their sum, before autograd lays it out
};

/// Outputs and gradients of a recorded step. Views name storages of the trace.
struct trace_ends {
  std::size_t accumulated = 0;                  ///< first call after autograd has the gradients
  std::optional<at::ScalarType> autocast = {};  ///< type of autocast in the backward, see `output_use`
  std::vector<index_t> parameters;
  std::vector<byte_view> parameter_grads;
  std::vector<byte_view> outputs;
  std::vector<int64_t> output_versions;
  std::vector<bool> differentiable;
  std::vector<std::optional<byte_view>> output_grads, input_grads;
  std::vector<std::size_t> results;
  std::vector<std::vector<bool>> parameter_sources, input_sources;
  std::vector<summed_gradient> parameter_sums, input_sums;
  std::vector<std::size_t> reached;  ///< parameters, in the order in which their gradients come; those without gradient are last
  std::vector<std::size_t> reached_edges,
      input_edges;                            ///< edges from all outputs to each parameter of `reached`, and to each input
  std::vector<std::size_t> output_tensors;    ///< number of the tensor, per output
  std::vector<std::size_t> hook_places = {};  ///< see `graph_contents`
};

/// A recorded step: its calls, and the ends, which stay empty until the step has ended. Views and slots name storages of the
/// trace.
struct trace : trace_ends {
  std::vector<slot> slots;
  std::vector<content> constants;
  std::vector<at::Tensor> found;   ///< tensors of the slots that are `role::found`
  c10::Device device = c10::kCPU;  ///< where the step runs
  std::vector<storage_value> storages;
  std::vector<traced_call> calls;
  std::size_t backward = 0;  ///< first call after the forward
  draw_origin after_forward, after_backward;
  std::vector<written_tensor> written;
  std::shared_ptr<const questions> asked;
  std::vector<index_t> tensors;  ///< slot of each tensor; none: a call made it
  forward_end forward;
  std::vector<std::size_t> python_held;  ///< numbers of other tensors that Python holds at the end of the forward, ascending
};

/// The number of the tensor in a slot.
inline std::size_t tensor_in(const trace& t, index_t slot) {
  return static_cast<std::size_t>(std::find(t.tensors.begin(), t.tensors.end(), slot) - t.tensors.begin());
}

class step_run;

/// Runs and records a step. Parameters are those of `capture`.
/// @param run the training step that the forward belongs to, which continues even if it cannot be recorded; null: the forward
///            runs for the recording only
trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names, const std::vector<output_use>& uses,
             step_run* run = nullptr);

/// The peak of a step in eager mode, in bytes, beyond what is held before it. A tensor lives from the call that makes it to the
/// last call that uses it; gradients and outputs live to the end. Workspaces of kernels do not count, nor do tensors that Python
/// code holds for longer. Complexity: O(V + E).
bytes_t plain_peak(const trace& recorded);

/// Turns a recorded step into a program: storage versions and nodes.
program lower(const trace& recorded);
/// The program of a recorded step, after all passes, and the tensors of a module for it.
captured captured_from(const trace& recorded, const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers);

}  // namespace remat::pytorch::detail
