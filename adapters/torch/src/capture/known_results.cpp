// SPDX-License-Identifier: Apache-2.0
#include "known_results.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "../base/key.hpp"
#include "../base/views.hpp"
#include "../program/operators.hpp"
#include "hollow.hpp"
#include "meta_kernels.hpp"

namespace remat::pytorch::detail {
namespace {

/// @return false for a kind of argument that the key cannot tell by its bytes
bool add_argument(key& k, const c10::IValue& v) {
  k << v.tagKind();
  if (v.isList()) {
    const auto list = v.toListRef();
    k << list.size();
    return std::all_of(list.begin(), list.end(), [&](const auto& x) { return add_argument(k, x); });
  }
  if (v.isBool())
    k << v.toBool();
  else if (v.isInt())
    k << v.toInt();
  else if (v.isDouble())
    k << v.toDouble();
  else if (v.isComplexDouble())
    k << v.toComplexDouble();
  else if (v.isString())
    k << v.toStringRef();
  else if (v.isDevice())
    k << v.toDevice();
  else
    return v.isNone() || v.isTensor() || v.isGenerator();
  return true;
}

/// Dispatch keys of dense tensors on this device.
c10::DispatchKeySet keys_on(c10::Device on) {
  return c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, on));
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  const auto *x = a.unsafeGetTensorImpl(), *y = b.unsafeGetTensorImpl();
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset() &&
         x->dtype() == y->dtype() && x->key_set() == y->key_set() && x->is_wrapped_number() == y->is_wrapped_number() &&
         storage_of(a)->nbytes() == storage_of(b)->nbytes();
}

std::mutex results_mutex;
std::unordered_map<std::string, std::shared_ptr<const known_results>> results_by_key;

}  // namespace

known_results::known_results(const std::vector<at::Tensor>& tensors, const std::vector<c10::IValue>& returned) {
  std::vector<const c10::StorageImpl*> made;
  for (const auto& v : returned) {
    results_.emplace_back();
    if (v.isTensor() && !v.toTensor().defined()) continue;
    complete_ = complete_ && v.isTensor() && v.toTensor().layout() == c10::kStrided && !v.toTensor().is_nested() &&
                v.toTensor().has_storage();
    if (!complete_) return;
    const auto& t = v.toTensor();
    on = t.device();
    auto& r = results_.back().emplace();
    for (std::size_t i = 0; i < tensors.size() && !r.itself; ++i)
      if (r.itself = tensors[i].is_same(t); r.itself || (r.operand < 0 && storage_of(tensors[i]) == storage_of(t)))
        r.operand = static_cast<int>(i);
    if (r.itself) continue;
    if (r.operand < 0) {
      const auto place = std::find(made.begin(), made.end(), storage_of(t));
      r.storage = static_cast<std::size_t>(place - made.begin());
      if (place == made.end()) {
        made.push_back(storage_of(t));
        storages_.push_back(storage_of(t)->nbytes());
      }
    }
    const auto* impl = t.unsafeGetTensorImpl();
    r.type = impl->dtype();
    r.sizes = t.sizes().vec();
    r.strides = t.strides().vec();
    r.offset = t.storage_offset();
  }
  const auto again = made_for(tensors);
  for (std::size_t i = 0; i < returned.size(); ++i)
    complete_ = complete_ && (!results_[i] || same_geometry(returned[i].toTensor(), again[i].toTensor()));
}

std::vector<c10::IValue> known_results::made_for(const std::vector<at::Tensor>& tensors) const {
  std::vector<c10::Storage> made;
  for (auto bytes : storages_) made.push_back(empty_storage(bytes, on));
  std::vector<c10::IValue> list;
  for (const auto& r : results_) {
    if (!r || r->itself) {
      list.emplace_back(r ? tensors[static_cast<std::size_t>(r->operand)] : at::Tensor());
      continue;
    }
    auto storage = r->operand < 0 ? made[r->storage] : tensors[static_cast<std::size_t>(r->operand)].storage();
    auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys_on(on), r->type);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(r->sizes, r->strides, r->offset);
    list.emplace_back(std::move(t));
  }
  return list;
}

std::optional<std::string> geometry_key(const traced_call& c, const std::vector<at::Tensor>& tensors) {
  const auto& schema = c.op.schema();
  const auto& returns = schema.returns();
  const bool plain =
      std::all_of(returns.begin(), returns.end(), [](const auto& r) { return r.type()->kind() == c10::TypeKind::TensorType; });
  if (!plain || !is_native(c.op) || facts(c.op).writes_lists) return std::nullopt;
  key k;
  k << schema.name() << schema.overload_name() << c.grad_mode << c10::InferenceMode::is_enabled();
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  k << tls.included_ << tls.excluded_;
  add_settings(k);
  for (const auto& argument : c.arguments)
    if (!add_argument(k, argument)) return std::nullopt;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    const auto first =
        std::find_if(tensors.begin(), tensors.end(), [&](const auto& o) { return storage_of(o) == storage_of(t); });
    const auto same = std::find_if(tensors.begin(), tensors.end(), [&](const auto& o) { return o.is_same(t); });
    const auto* impl = t.unsafeGetTensorImpl();
    k << c.operands[i].at << c.operands[i].element << first - tensors.begin() << same - tensors.begin() << t << t.storage_offset()
      << impl->key_set() << impl->is_wrapped_number() << storage_of(t)->nbytes();
  }
  return k.bytes();
}

