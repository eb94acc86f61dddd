// SPDX-License-Identifier: Apache-2.0
/// @file
/// Capture: runs a training step of a module once, without its memory, and records its operators below autograd as a program.
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

/// No output of the module depends on a tensor that requires a gradient.
struct no_gradient : cannot_capture {
  no_gradient() : cannot_capture("the outputs of the module need no gradient") {}
};

/// How the loss uses an output of the module.
struct output_use {
  bool used = true;                             ///< the output receives a gradient
  std::vector<int64_t> strides = {};            ///< strides of this gradient, in elements; empty: those of the output
  std::optional<at::ScalarType> autocast = {};  ///< autocast type during the backward; nothing: no autocast
  bool operator==(const output_use&) const = default;
};

/// Numbers that the forward read from tensors (`item`, `bool`) and that follow from inputs and buffers alone.
///
/// Example: the forward asks whether a mask is all ones. Inputs for which the answer differs may take another path.
class questions {
 public:
  virtual ~questions() = default;
  /// True if these inputs, and the tensors of the module as they are now, give the same numbers as in the capture.
  virtual bool guards_hold(const bindings& tensors, const std::vector<at::Tensor>& inputs) const = 0;
  /// Name of the operator that gave the last number.
  virtual std::string last() const = 0;
};

/// A captured step, and the tensors of the module it was captured from.
struct captured {
  std::shared_ptr<const program> step;
  bindings tensors;
  /// Parameters with a path to a differentiable output, used by the loss or not, in the order in which their gradients arrive.
  std::vector<std::size_t> reached;
  std::shared_ptr<const questions> asked = {};  ///< numbers that the forward asked for; null: none
};

/// Makes tensors like the given ones, but without memory. They share storages as the given ones do.
///
/// Use: a module on `meta` is captured with these in the place of its own tensors. The step can then be planned, but not run.
///
/// @param tensors parameters, buffers, inputs; `requires_grad` is not copied
/// @param on      device of the new tensors
/// @return one tensor per given tensor, without contents
/// Complexity: linear in the number of tensors.
///
/// @code
/// auto shadows = remat::pytorch::without_memory(module->parameters());
/// @endcode
std::vector<at::Tensor> without_memory(const std::vector<at::Tensor>& tensors, c10::Device on = c10::kCPU);

/// Records one training step (forward, gradient of the outputs with respect to parameters and inputs) as a program.
///
/// Every ATen call below autograd runs on the real device and is recorded. Its operands are *hollow* tensors: storages of the
/// true size that own memory only while an operator touches them. A capture thus needs the memory of the largest operator only.
/// A call does not run again if a call with equal operator, arguments, geometry and sharing of operands, and settings has run in
/// this process. Its results are made from the recorded geometry. So equal layers cost one layer, and a second capture costs next
/// to nothing.
/// The recorded calls are then turned into storage versions. A view is no call. An in-place write makes a new version, or becomes
/// part of the node that made the old version.
///
/// Parameters, buffers, inputs, `.grad` and the state of the generator are as before afterwards, also if an exception is thrown.
/// One capture runs at a time in a process; a second thread waits.
///
/// @param forward    the module; run once, with grad mode on
/// @param inputs     arguments of the forward. Their sizes, strides, types and `requires_grad` count. Values are read only from
///                   small integer tensors, as a hint to kernels that index with them
/// @param parameters parameters of the module; frozen ones (no `requires_grad`) are treated as buffers
/// @param buffers    buffers of the module
/// @param names      names of the parameters, then of the buffers; may be shorter
/// @param uses       uses of the outputs, each tensor once; may be shorter
/// @return the program, valid for inputs of the same sizes, strides and types; and the tensors of this module for it
/// @throws cannot_capture if
///         - the forward asks for values of activations (`item`), or the size of an output depends on values (`nonzero`, boolean
///           indexing), unless they follow from small integer inputs, buffers and constants (`questions`)
///         - no output needs a gradient (`no_gradient`)
///         - a tensor is sparse, quantized or nested, or tensors live on several devices
///         - a dispatch mode is active
///         - a module resizes storages, or returns a tensor that no recorded operator made
/// @throws broken_contract if the program would not pass `verify`: a bug
/// @throws not_available if this build of PyTorch, or another library, has taken the dispatch key the recorder needs
/// Complexity: one run of each distinct call; O(calls + views) bookkeeping.
///
/// @code
/// auto step = remat::pytorch::capture([&](const auto& in) { return std::vector<at::Tensor>{net->forward(in[0])}; }, {x},
///                                   net->parameters(), net->buffers());
/// std::cout << remat::pytorch::explain(*step.step);
/// @endcode
captured capture(const forward_function& forward, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers = {},
                 const std::vector<std::string>& names = {}, const std::vector<output_use>& uses = {});

