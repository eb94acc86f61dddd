// SPDX-License-Identifier: Apache-2.0
#include "fold.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "../base/views.hpp"
#include "edit.hpp"
#include "effects.hpp"
#include "operators.hpp"

namespace remat::pytorch {
namespace {

/// No gradients, no autograd and no autocast: nodes run as kernels see them.
struct as_in_a_plan {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// Runs a node that reads only constants and values in `made`.
/// @param made storages by value; gets those of the outputs
void run_on_constants(const program& step, const node& n, std::map<index_t, c10::Storage>& made) {
  const auto tensor = [&](index_t view) {
    const auto& v = step.views[view];
    if (const auto own = made.find(v.value); own != made.end()) return tensor_of(v, own->second);
    const auto slot = step.values[v.value].slot;
    if (is_number(step, view)) return constant_tensor(step, slot);
    return tensor_of(v, byte_tensor(step.constants[step.slots[slot].position]).to(step.slots[slot].type.device).storage());
  };
  for (const auto& c : n.calls) {
    auto stack = stack_of(c, false, tensor);
    at::AutoGradMode grad_mode(c.grad_mode);
    c.op.callBoxed(stack);
    for (const auto& r : c.results) made.insert_or_assign(step.views[r.view].value, tensor_at(stack, r).storage());
  }
}

}  // namespace

bool has_dynamic_call(const program& step, const node& n) {
  return std::any_of(n.calls.begin(), n.calls.end(), [&](const call& c) {
    return is_dynamic(c.op, [&](int argument) {
      return std::any_of(c.operands.begin(), c.operands.end(),
                         [&](const operand& o) { return o.at == argument && is_mask_type(step.views[o.view].dtype); });
    });
  });
}

namespace {

/// Tells nodes that depend on constants only, and do nothing but make values.
/// @param kept values that these nodes must not make
std::vector<bool> fixed_nodes(const program& step, const std::set<index_t>& kept) {
  std::vector<bool> made(step.values.size()), result(step.nodes.size());
  for (index_t i = 0; i < step.nodes.size(); ++i) {
    const auto& n = step.nodes[i];
    const auto fixed = [&](index_t v) { return made[v] || step.from(v) == role::constant; };
    result[i] = !n.calls.empty() && !n.outputs.empty() && !has_effects(step, n) && n.overwrites.empty() &&
                std::none_of(n.outputs.begin(), n.outputs.end(), [&](index_t v) { return kept.count(v) > 0; }) &&
                std::all_of(n.inputs.begin(), n.inputs.end(), fixed);
    if (result[i])
      for (auto v : n.outputs) made[v] = true;
  }
  return result;
}

/// Tells which foldable nodes are folded: those that make values elsewhere only, dynamic ones, and all that these need.
std::vector<bool> chosen(const program& step, c10::Device on) {
  auto result = fixed_nodes(step, handed_out(step));
  std::vector<bool> needed(step.values.size());
  for (auto i = step.nodes.size(); i-- > 0;) {
    if (!result[i]) continue;
    const auto& n = step.nodes[i];
    const auto elsewhere = [&](index_t v) { return step.values[v].device != on; };
    result[i] = std::all_of(n.outputs.begin(), n.outputs.end(), elsewhere) || has_dynamic_call(step, n) ||
                std::any_of(n.outputs.begin(), n.outputs.end(), [&](index_t v) { return needed[v]; });
    if (result[i])
      for (auto v : n.inputs) needed[v] = true;
  }
  return result;
}

}  // namespace

program folded(program step, c10::Device on) {
  const as_in_a_plan guards;
  auto wanted = chosen(step, on);
  wanted.flip();
  for (index_t i = 0; i < step.nodes.size(); ++i) {
    auto& n = step.nodes[i];
    if (wanted[i]) continue;
    std::map<index_t, c10::Storage> made;
    run_on_constants(step, n, made);
    for (auto v : std::exchange(n.outputs, {})) {
      auto& value = step.values[v];
      value.slot = static_cast<index_t>(step.slots.size());
      step.slots.push_back({.from = role::constant,
                            .position = step.constants.size(),
                            .name = "constant",
                            .type = {.sizes = {value.bytes}, .strides = {1}, .dtype = at::kByte, .device = value.device},
                            .value = v});
      step.constants.push_back(content_of(made.at(v)));
    }
  }
  return with_only(std::move(step), wanted);
}

std::map<index_t, c10::Storage> constant_inputs(const program& step, const node& n) {
  const as_in_a_plan guards;
  auto runs = fixed_nodes(step, {});
  std::vector<bool> needed(step.values.size());
  for (auto v : n.inputs) needed[v] = true;
  for (auto i = step.nodes.size(); i-- > 0;) {
    const auto& maker = step.nodes[i];
    runs[i] = runs[i] && std::any_of(maker.outputs.begin(), maker.outputs.end(), [&](index_t v) { return needed[v]; });
    if (runs[i])
      for (auto v : maker.inputs) needed[v] = true;
  }
  std::map<index_t, c10::Storage> made;
  for (index_t i = 0; i < step.nodes.size(); ++i)
    if (runs[i]) run_on_constants(step, step.nodes[i], made);
  for (auto v : n.inputs)
    if (step.from(v) == role::constant && !made.count(v)) {
      const auto& s = step.slots[step.values[v].slot];
      made.emplace(v, byte_tensor(step.constants[s.position]).to(s.type.device, false, true).storage());
    }
  return made;
}

}  // namespace remat::pytorch
