// SPDX-License-Identifier: Apache-2.0
/// @file
/// Chains of links with several ways to run each, and the steps of their schedules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
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

/// What the recurrence over parts of a chain, links i to j, reads of it (see `persistent_table`). Bytes are besides x_i.
/// Complexity: O(L) to make for L links; then O(1) per query, and O(j - i) for the splits of links i to j.
class recurrence {
 public:
  /// @throws bad_option if a link has no option
  explicit recurrence(heterogeneous_chain c) : chain_(std::move(c)), kept_(size() + 1, 0) {
    for (std::size_t i = 0; i < size(); ++i) {
      if (link(i).options.empty()) throw bad_option("chain: links[" + std::to_string(i) + "] has no option");
      kept_[i + 1] = kept_[i] + link(i).kept;
    }
  }

  std::size_t size() const { return chain_.links.size(); }
  const heterogeneous_chain::link& link(std::size_t i) const { return chain_.links[i]; }
  /// x_i, and its gradient; nothing after the last link.
  bytes_t input(std::size_t i) const { return i < size() ? link(i).input : 0; }
  bytes_t gradient(std::size_t i) const { return i < size() ? link(i).gradient : 0; }
  /// What the backwards of links i to j leave; nothing for i = j + 1.
  bytes_t kept(std::size_t i, std::size_t j) const { return kept_[j + 1] - kept_[i]; }
  /// Bytes with which link i can be run now in option `o`, the last one to be done being j.
  bytes_t threshold(std::size_t i, std::size_t j, const heterogeneous_chain::option& o) const {
    return o.saved + std::max(gradient(j + 1) + o.forward_transient, kept(i + 1, j) + gradient(i + 1) + o.backward_transient);
  }
  /// Calls `visit(s, seconds of the checkpoint forwards of i..s-1, bytes they need)` for each split s, ascending, until it
  /// answers false.
  template <class Visit>
  void splits(std::size_t i, std::size_t j, Visit&& visit) const {
    double forward = 0;
    bytes_t need = 0;
    for (auto t = i; t < j; ++t) {
      forward += link(t).checkpoint_seconds;
      need = std::max(need, gradient(j + 1) + (t > i ? input(t) : 0) + input(t + 1) + link(t).checkpoint_transient);
      if (!visit(t + 1, forward, need)) return;
    }
  }

 private:
  heterogeneous_chain chain_;
  std::vector<bytes_t> kept_;  // prefix sums
};

}  // namespace remat::chain
