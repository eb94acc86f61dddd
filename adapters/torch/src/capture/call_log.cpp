// SPDX-License-Identifier: Apache-2.0
#include "call_log.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>

#include <mutex>
#include <utility>

#include <remat/core/error.hpp>

#include "hollow.hpp"
#include "recorder.hpp"

namespace remat::pytorch::detail {
namespace {

void replace(c10::IValue& v, const std::unordered_map<const c10::TensorImpl*, at::Tensor>& by) {
  std::vector<std::pair<int, at::Tensor>> others;
  each_tensor(v, [&](const at::Tensor& t, int element) {
    if (const auto other = by.find(t.unsafeGetTensorImpl()); other != by.end()) others.emplace_back(element, other->second);
  });
  if (others.empty()) return;
  if (v.isTensor()) {
    v = others.front().second;
    return;
  }
  auto list = v.toList().copy();
  for (const auto& [i, t] : others) list.set(static_cast<std::size_t>(i), t);
  v = list;
}

}  // namespace

c10::Storage hollow_storage(std::size_t bytes, c10::Device on) {
  c10::Storage s(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, on), c10::GetAllocator(on.type()), true);
  if (bytes > 0) hide(s.unsafeGetStorageImpl());
  return s;
}

still_generator::still_generator(c10::Device on)
    : generator_(at::globalContext().defaultGenerator(on)), start_(now()), place_(start_) {}

std::string still_generator::now() const {
  at::AutoDispatchBelowADInplaceOrView below;
  auto g = generator_;
  std::lock_guard lock(g.mutex());
  const auto state = g.get_state();
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}
void still_generator::set(const std::string& state) const {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto bytes = static_cast<int64_t>(state.size());
  const auto to = at::from_blob(const_cast<char*>(state.data()), {bytes}, at::kByte);
  auto g = generator_;
  std::lock_guard lock(g.mutex());
  g.set_state(to);
}
void still_generator::rewind() const {
  if (now() != start_) set(start_);
}
bool still_generator::is_at(const draw_origin& origin) {
  auto state = now();
  if (origin.from == generator_origin::fixed) {
    if (state != text_of(origin.state)) return false;
  } else if (origin.from == generator_origin::forward) {
    if (state != start_) return false;
  } else if (origin.from != generator_origin::next || state != place_) {
    return false;
  }
  place_ = std::move(state);
  return true;
}

call_log::call_log(c10::Device on) : generator_(on) {}

void call_log::add(std::size_t call, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments,
                   std::vector<c10::IValue> results, const std::optional<draw_origin>& draws) {
  std::string put;
  if (draws && draws->from == generator_origin::fixed) put = text_of(draws->state);
  if (draws && draws->from == generator_origin::forward) put = generator_.start();
  calls_.push_back({call, op, std::move(arguments), std::move(results), at::GradMode::is_enabled(), std::move(put)});
}

void call_log::hide(const c10::Storage& s) {
  detail::hide(s.unsafeGetStorageImpl());
  hidden_.push_back(s);
}

void call_log::replace(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& by) {
  for (auto& c : calls_)
    for (auto* list : {&c.arguments, &c.results})
      for (auto& v : *list) detail::replace(v, by);
  for (auto& t : held_)
    if (const auto other = by.find(t.unsafeGetTensorImpl()); other != by.end()) t = other->second;
}

namespace {

/// Kernels run as they are, whoever asks.
struct plain_kernels {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard plain{c10::DispatchKey::Fake};
};

}  // namespace

void call_log::run(entry& c) {
  const at::AutoGradMode mode(c.grad_mode);
  auto stack = std::exchange(c.arguments, {});
  c.op.callBoxed(stack);
  std::size_t i = 0;
  for (const auto& made : stack) {
    std::vector<at::Tensor> real;
    each_tensor(made, [&](const at::Tensor& t, int) { real.push_back(t); });
    std::size_t k = 0;
    each_tensor(c.results[i++], [&](const at::Tensor& t, int) {
      const auto& r = real.at(k++);
      if (storage_of(t) == storage_of(r) || (r.nbytes() > 0 && storage_of(r)->data() == nullptr)) return;  // or moved already
      if (t.sizes() != r.sizes() || t.strides() != r.strides() || t.storage_offset() != r.storage_offset())
        throw broken_contract("remat: " + c.op.schema().name() + " gave a result of another geometry than it was recorded with");
      auto* to = storage_of(t);
      to->clear_data_ptr_access_error_msg_();
      to->set_nbytes(storage_of(r)->nbytes());
      to->set_data_ptr_noswap(storage_of(r)->set_data_ptr(c10::DataPtr(nullptr, r.device())));
    });
  }
}

void call_log::fill() {
  const plain_kernels kernels;
  filled_ = true;
  const auto now = generator_.now();
  for (const auto& s : hidden_) s.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  hidden_.clear();
  generator_.set(generator_.start());
  for (auto& c : std::exchange(calls_, {})) {
    if (!c.state.empty()) generator_.set(c.state);
    run(c);
  }
  if (now != generator_.place()) generator_.set(now);
  held_.clear();
}

void call_log::fill(const std::vector<bool>& chosen) {
  const plain_kernels kernels;
  for (auto& c : calls_) {
    if (!chosen[c.call]) continue;
    for (const auto& v : c.arguments) each_tensor(v, [&](const at::Tensor& t, int) { hold(t); });
    for (const auto& v : c.results) each_tensor(v, [&](const at::Tensor& t, int) { hold(t); });
    run(c);
  }
  std::erase_if(calls_, [&](const auto& c) { return chosen[c.call]; });
}

std::unordered_map<const c10::TensorImpl*, std::size_t> call_log::references() const {
  std::unordered_map<const c10::TensorImpl*, std::size_t> counts;
  const auto count = [&](const at::Tensor& t, int = -1) { ++counts[t.unsafeGetTensorImpl()]; };
  for (const auto& c : calls_)
    for (const auto* list : {&c.arguments, &c.results})
      for (const auto& v : *list) each_tensor(v, count);
  for (const auto& t : held_) count(t);
  return counts;
}

}  // namespace remat::pytorch::detail
