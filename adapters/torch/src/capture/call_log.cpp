// SPDX-License-Identifier: Apache-2.0
#include "call_log.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <remat/core/error.hpp>

#include "../device/allocator.hpp"
#include "../program/operators.hpp"
#include "draws.hpp"
#include "hollow.hpp"
#include "recorder.hpp"
#include "weights_elsewhere.hpp"

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

/// True if two storages share memory.
bool overlap(c10::StorageImpl* s, c10::StorageImpl* other) {
  const auto start_of = [](c10::StorageImpl* x) { return static_cast<const char*>(x->_mutable_data_ptr_no_checks().get()); };
  const auto *a = start_of(s), *b = start_of(other);
  return s == other || (a != nullptr && b != nullptr && a < b + other->nbytes() && b < a + s->nbytes());
}

/// True if code other than kernels may write the memory of a tensor at any time: PyTorch marks memory that `numpy()` has handed
/// out, or that it has got from elsewhere (`torch.from_numpy`).
bool others_may_write(const at::Tensor& t) {
  return t.is_cpu() && !t.requires_grad() && !storage_of(t)->resizable() && has_memory(t);
}

/// Moves memory from one storage to another.
void put(c10::StorageImpl* to, c10::StorageImpl* from) {
  to->clear_data_ptr_access_error_msg_();
  to->set_nbytes(from->nbytes());
  to->set_data_ptr_noswap(from->set_data_ptr(c10::DataPtr(nullptr, from->device())));
}

}  // namespace

c10::Storage hollow_storage(std::size_t bytes, c10::Device on) {
  auto s = empty_storage(bytes, on);
  if (bytes > 0) hide(s.unsafeGetStorageImpl());
  return s;
}

still_generator::still_generator(c10::Device on)
    : generator_(at::globalContext().defaultGenerator(on)), start_(current_state()), expected_(start_) {}

std::string still_generator::current_state() const {
  const at::AutoDispatchBelowADInplaceOrView below;
  const uncounted aside;  // the plan has no room for this state, which is freed at once
  return text_of(state_of(generator_));
}
void still_generator::set(const std::string& state) const {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto bytes = static_cast<int64_t>(state.size());
  set_state(generator_, at::from_blob(const_cast<char*>(state.data()), {bytes}, at::kByte));
}
void still_generator::rewind() const {
  if (current_state() != start_) set(start_);
}
bool still_generator::is_at(const draw_origin& origin) const {
  const auto state = current_state();
  switch (origin.from) {
    case generator_origin::next:
      return state == expected_;
    case generator_origin::forward:
      return state == start_;
    case generator_origin::fixed:
      return state == text_of(origin.state);
    case generator_origin::before:
      return std::any_of(draws_from_.begin(), draws_from_.end(),
                         [&](const auto& draw) { return draw.first == origin.call && draw.second == state; });
    default:
      return false;
  }
}
void still_generator::draw(std::size_t call) {
  draws_from_.emplace_back(call, current_state());
  expected_ = unlikely_state(generator_, draws_from_.size());
  set(expected_);
}

call_log::call_log(c10::Device on) : generator_(on) {}

void call_log::add(std::size_t call, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments,
                   std::vector<c10::IValue> results, const std::optional<draw_origin>& draws, bool has_run,
                   std::vector<at::Tensor> positions) {
  auto put = draws ? state_set_before(call, *draws) : std::string();
  calls_.push_back({call, op, std::move(arguments), std::move(results), at::GradMode::is_enabled(), std::move(put), has_run,
                    std::move(positions)});
}

void call_log::add_geometry_change(std::size_t call, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments,
                                   std::vector<c10::IValue> results,
                                   const std::unordered_map<const c10::TensorImpl*, at::Tensor>& before) {
  replace(before);
  for (auto& v : arguments) detail::replace(v, before);
  geometry_changes_.push_back({call, op, std::move(arguments), std::move(results), at::GradMode::is_enabled(), {}});
}

