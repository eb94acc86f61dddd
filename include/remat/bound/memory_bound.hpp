// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lower bounds on the memory of every schedule, from what has to stay when something runs for the last time. Needs Boost.Graph.
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

/// A lower bound on the memory of every schedule without copies: after the last run of an operation its targets stay, so the last
/// runs meet, in their order, ever more of them. The least peak over all orders of the last runs has the operation with the
/// largest working set first (Lawler's rule for one machine and a largest cost). Complexity: O(edges + targets log(targets)).
/// Reference: Lawler, "Optimal sequencing of a single machine subject to precedence constraints", Management Science 19, 1973.
inline bytes_t last_runs_bound(const problem& p) {
  const auto& values = p.values();
  const auto bytes = [&](value_id v) { return values[v].held ? 0 : values[v].bytes; };
  std::vector<std::pair<bytes_t, bytes_t>> runs;  // working set besides targets, targets
  bytes_t present = p.held_bytes();
  for (auto v : p.targets())
    if (p.is_source(v)) present += bytes(v);
  for (const auto& op : p.operations()) {
    bytes_t targets = 0, others = op.workspace;
    for (auto v : op.outputs) (p.is_target(v) ? targets : others) += values[v].bytes;
    for (auto v : op.inputs)
      if (!p.is_target(v)) others += bytes(v);
    if (targets > 0) runs.emplace_back(others, targets);
  }
  std::sort(runs.rbegin(), runs.rend());
  bytes_t bound = present;
  for (const auto& [others, targets] : runs) bound = std::max(bound, (present += targets) + others);
  return bound;
}

/// What has to be on the device when an operation runs for the last time, and others do not run after it.
///
/// Every target is on the device then or made later, from what is on the device and without those others: the least bytes of it
/// are a minimum cut.
class last_run_cut {
 public:
  /// @param p    must outlive this
  /// @param stop polled here and within cuts, which then throw `interrupted`
  /// @throws interrupted
  /// Complexity: O(values + edges).
  explicit last_run_cut(const problem& p, const std::function<bool()>& stop = {})
      : p_(p), network_(stop), run_(p.operations().size()), place_(p.values().size()), runs_(run_.size()), keeps_(place_.size()) {
    const auto& ops = p.operations();
    for (auto& o : run_) o = network_.add_vertex();
    for (value_id v = 0; v < keeps_.size(); ++v) {  // a vertex of its own only where it is no target and has several readers
      if (v % 65'536 == 65'535 && stop && stop()) throw interrupted();
      const auto readers = p.consumers(v);
      const bool several = !p.is_target(v) && (p.is_source(v) || readers.size() != 1);
      const auto place = p.is_target(v) ? network::source : several ? network_.add_vertex() : run_[readers[0]];
      if (several)
        for (auto o : readers) network_.connect(run_[o], place, network::infinite);
      place_[v] = place;
      keeps_[v] = network_.connect(place, p.is_source(v) ? network::sink : run_[p.producer(v)], bytes(v));
    }
    for (operation_id o = 0; o < ops.size(); ++o) runs_[o] = network_.connect(run_[o], network::sink, 0);
  }

  /// `o` does not run after the last run either.
  void forbid(operation_id o) { network_.set_capacity(runs_[o], network::infinite); }
  /// `o` may run after it.
  void permit(operation_id o) { network_.set_capacity(runs_[o], 0); }
  /// Bytes for operands, results and workspace of `o`, and for what is held.
  bytes_t working_set(operation_id o) const {
    const auto& op = p_.operations()[o];
    auto sum = p_.held_bytes() + p_.new_bytes(o);
    for (auto v : op.inputs) sum += bytes(v);
    return sum;
  }
  /// The least bytes on the device while `last` runs for the last time.
  /// @throws interrupted
  /// Complexity: a maximum flow on O(values + operations) vertices.
  bytes_t least(operation_id last) {
    const auto& op = p_.operations()[last];
    for (const auto* there : {&op.inputs, &op.outputs})
      for (auto v : *there) network_.set_capacity(keeps_[v], 0);
    const auto kept = network_.cut();
    for (const auto* there : {&op.inputs, &op.outputs})
      for (auto v : *there) network_.set_capacity(keeps_[v], bytes(v));
    return working_set(last) + kept;
  }
  /// What to keep across a run of `last`, besides its operands and results, for the least bytes, and prices of what runs again.
  /// @param there  per value: was made before, and may be kept
  /// @param prices per operation, bytes, at most `most_price` together; `forbidden`: does not run again
  /// @throws interrupted
  /// Complexity: that of `least`.
  std::vector<bool> kept(operation_id last, const std::vector<bool>& there, const std::vector<bytes_t>& prices) {
    for (operation_id o = 0; o < runs_.size(); ++o) {
      const auto& outputs = p_.operations()[o].outputs;
      const bool ran = std::all_of(outputs.begin(), outputs.end(), [&](value_id v) { return there[v]; });
      network_.set_capacity(runs_[o], ran ? prices[o] : 0);
    }
    for (value_id v = 0; v < keeps_.size(); ++v) network_.set_capacity(keeps_[v], there[v] ? bytes(v) : network::infinite);
    const auto& op = p_.operations()[last];
    for (const auto* used : {&op.inputs, &op.outputs})
      for (auto v : *used) network_.set_capacity(keeps_[v], 0);
    auto list = kept();
    for (const auto* used : {&op.inputs, &op.outputs})
      for (auto v : *used) list[v] = false;
    return list;
  }
  /// What to keep once all that is forbidden has run for the last time, for the least bytes.
  /// @throws interrupted
  /// Complexity: that of `least`.
  std::vector<bool> kept() {
    network_.cut();
    std::vector<bool> list(keeps_.size());
    for (value_id v = 0; v < list.size(); ++v)
      list[v] = (place_[v] == network::source || network_.reached(place_[v])) &&
                (p_.is_source(v) || !network_.reached(run_[p_.producer(v)]));
    return list;
  }
  static constexpr bytes_t forbidden = cut_network::infinite, most_price = cut_network::most / 2;

