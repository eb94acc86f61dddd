// SPDX-License-Identifier: Apache-2.0
/// @file
/// The node of one output of a planned step, for autograd. Private to the adapter.
#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>

namespace remat::pytorch {

/// An output of a forward: hooks of one that the loss does not use are not called, as in eager mode.
class output_node final : public ::torch::autograd::Node {
 public:
  explicit output_node(::torch::autograd::edge_list step) : Node(std::move(step)) {}
  std::string name() const override { return "RematBackward"; }

 protected:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&& incoming) override { return std::move(incoming); }
};

/// Makes `output` the next one of the step.
inline void add_history(const at::Tensor& output, const c10::intrusive_ptr<::torch::autograd::Node>& step) {
  ::torch::autograd::edge_list to{{step, step->add_input_metadata(output)}};
  ::torch::autograd::set_history(output, c10::make_intrusive<output_node>(std::move(to)));
}

}  // namespace remat::pytorch
