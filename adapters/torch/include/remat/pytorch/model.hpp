// SPDX-License-Identifier: Apache-2.0
/// @file
/// What can be trained inside a budget: all that a front end gives.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace remat::pytorch {

/// A tensor of a model, by its name.
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

/// Each tensor once, by its first name; those that are not defined are left out.
inline std::vector<named_tensor> distinct(std::vector<named_tensor> named) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(named, [&](const auto& n) { return !n.tensor.defined() || !seen.insert(n.tensor.unsafeGetTensorImpl()).second; });
  return named;
}

/// Tensors to tensors.
using forward_function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// One way to call a model: a forward with all arguments that are no tensors put in.
struct invocation {
  forward_function forward;    ///< runs with or without grad mode; may be kept for the backward of its step
  std::string signature = {};  ///< of those arguments: two invocations of one signature do the same
  /// What `forward` leaves beside its tensors; `session::forward` gives that of the call whose capture a step follows.
  std::shared_ptr<void> note = {};
};

/// Something that can be trained: a C++ module, a Python one, an exported program.
///
/// All functions are called on threads of the caller or of autograd, one at a time.
class model {
 public:
  virtual ~model() = default;
  virtual std::string name() const = 0;
  /// Parameters, frozen ones too. A tensor that has two names may be there twice.
  virtual std::vector<named_tensor> parameters() = 0;
  /// Tensors that the forward may write and that need no gradient.
  virtual std::vector<named_tensor> buffers() = 0;
  /// All that the forward depends on besides tensors, settings of PyTorch and the invocation: training flags, attributes.
  virtual std::string signature() = 0;
  /// May parameters, buffers or signature be other ones than when they were asked for last, all three? Every step asks.
  virtual bool changed() { return true; }
  /// Weights that steps fetch from memory of the host are elsewhere, or a buffer is not on the device. Puts them back, if it can.
  virtual void put_back() {}
};

}  // namespace remat::pytorch
