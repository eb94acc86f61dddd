// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lower bounds on the memory of every schedule, from the values on the device at last runs of operations. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <remat/bound/cut_network.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::bound {

namespace detail {

/// The bytes of `v` that a schedule may drop: none if it is held.
inline bytes_t droppable_bytes(const problem& p, value_id v) { return p.values()[v].held ? 0 : p.values()[v].bytes; }

/// The bytes of all targets that are not held.
inline bytes_t target_bytes(const problem& p) {
  bytes_t sum = 0;
  for (auto v : p.targets()) sum += droppable_bytes(p, v);
  return sum;
}

}  // namespace detail

/// A lower bound on the memory of every schedule without copies. The targets of an operation stay after its last run. So each
/// last run meets the targets of the last runs before it, its own targets, and its other operands, outputs and workspace. The
/// order of the last runs with the least peak has the largest "other" bytes first (Lawler's rule for one machine and a largest
/// cost).
/// @return bytes
/// Complexity: O(edges + targets log(targets)).
/// Reference: Lawler, "Optimal sequencing of a single machine subject to precedence constraints", Management Science 19, 1973.
inline bytes_t last_runs_bound(const problem& p) {
  const auto& values = p.values();
  std::vector<std::pair<bytes_t, bytes_t>> runs;  // bytes of others, of targets
  bytes_t present = p.held_bytes();
  for (auto v : p.targets())
    if (p.is_source(v)) present += detail::droppable_bytes(p, v);
  for (const auto& op : p.operations()) {
    bytes_t targets = 0, others = op.workspace;
    for (auto v : op.outputs) (p.is_target(v) ? targets : others) += values[v].bytes;
    for (auto v : op.inputs)
      if (!p.is_target(v)) others += detail::droppable_bytes(p, v);
    if (targets > 0) runs.emplace_back(others, targets);
  }
  std::sort(runs.rbegin(), runs.rend());
  bytes_t bound = present;
  for (const auto& [others, targets] : runs) bound = std::max(bound, (present += targets) + others);
  return bound;
}

/// The bytes on the device when an operation runs for the last time, given operations that do not run after it (*forbidden*).
///
/// Each target is on the device then, or is made later without forbidden operations from values on the device. The least bytes
/// of these values are a minimum cut. The run is of use: the operation makes a target, or a chain of operations that are not
/// forbidden leads from its outputs to a target. The operations that all these chains have in common run later.
class last_run_cut {
 public:
  /// @param p    must outlive this
  /// @param stop polled here and within cuts, which then throw `interrupted`
  /// @throws interrupted
  /// Complexity: O(values + edges).
  explicit last_run_cut(const problem& p, const std::function<bool()>& stop = {})
      : p_(p),
        network_(stop),
        operation_vertex_(p.operations().size()),
        value_vertex_(p.values().size()),
        operation_edge_(operation_vertex_.size()),
        later_edge_(operation_vertex_.size()),
        value_edge_(value_vertex_.size()),
        forbidden_(operation_vertex_.size()) {
    const auto& ops = p.operations();
    for (auto& o : operation_vertex_) o = network_.add_vertex();
    // A value has a vertex of its own, unless it is a target or has a producer and one reader.
    for (value_id v = 0; v < value_edge_.size(); ++v) {
      if (v % 65'536 == 65'535 && stop && stop()) throw interrupted();
      const auto readers = p.consumers(v);
      const bool several = !p.is_target(v) && (p.is_source(v) || readers.size() != 1);
      const auto vertex = p.is_target(v) ? network::source : several ? network_.add_vertex() : operation_vertex_[readers[0]];
      if (several)
        for (auto o : readers) network_.add_edge(operation_vertex_[o], vertex, network::infinite);
      value_vertex_[v] = vertex;
      value_edge_[v] = network_.add_edge(vertex, p.is_source(v) ? network::sink : operation_vertex_[p.producer(v)], bytes(v));
    }
    for (operation_id o = 0; o < ops.size(); ++o) {
      operation_edge_[o] = network_.add_edge(operation_vertex_[o], network::sink, 0);
      later_edge_[o] = network_.add_edge(network::source, operation_vertex_[o], 0);
    }
  }