std::string call_log::state_set_before(std::size_t call, const draw_origin& draws) {
  std::string put;
  if (draws.from == generator_origin::fixed) put = text_of(draws.state);
  if (draws.from == generator_origin::forward) put = generator_.start();
  if (draws.from == generator_origin::before)
    for (const auto& [other, from] : drawn_)
      if (other == draws.call) put = from;
  const bool first = drawn_.empty() && draws.from == generator_origin::next;
  drawn_.emplace_back(call, first ? generator_.start() : put);
  return put;
}

void call_log::hide(const c10::Storage& s) {
  detail::hide(s.unsafeGetStorageImpl());
  hidden_.push_back(s);
}

void call_log::keep_data(const at::Tensor& t) {
  if (std::any_of(saved_.begin(), saved_.end(), [&](const auto& k) { return k.of(t); })) return;
  lent_memory shown;
  shown.fill(t);
  saved_.push_back({t.storage(), bytes_of(t).clone()});
}

void call_log::expose(const at::Tensor& t) {
  const plain_kernels kernels;
  if (exposed(t) == nullptr) exposed_.push_back({t.storage(), bytes_of(t).clone()});
}

const call_log::saved_storage* call_log::exposed(const at::Tensor& t) const {
  const auto found = std::find_if(exposed_.begin(), exposed_.end(), [&](const auto& e) { return e.of(t); });
  return found == exposed_.end() ? nullptr : &*found;
}

bool call_log::is_exposed(const c10::StorageImpl* s) const {
  return std::any_of(exposed_.begin(), exposed_.end(), [&](const auto& e) { return e.storage.unsafeGetStorageImpl() == s; });
}

void call_log::watch(const trace& step, std::size_t inputs, const traced_call& c, const std::vector<c10::IValue>& arguments) {
  for (const auto& o : c.operands) {
    const auto& t = tensor_at(arguments, o);
    if (!t.has_storage() || storage_of(t)->resizable()) continue;
    auto* const s = storage_of(t);
    const auto shares = [&](const c10::Storage& other) { return overlap(s, other.unsafeGetStorageImpl()); };
    const auto same = [&](const auto& w) { return w.storage.nbytes() == s->nbytes() && w.storage.data() == s->data(); };
    const bool known = std::any_of(written_by_calls_.begin(), written_by_calls_.end(), shares);
    if (o.written) {
      std::erase_if(watched_, [&](const auto& w) { return shares(w.storage); });
      if (!known) written_by_calls_.push_back(t.storage());
      continue;
    }
    const auto k = step.storages[o.view.value].slot;
    const bool given = k != none && (step.slots[k].from == role::parameter ||
                                     (step.slots[k].from == role::input && step.slots[k].position < inputs));
    if (known || given || !others_may_write(t) || watched_bytes() + s->nbytes() > constant_limit ||
        std::any_of(watched_.begin(), watched_.end(), same))
      continue;
    const plain_kernels kernels;
    watched_.push_back({t.storage(), bytes_of(t).clone()});
  }
}

std::size_t call_log::watched_bytes() const {
  return std::accumulate(watched_.begin(), watched_.end(), std::size_t{0},
                         [](auto sum, const auto& w) { return sum + w.data.nbytes(); });
}

void call_log::end_watch() {
  watched_.clear();
  written_by_calls_.clear();
}

bool call_log::saved_storage::touched() const {
  const plain_kernels kernels;
  if (storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr) return false;  // freed: a constant
  return storage.nbytes() != data.nbytes() || !same_bytes(bytes_over(storage), data);
}

void call_log::saved_storage::exchange() {
  auto there = bytes_over(storage);
  const auto was = there.clone();
  there.copy_(data);
  data = was;
}

