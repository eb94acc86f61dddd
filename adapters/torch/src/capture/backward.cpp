// SPDX-License-Identifier: Apache-2.0
#include "backward.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorUtils.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <future>
#include <limits>
#include <set>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include <remat/pytorch/capture.hpp>

#include "../base/gradient_hooks.hpp"
#include "../base/hooks.hpp"
#include "../base/key.hpp"
#include "dispatch.hpp"
#include "graph_ends.hpp"

namespace remat::pytorch::detail {
namespace {

/// Makes what AccumulateGrad makes of a first gradient: a tensor of its own, laid out like the parameter.
at::Tensor first_gradient(const at::Tensor& grad, const at::Tensor& variable, bool shared) {
  at::NoGradGuard no_grad;
  if (!shared && ::torch::autograd::utils::obeys_layout_contract(grad, variable)) return grad;
  return ::torch::autograd::utils::clone_obey_contract(grad, variable);
}

/// Stands for the loss. As in a real step, only autograd holds the gradients of the outputs, so that it adds to them in place.
class loss_node final : public ::torch::autograd::Node {
 public:
  explicit loss_node(std::vector<at::Tensor> gradients) : gradients_(std::move(gradients)) {}
  std::string name() const override { return "RematLoss"; }

 protected:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&&) override { return std::exchange(gradients_, {}); }

 private:
  std::vector<at::Tensor> gradients_;
};

/// All nodes of the graph of `tensors`, up to the nodes of `ends`.
std::unordered_set<const ::torch::autograd::Node*> nodes_of(const std::vector<at::Tensor>& tensors,
                                                            const std::vector<::torch::autograd::Edge>& ends) {
  std::vector<const ::torch::autograd::Node*> stack;
  for (const auto& t : tensors) stack.push_back(::torch::autograd::impl::gradient_edge(t).function.get());
  std::unordered_set<const ::torch::autograd::Node*> seen(stack.begin(), stack.end()), last;
  for (const auto& e : ends) last.insert(e.function.get());
  while (!stack.empty()) {
    const auto* node = stack.back();
    stack.pop_back();
    if (last.count(node) > 0) continue;
    for (const auto& edge : node->next_edges())
      if (edge.is_valid() && seen.insert(edge.function.get()).second) stack.push_back(edge.function.get());
  }
  return seen;
}

/// Per tensor of `leaves`, the number of edges that lead to it in the graph of `tensors`.
std::vector<std::size_t> edges_to(const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& tensors) {
  std::vector<::torch::autograd::Edge> ends;
  for (const auto& t : leaves) ends.push_back(::torch::autograd::impl::gradient_edge(t));
  std::unordered_map<const ::torch::autograd::Node*, std::vector<std::size_t>> at;
  for (std::size_t k = 0; k < ends.size(); ++k) at[ends[k].function.get()].push_back(k);
  std::vector<std::size_t> counts(leaves.size());
  const auto count = [&](const ::torch::autograd::Edge& e) {
    if (const auto found = at.find(e.function.get()); found != at.end())
      for (auto k : found->second) counts[k] += e.input_nr == ends[k].input_nr;
  };
  for (const auto& t : tensors) count(::torch::autograd::impl::gradient_edge(t));
  for (const auto* node : nodes_of(tensors, ends))
    if (at.count(node) == 0)
      for (const auto& e : node->next_edges())
        if (e.is_valid()) count(e);
  return counts;
}

/// Per tensor of `leaves`, which of `outputs` its gradient comes from.
std::vector<std::vector<bool>> sources_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& leaves) {
  std::vector<std::vector<bool>> sources(leaves.size(), std::vector<bool>(outputs.size(), false));
  std::vector<::torch::autograd::Edge> ends;  // holds the accumulators of leaves, which would be freed otherwise
  for (const auto& t : leaves) ends.push_back(::torch::autograd::impl::gradient_edge(t));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    const auto seen = nodes_of({outputs[i]}, ends);
    for (std::size_t k = 0; k < leaves.size(); ++k) sources[k][i] = seen.count(ends[k].function.get()) > 0;
  }
  return sources;
}

