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

/// A chain of links, each with a forward and a backward. The forward of link i reads x_i and yields x_(i+1). Its backward reads
/// x_i, the values that its forward saved, and the gradient of x_(i+1), and yields the gradient of x_i. The loss is part of the
/// last link.
struct heterogeneous_chain {
  /// A way to run a link.
  struct option {
    bytes_t saved = 0;               ///< bytes kept from forward to backward, including x_(i+1)
    double forward = 0;              ///< s
    double backward = 0;             ///< s, including recomputation inside the link
    bytes_t forward_transient = 0;   ///< bytes that the forward needs besides x_i and `saved`
    bytes_t backward_transient = 0;  ///< bytes that the backward needs besides x_i, `saved` and the gradient of x_(i+1)
  };
  struct link {
    bytes_t input = 0;                 ///< bytes of x_i
    bytes_t gradient = 0;              ///< bytes of the gradient of x_i
    std::vector<option> options;       ///< at least one
    double checkpoint_seconds = 0;     ///< of a forward that saves nothing
    bytes_t checkpoint_transient = 0;  ///< bytes that such a forward needs besides x_i and x_(i+1)
    bytes_t kept = 0;                  ///< bytes that the backward leaves until the end, such as gradients of parameters
  };
  std::vector<link> links;
};

/// A step of a schedule of a chain. `checkpoint` is a forward that saves nothing.
struct chain_step {
  enum class kind { checkpoint, forward, backward } what;
  std::size_t link;
  std::size_t option;  ///< for `forward` and `backward`: index of the option
  friend bool operator==(const chain_step&, const chain_step&) = default;
};

/// The terms of the recurrence over parts of a chain, which are links i to j (see `persistent_table`). Bytes are besides x_i.
/// Complexity: O(L) to construct for L links; O(1) per query, and O(j - i) for the splits of links i to j.
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
  /// Bytes of x_i, and of its gradient; 0 after the last link.
  bytes_t input(std::size_t i) const { return i < size() ? link(i).input : 0; }
  bytes_t gradient(std::size_t i) const { return i < size() ? link(i).gradient : 0; }
  /// Bytes that the backwards of links i to j leave until the end; 0 for i = j + 1.
  bytes_t kept(std::size_t i, std::size_t j) const { return kept_[j + 1] - kept_[i]; }
  /// The least bytes with which link i can run now in option `o`, when links i to j are still to be done.
  bytes_t threshold(std::size_t i, std::size_t j, const heterogeneous_chain::option& o) const {
    return o.saved + std::max(gradient(j + 1) + o.forward_transient, kept(i + 1, j) + gradient(i + 1) + o.backward_transient);
  }
  /// Calls `visit` for each split s of links i to j, ascending, until it returns false.
  /// @param visit takes s, the seconds of the checkpoint forwards of links i to s - 1, and the bytes that these need
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
