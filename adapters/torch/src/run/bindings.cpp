// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <map>
#include <remat/pytorch/bindings.hpp>

#include "../base/views.hpp"

namespace remat::pytorch {
namespace {

/// A constant as a tensor. On the host it lies in the memory of the program, and keeps the program alive.
at::Tensor constant_in(const std::shared_ptr<const program>& step, index_t k) {
  const auto& s = step->slots[k];
  if (!s.type.device.is_cpu()) return constant_tensor(*step, k);
  const auto& bytes = step->constants[s.position];
  c10::DataPtr memory(
      const_cast<std::byte*>(bytes.data()), new std::shared_ptr<const program>(step),  // nodes copy it before writing
      [](void* p) { delete static_cast<std::shared_ptr<const program>*>(p); }, c10::kCPU);
  return constant_over(c10::Storage(c10::Storage::use_byte_size_t(), bytes.size(), std::move(memory), nullptr, false), s);
}

bool of_step(role r) { return r == role::input || r == role::gradient || r == role::output_grad; }

}  // namespace

void require_unchanged(const watched& w, const program& step) {
  const auto name = [&] {
    if (w.slot == none) return "output " + std::to_string(w.output);
    const auto& slot = step.slots[w.slot];
    return (slot.from == role::parameter ? "parameter " : slot.from == role::buffer ? "buffer " : "") + slot.name;
  };
  TORCH_CHECK(w.counter.current_version() == w.version, "remat: ", name(),
              " is needed by the backward of a wrapped module, but was modified by an inplace operation after the forward: it is "
              "at version ",
              w.counter.current_version(), "; expected version ", w.version);
}

tensor_type type_of(const at::Tensor& t) {
  return {t.sizes().vec(), t.strides().vec(), t.scalar_type(), t.device(), t.is_conj(), t.is_neg()};
}

bindings::bindings(std::shared_ptr<const program> step, const std::vector<at::Tensor>& announced,
                   const std::vector<at::Tensor>& found)
    : step_(std::move(step)), tensors_(step_->slots.size()), originals_(step_->slots.size()) {
  at::NoGradGuard no_grad;
  std::map<const void*, index_t> owners;  // first slot of each storage
  for (index_t k = 0; k < tensors_.size(); ++k) {
    const auto& s = step_->slots[k];
    if (of_step(s.from)) continue;
    if (s.from == role::constant) {
      tensors_[k] = constant_in(step_, k);
      continue;
    }
    tensors_[k] = tensor_for(k, s.from == role::found ? found : announced);
    check(k, owners);
    if (s.from != role::found) continue;
    originals_[k] = weak_tensor(tensors_[k].getIntrusivePtr());
    tensors_[k] = tensors_[k].detach();
    if (s.number) tensors_[k].unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

const at::Tensor& bindings::tensor_for(index_t k, const std::vector<at::Tensor>& list) const {
  const auto& s = step_->slots[k];
  if (s.position >= list.size() || !list[s.position].defined())
    throw bad_binding("slot " + std::to_string(k) + " (" + s.name + "): there is no tensor for it");
  return list[s.position];
}

void bindings::check(index_t k, std::map<const void*, index_t>& owners) const {
  const auto& s = step_->slots[k];
  const auto& t = tensors_[k];
  auto fail = [&](const std::string& why) { throw bad_binding("slot " + std::to_string(k) + " (" + s.name + "): " + why); };
  if (!t.has_storage() || !(type_of(t) == s.type))
    fail("the tensor has another type, size, layout or device than the captured one");
  if (t.unsafeGetTensorImpl()->is_wrapped_number() != s.number) fail("one of the two is a number, the other one a tensor");
  const auto anchor = step_->values[s.value].slot;
  const auto owner = owners.emplace(t.storage().unsafeGetStorageImpl(), anchor).first->second;
  if (owner != anchor || !t.is_alias_of(tensors_[anchor]) ||
      byte_offset(t) - byte_offset(tensors_[anchor]) != s.offset - step_->slots[anchor].offset)
    fail("shares memory with other tensors in another way than when captured, such as with " + step_->slots[owner].name);
}

bindings bindings::with(const std::vector<at::Tensor>& announced) const {
  auto others = *this;
  std::map<const void*, index_t> owners;
  for (index_t k = 0; k < tensors_.size(); ++k) {
    const auto from = step_->slots[k].from;
    if (from != role::parameter && from != role::buffer) continue;
    others.tensors_[k] = tensor_for(k, announced);
    others.check(k, owners);
  }
  return others;
}

bindings bindings::followed_by(std::shared_ptr<const program> step) const {
  auto longer = *this;
  longer.tensors_.resize(step->slots.size());
  longer.originals_.resize(step->slots.size());
  longer.step_ = std::move(step);
  return longer;
}

void bindings::clear_step() {
  for (index_t k = 0; k < tensors_.size(); ++k)
    if (of_step(step_->slots[k].from)) tensors_[k].reset();
}

bool bindings::out_of_date() const {
  for (index_t k = 0; k < tensors_.size(); ++k) {
    if (!originals_[k]) continue;
    const auto now = originals_[k]->lock();
    if (!now || now->storage().unsafeGetStorageImpl() != tensors_[k].storage().unsafeGetStorageImpl() ||
        now->storage_offset() != tensors_[k].storage_offset())
      return true;
  }
  return false;
}

std::vector<watched> bindings::watch(const std::vector<index_t>& values, const std::vector<at::Tensor>& inputs) const {
  std::vector<watched> list;
  list.reserve(values.size());
  for (auto v : values) {
    const auto k = step_->values[v].slot;
    const auto& s = step_->slots[k];
    const auto& t = s.from == role::input ? inputs.at(s.position) : tensors_[k];
    if (s.from == role::constant || !t.defined() || t.is_inference()) continue;
    list.push_back({t.unsafeGetTensorImpl()->version_counter(), t._version(), k});
  }
  return list;
}

}  // namespace remat::pytorch
