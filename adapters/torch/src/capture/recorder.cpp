// SPDX-License-Identifier: Apache-2.0
// A step while it is recorded: its beginning, its calls, and the state at its end.
#include "recorder.hpp"

#include "../program/operators.hpp"

namespace remat::pytorch::detail {

recorder::recorder(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
                   const std::vector<std::string>& names, c10::Device device)
    : draws_(std::in_place, device), device_(device) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    add_outside(parameters[i], parameters[i].requires_grad() ? role::parameter : role::buffer, i,
                i < names.size() ? names[i] : "parameter " + std::to_string(i));
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto at = parameters.size() + i;
    add_outside(buffers[i], role::buffer, at, at < names.size() ? names[at] : "buffer " + std::to_string(i));
  }
}

recorder::recorder(const trace& t, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& parameters)
    : trace_(t), draws_(std::in_place, t.device), device_(t.device), may_assume_zero_(true) {
  const auto& end = t.forward;
  trace_.calls.erase(trace_.calls.begin() + static_cast<std::ptrdiff_t>(t.backward), trace_.calls.end());
  trace_.slots.resize(end.slots);
  trace_.storages.resize(end.storages);
  trace_.tensors.resize(end.tensors);
  for (index_t k = 0; k < parameters.size(); ++k)  // their slots come first
    if (parameters[k].requires_grad()) trace_.slots[k].from = role::parameter;
  std::vector<index_t> storage(end.tensors, none);
  for (std::size_t id = 0; id < end.tensors; ++id)
    if (const auto k = trace_.tensors[id]; k != none) storage[id] = trace_.slots[k].value;
  for (const auto& c : trace_.calls)
    for (const auto& x : c.results) storage[x.tensor] = x.view.value;
  for (std::size_t s = 0; s < end.storages; ++s) {
    contents_.push_back(trace_.storages[s].slot != none ? contents::outside
                        : end.constants[s]              ? contents::constant
                                                        : contents::hollow);
    alive_.push_back(c10::weak_intrusive_ptr<c10::StorageImpl>(c10::Storage().getWeakStorageImpl()));
    uninitialized_.push_back(false);
    real_values_.push_back(false);
    of_forward_.push_back(true);
  }
  for (std::size_t id = 0; id < end.tensors; ++id) {
    const auto& x = tensors[id];
    met_.emplace_back(x.getIntrusivePtr());
    if (!x.defined() || storage[id] == none) continue;
    ids_.emplace(x.unsafeGetTensorImpl(), id);
    const bool first = index_.emplace(storage_of(x), storage[id]).second;
    if (first && trace_.tensors[id] != none) outside_tensors_.emplace(x.unsafeGetTensorImpl(), x);
  }
  for (const auto& c : trace_.calls) {
    auto next = c.positions.begin();
    for (const auto& o : c.operands) {
      if (next == c.positions.end() || o.at != takes_masks(c.op)) continue;
      const auto& mask = tensors[o.tensor];
      if (!mask.defined() || !is_mask(mask)) continue;
      const bool flat = o.element < 0;
      positions_.push_back({mask, flat ? c.operands[0].view.sizes : std::vector<int64_t>(), {}});
      for (auto j = flat ? 1 : mask.dim(); j > 0; --j) positions_.back().lists.push_back(tensors[tensor_in(trace_, *next++)]);
    }
  }
}

draw_origin recorder::abandon() {
  put_back_written();
  auto left = draws_->left_behind();
  draws_.reset();
  return left;
}

std::vector<std::pair<at::Tensor, int64_t>> recorder::versions() const {
  std::vector<std::pair<at::Tensor, int64_t>> list;
  for (const auto& o : watched_)
    if (o.tensor.defined()) list.emplace_back(o.tensor, version(o.tensor));
  return list;
}

