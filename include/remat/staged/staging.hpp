// SPDX-License-Identifier: Apache-2.0
/// @file
/// The class of staged schedules that a model admits.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::staged {

/// The class of staged schedules that a model admits: restrictions R1 to R4, and extensions.
struct staging {
  /// R1: operations from `backward_start` on are computed once.
  bool backward_once = false;
  /// R2: the operations before `backward_start` form one stage.
  bool forward_in_one_stage = false;
  /// R3: a value is recomputed only in a stage that uses it, or in the last stage if it is a target. An operation joins the stage
  /// before it if it reads nothing repeatable, except outputs of the operation before it.
  bool recompute_where_used = false;
  /// First operation of the backward; only R1 and R2 read it. If empty: `problem::backward_start`, else the operation at which
  /// store-all has its peak.
  std::optional<operation_id> backward_start = {};
  /// Number of empty stages before each stage but the first. Enlarges the class of schedules.
  unsigned extra_stages = 0;
  /// R4: the smallest values stay from their computation until their last possible use. Together they take at most this share of
  /// the budget without bytes that are always on the device, in [0, 1).
  double small_values = 0;
  /// The operations in the order of their first computation, topological. If empty: the order of the problem.
  std::vector<operation_id> order = {};
  /// One more stage at the end, without a block: for targets that are dropped and recomputed. Enlarges the class of schedules.
  bool last_stage = false;
};

/// The operations of `p` in the order in which `s` first computes them, for `staging::order`. Operations that `s` does not
/// compute come last.
/// Complexity: O(operations + steps).
inline std::vector<operation_id> first_computations(const problem& p, const schedule& s) {
  std::vector<operation_id> order;
  std::vector<bool> seen(p.operations().size(), false);
  const auto add = [&](operation_id o) {
    if (!seen.at(o)) order.push_back(o);
    seen[o] = true;
  };
  for (auto o : compute_order(s)) add(o);
  for (operation_id o = 0; o < seen.size(); ++o) add(o);
  return order;
}

/// Refuses a problem that is too large for a model over stages. Such models take gigabytes, and building them takes longer than
/// most searches may last.
/// @param method name of the method, for the message
/// @param p      the problem
/// @throws too_large if needed operations times (values + uses) exceed `max_cells`
/// Complexity: O(values + edges).
inline void require_size(const std::string& method, const problem& p) {
  constexpr std::size_t max_cells = 16'000'000;  // about 60 bytes each
  const auto needed = needed_operations(p);
  std::size_t cells = p.values().size();
  for (auto o : needed) cells += p.operations()[o].inputs.size();
  if (cells > 0 && needed.size() > max_cells / cells)
    throw too_large(method + ": a model of " + std::to_string(needed.size()) + " operations with " + std::to_string(cells) +
                    " values and uses is too large, the product may be " + std::to_string(max_cells) +
                    " at most; use min_cut, hierarchical or automatic");
}

/// Describes the schedules that `r` admits.
inline std::string to_string(const staging& r) {
  std::string text = "staged schedules";
  if (r.extra_stages > 0) text += " with " + std::to_string(r.extra_stages) + " extra stages each";
  if (r.last_stage) text += " with one more at the end";
  if (!r.order.empty()) text += " in another order";
  if (r.backward_once) text += ", backward computed once";
  if (r.forward_in_one_stage) text += ", forward in one stage";
  if (r.recompute_where_used) text += ", values recomputed where used";
  if (r.small_values > 0) text += ", small values held";
  return text;
}

}  // namespace remat::staged