 private:
  using network = cut_network;
  bytes_t bytes(value_id v) const { return p_.values()[v].held ? 0 : p_.values()[v].bytes; }

  const problem& p_;
  network network_;
  std::vector<network::vertex> run_, place_;  // per operation, per value
  std::vector<network::edge> runs_, keeps_;   // likewise
};

/// A lower bound on the memory of every schedule without copies: one of the operations with large working sets is the last of
/// them to run, and meets then what is needed to make all targets without any of them. The least over which is the last, the
/// largest over how large is large.
/// @param p     the problem
/// @param known a lower bound in bytes: what cannot exceed it is not looked at
/// @param stop  polled between and within cuts; true returns what is proven by then
/// @param cuts  the most minimum cuts
/// @return bytes, >= known
/// Complexity: at most `cuts` maximum flows on O(values + operations) vertices.
inline bytes_t last_large_run_bound(const problem& p, bytes_t known = 0, const std::function<bool()>& stop = {},
                                    std::size_t cuts = 300) {
  struct large {
    operation_id operation;
    bytes_t working_set;
    bytes_t least;      // `last_run_cut::least` among fewer operations, or a lower bound on that
    std::size_t level;  // how many they were
  };
  if (stop && stop()) return known;
  try {
    last_run_cut cut(p, stop);
    std::vector<large> all;
    for (auto o : needed_operations(p)) all.push_back({o, cut.working_set(o), cut.working_set(o), 0});
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.working_set > b.working_set; });
    bytes_t targets = 0;
    for (auto v : p.targets()) targets += p.values()[v].held ? 0 : p.values()[v].bytes;
    std::size_t level = 0, last = 0;  // all[0, level) are large; all[last] needs the least as far as known
    while (level < all.size() && all[level].working_set + targets > known) {
      const auto smallest = all[level].working_set;
      for (; level < all.size() && all[level].working_set == smallest; ++level) cut.forbid(all[level].operation);
      while (all[last].level < level) {
        if (cuts-- == 0 || (stop && stop())) return known;
        all[last].least = cut.least(all[last].operation);
        all[last].level = level;
        if (all[last].least <= known) break;
        for (std::size_t i = 0; i < level; ++i)
          if (all[i].least < all[last].least) last = i;
      }
      known = std::max(known, all[last].least);
    }
  } catch (const interrupted&) {  // what is known by then
  }
  return known;
}

/// Which operations run for the last time after which others.
struct last_run_phases {
  std::vector<std::vector<operation_id>> phases = {};  ///< the last runs of each come after those of the phase before
  bytes_t needed = 0;                                  ///< more than the budget where there are no phases: no schedule needs less
};

/// Finds phases of last runs that fit a budget, from the end: each has all operations that `last_run_cut::least` allows to be
/// the last of those that are left. If it allows none, no schedule fits, because one of them would be the last. The choice does
/// not matter: without an operation that runs last the others need no more (Lawler's rule).
/// @param p      the problem
/// @param cut    of `p`; afterwards operations without a phase are forbidden, all others permitted
/// @param budget bytes
/// @param cuts   the most minimum cuts
/// @throws interrupted, also where that takes more cuts
/// Complexity: a maximum flow for each operation and phase at most, none for operations that fit beside all targets.
inline last_run_phases phases_of_last_runs(const problem& p, last_run_cut& cut, bytes_t budget,
                                           std::size_t cuts = std::numeric_limits<std::size_t>::max()) {
  last_run_phases found;
  auto left = needed_operations(p);
  bytes_t targets = 0;
  for (auto v : p.targets()) targets += p.values()[v].held ? 0 : p.values()[v].bytes;
  const auto easy = [&](operation_id o) { return cut.working_set(o) + targets <= budget; };
  for (auto o : left) easy(o) ? cut.permit(o) : cut.forbid(o);
  while (!left.empty()) {
    std::vector<operation_id> last, others;
    auto least = max_peak;
    for (auto o : left) {
      auto needs = cut.working_set(o);
      if (needs <= budget && !easy(o)) {
        if (cuts-- == 0) throw interrupted();
        needs = cut.least(o);
      }
      least = std::min(least, needs);
      (needs <= budget ? last : others).push_back(o);
    }
    if (last.empty()) return {{}, least};
    for (auto o : last) cut.permit(o);
    found.phases.push_back(std::move(last));
    left = std::move(others);
  }
  std::reverse(found.phases.begin(), found.phases.end());
  return found;
}

}  // namespace remat::bound