/// Calls `run` on another thread. If a node of the engine called the engine again, the engine would run other nodes of this
/// thread while it waits.
::torch::autograd::variable_list on_another_thread(const std::function<::torch::autograd::variable_list()>& run) {
  std::packaged_task<::torch::autograd::variable_list()> task([&run, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard same(state);
    return run();
  });
  auto result = task.get_future();
  std::thread(std::move(task)).join();
  return result.get();
}

/// Sets autocast of this thread to that of a backward.
class autocast_of_backward {
 public:
  autocast_of_backward(c10::DeviceType kind, std::optional<at::ScalarType> type) {
    if (!type) return;
    at::autocast::set_autocast_enabled(kind, true);
    at::autocast::set_autocast_dtype(kind, *type);
  }
  ~autocast_of_backward() { before_.restore(); }
  autocast_of_backward(const autocast_of_backward&) = delete;
  autocast_of_backward& operator=(const autocast_of_backward&) = delete;

 private:
  autocast_state before_ = autocast_state::now();
  c10::impl::ExcludeDispatchKeyGuard none_{c10::autocast_dispatch_keyset};
};

/// Runs the engine. @return the gradients at the ends of the graph
::torch::autograd::variable_list execute(const ::torch::autograd::edge_list& roots, const std::vector<at::Tensor>& grads,
                                         bool keep, bool graph, const ending_at& end) {
  auto& engine = ::torch::autograd::Engine::get_default_engine();
  const auto ends = end.ends();
  if (!weights_disguised() || ::torch::autograd::get_current_graph_task_id() < 0)
    return engine.execute(roots, grads, keep, graph, false, ends);
  return on_another_thread([&] {  // not the engine of Python, which would leave an exception on that thread
    return engine.::torch::autograd::Engine::execute(roots, grads, keep, graph, false, ends);
  });
}

/// The tensors that collect a gradient, and what is known of their gradients. Each list has one entry per tensor, unless it says
/// otherwise.
struct collected_gradients {
  std::vector<at::Tensor> wanted;          ///< parameters, then arguments of the forward
  std::vector<index_t> parameter_slots;    ///< per parameter
  std::vector<at::Tensor> grads;           ///< undefined: none
  std::vector<std::size_t> numbers;        ///< of the gradients before autograd lays them out, as `recorder::id_of` counts
  std::vector<std::vector<bool>> sources;  ///< outputs that the gradient comes from
  std::vector<std::size_t> edges;          ///< from all outputs
  std::vector<std::size_t> summands;       ///< edges from outputs that the loss uses
  bool is_reached(std::size_t i) const { return std::count(sources[i].begin(), sources[i].end(), true) > 0; }
};

/// Lays out gradients as AccumulateGrad does, and notes their numbers. They must not share memory with `outputs`.
void lay_out_gradients(recorder& r, collected_gradients& c, const std::vector<at::Tensor>& outputs) {
  c10::impl::IncludeDispatchKeyGuard key(record_key);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::set<c10::StorageImpl*> taken;
  for (const auto& o : outputs) taken.insert(o.storage().unsafeGetStorageImpl());
  for (std::size_t i = 0; i < c.grads.size(); ++i) {
    auto& grad = c.grads[i];
    if (!grad.defined()) continue;
    if (!r.knows(grad)) throw cannot_capture("a gradient was not made by a recorded operator");
    c.numbers[i] = r.id_of(grad);
    const bool shared = r.is_outside(grad) || taken.count(grad.storage().unsafeGetStorageImpl());
    grad = first_gradient(grad, c.wanted[i], shared);
    taken.insert(grad.storage().unsafeGetStorageImpl());
  }
}

