// SPDX-License-Identifier: Apache-2.0
/// @file
/// A captured training step as straight-line code over storages: output of capture, input of the planner and the executor.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <boost/align/aligned_allocator.hpp>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::pytorch {

/// Where the storage of a value comes from. `slot::position` counts within the list named here.
enum class role {
  internal,    ///< written by a node
  parameter,   ///< parameter with a gradient; position among the parameters, then buffers, of the module
  buffer,      ///< buffer or frozen parameter; position as for `parameter`
  found,       ///< tensor that the module has in another place; position among the tensors that capture found
  input,       ///< argument of forward; position among the arguments
  constant,    ///< constant; position in `program::constants`
  gradient,    ///< existing gradient, to which the step adds that of a parameter; position in `program::parameters`
  output_grad  ///< gradient of a differentiable output; position in `program::outputs`. "Written" by the loss node
};

/// Bytes of a tensor, aligned as kernels expect.
using content = std::vector<std::byte, boost::alignment::aligned_allocator<std::byte, 64>>;

/// Geometry, type and device of a tensor.
struct tensor_type {
  std::vector<int64_t> sizes, strides;  ///< strides in elements
  at::ScalarType dtype = at::kFloat;
  c10::Device device = c10::kCPU;
  bool conj = false, neg = false;
  bool operator==(const tensor_type&) const = default;
};

/// A tensor from outside the program. Slots of one value share memory.
struct slot {
  role from = role::buffer;
  std::size_t position = 0;  ///< see `role`
  std::string name;
  tensor_type type;
  bytes_t offset = 0;    ///< of the first element in the storage, as captured, bytes
  bool number = false;   ///< wrapped number: operators promote it to the type of the other operands
  index_t value = none;  ///< storage of the tensor when the step (for `output_grad`: the backward) begins
  /// The tensor is in memory of the host while the step runs on another device: plans fetch it, and send its gradient there.
  bool on_host = false;
};

/// One version of one storage. An in-place write makes a new version, or is merged into the node that made the storage.
struct storage_value {
  index_t slot = none;  ///< first slot in this storage, if it comes from outside; none: written by a node
  bytes_t bytes = 0;    ///< size of the storage, as allocated
  std::string name;
  c10::Device device = c10::kCPU;
};

/// A tensor as a view of the storage of a value.
struct byte_view {
  index_t value = none;
  std::vector<int64_t> sizes, strides;  ///< strides in elements
  bytes_t offset = 0;  ///< of the first element in the storage, bytes; for values from outside as captured, like `slot::offset`
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false;
  bool whole = false;  ///< exactly the tensor in the slot of the value, flags included
};

/// A state of the random generator, described by its place in the step.
struct generator_origin {
  enum kind {
    next,      ///< current state: where the last draw ended, or as the caller left it
    before,    ///< state before the draw of `node`
    after,     ///< state after the draw of `node`
    forward,   ///< state when the forward began
    backward,  ///< state when the backward began
    fixed      ///< `state`, equal in every step (`manual_seed`)
  };
  kind from = next;
  index_t node = none;
  content state = {};
};

/// Binds view `view` to argument (or result) `at` of a call. `element` is the position in a list; -1 if `at` is a tensor.
/// Operands of a call that are one tensor have one view, because kernels may ask for that (`query.is_same(key)`).
struct operand {
  int at = 0, element = -1;
  index_t view = none;
};

/// One call of an ATen operator below autograd.
///
/// If the node overwrites a storage, operands in that storage name the *new* version, which holds the bytes of the old version
/// when the node starts. `results` lists only tensors that the call allocates: at most one per value, no alias of an operand.
struct call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  ///< undefined tensors at the places of `operands`; lists are copied before they are filled
  std::vector<operand> operands, results;
  bool grad_mode = false;           ///< `at::GradMode` during the call
  std::vector<int> first_run_only;  ///< tensor arguments passed as undefined when the node is recomputed (running statistics)
  /// {argument, index}: numbers that may change from step to step, see `executor::set_numbers`. Documents do not hold them.
  std::vector<std::pair<int, std::size_t>> numbers = {};
};

