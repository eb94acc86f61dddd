// SPDX-License-Identifier: Apache-2.0
/// @file
/// Gradients of parameters that hooks inside of a forward see. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "accumulation.hpp"

namespace remat::pytorch {

/// Gradients of parameters that are in `.grad` before the backward ends. Autograd puts a gradient there once it is complete, and
/// hooks of nodes that run later see it.
class shown_gradients {
 public:
  /// @param parameters per gradient: its parameter; undefined: the gradient is not shown
  /// @param undo       `take_back` may be called: keep contents of `.grad`
  shown_gradients(std::vector<at::Tensor> parameters, bool undo)
      : parameters_(std::move(parameters)), entries_(parameters_.size()), undo_(undo) {}

  bool has(std::size_t k) const { return entries_[k].gradient.defined(); }

  /// Shows gradients, each at its first time.
  /// @param complete {position, gradient}
  void show(const std::vector<std::pair<std::size_t, at::Tensor>>& complete) {
    const c10::impl::ForceDispatchKeyGuard as_the_caller(keys_);
    for (const auto& [k, gradient] : complete) {
      auto& e = entries_[k];
      const auto& p = parameters_[k];
      if (e.gradient.defined() || !p.defined() || (gradient_of(p).defined() && !only_adds(p))) continue;
      const accumulation_lock lock(p);
      e.gradient = gradient;
      e.sum = gradient_of(p);
      if (!e.sum.defined()) {
        p.mutable_grad() = gradient;
        continue;
      }
      if (undo_) e.before = e.sum.clone();
      e.sum.add_(gradient);
    }
  }

  /// Makes `.grad` what it was before. Code that has replaced it keeps its own.
  void take_back() {
    for (std::size_t k = 0; k < entries_.size(); ++k) {
      auto& e = entries_[k];
      if (!e.gradient.defined()) continue;
      if (e.sum.defined())
        e.sum.copy_(e.before);
      else if (gradient_of(parameters_[k]).is_same(e.gradient))
        parameters_[k].mutable_grad().reset();
      e = {};
    }
  }

 private:
  struct entry {
    at::Tensor gradient, sum, before;
  };
  std::vector<at::Tensor> parameters_;
  std::vector<entry> entries_;
  bool undo_;
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();  ///< of the code around the plan
};

}  // namespace remat::pytorch
