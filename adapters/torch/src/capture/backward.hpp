// SPDX-License-Identifier: Apache-2.0
/// @file
/// Records the backward of a step whose forward has been recorded. Private to the adapter.
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

/// True if the code of the node is not PyTorch's own: a custom function in Python or C++.
bool is_foreign(const ::torch::autograd::Node& node);

/// Inspects the autograd graph that the forward has built.
/// @param outputs of the forward
/// @param inputs  of the forward, where its graph ends
graph_contents contents_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

/// True if `node` is in the graph of `tensors`, which require gradients, up to the inputs of the forward.
bool leads_to(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& inputs, const ::torch::autograd::Node* node);

/// The gradients of `wanted` for a loss whose gradients are `grads`. Autograd may add to `grads` in place.
/// @param to       edges of the tensors that `grads` belong to
/// @param grads    one per edge, not held by the caller
/// @param autocast type of autocast during the backward; nothing: off
/// @param keep     the graph stays
std::vector<at::Tensor> gradients_from(::torch::autograd::edge_list to, std::vector<at::Tensor> grads,
                                       const std::vector<at::Tensor>& wanted, std::optional<at::ScalarType> autocast, bool keep);

/// Gradients of a function with respect to `wanted`, not added up. The graph ends at `wanted` and stays.
/// @param to    edges of the function's results
/// @param grads of these results, all defined
/// @param graph makes a graph of the gradients
/// @return per tensor of `wanted` the gradients of all edges to it, in the order in which they come
std::vector<std::vector<at::Tensor>> gradients_in_summands(::torch::autograd::edge_list to, const std::vector<at::Tensor>& grads,
                                                           const std::vector<at::Tensor>& wanted, bool graph);

/// Records the backward of a step whose forward has been recorded.
/// @param outputs   of the forward, each tensor once
/// @param results   positions among `outputs` of the tensors that the forward returned
/// @param arguments inputs of the forward
/// @param others    the arguments may have graphs from outside: no hooks of parameters and arguments are called, and the graph
///                  stays whole
trace_ends record_backward(recorder& r, std::vector<at::Tensor> outputs, std::vector<std::size_t> results,
                           const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> arguments,
                           const std::vector<output_use>& uses, bool others);

/// Joins the calls of a trace with the ends that `record_backward` returned.
trace joined(trace calls, trace_ends ends, c10::Device device);

}  // namespace remat::pytorch::detail