std::vector<std::pair<std::size_t, at::Tensor>> recorder::made_tensors() const {
  std::vector<std::pair<std::size_t, at::Tensor>> list;
  for (std::size_t id = 0; id < met_.size(); ++id)
    if (auto t = met_[id].lock(); t && trace_.tensors[id] == none)
      if (const auto s = index_.find(storage_of(at::Tensor(t)));
          s != index_.end() && trace_.storages[s->second].slot == none &&
          (contents_[s->second] != contents::constant || collects_gradient(at::Tensor(t))))
        list.emplace_back(id, at::Tensor(std::move(t)));
  return list;
}

at::Tensor recorder::stand_in(const at::Tensor& like, at::IntArrayRef strides, role from, std::size_t position) {
  const bool keep =
      from == role::input && at::isIntegralType(like.scalar_type(), true) && like.nbytes() <= value_limit() && has_memory(like);
  auto t = hollow_tensor(like.sizes(), strides, like.options());
  const auto s = add(t, keep ? contents::kept : contents::hollow);
  if (keep) {
    real_values_[s] = true;
    lent_memory memory;
    memory.fill(t);
    memory.give();
    t.copy_(like);
  }
  of_forward_[s] = from != role::output_grad;
  hide(storage_of(t));
  const auto slot =
      add_slot(t, s, from, position, (from == role::input ? "input " : "gradient of output ") + std::to_string(position));
  trace_.tensors[id_of(t)] = slot;
  if (from == role::input) {
    outside_tensors_.emplace(t.unsafeGetTensorImpl(), t);
    watch(t, slot);
  }
  return t;
}

void recorder::start_backward() {
  trace_.backward = trace_.calls.size();
  trace_.after_forward = draws_->left_behind();
  for (auto& o : watched_) o.forward = version(o.tensor);
  draws_->begin_phase();
}

bool recorder::watches_memory(const at::Tensor& t) const {
  const auto s = index_.find(storage_of(t));
  if (s == index_.end() || uninitialized_[s->second] || saved_.count(storage_of(t))) return false;
  const auto known = contents_[s->second];
  return known == contents::constant || (known == contents::outside && storage_of(t)->nbytes() <= constant_limit);
}

std::size_t recorder::id_of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  const auto [known, fresh] = ids_.emplace(impl, trace_.tensors.size());
  if (fresh) {
    trace_.tensors.push_back(none);
    met_.emplace_back(t.getIntrusivePtr());
  }
  return known->second;
}

void recorder::note_geometry_change(const at::Tensor& from, const at::Tensor& to) {
  const auto id = id_of(from);
  if (ids_.emplace(to.unsafeGetTensorImpl(), id).second) met_[id] = to.getIntrusivePtr();
}

trace recorder::finish() {
  trace_.after_backward = draws_->left_behind();
  for (std::size_t s = 0; s < trace_.storages.size(); ++s) freeze_if_temporary(static_cast<index_t>(s));
  note_versions();
  if (!asked_.empty()) trace_.asked = std::make_shared<recorded_questions>(trace_, calculable_, asked_);
  return std::move(trace_);
}

void recorder::refuse(const std::string& op, const std::string& why) const {
  const auto& calls = trace_.calls;
  std::string where = "call " + std::to_string(calls.size()) + ", " + (trace_.backward ? "backward" : "forward");
  if (!calls.empty()) where += ", after " + calls.back().op.schema().name();
  refusal_ = op + " (" + where + ") " + why;
  throw cannot_capture(*refusal_);
}

namespace {

/// The memory and the sizes of a tensor as a call finds it.
class found_as {
 public:
  explicit found_as(const at::Tensor& t)
      : storage_(t.storage().getWeakStorageImpl()),
        address_(storage_of(t)),
        bytes_(address_->nbytes()),
        sizes_(t.sizes()),
        strides_(t.strides()),
        offset_(t.storage_offset()) {}
  bool is_another(const at::Tensor& now) const { return storage_of(now) != address_ || address_->nbytes() != bytes_; }
  void put_back(const at::Tensor& t) const {
    auto there = storage_.lock();
    if (!there) return;
    there->set_nbytes(bytes_);
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(there)));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, offset_);
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const c10::StorageImpl* address_;
  std::size_t bytes_;
  c10::SmallVector<int64_t, 5> sizes_, strides_;
  int64_t offset_;
};

