// SPDX-License-Identifier: Apache-2.0
/// @file
/// The tensors of one module for the slots of a program.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// A tensor does not fit its slot in a program; `what()` names the slot.
struct bad_binding : error {
  using error::error;
};

/// Version counter of a tensor that nobody may write between forward and backward.
struct watched {
  c10::VariableVersion counter;
  int64_t version;         ///< version that the counter must still have
  index_t slot;            ///< slot of the tensor; `none`: the tensor is an output
  std::size_t output = 0;  ///< position of the output, if `slot` is `none`
};

/// @param step the program that has the slot
/// @throws c10::Error if the tensor was written since; the message names it
void require_unchanged(const watched& w, const program& step);

/// Tensors in the slots of a program: the tensors of one module, and during a step its inputs and incoming gradients.
class bindings {
 public:
  /// @param step      the program
  /// @param announced parameters, then buffers of a module like the captured one, in the order given to `capture`
  /// @param found     tensors that the module has in other places, one per slot of `role::found`
  /// @throws bad_binding if a tensor is missing, has another type, layout or device than captured, or shares memory differently
  bindings(std::shared_ptr<const program> step, const std::vector<at::Tensor>& announced,
           const std::vector<at::Tensor>& found = {});

  /// Bindings of the same module after its parameters or buffers were replaced.
  /// @param announced as for the constructor
  /// @return a copy of these bindings with the new parameters and buffers
  /// @throws bad_binding as the constructor
  bindings with(const std::vector<at::Tensor>& announced) const;

  /// The same tensors for a program that has the slots of this program and more behind them, as `accumulating` makes it.
  bindings followed_by(std::shared_ptr<const program> step) const;

  const program& step() const { return *step_; }
  /// The tensor in a slot. Undefined for an input or a gradient that was not set.
  const at::Tensor& operator[](index_t slot) const { return tensors_[slot]; }
  /// Puts an input or a gradient into its slot.
  void set(index_t slot, at::Tensor t) { tensors_[slot] = std::move(t); }
  /// Empties the slots that belong to one step: inputs, gradients to add to, gradients of outputs.
  void clear_step();

  /// True if the module has replaced a tensor of `role::found`: the tensor is gone, or has another storage or offset.
  bool out_of_date() const;
  /// Records the versions of values from outside the program, to notice later writes to them. Constants, undefined tensors and
  /// inference tensors are left out.
  /// @param values values that have a slot
  /// @param inputs arguments of the step
  std::vector<watched> watch(const std::vector<index_t>& values, const std::vector<at::Tensor>& inputs) const;

 private:
  using weak_tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  /// The entry of `list` at the position of the slot.
  const at::Tensor& tensor_for(index_t slot, const std::vector<at::Tensor>& list) const;
  void check(index_t slot, std::map<const void*, index_t>& owners) const;

  std::shared_ptr<const program> step_;
  std::vector<at::Tensor> tensors_;                    ///< per slot
  std::vector<std::optional<weak_tensor>> originals_;  ///< per slot: the module's tensor, where `tensors_` has an alias of it
};

/// Sizes, strides, type, device and flags of `t`, as a slot has them.
tensor_type type_of(const at::Tensor& t);

}  // namespace remat::pytorch
