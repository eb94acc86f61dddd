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

/// What a forward's graph contains that a planned backward does not run by itself.
struct graph_contents {
  std::vector<::torch::autograd::Node*> hooked;                           ///< nodes with hooks, see `gradient_hooks`
  std::vector<std::size_t> hook_places;                                   ///< where these are in the graph: equal in equal graphs
  std::vector<::torch::autograd::Node*> custom_nodes;                     ///< nodes that are not PyTorch's own
  std::unordered_map<const ::torch::autograd::Node*, std::size_t> edges;  ///< number of edges to the accumulator of a leaf, or to
                                                                          ///< the node that made an input

  std::size_t edges_to(const ::torch::autograd::Node& n) const {
    const auto found = edges.find(&n);
    return found == edges.end() ? 0 : found->second;
  }
};

/// During the lifetime of this object, leaves require gradients as in the forward. The training loop may have frozen some since.
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

/// The autograd graph of one forward, kept until its backward. If the loss uses the outputs in an unexpected way, a backward for
/// this use is recorded from the graph. If the backward is one that no plan makes (a graph of gradients, a second backward, hooks
/// inside), the graph runs with the data of the forward. The module's code does not run again.
class kept_graph {
 public:
  /// @param forward recorded or followed
  /// @param log     calls of this forward
  /// @param tensors of this forward, by their numbers in the trace; undefined: freed or not met
  /// @param inputs  of the forward
  /// @param outputs hollow, in the order of the trace, before they get data and another history
  kept_graph(std::shared_ptr<const trace> forward, std::shared_ptr<call_log> log, std::vector<at::Tensor> tensors,
             const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

  /// Records the step with a backward for other uses of its outputs.
  /// @param trained parameters that an output depends on
  /// @throws cannot_capture if that backward cannot be recorded
  trace record(const std::vector<output_use>& uses, const std::vector<at::Tensor>& parameters,
               const std::vector<at::Tensor>& trained) const;

  graph_contents contents() const;
  /// True if other outputs depend on this output.
  bool feeds_other_outputs(std::size_t output) const;
  /// The edge for the gradient of an output in this graph.
  ::torch::autograd::Edge edge_of(std::size_t output) const;
  /// Runs custom code of the backward on hollow tensors, and compares the calls with a plan. The graph stays.
  /// @param step   the step whose backward is planned
  /// @param hooked of `contents`
  /// @param wanted as for `gradients`
  /// @return how the backward differs from the plan; empty: not at all
  std::string differs(const candidate& step, const std::vector<::torch::autograd::Node*>& hooked,
                      const std::vector<at::Tensor>& wanted) const;
  /// Gives all tensors their data, with the memory of a plain step. Tensors that the forward writes must be as before the
  /// forward.
  void fill();
  bool filled() const { return filled_; }
  /// Runs the backward of autograd, after `fill`. Hooks of `wanted` are not called, and the graph stays.
  /// @param given  gradients of the outputs; undefined: not used
  /// @param wanted leaves, and tensors among the inputs
  /// @return per tensor of `wanted` the summands of its gradient, in order
  std::vector<std::vector<at::Tensor>> gradients(const std::vector<at::Tensor>& given,
                                                 const std::vector<at::Tensor>& wanted) const;

 private:
  std::shared_ptr<const trace> forward_;
  std::shared_ptr<call_log> log_;
  class as_recorded;
  std::vector<at::Tensor> tensors_, inputs_, outputs_;  ///< outputs have the memory of the graph
  /// The outputs that the caller got. They have data of the plan by now, and nodes may have saved them.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> caller_outputs_;
  bool filled_ = false;
};

}  // namespace remat::pytorch::detail