/// The unit of planning: calls that run together, e.g. {empty, bernoulli_, div_}. Operation `i` of the problem is node `i`.
struct node {
  std::string name;         ///< name of the main operator, such as "aten::addmm", or of several: "aten::mm+aten::relu"
  std::vector<call> calls;  ///< empty for the loss node
  std::vector<index_t> inputs, outputs;  ///< values; the problem's operation has the same lists
  std::vector<std::pair<index_t, index_t>>
      overwrites;           ///< {old version (an input), new version (an output)}: the calls write the storage of the old version
                            ///< in place. If the old version is read later, or is a constant, the calls write to a copy
  bool random = false;      ///< draws from the generator
  generator_origin starts;  ///< state of the generator before a random node
  bool once = false;        ///< must not be recomputed: writes memory that outlives the step, or reads it before a later write
  std::string line = {};    ///< line of the module's code that calls the operator, such as "model.py:41"; empty: unknown
  index_t gives = none;     ///< position in `program::parameters` of the gradient given to the caller here; the node has no calls
};

/// A tensor from outside that the step writes, with the version increments of eager mode.
struct written_tensor {
  index_t slot = none;
  int64_t forward = 0, backward = 0;  ///< increments of the version in each half of the step
};

/// A whole training step, without its tensors. Replicas of a module share it; documents hold it (`io.hpp`). First computations
/// run in the order of the nodes: the forward, the loss node, the backward.
struct program {
  std::vector<slot> slots;
  std::vector<content> constants;     ///< contents of the storages of slots of `role::constant`
  std::vector<storage_value> values;  ///< value `i` of the problem is value `i`
  std::vector<byte_view> views;
  std::vector<node> nodes;
  index_t loss = none;                   ///< node between forward and backward: reads the outputs, "writes" their gradients
  std::vector<index_t> parameters;       ///< slots of parameters that received a gradient; one entry per summand handed out
  std::vector<index_t> parameter_grads;  ///< view per parameter, in the layout of `.grad` in eager mode
  std::vector<index_t> outputs;          ///< view per output of forward
  std::vector<int64_t> output_versions;  ///< per output: version counter, i.e. number of in-place writes that made it
  std::vector<bool> differentiable;      ///< per output: requires a gradient in eager mode
  std::vector<index_t> output_grads;     ///< per output: view of its gradient; `none` without one from the loss
  std::vector<index_t> input_grads;      ///< per input: view of its gradient; `none` without one. Further summands follow
  std::vector<std::size_t> results;      ///< results of forward, as positions in `outputs`, which has each tensor once
  std::vector<std::vector<bool>> parameter_sources;  ///< per parameter and output: the gradient depends on that output
  std::vector<std::vector<bool>> input_sources;      ///< per input and output as above; empty if no output depends on the input
  generator_origin after_forward, after_backward;    ///< state of the generator after each half
  std::vector<written_tensor> written;
  /// Views of values that the backward assumes to be zero (`cumprod` asks whether a factor is zero). The loss reads them. If a
  /// value is not zero, the program has no backward: see `executor::as_assumed`.
  std::vector<index_t> assumed_zero = {};
  std::vector<index_t> tokens;  ///< values without bytes that are targets. Their nodes write parameters, buffers or inputs, or
                                ///< draw random numbers, and so must run even if nothing reads their results

  role from(index_t value) const { return values[value].slot == none ? role::internal : slots[values[value].slot].from; }
  /// True if the value exists before the step begins.
  bool is_given(index_t value) const { return from(value) != role::internal && from(value) != role::output_grad; }
};

/// Variant of a step for gradient accumulation: adds each gradient to an existing one as soon as it is complete, instead of
/// returning it. So a micro-batch needs no second set of gradients.
///
/// Slots of `role::gradient` are added behind the others; the caller passes their tensors to `executor::backward`.
/// Complexity: that of copying the program.
program accumulating(const program& step);

