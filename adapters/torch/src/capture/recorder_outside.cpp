// SPDX-License-Identifier: Apache-2.0
// Tensors and storages of a recording: those from outside, constants, and contents to restore.
#include "recorder.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/node.h>

#include "../program/operators.hpp"

namespace remat::pytorch::detail {

index_t recorder::add_value(const at::Tensor& t, const std::string& maker) {
  const auto k = static_cast<index_t>(trace_.slots.size());
  add_outside(t, role::input, inputs_ + values_.size(), "value of " + maker);
  values_.push_back(t);
  return k;
}

bool recorder::trained_elsewhere(const at::Tensor& t) const {
  if (log_ == nullptr || trace_.backward != 0 || !t.requires_grad() || ids_.count(t.unsafeGetTensorImpl())) return false;
  const auto known = index_.find(storage_of(t));
  if (known == index_.end()) return true;
  const auto k = trace_.storages[known->second].slot;  // that of the parameter, for its views
  if (k == none || trace_.slots[k].from != role::input) return false;
  const auto& node = t.grad_fn();
  return !node || node->thread_id() != at::RecordFunction::currentThreadId() || node->sequence_nr() < first_node_;
}

std::vector<at::Tensor> recorder::differentiable_values() const {
  std::vector<at::Tensor> list;
  for (const auto& t : values_) {
    const bool to_the_end = t.requires_grad() && (t.is_leaf() || trained_storages_.count(storage_of(t)) > 0);
    list.push_back(to_the_end ? t : at::Tensor());
  }
  return list;
}

void recorder::note_versions() {
  for (const auto& o : watched_) {
    const auto now = version(o.tensor);
    if (now == o.start) continue;
    trace_.written.push_back({o.slot, o.forward - o.start, now - o.forward});
    set_version(o.tensor, o.start);
  }
}

index_t recorder::add(const at::Tensor& t, contents known) {
  const auto s = static_cast<index_t>(trace_.storages.size());
  index_.emplace(storage_of(t), s);
  alive_.push_back(t.storage().getWeakStorageImpl());
  storage_value origin;
  origin.bytes = static_cast<bytes_t>(storage_of(t)->nbytes());
  origin.device = t.device();
  trace_.storages.push_back(std::move(origin));
  contents_.push_back(known);
  uninitialized_.push_back(false);
  real_values_.push_back(false);
  of_forward_.push_back(trace_.backward == 0);
  return s;
}

index_t recorder::add_slot(const at::Tensor& t, index_t storage, role from, std::size_t position, const std::string& name) {
  const auto k = static_cast<index_t>(trace_.slots.size());
  trace_.slots.push_back(
      {from, position, name, type_of(t), byte_offset(t), t.unsafeGetTensorImpl()->is_wrapped_number(), storage});
  auto& s = trace_.storages[storage];
  if (s.slot == none) s.slot = k, s.name = name;
  return k;
}

void recorder::add_outside(const at::Tensor& t, role from, std::size_t position, const std::string& name) {
  check(name, t);
  const auto known = index_.find(storage_of(t));
  // A tensor that shares its memory with an earlier one is identified by its geometry.
  if (known == index_.end()) outside_tensors_.emplace(t.unsafeGetTensorImpl(), t);
  const bool memory = known != index_.end() || has_memory(t);
  const auto s = known != index_.end() ? known->second : add(t, memory ? contents::outside : contents::hollow);
  const auto k = add_slot(t, s, from, position, name);
  if (const auto id = id_of(t); trace_.tensors[id] == none) trace_.tensors[id] = k;
  watch(t, k);
  if (known == index_.end()) real_values_.back() = from != role::parameter && memory;
  if (!memory) hide(storage_of(t));
}

void recorder::add_unannounced(const std::string& op, const at::Tensor& t) {
  if (t.requires_grad()) refuse(op, "reads a tensor that requires a gradient and is not among the parameters or arguments");
  add_outside(t, role::found, 0, "tensor of " + op);
  std::optional<content> copy;
  if (!storage_of(t)->resizable()) copy = content_of(t.storage());  // its owner may free this memory
  unannounced_.insert({index_.at(storage_of(t)), {t, std::move(copy)}});
}

void recorder::freeze_if_temporary(index_t s) {
  const auto found = unannounced_.find(s);
  if (found == unannounced_.end()) return;
  auto t = std::exchange(found->second.first, {});
  outside_tensors_.erase(t.unsafeGetTensorImpl());
  auto& slot = trace_.slots[trace_.storages[s].slot];
  auto watched = std::find_if(watched_.begin(), watched_.end(), [&](const auto& o) { return o.tensor.is_same(t); });
  if (watched != watched_.end()) watched->tensor.reset();
  const auto saved = saved_.find(storage_of(t));
  const auto logged = references_.find(t.unsafeGetTensorImpl());
  const auto count = t.use_count() - (logged != references_.end() ? logged->second : 0);
  // During a step, the graph holds its saved tensors. These references do not mean that the module keeps a tensor.
  const bool temporary = references_.empty()
                             ? holders(*t.unsafeGetTensorImpl(), count) == 1 &&
                                   holders(*storage_of(t), t.storage().use_count()) == (saved != saved_.end() ? 2U : 1U)
                             : !held_by_python(t);
  if (temporary) {
    const auto& as_found = saved != saved_.end() ? saved->second.second : t;
    freeze(slot, found->second.second ? std::move(*found->second.second) : content_of(as_found.storage()));
    if (watched != watched_.end()) watched_.erase(watched);
  } else {
    slot.position = trace_.found.size();
    if (watched != watched_.end()) watched->tensor = t;
    trace_.found.push_back(std::move(t));
  }
}

void recorder::freeze_filled_by_hand(const traced_call& c, const std::vector<at::Tensor>& tensors) {
  const bool view = is_view(c.op);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto s = c.operands[i].view.value;
    if (!uninitialized_[s] || view || reads_only_geometry(c.op)) continue;
    uninitialized_[s] = false;
    if (c.operands[i].written && overwrites(c.op)) continue;
    const auto& t = tensors[i];
    if (storage_of(t)->nbytes() == 0) continue;
    trace_.storages[s].name = "constant";
    freeze(trace_.slots[add_slot(bytes_of(t), s, role::constant, 0, "constant")], content_of(t.storage()));
  }
}

void recorder::check(const std::string& op, const at::Tensor& t) const {
  if (t.layout() != c10::kStrided || !t.has_storage() || t.is_quantized() || t.is_nested() || t._is_zerotensor())
    refuse(op, std::string("takes or gives a tensor that is sparse, quantized, nested or otherwise without a plain storage") +
                   (t.is_sparse() ? "; of an embedding, sparse=False helps" : ""));
  if (t.device() != device_ && !(t.is_cpu() && (t.dim() == 0 || t.nbytes() <= constant_limit)))
    refuse(op, "meets a tensor on " + t.device().str() + ", the step runs on " + device_.str());
}

void recorder::update_contents(c10::StorageImpl* s, bool constant, bool real_values) {
  auto& known = contents_[index_.at(s)];
  if (known == contents::outside || known == contents::hollow) return;
  if (known == contents::constant && constant && s->nbytes() <= constant_limit) return;
  if ((known == contents::kept || real_values) && s->nbytes() <= value_limit()) {
    known = contents::kept;
    return hide(s);
  }
  known = contents::hollow;
  release_or_hide(s);
}

}  // namespace remat::pytorch::detail
