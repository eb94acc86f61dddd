// SPDX-License-Identifier: Apache-2.0
/// @file
/// Liveness of values along an order of computations, and the memory of the order if every value is dropped as early as possible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat {

/// Backward liveness analysis of an order of computations. A value is wanted on the device (live) if a later computation reads it
/// before it is computed again. At the end the targets are wanted. Held values always are.
/// @code
/// remat::liveness after(p);
/// for (auto k = order.size(); k-- > 0;) memory[k] = after.step_back(order[k]);
/// @endcode
class liveness {
 public:
  /// Starts at the end of the order. Complexity: O(values).
  explicit liveness(const problem& p) : p_(p), wanted_(p.values().size(), 0) {
    for (value_id v = 0; v < wanted_.size(); ++v)
      if (p.values()[v].held) want(v);
    for (auto v : p.targets()) want(v);
  }

  /// True if `v` is wanted at the current position.
  bool wanted(value_id v) const { return wanted_[v] != 0; }
  /// True if an output of `o` is wanted at the current position.
  bool useful(operation_id o) const {
    const auto& outputs = p_.operations()[o].outputs;
    return std::any_of(outputs.begin(), outputs.end(), [&](value_id v) { return wanted_[v] != 0; });
  }
  /// Moves back over `o`, the computation right before the current position.
  /// @return bytes on the device while `o` is computed: wanted values, all outputs of `o`, workspace
  bytes_t step_back(operation_id o) {
    const auto& op = p_.operations()[o];
    const auto* const values = p_.values().data();
    auto* const wanted = wanted_.data();
    auto live = live_, written = op.workspace;  // local copies: the compiler would store members at each change
    for (auto v : op.outputs) {
      written += values[v].bytes;
      if (wanted[v]) live -= values[v].bytes;
      wanted[v] = 0;
    }
    for (auto v : op.inputs) {
      if (!wanted[v]) live += values[v].bytes;
      wanted[v] = 1;
    }
    live_ = live;
    return live + written;
  }

 private:
  void want(value_id v) {
    if (!wanted_[v]) live_ += p_.values()[v].bytes;
    wanted_[v] = true;
  }

  const problem& p_;
  std::vector<unsigned char> wanted_;
  bytes_t live_ = 0;  // of the wanted values
};

/// Memory and time of an order of computations if every value is dropped as early as possible (see `with_drops`).
struct order_cost {
  bytes_t peak = 0;             ///< largest memory at any position, or before the first, bytes
  double seconds = 0;           ///< sum of the times, s
  std::vector<bytes_t> memory;  ///< bytes while position i is computed
};

/// Measures an order in one backward pass. The order must be valid; this is not checked.
/// Complexity: O(values + edges executed).
inline order_cost measure_order(const problem& p, std::span<const operation_id> order) {
  order_cost n;
  n.memory.resize(order.size());
  n.peak = p.source_bytes();
  liveness after(p);
  for (std::size_t k = order.size(); k-- > 0;) {
    n.memory[k] = after.step_back(order[k]);
    n.peak = std::max(n.peak, n.memory[k]);
    n.seconds += p.operations()[order[k]].seconds;
  }
  return n;
}

/// The position in `order` of the computation during which the memory is largest, the first of several; 0 for an empty order.
/// Complexity: O(values + edges executed).
inline std::size_t heaviest_position(const problem& p, std::span<const operation_id> order) {
  const auto memory = measure_order(p, order).memory;
  return static_cast<std::size_t>(std::max_element(memory.begin(), memory.end()) - memory.begin());
}

/// Removes each computation with unused outputs: neither read before they are computed again, nor targets at the end.
/// Complexity: O(values + edges executed).
inline std::vector<operation_id> prune_order(const problem& p, std::span<const operation_id> order) {
  std::vector<operation_id> kept;
  liveness after(p);
  for (std::size_t k = order.size(); k-- > 0;) {
    if (!after.useful(order[k])) continue;
    after.step_back(order[k]);
    kept.push_back(order[k]);
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

}  // namespace remat
