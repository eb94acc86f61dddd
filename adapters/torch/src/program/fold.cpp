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

}  // namespace

program folded(program step, c10::Device on) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto kept = handed_out(step);
  std::vector<bool> wanted(step.nodes.size(), true);
  for (index_t i = 0; i < step.nodes.size(); ++i) {
    auto& n = step.nodes[i];
    const auto folds = [&](index_t v) { return step.values[v].device != on && kept.count(v) == 0; };
    const auto known = [&](index_t v) { return step.from(v) == role::constant; };
    wanted[i] = n.calls.empty() || n.outputs.empty() || has_effects(step, n) || !n.overwrites.empty() ||
                !std::all_of(n.outputs.begin(), n.outputs.end(), folds) || !std::all_of(n.inputs.begin(), n.inputs.end(), known);
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
  return only(std::move(step), wanted);
}

}  // namespace remat::pytorch
