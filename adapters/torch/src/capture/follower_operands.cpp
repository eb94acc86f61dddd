// SPDX-License-Identifier: Apache-2.0
// Compares the tensors of a call with the recorded call, and makes its results.
#include "follower_state.hpp"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "hollow.hpp"
#include "recorder.hpp"
#include "same_calls.hpp"

namespace remat::pytorch::detail {

void follower::reserve() {
  const auto& t = recorded();
  tensors_.resize(t.tensors.size());
  storages_.resize(t.storages.size());
  read_.resize(t.storages.size());
  compared_.resize(t.slots.size());
  written_.resize(t.storages.size());
  shift_.resize(t.storages.size());
}

void follower::bind() {
  reserve();
  const auto& t = recorded();
  for (std::size_t id = 0; id < t.tensors.size(); ++id) {
    if (t.tensors[id] == none || tensors_[id]) continue;
    const auto& slot = t.slots[t.tensors[id]];
    if (slot.from == role::input && slot.position < inputs_.size())
      bind(id, inputs_[slot.position]);
    else if (slot.from == role::parameter || slot.from == role::buffer)
      bind(id, (*candidates_[current_].tensors)[t.tensors[id]]);
  }
}

void follower::bind(std::size_t id, const at::Tensor& t) {
  if (!t.defined()) return;
  const auto& slot = recorded().slots[recorded().tensors[id]];
  set(id, t);
  if (t.has_storage() && outside_storages_.emplace(storage_of(t), slot.value).first->second != slot.value) newly_shared_ = true;
  locate(slot.value, t, slot.offset);
}

void follower::note_results(const traced_call& c, const ::torch::jit::Stack& stack) {
  for (const auto& r : c.results) {
    const auto& t = tensor_at(stack, r, stack.size() - c.op.schema().returns().size());
    set(r.tensor, t);
    if (!storages_[r.view.value]) storages_[r.view.value] = t.storage().getWeakStorageImpl();
  }
}

const char* follower::differs(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
  if (next_call_ >= (backward_ ? recorded().accumulated : recorded().backward)) return "comes after the last call of the plan";
  const auto& c = call();
  if (!(c.op == op)) return "another operator than planned";
  if (c.grad_mode != at::GradMode::is_enabled()) return "another grad mode than planned";
  const auto n = c.arguments.size(), first = stack.size() - n;
  const char* why = nullptr;
  std::size_t k = 0;
  for (std::size_t i = 0; i < n && why == nullptr; ++i) {
    const auto& a = stack[first + i];
    if (!same(a, c.arguments[i]) && !(request_ != nullptr && request_->vary_numbers && a.isDouble() && may_differ(c, i))) {
      const bool tensors =
          a.isTensor() || (a.isList() && c.arguments[i].isList() && a.toListRef().size() == c.arguments[i].toListRef().size());
      if (!tensors || !same_but_tensors(a, c.arguments[i])) return "another argument than planned";
    }
    each_tensor(a, [&](const at::Tensor& t, int element) {
      if (why != nullptr) return;
      if (k == c.operands.size() || c.operands[k].at != static_cast<int>(i) || c.operands[k].element != element)
        why = "one tensor more than planned";
      else
        why = differs(c.operands[k++], t);
    });
  }
  if (why == nullptr && k < c.operands.size()) why = "one tensor less than planned";
  if (why == nullptr && c.draws && !generator().is_at(*c.draws)) why = "another state of the generator than planned";
  if (why == nullptr && !backward_ && may_be_caught(op) != c.catchable) why = "called inside `try`, or no longer";
  return why;
}

bool follower::same_but_tensors(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor()) return b.isTensor();
  if (!a.isList() || !b.isList()) return false;
  const auto x = a.toListRef(), y = b.toListRef();
  return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                    [](const auto& p, const auto& q) { return p.isTensor() ? q.isTensor() || q.isNone() : same(p, q); });
}

