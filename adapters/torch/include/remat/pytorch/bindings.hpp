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

/// The tensors do not fit the slots of a program; `what()` names the slot.
struct bad_binding : error {
  using error::error;
};

/// Counts the writes to a tensor that must stay as it is.
struct watched {
  c10::VariableVersion counter;
  int64_t version;  ///< that it must have
  index_t slot;     ///< `none`: an output
  std::size_t output = 0;
};

/// Tensors in the slots of a program: those of one module, and for the time of a step its inputs and incoming gradients.
class bindings {
 public:
  /// @param step      the program
  /// @param announced parameters, then buffers of a module like the captured one, in the order given to `capture`
  /// @param found     tensors that the module has in other places, as many as the program has slots for
  /// @throws bad_binding if one is missing, of another type or device, or shares memory otherwise than captured
  bindings(std::shared_ptr<const program> step, const std::vector<at::Tensor>& announced,
           const std::vector<at::Tensor>& found = {});

  /// Those of the same module, which has other parameters or buffers by now.
  /// @param announced as for the constructor
  /// @throws bad_binding
  bindings with(const std::vector<at::Tensor>& announced) const;

  /// The same tensors for a program whose slots begin with those of this one, such as `accumulating` gives.
  bindings followed_by(std::shared_ptr<const program> step) const;

  const program& step() const { return *step_; }
  /// Undefined for an input or a gradient that is not there.
  const at::Tensor& operator[](index_t slot) const { return tensors_[slot]; }
  /// Puts an input or a gradient in its place.
  void set(index_t slot, at::Tensor t) { tensors_[slot] = std::move(t); }
  /// Takes out what belongs to one step.
  void clear_step();

  /// A tensor that capture found is gone or lies elsewhere: the module has put another one in its place.
  bool out_of_date() const;
  /// Outside values that must not be written from now on, of which a version is known.
  /// @param inputs arguments of the step
  std::vector<watched> watch(const std::vector<index_t>& values, const std::vector<at::Tensor>& inputs) const;

 private:
  using weak_tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  /// The tensor for a slot in the list that it is a position of.
  const at::Tensor& tensor_for(index_t slot, const std::vector<at::Tensor>& list) const;
  void check(index_t slot, std::map<const void*, index_t>& owners) const;

  std::shared_ptr<const program> step_;
  std::vector<at::Tensor> tensors_;                    ///< per slot
  std::vector<std::optional<weak_tensor>> originals_;  ///< per slot: of a found tensor, of which `tensors_` has an alias
};

/// The tensor `t` as a slot describes it, but for what lies in its memory.
tensor_type type_of(const at::Tensor& t);

}  // namespace remat::pytorch