/// Notes the gradients of the parameters.
void note_parameters(const recorder& r, const collected_gradients& c, trace_ends& t) {
  std::vector<std::pair<std::size_t, std::size_t>> reached;  // number of the gradient, position of the parameter
  for (std::size_t i = 0; i < c.parameter_slots.size(); ++i) {
    if (c.is_reached(i)) reached.emplace_back(c.numbers[i], i);
    if (!c.grads[i].defined()) continue;
    t.parameters.push_back(c.parameter_slots[i]);  // a slot, too: parameters have the first slots
    t.parameter_grads.push_back(r.view_of(c.grads[i]));
    t.parameter_sources.push_back(c.sources[i]);
    t.parameter_sums.push_back({c.summands[i], c.numbers[i]});
  }
  std::sort(reached.begin(), reached.end());
  for (const auto& [number, i] : reached) {
    t.reached.push_back(c.parameter_slots[i]);
    t.reached_edges.push_back(c.edges[i]);
  }
}

/// Notes the gradients of the arguments of the forward.
void note_arguments(const recorder& r, const collected_gradients& c, const std::vector<at::Tensor>& arguments, trace_ends& t) {
  auto i = c.parameter_slots.size();
  for (const auto& a : arguments) {
    t.input_grads.emplace_back();
    t.input_sources.emplace_back();
    t.input_sums.emplace_back();
    t.input_edges.push_back(0);
    if (!a.defined() || !a.requires_grad()) continue;
    if (c.is_reached(i)) t.input_sources.back() = c.sources[i];
    t.input_edges.back() = c.edges[i];
    if (c.grads[i].defined()) {
      t.input_grads.back() = r.view_of(c.grads[i]);
      t.input_sums.back() = {c.summands[i], c.numbers[i]};
    }
    ++i;
  }
}

}  // namespace

bool is_foreign(const ::torch::autograd::Node& node) {
  const std::string_view name = typeid(node).name();
  constexpr std::string_view own = "N5torch8autograd";
  return !name.starts_with(own) || name.starts_with("N5torch8autograd6PyNode") || name.starts_with("N5torch8autograd7CppNode");
}

graph_contents contents_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  graph_contents found;
  std::unordered_set<::torch::autograd::Node*> ends, seen;
  for (const auto& t : inputs)
    if (t.defined() && t.requires_grad()) ends.insert(::torch::autograd::impl::gradient_edge(t).function.get());
  std::vector<::torch::autograd::Node*> stack;
  const auto visit = [&](const ::torch::autograd::Edge& e) {
    if (!e.is_valid()) return;
    if (dynamic_cast<::torch::autograd::AccumulateGrad*>(e.function.get()) != nullptr || ends.count(e.function.get()) > 0)
      ++found.edges[e.function.get()];  // hooks of these tensors are called in any case
    else if (seen.insert(e.function.get()).second)
      stack.push_back(e.function.get());
  };
  for (const auto& o : outputs)
    if (o.requires_grad()) visit(::torch::autograd::impl::gradient_edge(o));
  for (std::size_t met = 0; !stack.empty(); ++met) {
    auto* node = stack.back();
    stack.pop_back();
    if (const bool before = has_hooks_before(*node), behind = has_hooks_behind(*node); before || behind) {
      found.hooked.push_back(node);
      found.hook_places.push_back(4 * met + 2 * before + behind);
    }
    if (is_foreign(*node)) found.custom_nodes.push_back(node);
    for (const auto& edge : node->next_edges()) visit(edge);
  }
  return found;
}

bool leads_to(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& inputs,
              const ::torch::autograd::Node* node) {
  ::torch::autograd::edge_list ends;
  for (const auto& t : inputs)
    if (t.defined()) ends.push_back(::torch::autograd::impl::gradient_edge(t));
  return nodes_of(tensors, ends).count(node) > 0;
}

std::vector<at::Tensor> gradients_from(::torch::autograd::edge_list to, std::vector<at::Tensor> grads,
                                       const std::vector<at::Tensor>& wanted, std::optional<at::ScalarType> autocast, bool keep) {
  // The root is on the device. So the device's thread knows all gradients of the loss before it continues with the first.
  const auto there = at::TensorOptions(to.front().function->input_metadata(to.front().input_nr).device());
  const auto one = at::ones({}, there);
  auto node = c10::make_intrusive<loss_node>(std::move(grads));
  node->add_input_metadata(one);
  node->set_next_edges(std::move(to));
  c10::impl::IncludeDispatchKeyGuard key(record_key);
  const autocast_of_backward casts(there.device().type(), autocast);
  ::torch::autograd::edge_list roots{{std::move(node), 0}};
  const ending_at end(roots, wanted);
  return execute(roots, {one}, keep, false, end);
}

