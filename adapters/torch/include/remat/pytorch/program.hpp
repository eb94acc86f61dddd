// SPDX-License-Identifier: Apache-2.0
/// @file
/// A captured training step as straight-line code over storages: what capture yields, what is planned, what the executor runs.
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

/// Where the storage of a value comes from.
enum class role {
  internal,    ///< written by a node
  parameter,   ///< of the module, with a gradient; by position among its parameters and then its buffers
  buffer,      ///< the same without one: a buffer or a frozen parameter
  found,       ///< a tensor that the module has in another place; by position among those that capture came upon
  input,       ///< argument of forward, by position
  constant,    ///< contents in `program::constants`, by position
  gradient,    ///< to which the step adds the gradient of a parameter, by position among `program::parameters`
  output_grad  ///< gradient of a differentiable output, by position among `program::outputs`; "written" by the loss node
};

/// Bytes that kernels can read as they read those of a tensor.
using content = std::vector<std::byte, boost::alignment::aligned_allocator<std::byte, 64>>;

/// How the elements of a tensor lie.
struct tensor_type {
  std::vector<int64_t> sizes, strides;  ///< strides in elements
  at::ScalarType dtype = at::kFloat;
  c10::Device device = c10::kCPU;
  bool conj = false, neg = false;
  bool operator==(const tensor_type&) const = default;
};

/// A tensor that comes from outside. Slots of one value share memory.
struct slot {
  role from = role::buffer;
  std::size_t position = 0;  ///< see `role`
  std::string name;
  tensor_type type;
  bytes_t offset = 0;    ///< of its first element in its storage, as captured, bytes
  bool number = false;   ///< a number that operators promote to the type of the other operands
  index_t value = none;  ///< the storage it lies in when the step (for `output_grad`: the backward) begins
  /// The tensor is in memory of the host while the step runs on another device: plans fetch it, and its gradient goes there.
  bool on_host = false;
};

/// One version of one storage. An in-place write that somebody could still tell from a new tensor makes a new version.
struct storage_value {
  index_t slot = none;  ///< from outside: the first slot that lies in it; none: written by a node
  bytes_t bytes = 0;    ///< of the storage, as allocated
  std::string name;
  c10::Device device = c10::kCPU;
};

/// A tensor: how a call sees a value.
struct byte_view {
  index_t value = none;
  std::vector<int64_t> sizes, strides;  ///< strides in elements
  bytes_t offset = 0;                   ///< of the first element; of a value from outside: where the slot lay when captured
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false;
  bool whole = false;  ///< exactly the tensor in the slot of the value, flags included
};

/// A state of the random generator, told by what of the step it belongs to.
struct generator_origin {
  enum kind {
    next,      ///< whatever it is then: where the last draw ended, or what the caller left
    before,    ///< what it was before `node` drew
    after,     ///< what it was after `node` drew
    forward,   ///< what it was when the forward began
    backward,  ///< the same of the backward
    fixed      ///< `state`, in every step alike (`manual_seed`)
  };
  kind from = next;
  index_t node = none;
  content state = {};
};

/// Puts view `view` into argument (or result) `at`, element `element` of it if that is a list, -1 if it is a tensor.
struct operand {
  int at = 0, element = -1;
  index_t view = none;
};

/// One call of an ATen operator below autograd.
///
/// Operands that touch a storage the node overwrites name the *new* version, which holds the bytes of the old one when the node
/// starts. `results` lists only what the call allocates: at most one result per value, never an alias of an operand.
struct call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  ///< with undefined tensors where `operands` go; lists are copied before they are filled
  std::vector<operand> operands, results;
  bool grad_mode = false;           ///< `at::GradMode` during the call
  std::vector<int> first_run_only;  ///< tensor arguments passed as undefined when the node is recomputed (running statistics)
  /// {argument, which}: a number that may be another one in each step, see `executor::set_numbers`. Files do not hold them.
  std::vector<std::pair<int, std::size_t>> numbers = {};
};

/// The unit of planning: calls that run together, e.g. {empty, bernoulli_, div_}. Operation `i` of the problem is node `i`.
struct node {
  std::string name;                      ///< of the main operator, such as "aten::addmm", or several: "aten::mm+aten::relu"
  std::vector<call> calls;               ///< empty for the loss node
  std::vector<index_t> inputs, outputs;  ///< values; the problem's operation has the same lists
  std::vector<std::pair<index_t, index_t>>
      overwrites;       ///< {old version (an input), new version (an output)}: the calls write the
                        ///< storage of `old` in place; where `old` lives on (always if it is a constant), a copy is made first
  bool random = false;  ///< draws from the generator
  generator_origin starts;  ///< random: from which state
  bool once = false;        ///< writes something that outlives the step, or reads what a later node overwrites there
  std::string line = {};    ///< of the module's code that calls it, such as "model.py:41"; empty: unknown
  index_t gives = none;     ///< position among `program::parameters`: its gradient goes to the caller here; calls nothing
};

/// A tensor from outside that the step writes: eager mode counts the writes.
struct written_tensor {
  index_t slot = none;
  int64_t forward = 0, backward = 0;  ///< increments of the version in each half of the step
};

