// SPDX-License-Identifier: Apache-2.0
/// @file
/// The program as a planning problem, and as text.
#include <c10/util/accumulate.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include <remat/pytorch/program.hpp>

#include "edit.hpp"
#include "effects.hpp"
#include "operators.hpp"

namespace remat::pytorch {

namespace {

/// True if the call writes this argument, even if the schema does not say so.
bool writes_argument(const call& c, int argument) {
  const auto& a = c.op.schema().arguments().at(static_cast<std::size_t>(argument));
  const auto& hidden = facts(c.op).writes;
  return is_written(a) || std::find(hidden.begin(), hidden.end(), a.name()) != hidden.end();
}

/// Bytes of a value of the problem.
bytes_t rounded(bytes_t b) { return (b + 63) / 64 * 64; }

}  // namespace

std::vector<bool> fetchable(const program& step) {
  std::vector<bool> can(step.values.size(), false);
  for (index_t v = 0; v < can.size(); ++v) {
    if (step.from(v) != role::parameter && step.from(v) != role::buffer) continue;
    const auto& slot = step.slots[step.values[v].slot];
    const auto elements = c10::multiply_integers(slot.type.sizes);
    can[v] = slot.offset == 0 && !slot.number && step.values[v].bytes > 0 &&
             elements * static_cast<bytes_t>(c10::elementSize(slot.type.dtype)) == step.values[v].bytes;
  }
  for (const auto& w : step.written) can[step.slots[w.slot].value] = false;
  for (const auto& n : step.nodes) {
    for (auto v : n.outputs) can[v] = false;  // later versions of parameters or buffers
    for (const auto& [old, fresh] : n.overwrites) can[old] = false;
    for (const auto& c : n.calls)
      for (const auto& o : c.operands)
        if (writes_argument(c, o.at)) can[step.views[o.view].value] = false;
  }
  for (auto v : handed_out(step)) can[v] = false;
  return can;
}

std::vector<std::size_t> leaving_gradients(const program& step) {
  std::vector<std::size_t> list;
  std::vector<int> uses(step.values.size(), 0);
  for (const auto* views : {&step.parameter_grads, &step.outputs, &step.input_grads})
    for (auto v : *views)
      if (v != none) ++uses[step.views[v].value];
  for (const auto& n : step.nodes)
    for (auto v : n.inputs) ++uses[v];
  for (std::size_t k = 0; k < step.parameters.size(); ++k) {
    const auto v = step.views[step.parameter_grads[k]].value;
    if (step.slots[step.parameters[k]].on_host && uses[v] == 1 && step.from(v) == role::internal && step.values[v].bytes > 0)
      list.push_back(k);
  }
  return list;
}

namespace {

/// Keeps the order of nodes with effects: a value without bytes leads from each of them to the next. Solvers may reorder all
/// other nodes. Gradients may be given in any order once the backward has begun.
void order_effects(const program& step, std::vector<value>& values, std::vector<operation>& operations,
                   std::vector<value_id>& targets) {
  const auto n = step.nodes.size();
  index_t begun = none;
  for (std::size_t i = 0, last = n; i < n; ++i) {
    if (!has_effects(step, step.nodes[i])) continue;
    if (step.nodes[i].gives != none) {
      if (begun == none) {
        begun = static_cast<index_t>(values.size());
        values.push_back({"backward", 0, false});
        operations[step.loss].outputs.push_back(begun);
      }
      operations[i].inputs.push_back(begun);
      continue;
    }
    if (last < n) {
      const auto order = static_cast<index_t>(values.size());
      values.push_back({"order " + std::to_string(last), 0, false});
      operations[last].outputs.push_back(order);
      operations[i].inputs.push_back(order);
      targets.push_back(order);
    }
    last = i;
  }
}

/// Lets weights start on the host, and lets their gradients end there.
/// @param fetched per value: it starts on the host
/// @param copies  the rates of copies are known
/// @throws bad_option
void place_on_host(const program& step, const std::vector<bool>& fetched, bool copies, std::vector<value>& values) {
  if (fetched.size() != step.values.size())
    throw bad_option("fetched has " + std::to_string(fetched.size()) + " entries for a program of " +
                     std::to_string(step.values.size()) + " values");
  const auto can = fetchable(step);
  for (index_t v = 0; v < fetched.size(); ++v) {
    if (!fetched[v]) continue;
    if (!can[v]) throw bad_option("fetched[" + std::to_string(v) + "]: " + step.values[v].name + " cannot be");
    if (!copies) throw bad_option("fetched[" + std::to_string(v) + "]: there are no rates of copies");
    values[v].held = false;
    values[v].movable = true;
    values[v].starts = tier_id(1);
  }
  for (const auto k : leaving_gradients(step)) {
    auto& gradient = values[step.views[step.parameter_grads[k]].value];
    gradient.movable = true;
    gradient.ends = tier_id(1);
  }
}

}  // namespace

problem to_problem(const program& step, const std::vector<double>& seconds, const std::vector<bytes_t>& workspace,
                   const std::string& name, const std::optional<copy_rates>& copies, const std::vector<bool>& fetched) {
  const auto n = step.nodes.size();
  if (seconds.size() != n || workspace.size() != n)
    throw bad_option("seconds has " + std::to_string(seconds.size()) + " entries and workspace " +
                     std::to_string(workspace.size()) + " for a program of " + std::to_string(n) + " nodes");
  std::vector<value> values;
  for (index_t v = 0; v < step.values.size(); ++v)
    values.push_back({step.values[v].name, rounded(step.values[v].bytes), step.is_given(v)});
  std::vector<operation> operations;
  for (std::size_t i = 0; i < n; ++i) {
    const auto& node = step.nodes[i];
    operations.push_back({node.name,
                          {node.inputs.begin(), node.inputs.end()},
                          {node.outputs.begin(), node.outputs.end()},
                          seconds[i],
                          rounded(workspace[i]),
                          node.once,
                          node.name});
  }
  std::vector<value_id> targets(step.tokens.begin(), step.tokens.end());
  order_effects(step, values, operations, targets);
  const auto early = has_early_gradient(step);
  for (std::size_t k = 0; k < early.size(); ++k)
    if (!early[k]) targets.push_back(step.views[step.parameter_grads[k]].value);
  for (const auto* views : {&step.input_grads, &step.outputs})
    for (auto v : *views)
      if (v != none) targets.push_back(step.views[v].value);
  std::optional<operation_id> backward;
  if (step.loss < n && step.loss + 1 < n) backward = operation_id(step.loss + 1);
  for (index_t v = 0; v < step.values.size(); ++v) values[v].movable = step.values[v].slot == none;
  for (const auto* views : {&step.input_grads, &step.outputs})
    for (auto v : *views)
      if (v != none) values[step.views[v].value].movable = false;
  for (auto node = step.nodes.rbegin(); node != step.nodes.rend(); ++node)
    for (const auto& [old, fresh] : node->overwrites) values[old].movable = values[old].movable && values[fresh].movable;
  if (!fetched.empty()) place_on_host(step, fetched, copies.has_value(), values);
  return {name, std::move(values), std::move(operations), std::move(targets), copies, backward};
}

std::vector<bytes_t> overwritten_bytes(const program& step) {
  std::vector<bytes_t> bytes;
  for (const auto& n : step.nodes) {
    bytes.push_back(0);
    for (const auto& [old, fresh] : n.overwrites) bytes.back() += rounded(step.values[fresh].bytes);
  }
  return bytes;
}

std::string explain(const program& step) {
  std::ostringstream out;
  auto value = [&](index_t v) { return "v" + std::to_string(v) + (step.is_given(v) ? " [" + step.values[v].name + "]" : ""); };
  auto list = [&](const std::vector<index_t>& values, bool sizes) {
    std::string text;
    for (auto v : values)
      text += (text.empty() ? "" : ", ") + value(v) + (sizes ? ": " + std::to_string(step.values[v].bytes) + " B" : "");
    return text;
  };
  for (std::size_t i = 0; i < step.nodes.size(); ++i) {
    const auto& n = step.nodes[i];
    out << i << ": ";
    if (!n.outputs.empty()) out << list(n.outputs, true) << " = ";
    out << n.name << "(" << list(n.inputs, false) << ")";
    if (n.calls.size() > 1) {
      out << " {";
      for (std::size_t k = 0; k < n.calls.size(); ++k) out << (k ? "; " : "") << n.calls[k].op.schema().name();
      out << "}";
    }
    for (const auto& [old, fresh] : n.overwrites) out << " v" << old << "->v" << fresh;
    if (n.random) {
      static constexpr const char* from[] = {"",         " as before ", " as after ", " as at the forward", " as at the backward",
                                             " reseeded"};
      out << " random" << from[n.starts.from] << (n.starts.node != none ? std::to_string(n.starts.node) : "");
    }
    if (n.once) out << " once";
    out << "\n";
  }
  auto views = [&](const char* title, const std::vector<index_t>& which) {
    out << title << ":";
    for (auto v : which) out << " " << (v == none ? "none" : value(step.views[v].value));
    out << "\n";
  };
  views("outputs", step.outputs);
  if (!step.assumed_zero.empty()) views("assumed to be zero", step.assumed_zero);
  views("gradients of parameters", step.parameter_grads);
  views("gradients of inputs", step.input_grads);
  return out.str();
}

}  // namespace remat::pytorch
