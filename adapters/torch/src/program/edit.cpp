// SPDX-License-Identifier: Apache-2.0
#include "edit.hpp"

#include <algorithm>
#include <utility>

#include "../base/gradient_hooks.hpp"

namespace remat::pytorch {

std::set<index_t> handed_out(const program& step) {
  std::set<index_t> values;
  for (const auto* list : {&step.outputs, &step.parameter_grads, &step.input_grads})
    for (auto v : *list)
      if (v != none) values.insert(step.views[v].value);
  return values;
}

program with_only(program step, const std::vector<bool>& wanted) {
  std::vector<index_t> value(step.values.size(), none), node_at(step.nodes.size(), none), view(step.views.size(), none);
  std::vector<bool> there(step.values.size());
  for (index_t v = 0; v < step.values.size(); ++v) there[v] = step.is_given(v);
  for (std::size_t i = 0; i < step.nodes.size(); ++i)
    for (auto v : step.nodes[i].outputs) there[v] = wanted[i];
  std::vector<storage_value> values;
  for (std::size_t v = 0; v < step.values.size(); ++v) {
    if (!there[v]) continue;
    value[v] = static_cast<index_t>(values.size());
    values.push_back(std::move(step.values[v]));
  }
  std::vector<byte_view> views;
  auto move_view = [&](index_t& v) {
    if (v == none) return;
    if (view[v] == none) {
      view[v] = static_cast<index_t>(views.size());
      views.push_back(step.views[v]);
      views.back().value = value[views.back().value];
    }
    v = view[v];
  };
  std::vector<node> nodes;
  for (std::size_t i = 0; i < step.nodes.size(); ++i) {
    if (!wanted[i]) continue;
    node_at[i] = static_cast<index_t>(nodes.size());
    auto n = std::move(step.nodes[i]);
    for (auto& v : n.inputs) v = value[v];
    for (auto& v : n.outputs) v = value[v];
    for (auto& [old, fresh] : n.overwrites) old = value[old], fresh = value[fresh];
    for (auto& c : n.calls) {
      for (auto& o : c.operands) move_view(o.view);
      for (auto& r : c.results) move_view(r.view);
    }
    if (n.starts.node != none) n.starts.node = node_at[n.starts.node];
    nodes.push_back(std::move(n));
  }
  for (auto* list : {&step.parameter_grads, &step.outputs, &step.output_grads, &step.input_grads, &step.assumed_zero})
    for (auto& v : *list) move_view(v);
  for (auto& t : step.tokens) t = value[t];
  for (auto& s : step.slots) s.value = value[s.value];
  for (auto* x : {&step.after_forward, &step.after_backward})
    if (x->node != none) x->node = node_at[x->node];
  step.loss = node_at[step.loss];
  step.values = std::move(values);
  step.views = std::move(views);
  step.nodes = std::move(nodes);
  return step;
}

void insert_behind(program& step, std::vector<std::vector<node>> added) {
  auto nodes = std::exchange(step.nodes, {});
  std::vector<index_t> moved;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    moved.push_back(static_cast<index_t>(step.nodes.size()));
    step.nodes.push_back(std::move(nodes[i]));
    if (auto& origin = step.nodes.back().starts; origin.node != none) origin.node = moved[origin.node];
    for (auto& n : added[i]) step.nodes.push_back(std::move(n));
  }
  step.loss = moved[step.loss];
  for (auto* origin : {&step.after_forward, &step.after_backward})
    if (origin->node != none) origin->node = moved[origin->node];
}

void order_hooks(program& step) {
  std::set<index_t> gradients;
  for (auto v : step.parameter_grads) gradients.insert(step.views[v].value);
  std::vector<index_t> complete;  // since the last call of hooks; these calls stay in order
  for (auto i = step.loss; i < step.nodes.size(); ++i) {
    auto& n = step.nodes[i];
    if (n.name == call_hooks_name)
      for (auto v : std::exchange(complete, {}))
        if (std::find(n.inputs.begin(), n.inputs.end(), v) == n.inputs.end()) n.inputs.push_back(v);
    for (auto v : n.outputs)
      if (gradients.count(v) > 0) complete.push_back(v);
  }
}

}  // namespace remat::pytorch
