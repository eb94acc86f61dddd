// SPDX-License-Identifier: Apache-2.0
/// @file
/// Frees planned steps whose backward can no longer run. Private to the adapter.
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

/// Breaks reference cycles of abandoned steps. The graph of the module's own code may hold an output from which others are
/// computed. That output leads to the node of the step, and the node holds the graph. If all outputs are freed and the backward
/// never runs, such a step would stay for ever.
class abandoned_steps {
 public:
  /// @param step    with several outputs, each behind an `output_node`
  /// @param outputs outputs with a gradient
  void watch(const c10::intrusive_ptr<::torch::autograd::Node>& step, const std::vector<at::Tensor>& outputs) {
    entry e{c10::weak_intrusive_ptr<::torch::autograd::Node>(step), {}};
    for (const auto& t : outputs) e.outputs.emplace_back(t.getIntrusivePtr());
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(e));
  }
  /// Frees what steps hold that only their own graphs refer to.
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

  /// The number of outputs that refer to the step and that only graphs hold. Outputs that Python never knew do not count, since
  /// any code may hold them.
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
