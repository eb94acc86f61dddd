// SPDX-License-Identifier: Apache-2.0
/// @file
/// The backward of a step whose forward has been recorded. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "kept_graph.hpp"
#include "recorder.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

/// The node is code of somebody else: a function in Python, or in C++ outside of PyTorch.
bool is_foreign(const ::torch::autograd::Node& node);

/// What is in the graph of `outputs` that the forward has made.
/// @param inputs of the forward: what lies beyond them is not its own
graph_contents contents_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

/// Is a node in the graph of tensors that need a gradient, as far as the inputs of the forward?
bool leads_to(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& inputs, const ::torch::autograd::Node* node);

/// The gradients of `wanted` for a loss that gives tensors `grads`, which nobody else holds then.
/// @param to       the tensors, as edges
/// @param autocast that it runs under
std::vector<at::Tensor> gradients_from(::torch::autograd::edge_list to, std::vector<at::Tensor> grads,
                                       const std::vector<at::Tensor>& wanted, std::optional<at::ScalarType> autocast, bool keep);

/// Gradients of a function of the tensors `wanted`, not added up: what has made these is not part of it. The graph stays.
/// @param to    the function's results, as edges
/// @param grads for these, all defined
/// @param graph of the gradients
/// @return per wanted tensor what each edge to it brings, in the order in which it comes
std::vector<std::vector<at::Tensor>> gradients_in_summands(::torch::autograd::edge_list to, const std::vector<at::Tensor>& grads,
                                                           const std::vector<at::Tensor>& wanted, bool graph);

/// Records the backward of a step whose forward has been recorded.
/// @param outputs   of the forward, each tensor once
/// @param results   what it returned: positions among these
/// @param arguments its inputs
/// @param others    graphs of others lead to these arguments: their hooks are not called, and the graph stays whole
trace_ends record_backward(recorder& r, std::vector<at::Tensor> outputs, std::vector<std::size_t> results,
                           const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> arguments,
                           const std::vector<output_use>& uses, bool others);

/// Both parts of a trace.
trace joined(trace calls, trace_ends ends, c10::Device device);

}  // namespace remat::pytorch::detail
