// SPDX-License-Identifier: Apache-2.0
#include <ATen/EmptyTensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <remat/pytorch/program.hpp>
#include <utility>
#include <vector>

#include "edit.hpp"

namespace remat::pytorch {
namespace {

/// Adds a slot, and makes a node that adds gradient `k` of `out` to it.
node add_to_gradient(program& out, std::size_t k) {
  const auto& parameter = out.slots[out.parameters[k]];
  const auto& view = out.views[out.parameter_grads[k]];
  const auto value = static_cast<index_t>(out.values.size()), token = value + 1;
  slot target{role::gradient, k, "gradient of " + parameter.name, {view.sizes, view.strides, view.dtype, parameter.type.device}};
  target.value = value;
  const auto bytes = at::detail::computeStorageNbytes(view.sizes, view.strides, c10::elementSize(view.dtype));
  out.values.push_back({static_cast<index_t>(out.slots.size()), static_cast<bytes_t>(bytes), target.name, target.type.device});
  out.values.push_back({none, 0, "done: " + target.name, target.type.device});
  out.views.push_back({value, view.sizes, view.strides, 0, view.dtype});
  out.views.back().whole = true;
  const auto sum = static_cast<index_t>(out.views.size() - 1), added = std::exchange(out.parameter_grads[k], sum);
  node n;
  n.name = "accumulate";
  auto& add =
      n.calls.emplace_back(call{c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor"), {}, {}, {}, false, {}});
  for (const auto& hole : std::vector<at::Tensor>(2)) add.arguments.emplace_back(hole);
  add.arguments.emplace_back(1);
  add.operands = {{0, -1, sum}, {1, -1, added}};
  n.inputs = {value, out.views[added].value};
  n.outputs = {token};
  n.once = true;
  out.tokens.push_back(token);
  out.slots.push_back(std::move(target));
  return n;
}

/// Makes a node that gives gradient `k` of `out` to the caller.
node give_gradient(program& out, std::size_t k) {
  const auto& parameter = out.slots[out.parameters[k]];
  const auto token = static_cast<index_t>(out.values.size());
  out.values.push_back({none, 0, "given: gradient of " + parameter.name, parameter.type.device});
  out.tokens.push_back(token);
  node n;
  n.name = "give";
  n.inputs = {out.views[out.parameter_grads[k]].value};
  n.outputs = {token};
  n.once = true;
  n.gives = static_cast<index_t>(k);
  return n;
}

/// The program with one more node per gradient, placed after the gradient is complete.
/// @param least smallest size of a parameter that gets a node, bytes
/// @param make  makes the node, from the program and the position of the gradient
/// @param after per gradient: a node that the new node must follow
template <class Make, class After>
program with_each_gradient(const program& step, bytes_t least, const Make& make, const After& after) {
  std::vector<index_t> producer(step.values.size(), none);
  for (index_t i = 0; i < step.nodes.size(); ++i)
    for (auto v : step.nodes[i].outputs) producer[v] = i;
  auto out = step;
  std::vector<std::vector<node>> added(step.nodes.size());
  for (std::size_t k = 0; k < step.parameter_grads.size(); ++k) {
    const auto& type = step.slots[step.parameters[k]].type;
    if (c10::multiply_integers(type.sizes) * static_cast<bytes_t>(c10::elementSize(type.dtype)) < least) continue;
    const auto p = producer[step.views[step.parameter_grads[k]].value];
    added[std::max(p == none ? step.loss : std::max(p, step.loss), after(k))].push_back(make(out, k));
  }
  insert_behind(out, std::move(added));
  return out;
}

}  // namespace

program accumulating(const program& step) {
  return with_each_gradient(step, 0, add_to_gradient, [&](std::size_t) { return step.loss; });
}

program giving(const program& step) {
  std::vector<index_t> last_reader(step.values.size(), step.loss);
  for (index_t i = step.loss; i < step.nodes.size(); ++i)
    for (auto v : step.nodes[i].inputs) last_reader[v] = i;
  return with_each_gradient(step, min_early_gradient_bytes, give_gradient,
                            [&](std::size_t k) { return last_reader[step.slots[step.parameters[k]].value]; });
}

std::vector<bool> has_early_gradient(const program& step) {
  std::vector<bool> given(step.parameters.size(), false);
  for (const auto& n : step.nodes)
    if (n.gives != none) given[n.gives] = true;
  return given;
}

}  // namespace remat::pytorch