const char* follower::differs(const traced_tensor& o, const at::Tensor& t) const {
  const auto& known = tensors_[o.tensor];
  if (!t.has_storage() || t.layout() != c10::kStrided) return "a tensor without a plain storage";
  // Autograd unpacks some saved tensors as new tensors, and functions in Python copy results of factories.
  const bool copied = static_cast<bool>(storages_[o.view.value]);
  if (known ? known.address() != t.unsafeGetTensorImpl() : recorded().tensors[o.tensor] == none && !copied)
    return "another tensor than planned";
  const auto& s = storages_[o.view.value];
  if (s ? s.address() != storage_of(t) : static_cast<bool>(known)) return "a tensor of other memory than planned";
  if (t.requires_grad() != o.requires_grad) return "a tensor with another requires_grad than planned";
  const auto& v = o.view;
  if (t.scalar_type() != v.dtype || t.sizes() != at::IntArrayRef(v.sizes) || t.strides() != at::IntArrayRef(v.strides) ||
      t.is_conj() != v.conj || t.is_neg() != v.neg)
    return "a tensor of another geometry than planned";
  if (s && byte_offset(t) != v.offset + shift_[v.value]) return "a tensor in another place than planned";
  if (o.written && newly_shared_ && recorded().storages[v.value].slot != none)
    return "a write to memory that two arguments may share";
  if (!known && recorded().tensors[o.tensor] != none) {
    const auto& slot = recorded().slots[recorded().tensors[o.tensor]];
    if (t.device() != slot.type.device || t.unsafeGetTensorImpl()->is_wrapped_number() != slot.number || o.written)
      return "a tensor that was not there before";
  }
  return nullptr;
}

void follower::take_operand(const traced_tensor& o, const at::Tensor& t) {
  if (log_) log_->hold(t);
  if (tensors_[o.tensor]) {
    const auto k = recorded().storages[o.view.value].slot;
    if (k == none || compared_[k]) return;
    const bool input = recorded().slots[k].from == role::input;
    if (candidates_[current_].forward->filled_by_hand[k] && !(backward_ && input)) compare_slot(k, t.storage(), bytes_of(t));
    return;
  }
  const auto k = recorded().tensors[o.tensor];
  set(o.tensor, t);
  if (k == none) return;
  locate(o.view.value, t, o.view.offset);
  compare_slot(k, t.storage(), t);
}

void follower::compare_slot(index_t k, const c10::Storage& s, const at::Tensor& t) {
  const auto& slot = recorded().slots[k];
  compared_[k] = true;
  bool as_planned = slot.from != role::input;
  if (slot.number) compared_numbers_.emplace_back(k, t);
  if (slot.from == role::constant) {
    as_planned = content_of(s) == recorded().constants[slot.position];
  } else if (slot.from == role::found) {
    const auto& bound = (*candidates_[current_].tensors)[k];
    as_planned = bound.defined() && bound.unsafeGetTensorImpl() == t.unsafeGetTensorImpl();
    if (!as_planned)
      as_planned = bound.defined() && bound.storage().is_alias_of(s) && bound.storage_offset() == t.storage_offset();
  }
  if (!as_planned) changed_slots_.emplace_back(k, t);
}

bool follower::has_same_outside(const candidate& other) const {
  const auto &before = recorded(), &t = *other.forward->recorded;
  for (index_t k = 0; k < compared_.size() && k < before.slots.size(); ++k) {
    if (!compared_[k]) continue;
    if (k >= t.slots.size() || t.slots[k].value != before.slots[k].value) return false;
    if (before.slots[k].number && t.slots[k].number) continue;  // numbers may differ in each step
    if (t.slots[k].from != before.slots[k].from) return false;
    const auto at = before.slots[k].position, there = t.slots[k].position;
    if (before.slots[k].from == role::constant && before.constants[at] != t.constants[there]) return false;
    if (before.slots[k].from == role::found && !(*candidates_[current_].tensors)[k].is_same((*other.tensors)[k])) return false;
  }
  return true;
}