  /// Forbids `o` to run after the last run.
  void forbid(operation_id o) { set_forbidden(o, true); }
  /// Allows `o` to run after the last run.
  void permit(operation_id o) { set_forbidden(o, false); }
  /// Bytes of the operands, outputs and workspace of `o`, and of held values.
  bytes_t working_set(operation_id o) const {
    const auto& op = p_.operations()[o];
    auto sum = p_.held_bytes() + p_.new_bytes(o);
    for (auto v : op.inputs) sum += bytes(v);
    return sum;
  }
  /// Can a run of `o` be of use if no forbidden operation runs after it?
  /// Complexity: O(1), but O(edges) after `forbid` and `permit`.
  bool may_be_last(operation_id o) {
    if (next_.empty()) find_next();
    return next_[o] != no_use;
  }
  /// The least bytes on the device while `last` runs for the last time and no forbidden operation runs after it.
  /// @pre `may_be_last(last)`
  /// @throws interrupted
  /// Complexity: a maximum flow on O(values + operations) vertices.
  bytes_t min_bytes(operation_id last) {
    if (next_.empty()) find_next();
    const auto& op = p_.operations()[last];
    const auto set_capacities = [&](bytes_t share, std::int64_t later) {
      for (const auto* used : {&op.inputs, &op.outputs})
        for (auto v : *used) network_.set_capacity(value_edge_[v], share * bytes(v));
      for (auto o = next_[last]; o != target; o = next_[o]) network_.set_capacity(later_edge_[o], later);
    };
    set_capacities(0, network::infinite);
    const auto kept = network_.cut();
    set_capacities(1, 0);
    return working_set(last) + kept;
  }
  /// The values to keep across a run of `last`, besides its operands and outputs. Their bytes, and the prices of the operations
  /// that run again, are minimal together. Overwrites the capacities that `forbid` and `permit` have set.
  /// @param made   per value: has been made and may be kept
  /// @param prices per operation, of running again, bytes, at most `max_price` in total; `forbidden`: does not run again
  /// @return per value: is it kept?
  /// @throws interrupted
  /// Complexity: that of `min_bytes`.
  std::vector<bool> values_to_keep_across(operation_id last, const std::vector<bool>& made, const std::vector<bytes_t>& prices) {
    for (operation_id o = 0; o < operation_edge_.size(); ++o) {
      const auto& outputs = p_.operations()[o].outputs;
      const bool ran = std::all_of(outputs.begin(), outputs.end(), [&](value_id v) { return made[v]; });
      network_.set_capacity(operation_edge_[o], ran ? prices[o] : 0);
    }
    for (value_id v = 0; v < value_edge_.size(); ++v)
      network_.set_capacity(value_edge_[v], made[v] ? bytes(v) : network::infinite);
    const auto& op = p_.operations()[last];
    for (const auto* used : {&op.inputs, &op.outputs})
      for (auto v : *used) network_.set_capacity(value_edge_[v], 0);
    auto list = values_to_keep();
    for (const auto* used : {&op.inputs, &op.outputs})
      for (auto v : *used) list[v] = false;
    return list;
  }
  /// The values of fewest bytes to keep after the last runs of all forbidden operations.
  /// @return per value: is it kept?
  /// @throws interrupted
  /// Complexity: that of `min_bytes`.
  std::vector<bool> values_to_keep() {
    network_.cut();
    std::vector<bool> list(value_edge_.size());
    for (value_id v = 0; v < list.size(); ++v)
      list[v] = (value_vertex_[v] == network::source || network_.on_source_side(value_vertex_[v])) &&
                (p_.is_source(v) || !network_.on_source_side(operation_vertex_[p_.producer(v)]));
    return list;
  }
  static constexpr bytes_t forbidden = cut_network::infinite, max_price = cut_network::max_total / 2;

 private:
  using network = cut_network;
  static constexpr operation_id target = none, no_use = none - 1;  ///< entries of `next_`

  bytes_t bytes(value_id v) const { return detail::droppable_bytes(p_, v); }
  void set_forbidden(operation_id o, bool now) {
    network_.set_capacity(operation_edge_[o], now ? network::infinite : 0);
    if (forbidden_[o] != now) next_.clear();
    forbidden_[o] = now;
  }
  /// Finds the operations that all chains to targets have in common: the nearest post-dominators. Where the next one is far away,
  /// it is left out, with all behind it.
  void find_next() {
    constexpr std::size_t most_steps = 1000;
    const auto& ops = p_.operations();
    next_.assign(ops.size(), no_use);
    std::vector<std::size_t> length(ops.size(), 0);  // of the chain of common operations
    for (auto o = static_cast<operation_id>(ops.size()); o-- > 0;) {
      auto& next = next_[o];
      const auto length_from = [&](operation_id c) { return c == target ? 0 : length[c]; };
      for (auto v : ops[o].outputs) {
        if (p_.is_target(v)) next = target;
        for (auto c : p_.consumers(v)) {
          if (next == target || forbidden_[c] || next_[c] == no_use) continue;
          if (next == no_use) next = c;
          std::size_t steps = 0;
          for (auto other = c; next != other; ++steps) {
            auto& longer = length_from(next) >= length_from(other) ? next : other;
            longer = steps < most_steps ? next_[longer] : target;
          }
        }
      }
      if (next != no_use) length[o] = 1 + length_from(next);
    }
  }

  const problem& p_;
  network network_;
  std::vector<network::vertex> operation_vertex_, value_vertex_;  // per operation (the vertex of r_o), per value (of x_v)
  std::vector<network::edge> operation_edge_, later_edge_;        // per operation: to the sink, from the source
  std::vector<network::edge> value_edge_;                         // per value
  std::vector<bool> forbidden_;                                   // per operation
  /// Per operation: the next of the operations through which all chains from it to a target lead; `target` if there is none;
  /// `no_use` if there is no such chain. Empty: not known.
  std::vector<operation_id> next_;
};

