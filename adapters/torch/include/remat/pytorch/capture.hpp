// SPDX-License-Identifier: Apache-2.0
/// @file
/// From a module as it is to a program: the training step is run once, without its memory, and recorded below autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/pytorch/bindings.hpp>
#include <remat/pytorch/model.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The module cannot be captured; `what()` names the operator, its place among the calls, and the reason.
struct cannot_capture : error {
  using error::error;
};

/// No output of the module depends on anything that requires a gradient.
struct no_gradient : cannot_capture {
  no_gradient() : cannot_capture("the outputs of the module need no gradient") {}
};

/// What the loss makes of an output.
struct output_use {
  bool used = true;                             ///< it gives it a gradient
  std::vector<int64_t> strides = {};            ///< of that gradient; empty: those of the output
  std::optional<at::ScalarType> autocast = {};  ///< type of the autocast that the backward runs under; nothing: under none
  bool operator==(const output_use&) const = default;
};

/// Numbers that the forward asked for on its way (`item`, `bool`), where inputs and buffers tell them: is a mask all ones?
/// Inputs that give other answers may take another path.
class questions {
 public:
  virtual ~questions() = default;
  /// Do such inputs, and the tensors of the module as they are, give the answers of the capture?
  virtual bool same_answers(const bindings& tensors, const std::vector<at::Tensor>& inputs) const = 0;
  /// The operator that gave the last one.
  virtual std::string last() const = 0;
};

/// A step, and the tensors of the module it was captured from.
struct captured {
  std::shared_ptr<const program> step;
  bindings tensors;
  /// Parameters that a differentiable output leads to, used by the loss or not, in the order in which their gradients come.
  std::vector<std::size_t> reached;
  std::shared_ptr<const questions> asked = {};  ///< empty: nothing
};

/// Tensors of the host like these, without memory: a module on `meta`, which has none either, can be captured with them in the
/// place of its own, to be planned but not run. They share storages as these do.
///
/// @param tensors parameters, buffers, inputs; `requires_grad` is left to the caller
/// @return as many; capture knows nothing of their contents
/// Complexity: linear in their number.
///
/// @code
/// auto shadows = remat::pytorch::without_memory(module->parameters());
/// @endcode
std::vector<at::Tensor> without_memory(const std::vector<at::Tensor>& tensors, c10::Device on = c10::kCPU);

/// Records one training step (forward, gradient of the outputs with respect to parameters and inputs) as a program.
///
/// Every ATen call below autograd is recorded while it runs on the real device on *hollow* tensors: storages of the true size
/// that own memory only while an operator touches them. The peak memory of a capture is that of the largest single operator.
/// A call like one that has run in this process (operator, arguments, geometry and sharing of operands, settings) does not run
/// again: its results are made as the kernel made them then. So equal layers cost one, and a second capture next to nothing.
/// The recorded calls are then turned into storage versions: a view is no call, an in-place write makes a new version or
/// becomes part of the node that made the old one.
///
/// Nothing is left changed: parameters, buffers, inputs, `.grad` and the state of the generator are as before, also if an
/// exception is thrown. One capture runs at a time in a process; a second thread waits.
///
/// @param forward    the module; run once, with grad mode on
/// @param inputs     its arguments: sizes, strides, types and `requires_grad` count; values only of small integer tensors, as
///                   a hint to kernels that index with them
/// @param parameters of the module; frozen ones (no `requires_grad`) are treated as buffers
/// @param buffers    of the module
/// @param names      of the parameters, then of the buffers; may be shorter
/// @param uses       of the outputs, each tensor once; may be shorter
/// @return the program, valid for inputs of the same sizes, strides and types; and the tensors of this module for it
/// @throws cannot_capture if the forward asks for values of activations (`item`) or the size of an output depends on values
///         (`nonzero`, boolean indexing), but for what small integer inputs, buffers and constants tell (`questions`);
///         no output needs a gradient, a tensor is sparse, quantized or nested, tensors live on several devices, a dispatch
///         mode is active, a module resizes storages or returns a tensor no recorded operator made
/// @throws broken_contract if the program would not pass `verify`: a bug
/// @throws not_available if this build of PyTorch, or another library, has taken the dispatch key the recorder needs
/// Complexity: one run of each different call; O(calls + views) bookkeeping.
///
/// @code
/// auto step = remat::pytorch::capture([&](const auto& in) { return std::vector<at::Tensor>{net->forward(in[0])}; }, {x},
///                                   net->parameters(), net->buffers());
/// std::cout << remat::pytorch::explain(*step.step);
/// @endcode
captured capture(const forward_function& forward, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers = {},
                 const std::vector<std::string>& names = {}, const std::vector<output_use>& uses = {});

