// SPDX-License-Identifier: Apache-2.0
/// @file
/// Interface of a model that can be trained within a budget. Front ends implement it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace remat::pytorch {

/// A tensor of a model with its name.
struct named_tensor {
  std::string name;
  at::Tensor tensor;
};

/// The tensors without their names, as optimizers take them.
inline std::vector<at::Tensor> tensors_of(const std::vector<named_tensor>& named) {
  std::vector<at::Tensor> list;
  for (const auto& n : named) list.push_back(n.tensor);
  return list;
}

/// Each defined tensor once, with its first name.
inline std::vector<named_tensor> distinct(std::vector<named_tensor> named) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(named, [&](const auto& n) { return !n.tensor.defined() || !seen.insert(n.tensor.unsafeGetTensorImpl()).second; });
  return named;
}

/// A forward: takes and returns lists of tensors.
using forward_function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// One way to call a model: its forward with all arguments bound that are no tensors.
struct invocation {
  forward_function forward;    ///< runs with or without grad mode; may be kept for the backward of its step
  std::string signature = {};  ///< identifies the bound arguments: invocations with equal signatures compute the same
  /// Results of `forward` beside its tensors. `session::forward` returns the note of the captured call that the step follows.
  std::shared_ptr<void> note = {};
};

/// A trainable model: a C++ module, a Python module, an exported program.
///
/// All functions are called on threads of the caller or of autograd, one at a time.
class model {
 public:
  virtual ~model() = default;
  virtual std::string name() const = 0;
  /// Parameters, frozen ones included. A tensor with two names may appear twice.
  virtual std::vector<named_tensor> parameters() = 0;
  /// Tensors that the forward may write and that need no gradient.
  virtual std::vector<named_tensor> buffers() = 0;
  /// A text of everything else that the forward depends on, such as training flags and attributes. Tensors, settings of PyTorch
  /// and the invocation are left out.
  virtual std::string signature() = 0;
  /// False only if parameters, buffers and signature are all unchanged since they were last asked for. Called in every step.
  virtual bool changed() { return true; }
  /// Called when weights that steps fetch are not in memory of the host, or a buffer is not on the device. Moves them back if
  /// possible.
  virtual void put_back() {}
};

}  // namespace remat::pytorch
