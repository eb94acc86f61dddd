// SPDX-License-Identifier: Apache-2.0
/// @file
/// Chains of links with several ways to run each, and the steps of their schedules.
#pragma once

#include <cstddef>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain {

/// A chain of links, each with a forward and a backward. The forward of link i reads x_i and yields x_(i+1); its backward reads
/// x_i, what its forward saved and the gradient of x_(i+1), and yields the gradient of x_i. The loss is part of the last link.
struct heterogeneous_chain {
  /// A way to run a link.
  struct option {
    bytes_t saved = 0;               ///< from forward to backward, x_(i+1) included
    double forward = 0;              ///< s
    double backward = 0;             ///< s, recomputation inside the link included
    bytes_t forward_transient = 0;   ///< needed by the forward besides x_i and `saved`
    bytes_t backward_transient = 0;  ///< needed by the backward besides x_i, `saved` and the gradient of x_(i+1)
  };
  struct link {
    bytes_t input = 0;                 ///< x_i
    bytes_t gradient = 0;              ///< the gradient of x_i
    std::vector<option> options;       ///< at least one
    double checkpoint_seconds = 0;     ///< forward that saves nothing
    bytes_t checkpoint_transient = 0;  ///< needed by it besides x_i and x_(i+1)
    bytes_t kept = 0;                  ///< what the backward leaves until the end, such as gradients of parameters
  };
  std::vector<link> links;
};

/// A step of a schedule of a chain.
struct chain_step {
  enum class kind { checkpoint, forward, backward } what;
  std::size_t link;
  std::size_t option;  ///< of `forward` and `backward`
  friend bool operator==(const chain_step&, const chain_step&) = default;
};

}  // namespace remat::chain
