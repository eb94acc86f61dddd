// SPDX-License-Identifier: Apache-2.0
/// @file
/// The autograd graph that the module's code has built over hollow tensors. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "call_log.hpp"
#include "follower.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

/// What a planned backward does not do by itself.
struct graph_contents {
  std::string observer;                                                   ///< who is told of gradients inside; empty: nobody
  std::vector<::torch::autograd::Node*> code;                             ///< nodes that are not PyTorch's own
  std::unordered_map<const ::torch::autograd::Node*, std::size_t> edges;  ///< how many lead to the accumulator of a leaf,
                                                                          ///< or to what has made an input
};

/// While it is there, leaves require gradients, as they did in the forward. The loop may have frozen some since.
class as_in_forward {
 public:
  explicit as_in_forward(const std::vector<at::Tensor>& leaves) {
    for (const auto& t : leaves)
      if (t.defined() && t.is_leaf() && !t.requires_grad()) frozen_.push_back(t.set_requires_grad(true));
  }
  ~as_in_forward() {
    for (const auto& t : frozen_) t.set_requires_grad(false);
  }
  as_in_forward(const as_in_forward&) = delete;
  as_in_forward& operator=(const as_in_forward&) = delete;

 private:
  std::vector<at::TensorBase> frozen_;
};

/// The graph of one forward, kept until its backward. Should the loss use the outputs in another way than expected, the backward
/// for that is recorded from it. What no plan does (a graph of gradients, a second backward, hooks inside), it does itself, with
/// the data of the forward. The module's code does not run again.
class kept_graph {
 public:
  /// @param forward that was recorded or followed
  /// @param log     of its calls
  /// @param tensors those of this forward, by their numbers in the trace; undefined: not there
  /// @param inputs  of the forward
  /// @param outputs hollow, in the order of the trace, before they get data and another history
  kept_graph(std::shared_ptr<const trace> forward, std::shared_ptr<call_log> log, std::vector<at::Tensor> tensors,
             const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

  /// The step with a backward for other uses of its outputs.
  /// @param trained those of the parameters that outputs lead to
  /// @throws cannot_capture
  trace record(const std::vector<output_use>& uses, const std::vector<at::Tensor>& parameters,
               const std::vector<at::Tensor>& trained) const;

  graph_contents contents() const;
  /// Do other outputs come from this one?
  bool is_inside(std::size_t output) const;
  /// Where the gradient of an output goes in this graph.
  ::torch::autograd::Edge edge_of(std::size_t output) const;
  /// Runs code of the backward that is not PyTorch's own, on hollow tensors. The graph stays.
  /// @param step   whose backward is planned
  /// @param wanted as for `gradients`
  /// @return how it differs from that; empty: not at all
  std::string differs(const candidate& step, const std::vector<at::Tensor>& wanted) const;
  /// Gives all tensors their data, which takes the memory of a plain step. What the forward writes is as it was before, by now.
  void fill();
  bool filled() const { return filled_; }
  /// The backward of autograd, after `fill`. Hooks of `wanted` are not called, and the graph stays.
  /// @param given  gradients of the outputs; undefined: not used
  /// @param wanted leaves, and tensors among the inputs
  /// @return per wanted tensor the summands of its gradient, in their order
  std::vector<std::vector<at::Tensor>> gradients(const std::vector<at::Tensor>& given,
                                                 const std::vector<at::Tensor>& wanted) const;

 private:
  std::shared_ptr<const trace> forward_;
  std::shared_ptr<call_log> log_;
  class as_recorded;
  std::vector<at::Tensor> tensors_, inputs_, outputs_;  ///< outputs: with the memory of the graph
  /// The outputs themselves, which have data of the plan by now. Nodes may have saved them.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> given_;
  bool filled_ = false;
};

}  // namespace remat::pytorch::detail
