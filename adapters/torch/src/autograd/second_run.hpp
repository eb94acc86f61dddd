// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs forwards once more, beside a planned step or in its place. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/session.hpp>

#include "../base/digest.hpp"
#include "../base/generators.hpp"
#include "../base/key.hpp"
#include "../base/views.hpp"

namespace remat::pytorch {

/// States of the default generators of the host and of the device of a step.
struct all_generators {
  static all_generators now(c10::Device on) {
    return {generator_state::now(), on, on.is_cpu() ? at::Tensor() : state_of(at::globalContext().defaultGenerator(on))};
  }
  void restore() const {
    host.restore();
    if (theirs.defined()) set_state(at::globalContext().defaultGenerator(on), theirs);
  }
  friend bool operator==(const all_generators& a, const all_generators& b) {
    return a.host == b.host && same_bits(a.theirs, b.theirs);
  }
  generator_state host;
  c10::Device on;
  at::Tensor theirs;
};

/// A forward that can run once more: plain, for a comparison with the planned step, or by another plan.
class second_run {
 public:
  /// Saves the state in which a forward begins.
  /// @param on      device of the forward
  /// @param read    other tensors that the forward may read
  /// @param written tensors that the forward may change
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
    const auto restored = c10::make_scope_exit([now = autocast_state::now()] { now.restore(); });
    autocast_.restore();
    return is_unchanged() && ask(inputs_);
  }

  /// Runs `forward` from the saved state. Afterwards restores the present state, even if `forward` throws.
  /// @throws c10::Error if an input or parameter has changed
  void run(const std::function<void(const std::vector<at::Tensor>&)>& forward) {
    TORCH_CHECK(
        is_unchanged(),
        "remat: the loss uses other outputs of a wrapped module than the last one, for which the forward runs once more, but "
        "an input, a parameter, or another tensor that it reads was modified by an inplace operation after it");
    std::vector<std::pair<at::Tensor, int64_t>> present;
    for (const auto& w : written_)
      present.emplace_back(is_now(w.tensor, w.before, w.version) ? w.before : w.tensor.detach().clone(), w.tensor._version());
    const auto restored = c10::make_scope_exit([&, generator = all_generators::now(on_), autocast = autocast_state::now()] {
      for (std::size_t i = 0; i < written_.size(); ++i) set(written_[i].tensor, present[i].first, present[i].second);
      generator.restore();
      autocast.restore();
    });
    for (const auto& w : written_) set(w.tensor, w.before, w.version);
    before_.restore();
    autocast_.restore();
    std::vector<at::Tensor> inputs;  // a forward that writes in place gives them a history
    for (const auto& t : inputs_) inputs.push_back(t.defined() ? t.detach().requires_grad_(t.requires_grad()) : t);
    forward(inputs);
    for (auto& w : written_) w.after = w.tensor.detach().clone();
  }

  /// True if the tensors that the forward reads have not changed.
  bool is_unchanged() const {
    return std::all_of(read_.begin(), read_.end(), [](const auto& r) { return r.first.current_version() == r.second; });
  }
  /// Gives tensors that the forward may change their contents after the last run.
  void redo_writes() const {
    for (const auto& w : written_) set(w.tensor, w.after, w.tensor._version());
  }
  /// Calls `f` for each tensor that the forward may change.
  template <class F>
  void each_written(F f) const {
    for (const auto& w : written_) f(w.tensor);
  }
  /// True if the forward may write to this input, which needs a gradient.
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
    set_version(t, version);
  }
  c10::Device on_;
  std::vector<at::Tensor> inputs_;
  std::vector<std::pair<c10::VariableVersion, int64_t>> read_;  ///< version counters of tensors that must not change, and
                                                                ///< versions
  std::vector<entry> written_;
  all_generators before_;
  autocast_state autocast_ = autocast_state::now();
};

}  // namespace remat::pytorch