/// True if this thread runs the forward, or a part of the backward, of a capture.
bool capturing();
/// True if this thread runs a forward in which weights of the host report the device of the steps as their device
/// (`wrap_options::steps_on`).
bool weights_disguised();

/// To be called before code reads the memory of a tensor without an operator.
///
/// If the forward of this thread is followed without data (`wrap_options::follow`), the kernels of its calls so far run first,
/// and the rest of the forward runs eagerly. If no kernel is pending, the forward may stay planned.
/// @param t         tensor whose memory is read
/// @param may_write the memory may be written, too, now or later
void about_to_read(const at::Tensor& t, bool may_write);
/// As `about_to_read`, for the state of the default generator.
void about_to_read_generator();
/// To be called before a forward without data runs code that no plan can hold. The kernels of its calls so far run first, and the
/// rest of the forward runs eagerly.
/// @param why names that code
/// @throws cannot_capture if eager execution is not allowed, or in a backward
void fall_back_to_eager(const std::string& why);
/// True if a forward without data on this thread may copy the data of `other` into `t`, instead of putting the memory of `other`
/// under `t`. The difference is invisible if no other tensor shares either storage and no autograd graph holds one.
bool may_copy(const at::Tensor& t, const at::Tensor& other);
/// Excludes the dispatch keys of a recording while it exists. Operators whose kernels are written in Python (higher-order
/// operators) have no kernels for these keys.
class without_recording_keys {
 public:
  /// @param recorded true: operators below autograd are still recorded
  explicit without_recording_keys(bool recorded);

 private:
  c10::impl::ExcludeDispatchKeyGuard keys_;
};
/// Sets a callback for caught exceptions. Another language may keep a reference to an exception that went through its code.
/// @param forget called after such an exception has been caught, to clear the reference
void on_exception_caught(void (*forget)());
/// Sets a callback that translates exceptions of a planned backward for another language.
/// @param translate called in the handler of the exception; may throw an exception of that language in its place
void on_backward_exception(void (*translate)());
/// Sets a callback that inspects custom backwards (autograd functions of the user). A plan runs a custom backward once more.
/// @param effect describes what the backward does beside computing gradients. A step with such an effect is not planned. An
///               empty text means no effect. Null: nothing is inspected, and all steps are planned
void set_effect_inspector(std::string (*effect)(::torch::autograd::Node& node));
/// Sets a callback that tells captures which line of the module's code calls an operator.
/// @param line called in the forward of a capture before each operator; returns file and line such as "model.py:41", or an empty
///             text. Null: no lines are recorded
void set_source_line_callback(std::string (*line)());
/// Sets a callback that tells whether code of the module handles errors of the operator that it calls. Kernels that may raise
/// errors for some values run ahead of the plan there.
/// @param has called before such an operator. Null: no code handles errors
void set_handler_query(bool (*has)());
/// While it exists, the caller may begin to watch the gradient of a tensor (a hook, `retain_grad`).
///
/// No plan has such a gradient if a planned step made the tensor and computes other outputs from it. The backward of that step
/// then runs plain, with the memory of a plain step.
class observing_gradient {
 public:
  explicit observing_gradient(const at::Tensor& t);
  ~observing_gradient();
  observing_gradient(const observing_gradient&) = delete;
  observing_gradient& operator=(const observing_gradient&) = delete;

 private:
  at::Tensor tensor_;
  ::torch::autograd::Edge edge_;  ///< gradient edge of the tensor before
};
/// Sets a callback for forwards with autograd functions in another language, whose objects may hold tensors until the backward.
/// @param held takes the nodes of these functions, and tensors that the language holds. Returns per tensor whether anything holds
///             it beside the objects of these functions and the objects that only they hold
void set_holder_query(std::vector<bool> (*held)(const std::vector<::torch::autograd::Node*>& functions,
                                                const std::vector<at::Tensor>& tensors));
/// Sets the lock of another language, so that its code cannot read gradients while they move.
/// @param lock   takes the lock, which this thread may hold already. Its result is passed to `unlock`
/// @param unlock releases the lock
void when_gradients_move(int (*lock)(), void (*unlock)(int));
/// True if this thread runs a forward, or a part of a backward, on tensors without data.
bool without_data();
/// Number of calls so far in the forward that this thread runs without data; nothing if it runs no such forward.
std::optional<std::size_t> calls_until_now();
/// Repeats those of the calls [since, until) that write memory from outside.
///
/// Eager mode runs a part under `torch.utils.checkpoint` twice, and so updates its statistics twice. A plan decides by itself
/// what to recompute, so the second update needs this call.
/// @param since first call, counted by `calls_until_now`
/// @param until end of the calls
/// @param all   false: the recomputation ends with the last call that the backward needs
void repeat_writes(std::size_t since, std::size_t until, bool all);

}  // namespace remat::pytorch
