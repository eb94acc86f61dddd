// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs calls of a forward ahead of the plan, because the module reads values.
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "../base/trim.hpp"
#include "../base/views.hpp"
#include "../program/operators.hpp"
#include "call_log.hpp"
#include "hollow.hpp"
#include "weights_elsewhere.hpp"

namespace remat::pytorch::detail {
namespace {

/// Calls `f(storage)` for each tensor in a list of arguments or results.
template <class F>
void each_storage(const std::vector<c10::IValue>& list, F f) {
  each_tensor(list, [&](const at::Tensor& t, int) {
    if (t.has_storage()) f(t.storage());
  });
}

/// True if the call only makes views, which do not depend on the contents of memory.
bool only_views(const call_log::entry& c) { return is_view(c.op) && is_native(c.op); }

}  // namespace

/// Notes the storages of calls that were added since the last time.
void call_log::look() {
  for (; looked_ < calls_.size(); ++looked_) {
    const auto& c = calls_[looked_];
    each_storage(c.arguments, [&](const c10::Storage& s) {
      storages_.try_emplace(s.unsafeGetStorageImpl(), known_storage{s, true, false, true});
    });
    each_storage(c.results, [&](const c10::Storage& s) {
      const auto [known, fresh] = storages_.try_emplace(s.unsafeGetStorageImpl(), known_storage{s, false, c.done, c.done});
      known->second.results_of.push_back(looked_);
      if (fresh && c.done) stay_.push_back(known->first);
    });
  }
}

/// True if the call has not run at once, or its results are gone.
bool call_log::has_to_run(const entry& c) const {
  if (only_views(c)) return false;
  bool gone = false;
  each_storage(c.results, [&](const c10::Storage& s) {
    const auto& known = storages_.at(s.unsafeGetStorageImpl());
    gone = gone || (!known.outside && !known.stays);
  });
  return !c.done || gone;
}

/// True if all calls that have not run have the data of their operands, or make them.
bool call_log::has_operands(const std::vector<at::Tensor>& wanted) const {
  std::unordered_set<const c10::StorageImpl*> made;
  bool found = true;
  const auto need = [&](const c10::Storage& s) {
    const auto known = storages_.find(s.unsafeGetStorageImpl());
    found = found && (known == storages_.end() || known->second.real || made.count(s.unsafeGetStorageImpl()));
  };
  for (auto i = ahead_; i < calls_.size(); ++i) {
    const auto& c = calls_[i];
    if (only_views(c)) continue;
    if (has_to_run(c)) each_storage(c.arguments, need);
    each_storage(c.results, [&](const c10::Storage& s) { made.insert(s.unsafeGetStorageImpl()); });
  }
  for (const auto& t : wanted) need(t.storage());
  return found;
}

/// Makes all calls run again.
void call_log::begin_anew() {
  show_before();
  for (auto& w : written_) w.now.reset();
  for (const auto& a : std::exchange(aside_, {})) a.put_back();
  for (const auto& k : kept_) k.put_back();
  for (auto& [impl, s] : storages_) s.real = s.outside || s.stays;
  made_.clear();
  ahead_ = 0;
}

/// Storages whose data must stay: `wanted`, pinned storages, and storages of the last calls, which code other than Python may use
/// again.
std::unordered_set<const c10::StorageImpl*> call_log::used_lately(const std::vector<at::Tensor>& wanted) const {
  std::unordered_set<const c10::StorageImpl*> list;
  const auto add = [&](const c10::Storage& s) { list.insert(s.unsafeGetStorageImpl()); };
  for (const auto& t : wanted) add(t.storage());
  for (const auto& s : pinned_) add(s);
  for (auto i = calls_.size() - std::min(window_, calls_.size()); i < calls_.size(); ++i) {
    each_storage(calls_[i].arguments, add);
    each_storage(calls_[i].results, add);
  }
  return list;
}

/// True if Python holds a tensor over the storage.
bool call_log::is_held(const known_storage& s) const {
  bool held = false;
  for (const auto i : s.results_of)
    each_tensor(calls_[i].results, [&](const at::Tensor& t, int) {
      held = held || (t.has_storage() && storage_of(t) == s.storage.unsafeGetStorageImpl() && held_by_python(t));
    });
  return held;
}

namespace {

/// Calls `f(tensor)` for each operand that a call writes.
template <class F>
void each_written(const traced_call& c, const call_log::entry& e, F f) {
  for (const auto& o : c.operands)
    if (o.written) f(tensor_at(e.arguments, o));
}

}  // namespace

/// True if a call that has not run writes a weight whose memory is elsewhere.
bool call_log::writes_elsewhere(const std::vector<traced_call>& calls) const {
  bool found = false;
  for (auto i = ahead_; i < calls_.size(); ++i)
    each_written(calls[calls_[i].call], calls_[i], [&](const at::Tensor& t) {
      const auto& s = storages_.at(storage_of(t));
      found = found || (s.outside && s.storage.nbytes() > 0 && !has_data(t));
    });
  return found;
}

/// Saves memory that a call is about to write and did not make.
void call_log::save_written(const traced_call& c, const entry& e) {
  each_written(c, e, [&](const at::Tensor& t) {
    const auto& s = storages_.at(storage_of(t));
    const auto same = [&](const auto& x) { return x.storage.unsafeGetStorageImpl() == storage_of(t); };
    if (s.outside && std::none_of(written_.begin(), written_.end(), same))
      written_.push_back({s.storage, bytes_of(t).clone(), {}});
    if (s.stays && std::none_of(kept_.begin(), kept_.end(), same)) {  // no entry is stale here
      kept_.push_back({s.storage, bytes_of(t).clone()});
      ++stale_;
    }
  });
}

bool call_log::run_ahead(const std::vector<traced_call>& calls, const std::vector<at::Tensor>& wanted) {
  if (is_any_touched()) return false;
  look();
  if (writes_elsewhere(calls)) return false;
  make_room();
  const plain_kernels kernels;
  const auto now = generator_.now();
  const auto hide_again = [](const known_storage& s) {  // outside ones: only if the weight is elsewhere
    auto* impl = s.storage.unsafeGetStorageImpl();
    if (s.outside ? !impl->throw_on_immutable_data_ptr() && impl->nbytes() > 0 && impl->data() == nullptr : !s.stays)
      detail::hide(impl);
  };
  for (const auto* impl : std::exchange(shown_, {})) hide_again(storages_.at(impl));
  for (const auto& a : std::exchange(aside_, {})) a.put_back();
  for (const auto& w : written_)
    if (w.now.defined()) saved_storage{w.storage, w.now}.put_back();
  for (; stale_ < kept_.size(); ++stale_) kept_[stale_].put_back();
  for (const auto* impl : stay_) {
    auto& s = storages_.at(impl);
    if (!s.stays) continue;
    s.storage.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
    if (s.storage.nbytes() > 0 && impl->data() == nullptr) s.stays = s.real = false;  // too large to be kept
  }
  if (!has_operands(wanted)) {
    begin_anew();
    window_ *= 4;
  }

  const auto later = used_lately(wanted);
  std::unordered_map<const c10::StorageImpl*, std::size_t> last;
  for (auto i = ahead_; i < calls_.size(); ++i) {
    const auto use = [&](const c10::Storage& s) { last[s.unsafeGetStorageImpl()] = i; };
    each_storage(calls_[i].arguments, use);
    each_storage(calls_[i].results, use);
  }
  for (const auto& [impl, call] : last) storages_.at(impl).storage.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  std::size_t live = 0, freed = 0;
  const auto let_go = [&](known_storage& s) {
    if (s.outside || s.stays || !s.real || later.count(s.storage.unsafeGetStorageImpl()) || is_held(s)) return;
    s.real = false;
    made_.erase(s.storage.unsafeGetStorageImpl());
    freed += s.storage.nbytes();
    release(s.storage.unsafeGetStorageImpl());
  };
  const std::vector<const c10::StorageImpl*> before_these(made_.begin(), made_.end());
  for (const auto* impl : before_these) {
    auto& s = storages_.at(impl);
    if (!last.count(impl)) let_go(s);
    live += s.real ? s.storage.nbytes() : 0;
  }
  generator_.set(ahead_ > 0 ? place_ : generator_.start());
  const auto before = freed;
  for (; ahead_ < calls_.size(); ++ahead_) {
    const auto& c = calls_[ahead_];
    if (has_to_run(c)) {
      save_written(calls[c.call], c);
      if (!c.state.empty()) generator_.set(c.state);
      run(c);
      each_storage(c.results, [&](const c10::Storage& s) {
        auto& known = storages_.at(s.unsafeGetStorageImpl());
        if (!known.real) live += s.nbytes();
        known.real = true;
        if (!known.outside && !known.stays) made_.insert(s.unsafeGetStorageImpl());
      });
      most_ahead_ = std::max(most_ahead_, live - (freed - before));
    }
    const auto end = [&](const c10::Storage& s) {
      if (last.at(s.unsafeGetStorageImpl()) == ahead_) let_go(storages_.at(s.unsafeGetStorageImpl()));
    };
    each_storage(c.arguments, end);
    each_storage(c.results, end);
  }
  place_ = generator_.now();
  generator_.set(now);
  note_freed(static_cast<bytes_t>(freed));
  for (auto& w : written_) w.now = bytes_over(w.storage).clone();
  for (const auto& [impl, call] : last) hide_again(storages_.at(impl));
  for (const auto& s : hidden_) detail::hide(s.unsafeGetStorageImpl());
  for (const auto& s : pinned_) s.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  for (const auto& t : wanted) {
    storage_of(t)->clear_data_ptr_access_error_msg_();
    if (storages_.count(storage_of(t))) shown_.push_back(storage_of(t));
  }
  return true;
}

bool call_log::try_kernel(const std::vector<traced_call>& calls, const c10::OperatorHandle& op,
                          const ::torch::jit::Stack& stack) {
  auto arguments = values_from(stack, stack.size() - op.schema().arguments().size());
  std::vector<at::Tensor> tensors;
  each_tensor(arguments, [&](const at::Tensor& t, int) {
    if (t.has_storage()) tensors.push_back(t);
  });
  if (!run_ahead(calls, tensors)) return false;
  const auto is_made = [&](const at::Tensor& t) {
    const auto known = storages_.find(storage_of(t));
    return known == storages_.end() || known->second.outside || t.nbytes() == 0 || has_memory(t);
  };
  if (!std::all_of(tensors.begin(), tensors.end(), is_made)) return false;
  const auto hidden_again = c10::make_scope_exit([&] {
    for (const auto& t : tensors) {
      const auto known = storages_.find(storage_of(t));
      if (known != storages_.end() && !known->second.outside && !known->second.stays && !is_pinned(storage_of(t)))
        detail::hide(storage_of(t));
    }
  });
  const weights_there lent(arguments);
  op.callBoxed(&arguments);
  return true;
}

void call_log::show_before() const {
  for (const auto& w : written_) saved_storage{w.storage, w.before}.put_back();
}

bool call_log::set_aside(const at::Tensor& t, bool leave) {
  const auto known = storages_.find(storage_of(t));
  if (ahead_ == 0 || known == storages_.end() || known->second.outside || !known->second.real || is_pinned(storage_of(t)))
    return false;
  if (storage_of(t)->nbytes() == 0) return true;
  const auto gone = [&](const auto& a) { return a.of(t); };
  if (std::any_of(aside_.begin(), aside_.end(), gone)) return true;
  if (leave) {
    lent_memory shown;
    shown.fill(t);
    aside_.push_back({t.storage(), bytes_of(t).clone()});
    return true;
  }
  auto empty = hollow_storage(storage_of(t)->nbytes(), t.device());
  storage_of(t)->clear_data_ptr_access_error_msg_();
  empty.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  empty.unsafeGetStorageImpl()->set_data_ptr_noswap(storage_of(t)->set_data_ptr(c10::DataPtr(nullptr, t.device())));
  aside_.push_back({t.storage(), bytes_over(empty)});
  detail::hide(storage_of(t));
  return true;
}

bool call_log::has_made(const c10::StorageImpl* s) const {
  const auto known = storages_.find(s);
  return ahead_ > 0 && known != storages_.end() && known->second.real;
}

bool call_log::is_pinned(const c10::StorageImpl* s) const {
  const auto same = [&](const auto& p) { return p.unsafeGetStorageImpl() == s; };
  return std::any_of(pinned_.begin(), pinned_.end(), same);
}

void call_log::give_back() {
  watched_.clear();
  if (storages_.empty()) return;
  const plain_kernels kernels;
  show_before();
  for (const auto& a : std::exchange(aside_, {})) a.put_back();
  bytes_t freed = 0;
  for (auto& [impl, s] : std::exchange(storages_, {})) {
    if (s.outside || s.stays || !s.real || is_pinned(impl)) continue;
    freed += static_cast<bytes_t>(s.storage.nbytes());
    release(s.storage.unsafeGetStorageImpl());
  }
  note_freed(freed);
  forget_ahead();
}

void call_log::forget_ahead() {
  written_.clear();
  shown_.clear();
  stay_.clear();
  made_.clear();
  ahead_ = looked_ = 0;
}

void call_log::give_back_constants(const std::vector<traced_call>& calls) {
  std::unordered_set<const c10::StorageImpl*> stay;  // held by the module, or filled by hand
  for (const auto& c : calls_)
    each_tensor(c.results, [&](const at::Tensor& t, int) {
      if (t.has_storage() && (makes_uninitialized(c.op) || held_by_python(t))) stay.insert(storage_of(t));
    });
  bytes_t freed = 0;
  for (const auto& c : calls_) {
    if (!c.done || !calls[c.call].constant) continue;
    each_storage(c.results, [&](const c10::Storage& s) {
      auto* impl = s.unsafeGetStorageImpl();
      if (stay.count(impl)) return;
      std::erase_if(kept_, [&](const auto& k) { return k.storage.unsafeGetStorageImpl() == impl; });
      impl->clear_data_ptr_access_error_msg_();
      if (impl->data() != nullptr) freed += static_cast<bytes_t>(impl->nbytes());
      release(impl);
    });
  }
  stale_ = std::min(stale_, kept_.size());
  note_freed(freed);
}

}  // namespace remat::pytorch::detail