bool call_log::uses_touched(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) const {
  const auto& arguments = op.schema().arguments();
  bool found = false;
  for (std::size_t i = 0; i < arguments.size() && !(exposed_.empty() && watched_.empty()); ++i)
    each_tensor(stack[stack.size() - arguments.size() + i], [&](const at::Tensor& t, int) {
      if (!t.has_storage()) return;
      for (const auto* list : {&exposed_, &watched_})
        for (const auto& e : *list)
          if (!found && overlap(storage_of(t), e.storage.unsafeGetStorageImpl()))
            found = (list == &exposed_ && is_written(arguments[i])) || e.touched();
    });
  return found;
}

bool call_log::is_alone(const at::Tensor& t) const {
  auto* s = storage_of(t);
  std::unordered_set<const c10::TensorImpl*> sharing{t.unsafeGetTensorImpl()};
  bool alone = s->resizable() && exposed(t) == nullptr && !is_pinned(s);  // else another owner lends the memory (numpy)
  const auto meet = [&](const at::Tensor& x) {
    if (!x.defined() || !x.has_storage() || storage_of(x) != s) return false;
    if (sharing.insert(x.unsafeGetTensorImpl()).second) alone = alone && !held_by_python(x);
    return true;
  };
  for (const auto& c : calls_) {
    bool uses = false, graph = false;
    for (const auto* list : {&c.arguments, &c.results})
      each_tensor(*list, [&](const at::Tensor& x, int) {
        uses = meet(x) || uses;
        graph = graph || (c.grad_mode && x.requires_grad());
      });
    alone = alone && !(uses && graph);
  }
  for (const auto& c : geometry_changes_)
    for (const auto* list : {&c.arguments, &c.results}) each_tensor(*list, [&](const at::Tensor& x, int) { meet(x); });
  for (const auto& x : held_) meet(x);
  return alone && holders(*s, t.storage().use_count()) == sharing.size() + references_to(s);
}

bool call_log::is_any_touched() const {
  const auto touched = [](const auto& w) { return w.touched(); };
  return std::any_of(watched_.begin(), watched_.end(), touched) ||
         std::any_of(exposed_.begin(), exposed_.end(), [&](const auto& e) {
           if (!e.touched()) return false;
           bool read = false;
           for (const auto& c : calls_)
             each_tensor(c.arguments, [&](const at::Tensor& t, int) { read = read || (t.has_storage() && e.of(t)); });
           return read;
         });
}

void call_log::replace(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& by) {
  for (auto* all : {&calls_, &geometry_changes_})
    for (auto& c : *all)
      for (auto* list : {&c.arguments, &c.results})
        for (auto& v : *list) detail::replace(v, by);
  for (auto& t : held_)
    if (const auto other = by.find(t.unsafeGetTensorImpl()); other != by.end()) t = other->second;
}

void call_log::saved_storage::put_back() const {
  auto* s = storage.unsafeGetStorageImpl();
  s->clear_data_ptr_access_error_msg_();
  if (s->nbytes() == data.nbytes() && s->data() != nullptr)
    bytes_over(storage).copy_(data);
  else
    put(s, storage_of(data.clone()));
}

void call_log::run(const entry& c) const {
  const at::AutoGradMode mode(c.grad_mode);
  auto stack = c.arguments;
  const lent_weights lent(c.arguments);
  c.op.callBoxed(stack);
  std::size_t i = 0;
  for (const auto& made : stack) {
    std::vector<at::Tensor> real;
    each_tensor(made, [&](const at::Tensor& t, int) { real.push_back(t); });
    std::size_t k = 0;
    each_tensor(c.results[i++], [&](const at::Tensor& t, int) {
      const auto& r = real.at(k++);
      if (storage_of(t) == storage_of(r) || (r.nbytes() > 0 && storage_of(r)->data() == nullptr)) return;  // or moved already
      if (!same_places(t, r)) {
        require_kernel_geometry(c.op);
        throw broken_contract("remat: " + c.op.schema().name() +
                              " gave a result of another geometry than it was recorded with. The next step is recorded anew");
      }
      is_pinned(storage_of(t)) ? void(bytes_of(t).copy_(bytes_of(r))) : put(storage_of(t), storage_of(r));
    });
  }
}