/// True for the momentum of a batch norm, which only averages its statistics. The backward does not need it.
bool is_momentum(const c10::FunctionSchema& of, std::size_t argument) {
  return of.name().find("batch_norm") != std::string::npos && of.arguments()[argument].name() == "momentum";
}

}  // namespace

void recorder::run(c10::OperatorHandle op, ::torch::jit::Stack& stack, repeated_call repeated) {
  std::vector<at::Tensor> tensors;
  repeats_ = repeated.original != nullptr;
  auto c = read_call(op, stack, repeated, tensors);
  const auto& name = op.schema().name();
  std::optional<traced_call> masked;
  if (const auto other = with_positions(c, stack, tensors, repeated)) {
    masked = std::move(c);
    op = *other;
    c = read_call(op, stack, {}, tensors);
  }
  const auto n = c.arguments.size();
  const auto first = stack.size() - n;
  mark_hidden_writes(c);
  if (repeated.original == nullptr) try_on_values(c, stack, tensors);
  const bool ask = classify_dynamic(c, tensors);
  if (c.ahead) {
    call_ahead(c, stack, first, tensors, repeated);
    trace_.calls.push_back(std::move(c));
    return;
  }
  freeze_filled_by_hand(c, tensors);
  const bool known = !masked || masked->masks_known;  // else a later step knows its positions only after calls have run ahead
  const bool real_values =
      known && std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return has_real_values(t); });
  const bool constant = std::all_of(c.operands.begin(), c.operands.end(),
                                    [&](const auto& o) { return contents_[o.view.value] == contents::constant; });
  std::vector<found_as> before;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto s = c.operands[i].view.value;
    if (c.operands[i].written && contents_[s] == contents::outside) save(tensors[i]);
    if (c.operands[i].written && log_ != nullptr && trace_.backward == 0 && !constant && !repeated.original)
      keep_data(tensors[i], s, real_values);
    before.emplace_back(tensors[i]);
    if (c.operands[i].written && !tensors[i].is_inference()) c.operands[i].version_increments = -version(tensors[i]);
  }

  repeated.original != nullptr ? repeat(c, stack, first, repeated) : execute(c, stack, first, tensors, real_values, constant);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto& o = c.operands[i];
    if (before[i].is_another(tensors[i])) {
      for (std::size_t k = 0; k < tensors.size(); ++k) before[k].put_back(tensors[k]);  // in the step, the operator does so again
      refuse(name, "resizes or replaces the storage of a tensor");
    }
    if (o.written && !tensors[i].is_inference()) o.version_increments += version(tensors[i]);
    if (repeated.original != nullptr) o.version_increments = repeated.original->operands[i].version_increments;
  }

  std::vector<c10::StorageImpl*> touched;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (c.operands[i].written || (storage_of(tensors[i])->nbytes() > constant_limit && !is_view(op)))
      touched.push_back(storage_of(tensors[i]));
  const auto results = op.schema().returns().size();
  for (std::size_t i = 0; i < results; ++i)
    each_tensor(stack[stack.size() - results + i], [&](const at::Tensor& t, int element) {
      check(name, t);
      if (!index_.count(storage_of(t))) add_result_storage(c, name, t, real_values, constant);
      c.results.push_back({static_cast<int>(i), element, view_of(t), false, id_of(t)});
    });
  for (auto* s : touched) update_contents(s, constant && !c.draws, real_values && !c.draws);
  if (log_ != nullptr) limit_kept();
  c.constant = constant && !c.draws && std::all_of(c.results.begin(), c.results.end(), [&](const auto& x) {
                 return contents_[x.view.value] == contents::constant;
               });
  forget_changed_values(c, real_values);
  if (real_values && !c.draws) calculable_.push_back(trace_.calls.size());
  if (ask && log_ == nullptr) asked_.push_back({trace_.calls.size(), values_from(stack, stack.size() - results)});
  if (!masked) return trace_.calls.push_back(std::move(c));
  masked->results = c.results;
  masked->replacement = std::make_shared<const traced_call>(std::move(c));
  trace_.calls.push_back(std::move(*masked));
}

