// SPDX-License-Identifier: Apache-2.0
/// @file
/// The strong alive-interval MILP of staged rematerialization schedules.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/milp/model.hpp>
#include <remat/staged/staged_model.hpp>

namespace remat {

/// The MILP whose solutions are the staged schedules of a problem within a budget.
///
/// Columns, for stage s, operation i, value v, besides R[s,i] and S[s,v] of `staged_model`:
/// - L[s,v,q] in [0,1], continuous: v is still there after the first q of its users u_1 < .. < u_r in stage s. It is constant 1
/// up
///   to the last user in the block. L[s,v,r] stands for S[s+1,v], and L[s,v,0] for R[s,producer] + S[s,v] unless the producer
///   has other outputs, for whose sake alone it may be recomputed.
///
/// Rows:
/// - R[s,i] + S[s,v] <= 1 for each output v of i: recomputing what is held is never useful;
/// - L[s,v,0] <= R[s,producer] + S[s,v], R[s,u_q] <= L[s,v,q-1] and L[s,v,q] <= L[s,v,q-1];
/// - no waste: S[s,v] <= sum_q R[s,u_q] + S[s+1,v]; R[s,i] <= the same, summed over the outputs of i;
/// - memory at each step k: its outputs and workspace, if computed, and every L or S that holds there <= budget.
///
/// Where the block uses v, S[s,v] is 1 - R[s,producer] and no column. Columns that are constant in every solution are not made
/// either: R of an operation that nothing in this stage or later can need, S and L of a value that is not needed any more or
/// cannot be rebuilt while it is needed, or stays anyway (R4; values without bytes).
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020 (stages, R,
/// S); the interval columns replace its indicator of freed values.
class strong_form : public staged_model {
 public:
  static constexpr bool restricts = true;  ///< takes all of `staging`

  /// @param p      the problem; must outlive the form
  /// @param budget bytes, >= what `bounds_without_search` gives
  /// @param rules  the restrictions
  /// @param longest_row memory rows with more entries are split by a running sum
  /// @param stop   polled while the model is built, which takes long for thousands of operations; true leaves it incomplete
  /// @throws bad_option if `rules.turn` is no operation, `rules.small_values` out of range or `rules.order` no topological order
  /// Complexity: O(stages (operations + edges)) columns and rows; memory rows have O(values) entries each, unless split.
  strong_form(const problem& p, bytes_t budget, const staging& rules = {},
              std::size_t longest_row = std::numeric_limits<std::size_t>::max(), const std::function<bool()>& stop = {})
      : staged_model(p, budget, rules), longest_row_(longest_row) {
    if (!make_columns(stop)) return;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (stop && stop()) return;
      make_rows(s);
    }
    build();
  }

 private:
  /// False if `stop` ended it.
  bool make_columns(const std::function<bool()>& stop) {
    const auto n = needed_.size();
    const auto count = stages_.size();
    std::vector<std::vector<bool>> useful(count + 1, std::vector<bool>(n, false));  // recomputing i in stage s serves something
    for (std::size_t s = 0; s < count; ++s)
      for (std::size_t i = stages_[s].first; i-- > 0;)
        for (auto v : at(i).outputs) {
          if (stays_[v]) continue;
          const bool serves = rules_.recompute_where_used
                                  ? used_in_block(s, v) || (p_.is_target(v) && s + 1 == count)
                                  : p_.is_target(v) || (!uses_[v].empty() && uses_[v].back() >= stages_[s].first);
          const auto is_useful = [&](std::size_t j) { return j < stages_[s].first && useful[s][j]; };
          if (repeatable_[i] && (serves || std::any_of(uses_[v].begin(), uses_[v].end(), is_useful))) useful[s][i] = true;
        }
    auto later = useful;  // .. in stage s or a later one
    for (std::size_t s = count; s-- > 0;)
      for (std::size_t i = 0; i < stages_[s].first; ++i) later[s][i] = later[s][i] || later[s + 1][i];

    for (std::size_t s = 0; s <= count; ++s) {
      if (stop && stop()) return false;
      open_stage(s);
      const auto first = s < count ? stages_[s].first : n;
      if (s < count)
        for (std::size_t i = 0; i < stages_[s].second; ++i) {
          if (i >= first)
            R_[s][i].constant = 1;
          else if (useful[s][i])
            R_[s][i] = builder_.binary(at(i).seconds / second_);
        }
      for (value_id v = 0; v < p_.values().size(); ++v) {
        const auto i = producer_[v];
        if (!modelled_[v] || (i != none && i >= first)) continue;
        const auto& uses = uses_[v];
        const bool certain = p_.is_target(v) || (!uses.empty() && uses.back() >= first);
        const bool lasting = i == none || !repeatable_[i];
        if (s == count)
          S_[s][v].constant = p_.is_target(v);
        else if (certain && (lasting || stays_[v]))
          S_[s][v].constant = 1;
        else if (stays_[v])
          S_[s][v].constant = std::any_of(uses.begin(), uses.end(), [&](auto j) { return later[s][j]; });
        else if (used_in_block(s, v))
          S_[s][v] = expression{{}, 1} - R_[s][i];
        else if (certain || std::any_of(uses.begin(), uses.end(), [&](auto j) { return later[s][j]; }))
          S_[s][v] = builder_.binary(0);
      }
    }
    return true;
  }

  bool used_in_block(std::size_t s, value_id v) const {
    const auto [first, last] = stages_[s];
    const auto user = std::lower_bound(uses_[v].begin(), uses_[v].end(), first);
    return user != uses_[v].end() && *user < last;
  }

  void make_rows(std::size_t s) {
    const auto [first, last] = stages_[s];
    const auto& R = R_[s];
    std::vector<expression> live(p_.values().size());                 // level of each value before the current step
    std::vector<std::vector<expression>> levels(p_.values().size());  // before each user of the stage, and after the last
    std::vector<std::vector<std::size_t>> users(p_.values().size());

    std::vector<expression> purpose(last);   // of recomputing each operation
    std::vector<bool> certain(last, false);  // is there one in any case?
    for (value_id v = 0; v < p_.values().size(); ++v) {
      const auto i = producer_[v];
      if (!modelled_[v] || (i != none && i >= last)) continue;
      for (auto j : uses_[v])
        if (j < last && !is_zero(R[j])) users[v].push_back(j);
      const auto& after = S(s + 1, v);
      const auto before = i == none || (stays_[v] && i < first) ? S(s, v) : R[i] + S(s, v);
      auto& level = levels[v];
      const auto others = [&](auto u) { return u != v && !stays_[u]; };
      const bool byproduct =  // may be recomputed without being used
          i != none && !constant(R[i]) && std::any_of(at(i).outputs.begin(), at(i).outputs.end(), others);
      if (!byproduct && !users[v].empty()) level.push_back(before);
      for (std::size_t q = level.size(); q < users[v].size(); ++q) {
        if (users[v].back() >= first || is_one(after) || stays_[v]) {
          level.push_back({{}, 1});
          continue;
        }
        derived_.push_back({builder_.columns(), {after}});
        for (std::size_t later = q; later < users[v].size(); ++later) derived_.back().parts.push_back(R[users[v][later]]);
        level.push_back(builder_.column(0, 0, 1));
      }
      level.push_back(after);
      at_most(level.front(), before);
      for (std::size_t q = 0; q < users[v].size(); ++q) {
        at_most(R[users[v][q]], level[q]);
        at_most(level[q + 1], level[q]);
      }

      live[v] = i == none ? before : S(s, v);
      if (stays_[v]) continue;
      if (i != none && !constant(R[i])) at_most(before, {{}, 1});
      const bool block_use = !users[v].empty() && users[v].back() >= first;
      expression use;
      for (auto j : users[v]) use.add(R[j]);
      if (!block_use && !is_one(after)) at_most(S(s, v), use + after);
      if (i != none) {
        const bool at_end = p_.is_target(v) && s + 1 == stages_.size();
        if (!rules_.recompute_where_used || at_end) use.add(after);
        purpose[i].add(use);
        certain[i] = certain[i] || block_use || at_end;
      }
    }
    for (std::size_t i = 0; i < last; ++i)
      if (!constant(R[i]) && !certain[i]) at_most(R[i], purpose[i]);
    make_memory_rows(s, live, levels);
  }

  /// @param live   level of each value when the stage starts
  /// @param levels of each value: before its first user, .., after its last
  void make_memory_rows(std::size_t s, std::vector<expression>& live, const std::vector<std::vector<expression>>& levels) {
    expression row;  // what is live before the current step
    std::vector<std::size_t> used(live.size(), 0);
    for (value_id v = 0; v < live.size(); ++v)
      if (modelled_[v] && !levels[v].empty()) row.add(live[v], size(v));
    const auto change = [&](value_id v, const expression& level) {
      row.add(live[v], -size(v)).add(level, size(v));
      live[v] = level;
    };
    for (std::size_t k = 0; k < stages_[s].second; ++k) {
      if (is_zero(R_[s][k])) continue;
      for (auto v : at(k).outputs) change(v, stays_[v] && is_one(S(s, v)) ? S(s, v) : R_[s][k] + S(s, v));
      compact(row);
      if (row.terms.size() > longest_row_) row = running_sum(row);
      within_budget(row + static_cast<double>(at(k).workspace) / byte_ * R_[s][k]);
      for (auto v : at(k).outputs) change(v, levels[v].front());
      for (auto v : at(k).inputs)
        if (modelled_[v]) change(v, levels[v][++used[v]]);
    }
  }

  std::size_t longest_row_;
};

}  // namespace remat