bool follower::run_at_once(const std::vector<bool>& chosen) {
  const auto& calls = recorded().calls;
  std::vector<bool> read(storages_.size());  // by calls that wait: no later chosen call may write there
  std::vector<bool> made(storages_.size());  // by chosen calls: they would undo a later write that has run ahead
  bool any = false;
  for (std::size_t i = 0; i < next_call_; ++i) any = any || (chosen[i] && !ran_[i]);
  if (!any) return true;
  const bool pinned = log_->has_pinned();  // calls that have run ahead will not run again
  for (std::size_t i = 0; i < next_call_; ++i) {
    const bool runs = chosen[i] && !ran_[i];
    for (const auto& o : calls[i].operands) {
      if (!chosen[i] && !ran_[i]) read[o.view.value] = true;
      if (runs && o.written && read[o.view.value]) return false;
      if (!runs && o.written && made[o.view.value] && pinned && log_->has_run_ahead(i)) return false;
      made[o.view.value] = made[o.view.value] || (runs && o.written);
    }
    for (const auto& r : calls[i].results) {
      made[r.view.value] = made[r.view.value] || runs;
      if (runs && pinned && log_->is_pinned(storages_[r.view.value].address())) return false;
    }
  }
  log_->fill(chosen);
  for (std::size_t i = 0; i < next_call_; ++i) ran_[i] = ran_[i] || chosen[i];
  for (std::size_t s = 0; s < storages_.size(); ++s)
    if (const auto there = storages_[s].lock(); there && written_[s] && recorded().storages[s].slot == none)
      log_->hide(c10::Storage(there));
  return true;
}

bool follower::keeps_read_memory(const std::vector<at::Tensor>& returned) const {
  if (!log_->has_pinned()) return false;
  const auto read = [&](const at::Tensor& t) { return t.defined() && t.has_storage() && log_->is_pinned(storage_of(t)); };
  return std::any_of(returned.begin(), returned.end(), read) ||
         std::any_of(tensors_.begin(), tensors_.end(), [&](const auto& known) {
           const at::Tensor t(known.lock());
           return read(t) && held_by_python(t);
         });
}

std::unordered_map<const c10::TensorImpl*, at::Tensor> follower::reshape(const traced_call& c,
                                                                         const std::vector<c10::IValue>& arguments) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> before;
  for (const auto& r : c.results)
    for (const auto& o : c.operands) {
      if (o.tensor != r.tensor || same_place(o.view, r.view)) continue;
      const auto& t = tensor_at(arguments, o);
      before.emplace(t.unsafeGetTensorImpl(), alias_of(t));
      t.unsafeGetTensorImpl()->set_sizes_and_strides(r.view.sizes, r.view.strides,
                                                     (r.view.offset + shift_[r.view.value]) / static_cast<bytes_t>(t.itemsize()));
    }
  return before;
}

std::vector<c10::IValue> follower::results_of(const traced_call& c, const std::vector<c10::IValue>& arguments) {
  const auto& returns = c.op.schema().returns();
  std::vector<c10::IValue> results;
  std::size_t j = 0;
  const auto next = [&]() -> at::Tensor {
    const auto& r = c.results[j++];
    if (tensors_[r.tensor])  // an operand
      for (const auto& o : c.operands)
        if (o.tensor == r.tensor) return tensor_at(arguments, o);
    const auto& value = recorded().storages[r.view.value];
    const auto there = storages_[r.view.value].lock();
    const auto s = there ? c10::Storage(there) : hollow_storage(static_cast<std::size_t>(value.bytes), value.device);
    storages_[r.view.value] = s.getWeakStorageImpl();
    auto v = r.view;
    v.offset += shift_[r.view.value];
    const auto shown =
        std::find_if(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.view.value == r.view.value; });
    std::optional<c10::InferenceMode> as_shown;  // a view of a normal tensor is normal, also in inference mode
    if (const bool on = c10::InferenceMode::is_enabled();
        shown != c.operands.end() && tensor_at(arguments, *shown).is_inference() != on)
      as_shown.emplace(!on);
    auto t = tensor_over(s, v);
    set(r.tensor, t);
    return t;
  };
  for (std::size_t i = 0; i < returns.size(); ++i) {
    const auto here = [&] { return j < c.results.size() && c.results[j].at == static_cast<int>(i); };
    if (returns[i].type()->kind() == c10::TypeKind::ListType) {
      c10::List<at::Tensor> list;
      while (here()) list.push_back(next());
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(here() ? next() : at::Tensor());
    }
  }
  return results;
}

}  // namespace remat::pytorch::detail
