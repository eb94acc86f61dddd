// SPDX-License-Identifier: Apache-2.0
#include "fold.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <utility>

#include "../base/views.hpp"
#include "edit.hpp"
#include "effects.hpp"
#include "operators.hpp"

namespace remat::pytorch {
namespace {

/// Runs a node that reads only constants.
/// @return storages of its outputs, by value
std::map<index_t, c10::Storage> made_by(const program& step, const node& n) {
  std::map<index_t, c10::Storage> made;
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
  return made;
}

/// True if values of operands determine sizes of results.
bool has_dynamic_call(const program& step, const node& n) {
  return std::any_of(n.calls.begin(), n.calls.end(), [&](const call& c) {
    return is_dynamic(c.op, [&](int argument) {
      return std::any_of(c.operands.begin(), c.operands.end(),
                         [&](const operand& o) { return o.at == argument && is_mask_type(step.views[o.view].dtype); });
    });
  });
}

/// Tells nodes that can be folded: they depend on constants only, and do nothing but make values that stay in the step.
std::vector<bool> foldable(const program& step) {
  const auto kept = handed_out(step);
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
  auto result = foldable(step);
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
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto wanted = chosen(step, on);
  wanted.flip();
  for (index_t i = 0; i < step.nodes.size(); ++i) {
    auto& n = step.nodes[i];
    if (wanted[i]) continue;
    const auto made = made_by(step, n);
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

}  // namespace remat::pytorch