/// A lower bound on the memory of every schedule without copies. Take all operations with a working set of some size or more. One
/// of them is the last to run. At its last run, the device holds values from which all targets can be made without any of them.
/// The bound of a size is the least `last_run_cut::min_bytes` over the operation that runs last. The largest bound of all sizes
/// counts.
/// @param p     the problem
/// @param known a proven lower bound, bytes; sizes that cannot raise it are skipped
/// @param stop  polled between and within cuts; true returns the bound that is proven by then
/// @param cuts  the largest number of minimum cuts
/// @return bytes, >= known
/// Complexity: at most `cuts` maximum flows on O(values + operations) vertices.
inline bytes_t last_large_run_bound(const problem& p, bytes_t known = 0, const std::function<bool()>& stop = {},
                                    std::size_t cuts = 300) {
  struct large {
    operation_id operation;
    bytes_t working_set;
    // `last_run_cut::min_bytes` with the first `level` operations forbidden; the working set if there are none.
    bytes_t min_bytes;
    std::size_t level;  // number of forbidden operations
  };
  if (stop && stop()) return known;
  try {
    last_run_cut cut(p, stop);
    std::vector<large> all;
    for (auto o : needed_operations(p)) all.push_back({o, cut.working_set(o), cut.working_set(o), 0});
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.working_set > b.working_set; });
    const auto targets = detail::target_bytes(p);
    const auto smallest_of = [&](std::size_t count) {
      const auto less = [](const auto& a, const auto& b) { return a.min_bytes < b.min_bytes; };
      return static_cast<std::size_t>(std::min_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), less) -
                                      all.begin());
    };
    std::size_t level = 0, last = 0;  // all[0, level) are large; all[last] has the smallest known `min_bytes`
    while (level < all.size() && all[level].working_set + targets > known) {
      const auto smallest = all[level].working_set;
      for (; level < all.size() && all[level].working_set == smallest; ++level) cut.forbid(all[level].operation);
      for (std::size_t i = 0; i < level; ++i)
        if (!cut.may_be_last(all[i].operation)) all[i].min_bytes = max_peak, all[i].level = all.size();
      last = smallest_of(level);
      while (all[last].level < level) {
        if (cuts-- == 0 || (stop && stop())) return known;
        all[last].min_bytes = cut.min_bytes(all[last].operation);
        all[last].level = level;
        if (all[last].min_bytes <= known) break;
        last = smallest_of(level);
      }
      known = std::max(known, all[last].min_bytes);
    }
  } catch (const interrupted&) {  // returns the bound known so far
  }
  return known;
}

/// Operations in the order of their last runs, in groups.
struct last_run_phases {
  std::vector<std::vector<operation_id>> phases = {};  ///< last runs of a phase come after those of earlier phases
  bytes_t needed_bytes = 0;  ///< if there are no phases: every schedule needs this, more than the budget; else 0
};

/// Finds phases of last runs that fit a budget, from the last phase to the first. A phase has all operations that
/// `last_run_cut::min_bytes` allows to be the last of the remaining ones. If it allows none, no schedule fits, because one of the
/// remaining operations would be the last. The order of the choices does not matter: without an operation that runs last, the
/// others need no more (Lawler's rule).
/// @param p      the problem
/// @param cut    of `p`; afterwards operations without a phase are forbidden, all others permitted
/// @param budget bytes
/// @param cuts   the largest number of minimum cuts
/// @return the phases, or the bytes that every schedule needs
/// @throws interrupted if `cut` is stopped, or if more than `cuts` cuts are necessary
/// Complexity: a maximum flow for each operation and phase at most, none for operations that fit beside all targets.
inline last_run_phases phases_of_last_runs(const problem& p, last_run_cut& cut, bytes_t budget,
                                           std::size_t cuts = std::numeric_limits<std::size_t>::max()) {
  last_run_phases found;
  auto remaining = needed_operations(p);
  const auto targets = detail::target_bytes(p);
  const auto fits_beside_targets = [&](operation_id o) { return cut.working_set(o) + targets <= budget; };
  for (auto o : remaining) fits_beside_targets(o) ? cut.permit(o) : cut.forbid(o);
  while (!remaining.empty()) {
    std::vector<operation_id> last, others;
    auto min_bytes = max_peak;
    for (auto o : remaining) {
      const bool fits = fits_beside_targets(o);
      auto needs = fits || cut.may_be_last(o) ? cut.working_set(o) : max_peak;
      if (needs <= budget && !fits) {
        if (cuts-- == 0) throw interrupted();
        needs = cut.min_bytes(o);
      }
      min_bytes = std::min(min_bytes, needs);
      (needs <= budget ? last : others).push_back(o);
    }
    if (last.empty()) return {{}, min_bytes};
    for (auto o : last) cut.permit(o);
    found.phases.push_back(std::move(last));
    remaining = std::move(others);
  }
  std::reverse(found.phases.begin(), found.phases.end());
  return found;
}

}  // namespace remat::bound
