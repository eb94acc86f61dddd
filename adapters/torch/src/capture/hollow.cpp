// SPDX-License-Identifier: Apache-2.0
#include "hollow.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>

#include <remat/pytorch/capture.hpp>

#include "../base/trim.hpp"
#include "../program/operators.hpp"
#include "lists.hpp"

namespace remat::pytorch::detail {

at::Tensor hollow_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, options.dtype().itemsize());
  return at::empty({0}, options).set_(storage_over(nullptr, bytes, options.device()), 0, sizes, strides);
}

at::Tensor tensor_over(const c10::Storage& s, const byte_view& v) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(s), c10::DispatchKeySet(c10::computeDispatchKey(v.dtype, std::nullopt, s.device())),
      c10::scalarTypeToTypeMeta(v.dtype));
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(v.sizes, v.strides, v.offset / static_cast<bytes_t>(t.itemsize()));
  if (v.conj) impl->_set_conj(true);
  if (v.neg) impl->_set_neg(true);
  return t;
}

at::Tensor alias_of(const at::Tensor& t) {
  return tensor_over(t.storage(),
                     {none, t.sizes().vec(), t.strides().vec(), byte_offset(t), t.scalar_type(), t.is_conj(), t.is_neg(), false});
}

at::Tensor twin_of(const at::Tensor& t) {
  auto twin = alias_of(t);
  ::torch::autograd::impl::set_version_counter(twin, ::torch::autograd::impl::version_counter(t));
  return twin;
}

bool same_places(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.storage_offset() == b.storage_offset() &&
         (a.numel() == 0 || same_strides(a.sizes(), a.strides(), b.strides()));
}

bool has_memory(const at::Tensor& t) {
  const auto* s = storage_of(t);
  return s->nbytes() == 0 || (!s->throw_on_immutable_data_ptr() && s->data() != nullptr);
}

bool held_by_python(const at::Tensor& t) {
  const auto* slot = t.unsafeGetTensorImpl()->pyobj_slot();
  return slot->load_pyobj() != nullptr && !slot->has_unique_reference();
}

void release(c10::StorageImpl* s) {
  s->set_data_ptr_noswap(c10::DataPtr(nullptr, s->device()));
  hide(s);
}
void hide(c10::StorageImpl* s) { s->release_data_and_set_meta_custom_data_ptr_error_msg_(reads_memory); }

lent_memory::~lent_memory() {
  bytes_t bytes = 0;
  for (const auto& s : filled_) {
    bytes += static_cast<bytes_t>(s.nbytes());
    release(s.unsafeGetStorageImpl());
  }
  note_freed(bytes);
  for (const auto& s : shown_) hide(s.unsafeGetStorageImpl());
}

void lent_memory::fill(const at::Tensor& t) {
  auto* s = storage_of(t);
  if (s->throw_on_immutable_data_ptr()) {
    s->clear_data_ptr_access_error_msg_();
    shown_.push_back(t.storage());
  }
  if (s->nbytes() == 0 || s->data() != nullptr) return;
  s->set_data_ptr_noswap(c10::GetAllocator(s->device_type())->allocate(s->nbytes()));
  filled_.push_back(t.storage());
  bytes_of(t).zero_();
}

void lent_memory::give() { filled_.clear(); }

void run_hollow(const c10::OperatorHandle& op, ::torch::jit::Stack& stack, std::size_t arguments,
                const std::vector<at::Tensor>& tensors) {
  lent_memory memory;
  for (const auto& t : tensors) memory.fill(t);
  if (memory.filled_.empty()) return op.callBoxed(&stack);
  const auto first = stack.size() - arguments;
  const auto again = values_from(stack, first);
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error&) {
    replace_from(stack, first, again);
    for (const auto& t : tensors)
      if (std::any_of(memory.filled_.begin(), memory.filled_.end(), [&](const auto& s) { return s.is_alias_of(t.storage()); }))
        fill_with_safe_values(t);
    op.callBoxed(&stack);
  }
}

void run_on_zeros(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
  for (auto i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i)
    if (stack[i].isTensor()) stack[i] = at::zeros(stack[i].toTensor().sizes(), stack[i].toTensor().options());
  op.callBoxed(&stack);
}

}  // namespace remat::pytorch::detail

namespace remat::pytorch {

std::vector<at::Tensor> without_memory(const std::vector<at::Tensor>& tensors, c10::Device on) {
  const at::NoGradGuard no_grad;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;
  std::vector<at::Tensor> list;
  for (const auto& t : tensors) {
    const auto* like = detail::storage_of(t);
    const auto made = storages.try_emplace(like, detail::empty_storage(like->nbytes(), on));
    list.push_back(at::empty({0}, at::TensorOptions(on).dtype(t.dtype()))
                       .set_(made.first->second, t.storage_offset(), t.sizes(), t.strides()));
  }
  return list;
}

}  // namespace remat::pytorch
