// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fallbacks of a step whose backward is not the planned one. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../capture/kept_graph.hpp"
#include "../plan/captured_step.hpp"
#include "output_node.hpp"

namespace remat::pytorch {

/// Runs the forward once more by a plan for another use of the outputs, or leaves the plan.
struct second_plan {
  std::function<bool(const std::vector<at::Tensor>&, const std::vector<output_use>&)> possible;  ///< for these inputs and uses
  /// Called when the first executor has been freed. Returns an executor whose forward has run: for the given use if that is
  /// possible, otherwise for any use. `leaves` is not empty if the backward has custom code, which must make the planned calls.
  std::function<std::shared_ptr<runner>(const std::vector<at::Tensor>& inputs, const std::vector<output_use>&, bool possible,
                                        const std::vector<at::Tensor>& leaves)>
      make;
  /// The graph of the module's own code, for backwards that no plan makes; null: freed, or the code has not run.
  std::shared_ptr<detail::kept_graph> graph = {};
  /// While the result lives, weights on the host look as if they were where steps run, with or without data; null: they are
  /// there.
  std::function<std::shared_ptr<void>(bool with_data)> disguise = {};
  /// The gradients of the outputs, if the backward runs on another thread than the device's; null: they arrive at the node.
  std::shared_ptr<handed_over> handed = {};
  /// Gets the reason for leaving the plan, and whether it always holds.
  std::function<void(const std::string&, bool)> as_it_is = {};
  /// Called if code of the backward makes other calls than in the recording.
  std::function<void()> other_code = {};
};

}  // namespace remat::pytorch