std::vector<std::vector<at::Tensor>> gradients_in_summands(::torch::autograd::edge_list to, const std::vector<at::Tensor>& grads,
                                                           const std::vector<at::Tensor>& wanted, bool graph) {
  const ending_at end(to, wanted, true);
  return end.arrived(execute(to, grads, true, graph, end));
}

trace_ends record_backward(recorder& r, std::vector<at::Tensor> outputs, std::vector<std::size_t> results,
                           const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> arguments,
                           const std::vector<output_use>& uses, bool others) {
  collected_gradients c;
  for (index_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad()) {
      c.wanted.push_back(parameters[i]);
      c.parameter_slots.push_back(i);
    }
  for (const auto& a : arguments)
    if (a.defined() && a.requires_grad()) c.wanted.push_back(a);
  trace_ends t;
  std::vector<at::Tensor> output_grads, used;
  ::torch::autograd::edge_list roots;
  r.end_forward();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& o = outputs[i];
    t.output_grads.emplace_back();
    const auto use = i < uses.size() ? uses[i] : output_use{};
    if (!o.requires_grad() || !use.used) continue;
    at::NoGradGuard no_grad;
    const bool dense = o.is_non_overlapping_and_dense();
    // The use may be that of another output, which an earlier forward had at this place.
    const bool fits = use.strides.size() == static_cast<std::size_t>(o.dim()) && apart_or_expanded(o.sizes(), use.strides);
    const auto strides = fits ? use.strides : dense ? o.strides().vec() : at::detail::defaultStrides(o.sizes());
    output_grads.push_back(r.stand_in(o.detach(), strides, role::output_grad, i));
    t.output_grads.back() = r.view_of(output_grads.back());
    roots.push_back(::torch::autograd::impl::gradient_edge(o));
    used.push_back(o);
    if (use.autocast) t.autocast = use.autocast;
  }
  if (roots.empty()) throw no_gradient();
  c.sources = sources_of(outputs, c.wanted);
  auto differentiable = outputs;
  std::erase_if(differentiable, [](const auto& o) { return !o.requires_grad(); });
  c.edges = edges_to(c.wanted, differentiable);
  c.summands = used.size() == differentiable.size() ? c.edges : edges_to(c.wanted, used);
  c.numbers.assign(c.wanted.size(), std::numeric_limits<std::size_t>::max());  // numbers ascend as tensors are made
  {
    std::optional<without_hooks> hooks;
    if (others) hooks.emplace(c.wanted);
    r.start_backward();
    c.grads = r.rethrow_refusal(
        [&] { return gradients_from(std::exchange(roots, {}), std::exchange(output_grads, {}), c.wanted, t.autocast, others); });
    t.accumulated = r.calls().size();
    lay_out_gradients(r, c, outputs);
  }
  note_parameters(r, c, t);
  note_arguments(r, c, arguments, t);
  for (const auto& o : outputs) {
    t.outputs.push_back(r.view_of(o));
    t.differentiable.push_back(o.requires_grad());
    t.output_versions.push_back(o.is_inference() ? 0 : o._version());
    t.output_tensors.push_back(r.id_of(o));
  }
  t.results = std::move(results);
  return t;
}

trace joined(trace calls, trace_ends ends, c10::Device device) {
  static_cast<trace_ends&>(calls) = std::move(ends);
  calls.device = device;
  for (index_t k = 0; k < calls.slots.size(); ++k)
    if (calls.slots[k].from == role::parameter &&
        std::find(calls.parameters.begin(), calls.parameters.end(), k) == calls.parameters.end())
      calls.slots[k].from = role::buffer;
  return calls;
}

}  // namespace remat::pytorch::detail
