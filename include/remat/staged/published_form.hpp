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
      : staged_model(unrestricted_stages(p, budget, rules), budget) {
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
  static stages unrestricted_stages(const problem& p, bytes_t budget, const staging& rules) {
    if (rules.backward_once || rules.forward_in_one_stage || rules.recompute_where_used || rules.small_values > 0)
      throw bad_option("staging: the published form has no restrictions");
    stages s(p, budget, rules);
    s.kept_throughout.assign(p.values().size(), false);  // values without bytes are treated like others
    return s;
  }

  void make_columns(std::size_t t) {
    const auto first = t < frame().size() ? frame().blocks[t].first : frame().needed.size();
    if (t < frame().size())
      for (std::size_t k = 0; k < frame().blocks[t].second; ++k) {
        if (k >= first)
          R(t, k).constant = 1;
        else if (frame().repeatable[k])
          R(t, k) = rows().binary(frame().at(k).seconds / frame().seconds_per_unit);
      }
    for (value_id v = 0; v < frame().p->values().size(); ++v) {
      const auto k = frame().producer[v];
      if (!frame().modelled[v] || (k != stages::no_position && k >= first)) continue;
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
    const auto available = [&](value_id v) {
      return frame().producer[v] == stages::no_position ? S(t, v) : R(t, frame().producer[v]) + S(t, v);
    };
    const auto may_exist = [&](value_id v) {
      return frame().modelled[v] && (frame().producer[v] == stages::no_position || frame().producer[v] < last);
    };
    expression memory;
    for (value_id v = 0; v < frame().p->values().size(); ++v)
      if (may_exist(v)) {
        rows().at_most(S(t + 1, v), available(v));
        memory.add(S(t, v), frame().size(v));
      }
    for (std::size_t k = 0; k < last; ++k) {
      const auto& run = R(t, k);
      for (auto v : frame().at(k).outputs) memory.add(run, frame().size(v));
      memory.compact();
      memory = running_sum(memory);
      within_budget(memory + static_cast<double>(frame().at(k).workspace) / frame().bytes_per_unit * run);
      for (auto v : frame().at(k).inputs)
        if (frame().modelled[v]) {
          rows().at_most(run, available(v));
          add_free_column(t, v, k, memory);
        }
      for (auto v : frame().at(k).outputs) add_free_column(t, v, k, memory);
    }
  }

  /// Makes FREE[t,v,k], and subtracts the bytes that it frees from `memory`.
  void add_free_column(std::size_t t, value_id v, std::size_t k, expression& memory) {
    if (R(t, k).is_zero()) return;
    auto reasons_to_keep = expression{{}, 1} - R(t, k) + S(t + 1, v);
    for (auto j : frame().uses[v])
      if (j > k && j < frame().blocks[t].second) reasons_to_keep.add(R(t, j));
    reasons_to_keep.compact();
    double min_reasons = reasons_to_keep.constant, max_reasons = reasons_to_keep.constant;
    for (const auto& [column, factor] : reasons_to_keep.terms) (factor < 0 ? min_reasons : max_reasons) += factor;
    if (min_reasons > 0.5) return;
    const auto may_be_freed = expression{{}, 1} - reasons_to_keep;
    next_is_largest_of({may_be_freed});
    const auto free = rows().binary(0);
    rows().at_least(free - may_be_freed, 0);
    rows().at_most(reasons_to_keep + max_reasons * free, max_reasons);
    memory.add(free, -frame().size(v));
  }
};

}  // namespace remat::staged