void recorder::add_result_storage(const traced_call& c, const std::string& name, const at::Tensor& t, bool real_values,
                                  bool constant) {
  const bool keep = !constant && keeps_values(t.scalar_type(), storage_of(t)->nbytes(), real_values) && has_memory(t);
  const auto s = add(t, !c.draws && constant ? contents::constant : keep ? contents::kept : contents::hollow);
  trace_.storages[s].name = name;
  uninitialized_[s] = makes_uninitialized(c.op);
  if (contents_[s] == contents::hollow) release_or_hide(storage_of(t));
  if (contents_[s] == contents::kept) {
    hide(storage_of(t));
    kept_.push_back(s);
    kept_bytes_ += trace_.storages[s].bytes;
  }
  real_values_[s] = real_values && !c.draws && contents_[s] != contents::hollow;
  of_forward_[s] = trace_.backward == 0 || (!c.draws && std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
                     return of_forward_[o.view.value] && !o.written;
                   }));
}

void recorder::forget_changed_values(const traced_call& c, bool real_values) {
  for (const auto& o : c.operands) {
    const auto s = o.view.value;
    if (o.written && (!real_values || c.draws || trace_.storages[s].slot != none)) real_values_[s] = false;
    if (contents_[s] == contents::hollow) real_values_[s] = false;
    if (o.written && trace_.backward > 0) of_forward_[s] = false;
  }
}

void recorder::let_numbers_vary() {
  auto& c = trace_.calls.back();
  if (c.ahead || c.draws || c.constant || c.replacement || trace_.backward > 0) return;
  const auto& schema = c.op.schema();
  const bool apart =
      std::any_of(c.operands.begin(), c.operands.end(),
                  [&](const auto& o) { return o.written && trace_.storages[o.view.value].slot != none; }) &&
      (!c.grad_mode || std::none_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.requires_grad; }));
  for (std::size_t i = 0; i < c.arguments.size(); ++i)
    if (c.arguments[i].isDouble() && (apart || is_momentum(schema, i))) c.numbers.push_back(static_cast<int>(i));
}

void recorder::keep_numbers() {
  for (auto& c : trace_.calls)
    std::erase_if(c.numbers, [&](int at) { return !is_momentum(c.op.schema(), static_cast<std::size_t>(at)); });
}

void recorder::limit_kept() {
  for (; kept_bytes_ > static_cast<bytes_t>(value_limit()); kept_.pop_front()) {
    const auto s = kept_.front();
    kept_bytes_ -= trace_.storages[s].bytes;
    const auto there = alive_[s].lock();
    if (!there || contents_[s] != contents::kept) continue;
    contents_[s] = contents::hollow;
    real_values_[s] = false;
    release_or_hide(there.get());
  }
}

void recorder::give_back_kept() const {
  for (std::size_t s = 0; s < alive_.size(); ++s)
    if (const auto there = alive_[s].lock();
        there && contents_[s] == contents::kept && trace_.storages[s].slot == none && !log_->is_pinned(there.get()))
      release(there.get());
}

std::optional<std::string> recorder::kept_by_module() const {
  for (std::size_t s = 0; s < alive_.size(); ++s)
    if (trace_.storages[s].slot == none && (contents_[s] == contents::hollow || contents_[s] == contents::kept) &&
        !alive_[s].expired())
      return trace_.storages[s].name;
  return std::nullopt;
}

}  // namespace remat::pytorch::detail
