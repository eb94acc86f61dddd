// SPDX-License-Identifier: Apache-2.0
/// @file
/// Forwards that run once more, beside a planned step or in its place. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/session.hpp>

#include "../base/digest.hpp"
#include "../base/key.hpp"

namespace remat::pytorch {

/// Autocast of this thread.
class autocast_state {
 public:
  static autocast_state now() {
    autocast_state s;
    for (const auto device : devices_of_steps())
      s.modes_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
    s.cache_ = at::autocast::is_autocast_cache_enabled();
    return s;
  }
  void restore() const {
    for (const auto& m : modes_) {
      at::autocast::set_autocast_enabled(m.device, m.enabled);
      at::autocast::set_autocast_dtype(m.device, m.type);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  struct mode {
    at::DeviceType device;
    bool enabled;
    at::ScalarType type;
  };
  std::vector<mode> modes_;
  bool cache_ = true;
};

/// States of the default generators of the host and of the device of a step.
struct all_generators {
  static all_generators now(c10::Device on) {
    all_generators all{generator_state::now(), on, {}};
    if (on.is_cpu()) return all;
    auto g = at::globalContext().defaultGenerator(on);
    std::lock_guard lock(g.mutex());
    all.theirs = g.get_state();
    return all;
  }
  void restore() const {
    host.restore();
    if (!theirs.defined()) return;
    auto g = at::globalContext().defaultGenerator(on);
    std::lock_guard lock(g.mutex());
    g.set_state(theirs);
  }
  friend bool operator==(const all_generators& a, const all_generators& b) {
    return a.host == b.host && same_bits(a.theirs, b.theirs);
  }
  generator_state host;
  c10::Device on;
  at::Tensor theirs;
};

/// A forward that can be run once more: plain, to compare the planned step with it, or by another plan.
class second_run {
 public:
  /// Notes what a forward begins with.
  /// @param on      where it runs
  /// @param read    other tensors that it may read
  /// @param written what it may change, other than the generators
  second_run(c10::Device on, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& read,
             const std::vector<at::Tensor>& written)
      : on_(on), before_(all_generators::now(on)) {
    std::unordered_set<const c10::StorageImpl*> storages;
    for (const auto& w : written) storages.insert(w.storage().unsafeGetStorageImpl());
    for (const auto* list : {&inputs, &read})
      for (const auto& t : *list)
        if (t.defined() && !t.is_inference() && !(t.has_storage() && storages.count(t.storage().unsafeGetStorageImpl())))
          read_.emplace_back(t.unsafeGetTensorImpl()->version_counter(), t._version());
    for (const auto& t : inputs) inputs_.push_back(t.defined() ? t.detach().requires_grad_(t.requires_grad()) : t);
    for (const auto& t : written) written_.push_back({t, t.detach().clone(), {}, t._version()});
  }

  /// True if no external tensor was modified since the forward, and `ask` holds for the inputs under the autocast state of that
  /// forward.
  bool possible(const std::function<bool(const std::vector<at::Tensor>&)>& ask) const {
    struct put_back {
      autocast_state autocast = autocast_state::now();
      ~put_back() { autocast.restore(); }
    } at_exit;
    autocast_.restore();
    return is_unchanged() && ask(inputs_);
  }

  /// Runs `forward` from there, and leaves everything as it is now, also if that throws.
  /// @throws c10::Error if what it reads has changed
  void run(const std::function<void(const std::vector<at::Tensor>&)>& forward) {
    TORCH_CHECK(
        is_unchanged(),
        "remat: the loss uses other outputs of a wrapped module than the last one, for which the forward runs once more, but "
        "an input, a parameter, or another tensor that it reads was modified by an inplace operation after it");
    struct put_back {
      std::vector<entry>& written;
      all_generators generator;
      autocast_state autocast = autocast_state::now();
      std::vector<std::pair<at::Tensor, int64_t>> present = {};
      put_back(c10::Device on, std::vector<entry>& list) : written(list), generator(all_generators::now(on)) {
        for (const auto& w : written)
          present.emplace_back(is_now(w.tensor, w.before, w.version) ? w.before : w.tensor.detach().clone(), w.tensor._version());
      }
      ~put_back() {
        for (std::size_t i = 0; i < written.size(); ++i) set(written[i].tensor, present[i].first, present[i].second);
        generator.restore();
        autocast.restore();
      }
    } at_exit(on_, written_);
    for (const auto& w : written_) set(w.tensor, w.before, w.version);
    before_.restore();
    autocast_.restore();
    std::vector<at::Tensor> inputs;  // a forward that writes in place gives them a history
    for (const auto& t : inputs_) inputs.push_back(t.defined() ? t.detach().requires_grad_(t.requires_grad()) : t);
    forward(inputs);
    for (auto& w : written_) w.after = w.tensor.detach().clone();
  }

  /// What it reads is as it was.
  bool is_unchanged() const {
    return std::all_of(read_.begin(), read_.end(), [](const auto& r) { return r.first.current_version() == r.second; });
  }
  /// Gives tensors that it may change the contents that the last run left in them.
  void redo_writes() const {
    for (const auto& w : written_) set(w.tensor, w.after, w.tensor._version());
  }
  /// Calls `f` for each tensor that it may change.
  template <class F>
  void each_written(F f) const {
    for (const auto& w : written_) f(w.tensor);
  }
  /// The forward may write to this input, which needs a gradient.
  bool writes_input_with_gradient(const at::Tensor& t) const {
    return t.defined() && t.requires_grad() &&
           std::any_of(written_.begin(), written_.end(), [&](const auto& w) { return w.tensor.is_alias_of(t); });
  }
  c10::Device device() const { return on_; }

 private:
  struct entry {
    at::Tensor tensor, before, after;
    int64_t version;
  };
  static bool is_now(const at::Tensor& t, const at::Tensor& contents, int64_t version) {
    return t._version() == version && same_bits(t.detach(), contents);
  }
  /// Gives a tensor contents and a version. Writes nothing if the tensor has both: other threads may be reading it.
  static void set(const at::Tensor& t, const at::Tensor& contents, int64_t version) {
    if (is_now(t, contents, version)) return;
    at::NoGradGuard no_grad;
    t.detach().copy_(contents);
    auto counter = t.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
  c10::Device on_;
  std::vector<at::Tensor> inputs_;
  std::vector<std::pair<c10::VariableVersion, int64_t>> read_;  ///< of what must stay as it is: the counter, and what it must say
  std::vector<entry> written_;
  all_generators before_;
  autocast_state autocast_ = autocast_state::now();
};

}  // namespace remat::pytorch
