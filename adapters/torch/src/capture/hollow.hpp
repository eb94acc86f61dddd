// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tensors with sizes but without memory, and how operators run on them. Private to the adapter.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include <remat/pytorch/program.hpp>

#include "../base/views.hpp"

namespace remat::pytorch::detail {

/// Error message for code that reads memory between operators.
inline constexpr const char* reads_memory =
    "the module reads the memory of a tensor of the step directly (accessor, data_ptr, numpy, tolist, or on another thread) "
    "while "
    "it is captured; a plan would keep what it read for ever";

/// Error message for code that keeps memory which it has read.
inline constexpr const char* keeps_read =
    "the module returns or keeps a tensor whose memory it has read directly, or an array over that memory";

inline constexpr const char* not_ahead =
    ", and the module has written memory without an operator, or a weight that is in memory of the host";

inline c10::StorageImpl* storage_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

inline at::Tensor bytes_of(const at::Tensor& t) { return bytes_over(t.storage()); }

/// True if each element lies at the same place of its storage. Strides along dimensions of one element do not count.
bool same_places(const at::Tensor& a, const at::Tensor& b);
/// True if the memory can be read.
bool has_memory(const at::Tensor& t);

/// True if the tensor has memory, which may be hidden.
inline bool has_data(const at::Tensor& t) {
  return storage_of(t)->nbytes() == 0 || storage_of(t)->_mutable_data_ptr_no_checks().get() != nullptr;
}

/// True if Python code holds this tensor.
bool held_by_python(const at::Tensor& t);
/// The number of owners of `x`, without a Python wrapper that exists only because C++ holds `x`.
template <class T>
std::size_t holders(T& x, std::size_t count) {
  return count - (x.pyobj_slot()->has_unique_reference() ? 1 : 0);
}
/// True if Python code holds or has held this tensor.
inline bool known_to_python(const at::Tensor& t) { return t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr; }

/// True if a backward writes `.grad` of this tensor.
inline bool collects_gradient(const at::Tensor& t) { return t.is_leaf() && t.requires_grad(); }

/// A storage without memory, which it may get later.
inline c10::Storage empty_storage(std::size_t bytes, c10::Device on) {
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, on), c10::GetAllocator(on.type()), true};
}
/// A tensor of the given geometry whose storage owns no memory.
at::Tensor hollow_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options);

/// A tensor over a storage, as a kernel would have made it.
at::Tensor tensor_over(const c10::Storage& s, const byte_view& v);
/// A new tensor over the memory of `t`.
at::Tensor alias_of(const at::Tensor& t);
/// A new tensor over the memory of `t`, with the version counter of `t`.
at::Tensor twin_of(const at::Tensor& t);

/// Frees the memory of a storage, and hides the storage.
void release(c10::StorageImpl* s);
/// Hides the memory of a storage: reading it between operators raises an error, because its values change with each step.
void hide(c10::StorageImpl* s);

/// While it lives, operators go to their kernels, past autograd, autocast and any recorder.
struct plain_kernels {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard plain{c10::DispatchKey::Fake};
};

/// Lends memory to hollow tensors while an operator runs.
class lent_memory {
 public:
  lent_memory() = default;
  ~lent_memory();
  lent_memory(const lent_memory&) = delete;
  lent_memory& operator=(const lent_memory&) = delete;

  /// Lends zeros to the storage of a hollow tensor; makes hidden memory of other tensors readable.
  void fill(const at::Tensor& t);
  /// Leaves the lent memory to its borrowers.
  void give();

 private:
  friend void run_hollow(const c10::OperatorHandle&, ::torch::jit::Stack&, std::size_t, const std::vector<at::Tensor>&);
  std::vector<c10::Storage> filled_, shown_;
};

/// Runs an operator on hollow tensors, to which it lends zeros. If that raises an error, as for a matrix to be inverted or a
/// distribution to be drawn from, the operator runs again on more plausible numbers.
/// @param arguments number of arguments on the stack
/// @param tensors   among these arguments
void run_hollow(const c10::OperatorHandle& op, ::torch::jit::Stack& stack, std::size_t arguments,
                const std::vector<at::Tensor>& tensors);

/// Runs an operator on zeros in place of its tensors.
void run_on_zeros(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);

}  // namespace remat::pytorch::detail
