// SPDX-License-Identifier: Apache-2.0
/// @file
/// Planned steps whose backward can no longer be run. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>
#include <vector>

#include "../capture/hollow.hpp"
#include "output_node.hpp"

namespace remat::pytorch {

/// The graph that the code of a module has built may hold an output that others come from, and that output leads to the node of
/// the step, which holds this graph. Such a step would stay for ever if its outputs go and its backward never runs.
class abandoned_steps {
 public:
  /// @param step    that has several outputs, each with an `output_node`
  /// @param outputs those with a gradient
  void watch(const c10::intrusive_ptr<::torch::autograd::Node>& step, const std::vector<at::Tensor>& outputs) {
    entry e{c10::weak_intrusive_ptr<::torch::autograd::Node>(step), {}};
    for (const auto& t : outputs) e.outputs.emplace_back(t.getIntrusivePtr());
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(e));
  }
  /// Gives back what steps hold that only their own graphs lead to.
  void end() {
    std::vector<c10::intrusive_ptr<::torch::autograd::Node>> met, gone;
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(waiting_, [&](const auto& e) {
        met.push_back(e.step.lock());
        if (!met.back()) return true;
        const bool only_own = met.back().use_count() == 1 + own_references(*met.back(), e.outputs);
        if (only_own) gone.push_back(met.back());
        return only_own;
      });
    }
    for (const auto& step : gone) step->release_variables();
  }

 private:
  using weak_tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct entry {
    c10::weak_intrusive_ptr<::torch::autograd::Node> step;
    std::vector<weak_tensor> outputs;
  };

  /// How many outputs refer to the step that nobody holds but graphs. Those that were never Python's may be held by anybody.
  static std::size_t own_references(const ::torch::autograd::Node& step, const std::vector<weak_tensor>& outputs) {
    std::size_t found = 0;
    for (const auto& weak : outputs) {
      const at::Tensor t(weak.lock());
      if (!t.defined() || !detail::known_to_python(t) || detail::held_by_python(t)) continue;
      const auto& node = ::torch::autograd::impl::get_autograd_meta(t)->grad_fn_;
      const auto* own = dynamic_cast<const output_node*>(node.get());
      if (own != nullptr && node.use_count() == 1 && own->next_edge(0).function.get() == &step) ++found;
    }
    return found;
  }

  std::mutex mutex_;
  std::vector<entry> waiting_;
};

}  // namespace remat::pytorch