void call_log::fill() {
  const plain_kernels kernels;
  filled_ = true;
  const auto state_before = generator_.current_state();
  for (const auto& s : std::exchange(hidden_, {})) s.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  for (const auto& a : std::exchange(set_aside_, {})) a.put_back();
  show_before();
  forget_ahead();
  storages_.clear();
  first_stale_ = 0;
  for (const auto& k : std::exchange(saved_, {})) k.put_back();
  auto touched = std::exchange(exposed_, {});  // the calls so far have seen the data from before
  std::move(watched_.begin(), watched_.end(), std::back_inserter(touched));
  end_watch();
  std::erase_if(touched, [](const auto& e) { return !e.touched(); });
  for (auto& e : touched) e.exchange();
  const auto written = c10::make_scope_exit([&] {
    for (auto e = touched.rbegin(); e != touched.rend(); ++e) e->exchange();  // entries may share memory
  });
  std::unordered_set<const c10::StorageImpl*> gone;
  for (const auto& c : calls_) {
    if (!c.has_run) continue;
    each_tensor(c.results, [&](const at::Tensor& t, int) {
      storage_of(t)->clear_data_ptr_access_error_msg_();
      if (!has_memory(t)) gone.insert(storage_of(t));
    });
  }
  generator_.set(generator_.start());
  held_.clear();
  geometry_changes_.clear();
  auto calls = std::exchange(calls_, {});
  for (auto& next : calls) {
    const auto c = std::move(next);  // frees what only this call holds
    bool again = !c.has_run;
    each_tensor(c.results, [&](const at::Tensor& t, int) { again = again || gone.count(storage_of(t)); });
    if (!again) continue;
    if (!c.set_state.empty()) generator_.set(c.set_state);
    run(c);
  }
  if (state_before != generator_.expected()) generator_.set(state_before);
}

void call_log::fill(const std::vector<bool>& chosen) {
  const plain_kernels kernels;
  bool any = false;
  for (auto& c : calls_) {
    if (!chosen[c.call] || c.has_run) continue;
    run(c);
    c.has_run = any = true;
    each_tensor(c.results, [&](const at::Tensor& t, int) {
      const auto known = storages_.find(storage_of(t));
      if (known == storages_.end()) return;
      known->second.stays = known->second.real = true;
      ahead_data_.erase(known->first);
    });
  }
  if (any && run_ahead_count_ > 0 && !has_pinned()) begin_anew();
}

std::unordered_map<const c10::TensorImpl*, std::size_t> call_log::references() const {
  std::unordered_map<const c10::TensorImpl*, std::size_t> counts;
  const auto count = [&](const at::Tensor& t, int = -1) { ++counts[t.unsafeGetTensorImpl()]; };
  for (const auto* all : {&calls_, &geometry_changes_})
    for (const auto& c : *all)
      for (const auto* list : {&c.arguments, &c.results}) each_tensor(*list, count);
  for (const auto& t : held_) count(t);
  return counts;
}

std::vector<std::pair<c10::OperatorHandle, std::vector<c10::IValue>>> writes_since(const call_log& log, const trace& calls,
                                                                                   std::size_t since, std::size_t until,
                                                                                   bool all) {
  const auto needed = [&](const traced_call& c) {
    return c.grad_mode && std::any_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.requires_grad; });
  };
  const auto writes = [&](const traced_call& c) {
    return std::any_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
      const auto k = calls.storages[o.view.value].slot;
      return o.written && k != none && calls.slots[k].from != role::constant;
    });
  };
  std::size_t end = since;
  for (const auto& c : log.calls())
    if (c.call >= since && c.call < until && needed(calls.calls[c.call])) end = all ? until : c.call + 1;
  std::vector<std::pair<c10::OperatorHandle, std::vector<c10::IValue>>> found;
  for (const auto& c : log.calls())
    if (c.call >= since && c.call < end && writes(calls.calls[c.call])) found.emplace_back(c.op, c.arguments);
  return found;
}

}  // namespace remat::pytorch::detail
