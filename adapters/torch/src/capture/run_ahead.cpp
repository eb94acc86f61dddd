// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs calls of a forward ahead of the plan, because the module reads values.

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "../base/trim.hpp"
#include "../base/views.hpp"
#include "../program/operators.hpp"
#include "call_log.hpp"
#include "hollow.hpp"

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
void call_log::note_storages() {
  for (; noted_ < calls_.size(); ++noted_) {
    const auto& c = calls_[noted_];
    each_storage(c.arguments, [&](const c10::Storage& s) {
      storages_.try_emplace(s.unsafeGetStorageImpl(), known_storage{s, true, false, true});
    });
    each_storage(c.results, [&](const c10::Storage& s) {
      const auto [known, fresh] = storages_.try_emplace(s.unsafeGetStorageImpl(), known_storage{s, false, c.has_run, c.has_run});
      known->second.results_of.push_back(noted_);
      if (fresh && c.has_run) staying_.push_back(known->first);
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
  return !c.has_run || gone;
}

/// True if all calls that have not run have the data of their operands, or make them.
bool call_log::has_operands(const std::vector<at::Tensor>& wanted) const {
  std::unordered_set<const c10::StorageImpl*> made;
  bool found = true;
  const auto need = [&](const c10::Storage& s) {
    const auto known = storages_.find(s.unsafeGetStorageImpl());
    found = found && (known == storages_.end() || known->second.real || made.count(s.unsafeGetStorageImpl()));
  };
  for (auto i = run_ahead_count_; i < calls_.size(); ++i) {
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
  for (auto& w : written_outside_) w.now.reset();
  for (const auto& a : std::exchange(set_aside_, {})) a.put_back();
  for (const auto& k : saved_) k.put_back();
  for (auto& [impl, s] : storages_) s.real = s.outside || s.stays;
  ahead_data_.clear();
  run_ahead_count_ = 0;
}

/// Storages whose data must stay: `wanted`, pinned storages, and storages of the last calls, which code other than Python may use
/// again.
std::unordered_set<const c10::StorageImpl*> call_log::used_lately(const std::vector<at::Tensor>& wanted) const {
  std::unordered_set<const c10::StorageImpl*> list;
  const auto add = [&](const c10::Storage& s) { list.insert(s.unsafeGetStorageImpl()); };
  for (const auto& t : wanted) add(t.storage());
  for (const auto& s : pinned_) add(s);
  for (auto i = calls_.size() - std::min(recent_calls_, calls_.size()); i < calls_.size(); ++i) {
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
  for (auto i = run_ahead_count_; i < calls_.size(); ++i)
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
    if (s.outside && std::none_of(written_outside_.begin(), written_outside_.end(), same))
      written_outside_.push_back({s.storage, bytes_of(t).clone(), {}});
    if (s.stays && std::none_of(saved_.begin(), saved_.end(), same)) {  // no entry is stale here
      saved_.push_back({s.storage, bytes_of(t).clone()});
      ++first_stale_;
    }
  });
}

/// Hides the memory of a storage again, if the module must not read it. Memory from outside is hidden only if it is that of a
/// weight whose memory is elsewhere.
void call_log::hide_again(const known_storage& s) {
  auto* impl = s.storage.unsafeGetStorageImpl();
  if (s.outside ? !impl->throw_on_immutable_data_ptr() && impl->nbytes() > 0 && impl->data() == nullptr : !s.stays)
    detail::hide(impl);
}

/// Makes all data those after the last call that has run ahead.
void call_log::restore_ahead() {
  for (const auto* impl : std::exchange(shown_, {})) hide_again(storages_.at(impl));
  for (const auto& a : std::exchange(set_aside_, {})) a.put_back();
  for (const auto& w : written_outside_)
    if (w.now.defined()) saved_storage{w.storage, w.now}.put_back();
  for (; first_stale_ < saved_.size(); ++first_stale_) saved_[first_stale_].put_back();
  for (const auto* impl : staying_) {
    auto& s = storages_.at(impl);
    if (!s.stays) continue;
    s.storage.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
    if (s.storage.nbytes() > 0 && impl->data() == nullptr) s.stays = s.real = false;  // too large to be kept
  }
}

/// Frees the data of a storage that calls have made ahead, unless they are needed.
/// @return the freed bytes
std::size_t call_log::free_ahead_data(known_storage& s, const std::unordered_set<const c10::StorageImpl*>& needed) {
  auto* impl = s.storage.unsafeGetStorageImpl();
  if (s.outside || s.stays || !s.real || needed.count(impl) || is_held(s)) return 0;
  s.real = false;
  ahead_data_.erase(impl);
  const auto bytes = s.storage.nbytes();
  release(impl);
  return bytes;
}

/// Runs the calls that have not run ahead, in order. Frees data that no later one of them uses.
/// @param last_use per storage, the last of these calls that uses it
/// @param needed   storages whose data stay
void call_log::run_pending(const std::vector<traced_call>& calls,
                           const std::unordered_map<const c10::StorageImpl*, std::size_t>& last_use,
                           const std::unordered_set<const c10::StorageImpl*>& needed) {
  std::size_t live = 0, freed = 0;
  const std::vector<const c10::StorageImpl*> before_these(ahead_data_.begin(), ahead_data_.end());
  for (const auto* impl : before_these) {
    auto& s = storages_.at(impl);
    if (!last_use.count(impl)) freed += free_ahead_data(s, needed);
    live += s.real ? s.storage.nbytes() : 0;
  }
  generator_.set(run_ahead_count_ > 0 ? ahead_state_ : generator_.start());
  const auto freed_before = freed;
  for (; run_ahead_count_ < calls_.size(); ++run_ahead_count_) {
    const auto& c = calls_[run_ahead_count_];
    if (has_to_run(c)) {
      save_written(calls[c.call], c);
      if (!c.set_state.empty()) generator_.set(c.set_state);
      run(c);
      each_storage(c.results, [&](const c10::Storage& s) {
        auto& known = storages_.at(s.unsafeGetStorageImpl());
        if (!known.real) live += s.nbytes();
        known.real = true;
        if (!known.outside && !known.stays) ahead_data_.insert(s.unsafeGetStorageImpl());
      });
      peak_ahead_ = std::max(peak_ahead_, live - (freed - freed_before));
    }
    const auto end_use = [&](const c10::Storage& s) {
      auto* impl = s.unsafeGetStorageImpl();
      if (last_use.at(impl) == run_ahead_count_) freed += free_ahead_data(storages_.at(impl), needed);
    };
    each_storage(c.arguments, end_use);
    each_storage(c.results, end_use);
  }
  ahead_state_ = generator_.current_state();
  note_freed(static_cast<bytes_t>(freed));
}

bool call_log::run_ahead(const std::vector<traced_call>& calls, const std::vector<at::Tensor>& wanted) {
  if (is_any_touched()) return false;
  note_storages();
  if (writes_elsewhere(calls)) return false;
  make_room();
  const plain_kernels kernels;
  const auto state_before = generator_.current_state();
  restore_ahead();
  if (!has_operands(wanted)) {
    begin_anew();
    recent_calls_ *= 4;
  }
  std::unordered_map<const c10::StorageImpl*, std::size_t> last_use;
  for (auto i = run_ahead_count_; i < calls_.size(); ++i) {
    const auto use = [&](const c10::Storage& s) { last_use[s.unsafeGetStorageImpl()] = i; };
    each_storage(calls_[i].arguments, use);
    each_storage(calls_[i].results, use);
  }
  for (const auto& [impl, call] : last_use) storages_.at(impl).storage.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  run_pending(calls, last_use, used_lately(wanted));
  generator_.set(state_before);
  for (auto& w : written_outside_) w.now = bytes_over(w.storage).clone();
  for (const auto& [impl, call] : last_use) hide_again(storages_.at(impl));
  for (const auto& s : hidden_) detail::hide(s.unsafeGetStorageImpl());
  for (const auto& s : pinned_) s.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  for (const auto& t : wanted) {
    storage_of(t)->clear_data_ptr_access_error_msg_();
    if (storages_.count(storage_of(t))) shown_.push_back(storage_of(t));
  }
  return true;
}

void call_log::show_before() const {
  for (const auto& w : written_outside_) saved_storage{w.storage, w.before}.put_back();
}

bool call_log::set_aside(const at::Tensor& t, bool leave) {
  const auto known = storages_.find(storage_of(t));
  if (run_ahead_count_ == 0 || known == storages_.end() || known->second.outside || !known->second.real ||
      is_pinned(storage_of(t)))
    return false;
  if (storage_of(t)->nbytes() == 0) return true;
  const auto gone = [&](const auto& a) { return a.of(t); };
  if (std::any_of(set_aside_.begin(), set_aside_.end(), gone)) return true;
  if (leave) {
    lent_memory shown;
    shown.fill(t);
    set_aside_.push_back({t.storage(), bytes_of(t).clone()});
    return true;
  }
  auto empty = hollow_storage(storage_of(t)->nbytes(), t.device());
  storage_of(t)->clear_data_ptr_access_error_msg_();
  empty.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  empty.unsafeGetStorageImpl()->set_data_ptr_noswap(storage_of(t)->set_data_ptr(c10::DataPtr(nullptr, t.device())));
  set_aside_.push_back({t.storage(), bytes_over(empty)});
  detail::hide(storage_of(t));
  return true;
}

bool call_log::made_at_once(const c10::StorageImpl* s) const {
  bool made = false;
  for (const auto& c : calls_)
    if (c.has_run) each_storage(c.results, [&](const c10::Storage& r) { made = made || r.unsafeGetStorageImpl() == s; });
  return made;
}

bool call_log::holds_ahead_data(const c10::StorageImpl* s) const {
  const auto known = storages_.find(s);
  return run_ahead_count_ > 0 && known != storages_.end() && known->second.real;
}

bool call_log::is_pinned(const c10::StorageImpl* s) const {
  const auto same = [&](const auto& p) { return p.unsafeGetStorageImpl() == s; };
  return std::any_of(pinned_.begin(), pinned_.end(), same);
}

std::size_t call_log::references_to(const c10::StorageImpl* s) const {
  std::size_t known = storages_.count(s);
  const auto count = [&](const c10::Storage& x) { known += x.unsafeGetStorageImpl() == s; };
  for (const auto& x : hidden_) count(x);
  for (const auto* list : {&saved_, &set_aside_})
    for (const auto& x : *list) count(x.storage);
  for (const auto& x : written_outside_) count(x.storage);
  return known;
}

std::unordered_set<const c10::StorageImpl*> call_log::copied() const {
  std::unordered_set<const c10::StorageImpl*> used, found;
  for (const auto& c : calls_) each_storage(c.arguments, [&](const c10::Storage& s) { used.insert(s.unsafeGetStorageImpl()); });
  for (const auto& c : calls_)
    each_storage(c.results, [&](const c10::Storage& s) {
      auto* impl = s.unsafeGetStorageImpl();
      if (!used.count(impl) && holders(*impl, s.use_count()) > 1 + references_to(impl)) found.insert(impl);
    });
  return found;
}

void call_log::give_back() {
  end_watch();
  if (storages_.empty()) return;
  const plain_kernels kernels;
  show_before();
  for (const auto& a : std::exchange(set_aside_, {})) a.put_back();
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
  written_outside_.clear();
  shown_.clear();
  staying_.clear();
  ahead_data_.clear();
  run_ahead_count_ = noted_ = 0;
}

void call_log::give_back_constants(const std::vector<traced_call>& calls) {
  if (std::none_of(calls_.begin(), calls_.end(), [&](const auto& c) { return c.has_run && calls[c.call].constant; })) return;
  std::unordered_set<const c10::StorageImpl*> stay;  // held by the module, or filled by hand
  for (const auto& c : calls_) {
    each_tensor(c.arguments, [&](const at::Tensor& t, int) {
      if (t.has_storage() && held_by_python(t)) stay.insert(storage_of(t));
    });
    each_tensor(c.results, [&](const at::Tensor& t, int) {
      if (t.has_storage() && (makes_uninitialized(c.op) || held_by_python(t))) stay.insert(storage_of(t));
    });
  }
  stay.merge(copied());
  bytes_t freed = 0;
  for (const auto& c : calls_) {
    if (!c.has_run || !calls[c.call].constant) continue;
    each_storage(c.results, [&](const c10::Storage& s) {
      auto* impl = s.unsafeGetStorageImpl();
      if (stay.count(impl)) return;
      std::erase_if(saved_, [&](const auto& k) { return k.storage.unsafeGetStorageImpl() == impl; });
      impl->clear_data_ptr_access_error_msg_();
      if (impl->data() != nullptr) freed += static_cast<bytes_t>(impl->nbytes());
      release(impl);
    });
  }
  first_stale_ = std::min(first_stale_, saved_.size());
  note_freed(freed);
}

}  // namespace remat::pytorch::detail
