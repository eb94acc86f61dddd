// SPDX-License-Identifier: Apache-2.0
/// @file
/// The backward of a planned step with hooks inside of its forward. Private to the adapter.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/gradient_hooks.hpp"
#include "step_node.hpp"

namespace remat::pytorch {

inline std::vector<at::Tensor> step_node::showing(const runner& r, const std::vector<at::Tensor>& given,
                                                  const detail::graph_contents& inside) const {
  std::vector<at::Tensor> parameters(r.kind->step->parameters.size());
  const auto* captured = ::torch::autograd::get_current_graph_task_exec_info();
  if (!in_backward() || (captured != nullptr && !captured->empty()) || r.kind->in_summands) return parameters;
  const auto place = places_of(r, bound_->trained);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = bound_->trained[place[i]];
    const auto others = inside.edges_to(*next_edge(edges_.first()[place[i]]).function);
    if (is_reached(r.kind->step->parameter_sources[i], given) && edges_.is_alone(place[i], others) && has_no_hooks(p))
      parameters[i] = p;
  }
  return parameters;
}

/// Tells autograd that the backward runs the nodes whose hooks the program calls. `register_multi_grad_hook` asks for it.
/// @param hooked in the order of the recording
inline void note_nodes(const program& step, const std::vector<::torch::autograd::Node*>& hooked) {
  const auto* run = ::torch::autograd::get_current_graph_task_nodes_in_graph();
  if (run == nullptr) return;
  constexpr std::size_t place = 2;  // argument of the operator
  for (const auto& n : step.nodes)
    if (n.name == call_hooks_name)
      const_cast<std::unordered_set<::torch::autograd::Node*>*>(run)->insert(
          hooked.at(hook_place::of(n.calls[0].arguments[place].toInt()).node));
}

inline ::torch::autograd::variable_list step_node::with_hooks(std::shared_ptr<runner> r, const std::vector<at::Tensor>& given,
                                                              std::vector<watched>& unread,
                                                              const detail::graph_contents& inside) {
  const bool first = !r->kind->hooks_known;
  std::optional<gradient_hooks> hooks(std::in_place, inside.hooked, first);
  shown_gradients shown(showing(*r, given, inside), first);
  if (in_backward()) note_nodes(*r->kind->step, inside.hooked);
  const auto kept = not_overwritten(given, *r->kind->step);
  try {
    auto result = [&] {
      const gradient_hooks::active calls(*hooks, [&] { shown.show(r->executor->complete_gradients()); });
      return planned(*r, given, unread, &shown);
    }();
    r->kind->hooks_known = true;
    hooks.reset();
    if (!ran_kept_) beside_.reset(), replan_ = {};
    if (in_backward()) edges_.trim(result);
    return result;
  } catch (const other_gradient& why) {
    std::exchange(r, nullptr)->executor->reset();
    if (first) {
      shown.take_back();
      hooks->give_results();
      return by_graph(kept, why.what(), true);
    }
    replan_.as_it_is(why.what(), true);
    throw not_supported(std::string("remat: this step has ") + why.what() +
                        ", unlike the steps before. Later steps run unplanned");
  }
}

}  // namespace remat::pytorch