/// A whole training step, without its tensors: replicas of a module share it, files hold it (`io.hpp`). First computations run
/// in the order of the nodes: the forward, the loss node, the backward.
struct program {
  std::vector<slot> slots;
  std::vector<content> constants;     ///< of the storages of the slots that are `role::constant`
  std::vector<storage_value> values;  ///< value `i` of the problem is value `i`
  std::vector<byte_view> views;
  std::vector<node> nodes;
  index_t loss = none;                   ///< the node between forward and backward: reads the outputs, "writes" their gradients
  std::vector<index_t> parameters;       ///< slots of those that require a gradient and got one, once per summand handed out
  std::vector<index_t> parameter_grads;  ///< view per parameter, with the layout that `.grad` has in eager mode
  std::vector<index_t> outputs;          ///< view per output of forward
  std::vector<int64_t> output_versions;  ///< per output: writes in place that made it
  std::vector<bool> differentiable;      ///< per output: has a gradient in eager mode
  std::vector<index_t> output_grads;     ///< per output: view of its gradient, `none` if it has none or the loss gives it none
  std::vector<index_t> input_grads;      ///< per input: view of its gradient, `none` if it requires or got none; then summands
  std::vector<std::size_t> results;      ///< what forward returns: positions among `outputs`, each tensor being there once
  std::vector<std::vector<bool>> parameter_sources;  ///< per parameter and output: does its gradient come from there?
  std::vector<std::vector<bool>> input_sources;      ///< the same per input; empty for one that no output leads to
  generator_origin after_forward, after_backward;    ///< how the halves leave the generator
  std::vector<written_tensor> written;
  /// Views of what the backward takes for zeros (`cumprod` asks whether a factor is zero). The loss reads them. Where one is not
  /// zero, the program has no backward: see `executor::as_assumed`.
  std::vector<index_t> assumed_zero = {};
  std::vector<index_t> tokens;  ///< values of no bytes that must be there at the end: their nodes write parameters,
                                ///< buffers or inputs, or draw random numbers, and so must run even if nothing reads them

  role from(index_t value) const { return values[value].slot == none ? role::internal : slots[values[value].slot].from; }
  /// The value is there before the step begins.
  bool is_given(index_t value) const { return from(value) != role::internal && from(value) != role::output_grad; }
};

/// The step whose gradients are added to those that are there, each as soon as it is complete, instead of being handed out:
/// a micro-batch of an accumulation takes no second set of gradients.
///
/// Slots of `role::gradient` are added behind the others; the caller gives their tensors to `executor::backward`.
/// Complexity: that of copying the program.
program accumulating(const program& step);

/// Gradients of parameters of fewer bytes are not worth giving early.
inline constexpr bytes_t least_given = 4096;

/// The step that gives each gradient, of `least_given` bytes or more, to the caller as soon as it is complete, and does not hold
/// it any longer: for an optimizer that steps, or a disk that takes, one gradient after another (`executor::taker`).
///
/// A gradient is given once nothing reads its parameter any more, as whoever gets it may write there.
/// Complexity: that of copying the program.
program giving(const program& step);

/// Per parameter: does a node give its gradient to the caller?
std::vector<bool> given_early(const program& step);

/// Weights that a plan can fetch from where the caller has them, drop, and fetch again: per value, is it all of a parameter or a
/// buffer, which the step reads and neither writes nor hands out?
/// Complexity: O(values + views + edges).
std::vector<bool> fetchable(const program& step);

/// Parameters of the host whose gradients plans send there: those whose gradient lies alone in what a node makes. The others are
/// on the device when the step ends.
/// @return positions in `program::parameters`
/// Complexity: O(V).
std::vector<std::size_t> leaving_gradients(const program& step);

/// A program breaks a rule; `what()` names the node, the list or the slot, and the field.
struct bad_program : error {
  bad_program(index_t at, const std::string& field, const std::string& why)
      : error((at == none ? "" : "node " + std::to_string(at) + ": ") + field + ": " + why), node(at) {}
  index_t node;  ///< none: not in a node
};

/// Checks all that `program` promises: indices, sizes of lists, one producer per value, inputs made before they are read, views
/// and slots within the bytes of their storages, overwrites, tokens, origins of draws, arguments as the operators' schemas have
/// them. What holds for a program that capture made, and is asked of one from a file.
///
/// @throws bad_program for the first rule that is broken
/// Complexity: O(views + operands + edges).
void verify(const program& step);

/// The planning problem of a program: value `i` is value `i`, operation `i` is node `i`, in the order of the program.
///
/// Parameters, buffers, inputs and constants are held sources. Targets are gradients that no node gives to the caller, outputs
/// (they belong to the caller until the end of the step) and tokens. Sizes are rounded up to multiples of 64 bytes. After the V
/// values come some without bytes, from each node with effects (random numbers, writes that outlive the step) to the next: they
/// keep the order of these. The backward begins after the loss node. Values whose memory is the caller's are not movable.
///
/// What is fetched is no held source: it starts on the host, and is on the device from a prefetch on until it is dropped.
///
/// @param step      captured program with V values and E nodes
/// @param seconds   cost of each node, s; E numbers
/// @param workspace bytes each node needs while it runs, besides inputs and outputs; E numbers
/// @param name      label of the problem
/// @param copies    rates of copies to far memory and back, if there is such
/// @param fetched   per value; empty: nothing is. The problem is then beyond those that are `plain`
/// @return the problem
/// @throws bad_option if `seconds` or `workspace` has not one entry per node, what is fetched is not `fetchable`, or there are no
///         rates for it
/// @throws bad_problem for a cost that is negative or not finite
/// Complexity: O(V + edges).
problem to_problem(const program& step, const std::vector<double>& seconds, const std::vector<bytes_t>& workspace,
                   const std::string& name = "step", const std::optional<copy_rates>& copies = std::nullopt,
                   const std::vector<bool>& fetched = {});

/// A listing of the program for people: one line per node, with values, sizes and marks.
///
/// Complexity: linear in the length of the text.
std::string explain(const program& step);

}  // namespace remat::pytorch