/// This thread runs the forward, or a part of the backward, of a capture.
bool capturing();
/// This thread runs a forward in which weights of the host look as if they were on the device of the steps
/// (`wrap_options::steps_on`).
bool weights_disguised();

/// A forward of this thread, whose kernels have not run yet, is about to read the memory of a tensor without an operator: they
/// run first, and the rest of the forward runs eagerly (`wrap_options::follow`). If there are none, the forward may stay planned.
/// @param may_write the memory may be written, too, now or later
void about_to_read(const at::Tensor& t, bool may_write);
/// The same for the state of the default generator.
void about_to_read_generator();
/// A forward of this thread, whose kernels have not run yet, is about to run code that no plan can hold: they run first, and the
/// rest of the forward runs eagerly.
/// @param why names that code
/// @throws cannot_capture if nothing may run eagerly, or it is a backward
void leave_plan(const std::string& why);
/// A forward of this thread, without data, is about to put the memory of `other` under `t`. Nobody can tell that from a copy of
/// the data: no other tensor shares one of the two, and no graph holds it.
bool may_copy(const at::Tensor& t, const at::Tensor& other);
/// While it is there, operators whose kernels are written in Python (higher-order operators) find these: they have none for the
/// keys of a recording.
class without_recording_keys {
 public:
  /// @param recorded operators below autograd are recorded all the same
  explicit without_recording_keys(bool recorded);

 private:
  c10::impl::ExcludeDispatchKeyGuard keys_;
};
/// @param forget called when an exception that went through code of another language has been caught: that language may keep it
void when_caught(void (*forget)());
/// @param translate called in the handler of an exception that the backward of a step raises; may throw another one in its place,
///                  which another language knows
void when_raised(void (*translate)());
/// A plan is made from one more run of a backward that is code of somebody else.
/// @param effect tells what that code does beside computing gradients; an empty text: nothing. Such a step is not planned. Null:
///               nobody knows, and all are planned
void when_foreign(std::string (*effect)(::torch::autograd::Node& node));
/// Captures note where the code of the module calls each operator.
/// @param line called in the forward of a capture, before each operator; gives file and line such as "model.py:41", or an empty
///             text. Null: nothing is noted
void when_recorded(std::string (*line)());
/// While it is there, somebody may begin to watch the gradient of a tensor (a hook, `retain_grad`). If a planned step has made
/// that tensor, and computes other outputs from it, the backward of that step runs as it is, with the memory of a plain step: no
/// plan has such a gradient.
class observing_gradient {
 public:
  explicit observing_gradient(const at::Tensor& t);
  ~observing_gradient();
  observing_gradient(const observing_gradient&) = delete;
  observing_gradient& operator=(const observing_gradient&) = delete;

 private:
  at::Tensor tensor_;
  ::torch::autograd::Edge edge_;  ///< where its gradient goes otherwise
};
/// For forwards with autograd functions in another language, whose objects may hold tensors until the backward.
/// @param held takes nodes of these functions and tensors that the language holds; says of each whether it holds it beside these
///             objects, and what they alone hold
void when_held(std::vector<bool> (*held)(const std::vector<::torch::autograd::Node*>& functions,
                                         const std::vector<at::Tensor>& tensors));
/// For gradients that code in another language can reach: it must not read them while they move.
/// @param lock of the language; this thread may have it already. Its result is for `unlock`
void when_gradients_move(int (*lock)(), void (*unlock)(int));
/// This thread runs a forward, or a part of a backward, on tensors without data.
bool without_data();
/// How many calls the forward of a training step has made that this thread runs without data; nothing: it runs none.
std::optional<std::size_t> calls_until_now();
/// Makes calls [since, until) again that write memory from outside: eager mode runs a part under a checkpoint twice, and writes
/// its statistics twice, while a plan decides by itself what is recomputed.
/// @param all a recomputation does not end with the last call that the backward needs
void repeat_writes(std::size_t since, std::size_t until, bool all);

}  // namespace remat::pytorch
