// SPDX-License-Identifier: Apache-2.0
/// @file
/// The gradients of outputs that a backward gets, compared with those that a program takes. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/program.hpp>

#include "../base/key.hpp"
#include "../base/views.hpp"

namespace remat::pytorch {

/// How the loss has used the outputs. Strides are set for gradients whose strides differ from those of the program.
/// @param given per output; undefined: not used
inline std::vector<output_use> uses_of(const std::vector<at::Tensor>& given, const program& step, c10::DeviceType on) {
  std::vector<output_use> uses;
  for (std::size_t i = 0; i < given.size(); ++i) {
    uses.push_back({given[i].defined(), {}, given[i].defined() ? autocast_on(on) : std::nullopt});
    if (!given[i].defined()) continue;
    const auto sizes = given[i].sizes(), strides = given[i].strides();
    const auto* planned = step.output_grads[i] == none ? nullptr : &step.views[step.output_grads[i]].strides;
    if (planned != nullptr && same_strides(sizes, strides, *planned)) continue;
    if (apart_or_expanded(sizes, strides)) uses[i].strides = strides.vec();
  }
  return uses;
}

/// True if the program gives the right gradients, perhaps with the bits of another layout.
inline bool serves(const program& step, const std::vector<at::Tensor>& given) {
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    if (step.output_grads[i] == none) return false;
    const auto& planned = step.views[step.output_grads[i]].strides;
    if (is_expanded(given[i].sizes(), planned) && !same_strides(given[i].sizes(), given[i].strides(), planned)) return false;
  }
  return true;
}

/// True if the loss uses an output that a gradient depends on. Otherwise there is no gradient, as in eager mode.
inline bool is_reached(const std::vector<bool>& sources, const std::vector<at::Tensor>& given) {
  for (std::size_t i = 0; i < sources.size(); ++i)
    if (sources[i] && given[i].defined()) return true;
  return false;
}

/// The same gradients, in memory that the program does not write.
inline std::vector<at::Tensor> not_overwritten(std::vector<at::Tensor> given, const program& step) {
  for (const auto& n : step.nodes)
    for (const auto& [old, fresh] : n.overwrites)
      if (step.from(old) == role::output_grad)
        if (auto& g = given[step.slots[step.values[old].slot].position]; g.defined()) g = g.clone();
  return given;
}

}  // namespace remat::pytorch
