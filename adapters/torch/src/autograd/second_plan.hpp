// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step falls back to whose backward is not the one that was planned. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../capture/kept_graph.hpp"
#include "../plan/planned.hpp"
#include "output_node.hpp"

namespace remat::pytorch {

/// For the forward once more, by a plan for another use of the outputs.
struct second_plan {
  std::function<bool(const std::vector<at::Tensor>&, const std::vector<output_use>&)> possible;  ///< for these inputs and uses
  /// When the first executor has been let go: one whose forward has run, for the use that has been seen, if that is possible,
  /// or else for any use. Leaves: where the backward has code of somebody else, which has to do what that plan has; else empty.
  std::function<std::shared_ptr<runner>(const std::vector<at::Tensor>& inputs, const std::vector<output_use>&, bool possible,
                                        const std::vector<at::Tensor>& leaves)>
      make;
  /// The graph that the module's code has built, for backwards that no plan does; null: it is gone, or the code has not run.
  std::shared_ptr<detail::kept_graph> graph = {};
  /// While the result lives, weights of the host look as if they were where steps run, with data or without; null: they are.
  std::function<std::shared_ptr<void>(bool with_data)> disguise = {};
  /// Where gradients of the outputs are, if this runs on another thread than the device's; null: they come as they are.
  std::shared_ptr<handed_over> handed = {};
  /// Is told why that was needed, and whether it always will.
  std::function<void(const std::string&, bool)> as_it_is = {};
  /// Is told that code of the backward does something else than when the step was recorded.
  std::function<void()> other_code = {};
};

}  // namespace remat::pytorch
