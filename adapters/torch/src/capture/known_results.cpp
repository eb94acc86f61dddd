// SPDX-License-Identifier: Apache-2.0
#include "known_results.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/baddbmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/gather_meta_dispatch.h>
#include <ATen/ops/index_add_meta_dispatch.h>
#include <ATen/ops/index_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/scatter_add_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "../key.hpp"
#include "hollow.hpp"
#include "operators.hpp"

namespace remat::pytorch::detail {
namespace {

/// @return false for a kind of argument whose value is not told by bytes
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

/// Without memory.
c10::Storage empty_storage(std::size_t bytes, c10::Device on) {
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, on), c10::GetAllocator(on.type()), true};
}
/// Of dense tensors there.
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
    complete_ = complete_ && v.isTensor() && v.toTensor().layout() == c10::kStrided && v.toTensor().has_storage();
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
  const auto again = over(tensors);
  for (std::size_t i = 0; i < returned.size(); ++i)
    complete_ = complete_ && (!results_[i] || same_geometry(returned[i].toTensor(), again[i].toTensor()));
}

std::vector<c10::IValue> known_results::over(const std::vector<at::Tensor>& tensors) const {
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

using argument_list = std::vector<c10::IValue>;

/// Positions; nothing if there are masks among them.
std::optional<c10::List<std::optional<at::Tensor>>> positions_among(const c10::IValue& list) {
  c10::List<std::optional<at::Tensor>> positions;
  for (const auto& v : list.toListRef()) {
    const bool there = v.isTensor() && v.toTensor().defined();
    if (there && is_mask(v.toTensor())) return std::nullopt;
    positions.push_back(there ? std::optional(v.toTensor()) : std::nullopt);
  }
  return positions;
}
/// What `index` gives, or an undefined tensor.
at::Tensor at_positions(const argument_list& a) {
  const auto positions = positions_among(a[1]);
  return positions ? at::meta::index(a[0].toTensor(), *positions) : at::Tensor();
}
at::Tensor selected(const argument_list& a) {
  const auto& t = a[0].toTensor();
  const auto& index = a[2].toTensor();
  if (t.dim() == 0 || index.dim() > 1 || !at::isIntegralType(index.scalar_type(), false)) return {};
  auto sizes = t.sizes().vec();
  sizes.at(static_cast<std::size_t>(at::maybe_wrap_dim(a[1].toInt(), t.dim()))) = index.numel();
  return at::detail::empty_meta(sizes, t.scalar_type());
}
at::Tensor put(const argument_list& a) {
  const auto place = at_positions(a);
  return place.defined() && at::is_expandable_to(a[2].toTensor().sizes(), place.sizes()) ? a[0].toTensor() : at::Tensor();
}

/// What operators return on `meta`, whose kernels for devices begin with those for `meta`, or are as simple; undefined: the
/// kernel is to say it. Not by the dispatcher: PyTorch has put Python in front of these kernels, of which the first call loads
/// its compiler, 80 MB.
const std::map<std::string, at::Tensor (*)(const argument_list&)>& on_meta() {
  static const std::map<std::string, at::Tensor (*)(const argument_list&)> all = {
      {"aten::mm", [](const auto& a) { return at::meta::mm(a[0].toTensor(), a[1].toTensor()); }},
      {"aten::bmm", [](const auto& a) { return at::meta::bmm(a[0].toTensor(), a[1].toTensor()); }},
      {"aten::addmm",
       [](const auto& a) {
         return at::meta::addmm(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toScalar(), a[4].toScalar());
       }},
      {"aten::baddbmm",
       [](const auto& a) {
         return at::meta::baddbmm(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toScalar(), a[4].toScalar());
       }},
      {"aten::sum.dim_IntList",
       [](const auto& a) {
         const auto dims = a[1].isNone() ? std::vector<int64_t>() : a[1].toIntVector();
         const auto type = a[3].isNone() ? std::nullopt : std::optional(a[3].toScalarType());
         return at::meta::sum(a[0].toTensor(), a[1].isNone() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims),
                              a[2].toBool(), type);
       }},
      {"aten::index.Tensor", at_positions},
      {"aten::index_select", selected},
      {"aten::_index_put_impl_", put},
      {"aten::index_add_",
       [](const auto& a) {
         auto t = a[0].toTensor();
         return at::meta::index_add_(t, a[1].toInt(), a[2].toTensor(), a[3].toTensor(), a[4].toScalar());
       }},
      {"aten::gather",
       [](const auto& a) { return at::meta::gather(a[0].toTensor(), a[1].toInt(), a[2].toTensor(), a[3].toBool()); }},
      {"aten::scatter_add_", [](const auto& a) {
         auto t = a[0].toTensor();
         return at::meta::scatter_add_(t, a[1].toInt(), a[2].toTensor(), a[3].toTensor());
       }}};
  return all;
}

/// What an operator gives that works element by element on tensors of one type and geometry: another one of these.
std::optional<known_results> like_operands(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* like = nullptr;
  for (const auto& t : tensors) {
    if (t.unsafeGetTensorImpl()->is_wrapped_number() && at::isFloatingType(t.scalar_type())) continue;
    const bool plain = at::isFloatingType(t.scalar_type()) && t.is_contiguous() && !t.is_conj() && !t.is_neg();
    if (!plain || (like != nullptr &&
                   (t.scalar_type() != like->scalar_type() || t.sizes() != like->sizes() || t.device() != like->device())))
      return std::nullopt;
    like = &t;
  }
  if (like == nullptr) return std::nullopt;
  auto made = at::detail::make_tensor<c10::TensorImpl>(empty_storage(like->nbytes(), like->device()), keys_on(like->device()),
                                                       like->dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like->sizes(), like->strides());
  known_results results(tensors, {made});
  return results.complete() ? std::optional(std::move(results)) : std::nullopt;
}

}  // namespace

std::optional<known_results> deduced(const traced_call& c, const std::vector<at::Tensor>& tensors) {
  if (is_elementwise(c.op)) return like_operands(tensors);
  const auto known = on_meta().find(c10::toString(c.op.operator_name()));
  if (known == on_meta().end()) return std::nullopt;
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<at::Tensor> list;
  auto stack = c.arguments;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    if (t.is_conj() || t.is_neg() || !t.has_storage()) return std::nullopt;
    const c10::Device meta(c10::kMeta);
    auto like = at::detail::make_tensor<c10::TensorImpl>(empty_storage(storage_of(t)->nbytes(), meta), keys_on(meta), t.dtype());
    like.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    auto& argument = stack[static_cast<std::size_t>(c.operands[i].at)];
    if (c.operands[i].element < 0) {
      argument = like;
    } else {
      auto elements = argument.toListRef().vec();
      elements[static_cast<std::size_t>(c.operands[i].element)] = like;
      argument = c10::impl::GenericList(c10::AnyType::get());
      for (auto& x : elements) argument.toList().push_back(std::move(x));
    }
    list.push_back(std::move(like));
  }
  try {
    const auto result = known->second(stack);
    if (!result.defined()) return std::nullopt;
    stack = {result};
  } catch (const c10::Error&) {  // the kernel is to say so
    return std::nullopt;
  }
  known_results results(list, stack);
  results.on = tensors[0].device();
  return results.complete() ? std::optional(std::move(results)) : std::nullopt;
}

}  // namespace remat::pytorch::detail