/// Smallest size of a gradient that `giving` gives early, bytes.
inline constexpr bytes_t min_early_gradient_bytes = 4096;

/// Variant of a step that gives each gradient of `min_early_gradient_bytes` bytes or more to the caller as soon as it is
/// complete, and does not hold it any longer. For optimizers that step, or disks that store, one gradient after another
/// (`executor::taker`).
///
/// A gradient is given after the last operation that reads its parameter, as the receiver may write to the parameter.
/// Complexity: that of copying the program.
program giving(const program& step);

/// Per parameter: true if a node gives its gradient to the caller.
std::vector<bool> has_early_gradient(const program& step);

/// Weights that a plan can fetch from the memory of the caller, drop, and fetch again.
/// @return per value: true if it is all of a parameter or buffer, and the step reads it, but neither writes nor returns it
/// Complexity: O(values + views + edges).
std::vector<bool> fetchable(const program& step);

/// Parameters on the host whose gradients a plan sends to the host. A node makes such a gradient, no node reads its value, and
/// the step returns the value only once. All other gradients are on the device when the step ends.
/// @return positions in `program::parameters`
/// Complexity: O(V).
std::vector<std::size_t> leaving_gradients(const program& step);

/// A program breaks a rule; `what()` names the node, the list or the slot, and the field.
struct bad_program : error {
  bad_program(index_t at, const std::string& field, const std::string& why)
      : error((at == none ? "" : "node " + std::to_string(at) + ": ") + field + ": " + why), node(at) {}
  index_t node;  ///< position of the node; none: the error is not in a node
};

/// Checks all rules of a program: indices, sizes of lists, one producer per value, inputs made before they are read, views and
/// slots within the bytes of their storages, overwrites, tokens, origins of draws, arguments that match the operators' schemas.
/// Programs made by capture obey these rules; programs read from a file must.
///
/// @throws bad_program for the first broken rule
/// Complexity: O(views + operands + edges).
void verify(const program& step);

/// The planning problem of a program: value `i` is value `i`, operation `i` is node `i`, in the order of the program.
///
/// Parameters, buffers, inputs and constants are held sources. Targets are gradients that no node gives to the caller, outputs
/// (they belong to the caller until the end of the step) and tokens. Sizes are rounded up to multiples of 64 bytes. After the V
/// values come values without bytes, from each node with effects (random numbers, writes that outlive the step) to the next such
/// node. They keep these nodes in order. The backward begins after the loss node. Values in memory of the caller are not movable.
///
/// Fetched weights are no held sources. They start on the host, and are on the device from a prefetch until they are dropped.
///
/// @param step      captured program with V values and E nodes
/// @param seconds   time of each node, s; E numbers
/// @param workspace bytes each node needs while it runs, besides inputs and outputs; E numbers
/// @param name      label of the problem
/// @param copies    rates of copies to far memory and back; nothing: no far memory
/// @param fetched   per value: the plan fetches it; empty: no value. With fetched values the problem is not `plain`
/// @return the problem
/// @throws bad_option if `seconds` or `workspace` does not have E entries, a fetched value is not `fetchable`, or `copies` is
///         missing for it
/// @throws bad_problem for a cost that is negative or not finite
/// Complexity: O(V + edges).
problem to_problem(const program& step, const std::vector<double>& seconds, const std::vector<bytes_t>& workspace,
                   const std::string& name = "step", const std::optional<copy_rates>& copies = std::nullopt,
                   const std::vector<bool>& fetched = {});

/// Bytes of storages that each node overwrites. The problem has two values for such a storage, and the layout one. So the layout
/// of a schedule may take that much less than the problem says while this node runs.
/// @return E numbers
/// Complexity: O(E + overwrites).
std::vector<bytes_t> overwritten_bytes(const program& step);

/// A listing of the program for people: one line per node, with values, sizes and marks.
///
/// Complexity: linear in the length of the text.
std::string explain(const program& step);

}  // namespace remat::pytorch
