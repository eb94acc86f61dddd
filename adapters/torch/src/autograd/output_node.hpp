// SPDX-License-Identifier: Apache-2.0
/// @file
/// The node of one output of a planned step, for autograd. Private to the adapter.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace remat::pytorch {

/// Gradients of outputs for a step whose backward runs on the thread that has called it, not on the device's thread.
struct handed_over {
  std::vector<at::Tensor> gradients;  ///< by position among the connected outputs
  std::optional<c10::Stream> stream;  ///< stream that makes them
};

/// The node of one output of a forward. If the loss does not use the output, its hooks are not called, as in eager mode.
class output_node final : public ::torch::autograd::Node {
 public:
  /// @param handed gets the gradient, and the step gets a tensor of the host in its place: PyTorch runs a node on the thread of
  ///               the device on which its gradients are. Null: the step gets the gradient
  explicit output_node(::torch::autograd::edge_list step, std::shared_ptr<handed_over> handed = nullptr)
      : Node(std::move(step)), handed_(std::move(handed)) {}
  std::string name() const override { return "RematBackward"; }

 protected:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&& incoming) override {
    if (!handed_ || !incoming[0].defined()) return std::move(incoming);
    const auto at = next_edge(0).input_nr;
    handed_->gradients.resize(std::max<std::size_t>(handed_->gradients.size(), at + 1));
    handed_->gradients[at] = std::exchange(incoming[0], at::empty({0}, c10::kCPU));
    handed_->stream = stream();
    return std::move(incoming);
  }

 private:
  std::shared_ptr<handed_over> handed_;
};

/// Makes `output` the next output of the step.
inline void add_history(const at::Tensor& output, const c10::intrusive_ptr<::torch::autograd::Node>& step,
                        const std::shared_ptr<handed_over>& handed) {
  const auto nr = step->add_input_metadata(handed ? at::empty({0}, c10::kCPU) : output);
  ::torch::autograd::set_history(output, c10::make_intrusive<output_node>(::torch::autograd::edge_list{{step, nr}}, handed));
}

}  // namespace remat::pytorch