std::shared_ptr<const known_results> find_known(const std::string& key) {
  const std::lock_guard lock(results_mutex);
  const auto found = results_by_key.find(key);
  return found == results_by_key.end() ? nullptr : found->second;
}

std::shared_ptr<const known_results> remember(std::string key, known_results results) {
  constexpr std::size_t most = 1 << 16;
  const std::lock_guard lock(results_mutex);
  if (results_by_key.size() >= most) results_by_key.clear();
  return results_by_key[std::move(key)] = std::make_shared<known_results>(std::move(results));
}

void forget_results() {
  const std::lock_guard lock(results_mutex);
  results_by_key.clear();
}

namespace {

/// True if the tensor is contiguous, and strides along single elements are those of a new tensor.
bool is_plain(const at::Tensor& t) { return t.strides() == c10::contiguous_strides(t.sizes()); }

/// The result of an elementwise operator on tensors of one type and geometry: a new tensor of that geometry.
std::optional<known_results> like_operands(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* like = nullptr;
  for (const auto& t : tensors) {
    if (t.unsafeGetTensorImpl()->is_wrapped_number() && at::isFloatingType(t.scalar_type())) continue;
    const bool plain = at::isFloatingType(t.scalar_type()) && is_plain(t) && !t.is_conj() && !t.is_neg();
    if (!plain || (like != nullptr &&
                   (t.scalar_type() != like->scalar_type() || t.sizes() != like->sizes() || t.device() != like->device())))
      return std::nullopt;
    like = &t;
  }
  if (like == nullptr) return std::nullopt;
  auto made = at::detail::make_tensor<c10::TensorImpl>(empty_storage(like->nbytes(), like->device()), keys_on(like->device()),
                                                       like->dtype());
  made.unsafeGetTensorImpl()->set_sizes_contiguous(like->sizes());  // in `like`, sizes 0 and 1 may have other strides
  known_results results(tensors, {made});
  return results.complete() ? std::optional(std::move(results)) : std::nullopt;
}

/// The device of the results: operands may include numbers on the host.
c10::Device device_of_results(const std::vector<at::Tensor>& tensors) {
  const auto t = std::find_if(tensors.begin(), tensors.end(), [](const auto& x) { return x.dim() > 0; });
  return (t == tensors.end() ? tensors.front() : *t).device();
}

/// The arguments of a call with operands on `meta`.
/// @param list gets these operands
/// @return nothing if the arguments cannot be on `meta`
std::optional<std::vector<c10::IValue>> arguments_on_meta(const traced_call& c, const std::vector<at::Tensor>& tensors,
                                                          c10::Device here, std::vector<at::Tensor>& list) {
  const c10::Device meta(c10::kMeta);
  auto stack = c.arguments;
  own_lists(stack);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    if (t.is_conj() || t.is_neg() || !t.has_storage()) return std::nullopt;
    auto twin = at::detail::make_tensor<c10::TensorImpl>(empty_storage(storage_of(t)->nbytes(), meta), keys_on(meta), t.dtype());
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
    put_tensor(stack, c.operands[i], twin);
    list.push_back(std::move(twin));
  }
  for (auto& argument : stack)
    if (argument.isDevice()) {
      if (argument.toDevice().type() != here.type()) return std::nullopt;
      argument = meta;
    }
  return stack;
}

}  // namespace

std::optional<known_results> deduced(const traced_call& c, const std::vector<at::Tensor>& tensors) {
  if (is_elementwise(c.op)) {
    if (auto results = like_operands(tensors)) return results;
    // If strides along single elements are odd, some kernels keep them and others do not.
    if (std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.is_contiguous() && !is_plain(t); }))
      return std::nullopt;
  }
  if (tensors.empty()) return std::nullopt;
  if (takes_masks(c.op) >= 0 && std::any_of(tensors.begin(), tensors.end(), is_mask)) return std::nullopt;
  const auto here = device_of_results(tensors);
  const auto* kernel = meta_kernel(c.op, here.type());
  if (kernel == nullptr) return std::nullopt;
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<at::Tensor> list;
  auto stack = arguments_on_meta(c, tensors, here, list);
  if (!stack) return std::nullopt;
  try {
    kernel->function.callBoxed(c.op, c10::DispatchKeySet(c10::DispatchKey::Meta), &*stack);
  } catch (const c10::Error&) {  // leave the error to the kernel of the device
    return std::nullopt;
  }
  known_results results(list, *stack);
  results.on = here;
  results.draws = kernel->draws;
  return results.complete() ? std::optional(std::move(results)) : std::nullopt;
}

bool gives_sizes_by_values(const traced_call& c, const std::vector<at::Tensor>& tensors) {
  if (is_native(c.op) || tensors.empty()) return false;
  if (!c.op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
    const auto& returns = c.op.schema().returns();
    return distrusts_results(c.op) || std::any_of(returns.begin(), returns.end(), gives_number);
  }
  std::vector<at::Tensor> list;
  auto stack = arguments_on_meta(c, tensors, device_of_results(tensors), list);
  if (!stack) return false;
  const plain_kernels kernels;
  try {
    c.op.callBoxed(*stack);
  } catch (const std::exception&) {
    forget_caught();
    return true;
  }
  return false;
}

}  // namespace remat::pytorch::detail
