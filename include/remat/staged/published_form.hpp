// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkmate's published MILP of staged rematerialization schedules, for comparison with `strong_form`. Needs Eigen.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>

#include <remat/core/problem.hpp>
#include <remat/milp/model.hpp>
#include <remat/staged/staged_model.hpp>

namespace remat::staged {

/// Checkmate's MILP. It has the schedules and the optimum of an unrestricted `strong_form`, but a far weaker relaxation.
///
/// Columns, for stage t, operation k, value v: R[t,k] and S[t,v] as in `staged_model`; FREE[t,v,k] in {0,1}: stage t frees v
/// right after k, which reads or yields v; U[t,k]: memory while k is computed. Rows:
/// - S[t+1,v] <= S[t,v] + R[t,producer(v)]; R[t,k] <= R[t,producer(v)] + S[t,v] for every input v of k;
/// - FREE[t,v,k] = 1 exactly if h = 0, with h = (1 - R[t,k]) + S[t+1,v] + sum of R[t,j] over the readers j > k of v:
///   1 - FREE <= h <= kappa (1 - FREE), kappa = the largest h;
/// - U[t,k+1] = U[t,k] + bytes of the outputs of k + 1, if computed - bytes of the values freed after k.
///
/// In the paper, operations have one output and no workspace, and a value is freed after a reader. Here S and FREE are per value,
/// and R per operation. A value may also be freed after its producer, which may run for the sake of another output. Workspace is
/// added to U[t,k] where the budget bounds it. Targets are on the device at the end, and values that cannot be recomputed at the
/// start. Columns that the stages fix, such as R above the diagonal, are constants.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
class published_form : public staged_model {
 public:
  static constexpr bool restricts = false;  ///< of `staging`, it takes only members that are no restrictions

  /// @param p      the problem; must outlive the form
  /// @param budget bytes, >= the budget of `bounds_without_search`
  /// @param rules  members that are no restrictions, such as the order and the extra stages
  /// @param stop   polled while the model is built; true leaves it incomplete
  /// @throws bad_option if `rules` has a restriction (R1 to R4), or as `stages` does
  /// Complexity: O(stages (operations + edges)) columns, rows and entries.
  published_form(const problem& p, bytes_t budget, const staging& rules = {},
                 std::size_t = std::numeric_limits<std::size_t>::max(), const std::function<bool()>& stop = {})
      : staged_model(plain(p, budget, rules), budget) {
    for (std::size_t t = 0; t <= frame().size(); ++t) {
      if (stop && stop()) return;
      make_columns(t);
    }
    for (std::size_t t = 0; t < frame().size(); ++t) {
      if (stop && stop()) return;
      make_rows(t);
    }
    build();
  }

 private:
  /// @throws bad_option if `rules` has a restriction, or as `stages` does
  static stages plain(const problem& p, bytes_t budget, const staging& rules) {
    if (rules.backward_once || rules.forward_in_one_stage || rules.recompute_where_used || rules.small_values > 0)
      throw bad_option("staging: the published form has no restrictions");
    stages s(p, budget, rules);
    s.stays.assign(p.values().size(), false);  // values without bytes are treated like others
    return s;
  }

  void make_columns(std::size_t t) {
    const auto first = t < frame().size() ? frame().blocks[t].first : frame().needed.size();
    if (t < frame().size())
      for (std::size_t k = 0; k < frame().blocks[t].second; ++k) {
        if (k >= first)
          R(t, k).constant = 1;
        else if (frame().repeatable[k])
          R(t, k) = rows().binary(frame().at(k).seconds / frame().second);
      }
    for (value_id v = 0; v < frame().p->values().size(); ++v) {
      const auto k = frame().producer[v];
      if (!frame().modelled[v] || (k != stages::nothing && k >= first)) continue;
      if (t == frame().size())
        S(t, v).constant = frame().p->is_target(v);
      else if (t == 0)
        S(t, v).constant = 1;  // a source
      else if (frame().p->is_target(v) || !frame().uses[v].empty())
        S(t, v) = rows().binary(0);
    }
  }

  void make_rows(std::size_t t) {
    const auto last = frame().blocks[t].second;
    const auto there = [&](value_id v) {
      return frame().producer[v] == stages::nothing ? S(t, v) : R(t, frame().producer[v]) + S(t, v);
    };
    const auto exists = [&](value_id v) {
      return frame().modelled[v] && (frame().producer[v] == stages::nothing || frame().producer[v] < last);
    };
    expression memory;
    for (value_id v = 0; v < frame().p->values().size(); ++v)
      if (exists(v)) {
        rows().at_most(S(t + 1, v), there(v));
        memory.add(S(t, v), frame().size(v));
      }
    for (std::size_t k = 0; k < last; ++k) {
      const auto& run = R(t, k);
      for (auto v : frame().at(k).outputs) memory.add(run, frame().size(v));
      memory.compact();
      memory = running_sum(memory);
      within_budget(memory + static_cast<double>(frame().at(k).workspace) / frame().byte * run);
      for (auto v : frame().at(k).inputs)
        if (frame().modelled[v]) {
          rows().at_most(run, there(v));
          release(t, v, k, memory);
        }
      for (auto v : frame().at(k).outputs) release(t, v, k, memory);
    }
  }

  /// Makes FREE[t,v,k], and subtracts the bytes that it frees from `memory`.
  void release(std::size_t t, value_id v, std::size_t k, expression& memory) {
    if (R(t, k).is_zero()) return;
    auto hindrances = expression{{}, 1} - R(t, k) + S(t + 1, v);
    for (auto j : frame().uses[v])
      if (j > k && j < frame().blocks[t].second) hindrances.add(R(t, j));
    hindrances.compact();
    double lowest = hindrances.constant, highest = hindrances.constant;
    for (const auto& [column, factor] : hindrances.terms) (factor < 0 ? lowest : highest) += factor;
    if (lowest > 0.5) return;
    const auto may_go = expression{{}, 1} - hindrances;
    next_is_largest_of({may_go});
    const auto free = rows().binary(0);
    rows().at_least(free - may_go, 0);
    rows().at_most(hindrances + highest * free, highest);
    memory.add(free, -frame().size(v));
  }
};

}  // namespace remat::staged
