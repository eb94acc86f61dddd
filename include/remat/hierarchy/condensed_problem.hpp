// SPDX-License-Identifier: Apache-2.0
/// @file
/// The whole problem with each part condensed to two operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/topological_order.hpp>
#include <remat/hierarchy/part_problem.hpp>

namespace remat::hierarchy {

/// One operation of the condensed problem: a half of a part in one of its options, or an operation that is in no part.
struct condensed_run {
  part_id part;                          ///< the part, or `none`
  bool backward;                         ///< which half of the part
  std::vector<operation_id> operations;  ///< of the whole problem, in the order of their runs
  std::vector<value_id> reads;           ///< values from outside the part; for a backward also `part_option::kept`
  std::vector<value_id> makes;           ///< values that leave the part
  double seconds = 0;
  bytes_t workspace = 0;
  bool once = false;  ///< true if one of the operations is once-only

  /// @param p           the whole problem
  /// @param index       index of the partition
  /// @param part_number the part, or `none`
  /// @param is_backward which half of the part
  /// @param list        the operations, in the order of their runs
  /// @param o           the option, or nothing for an operation in no part
  /// Complexity: O(edges log edges).
  condensed_run(const problem& p, const part_index& index, part_id part_number, bool is_backward, std::vector<operation_id> list,
                const part_option* o)
      : part(part_number), backward(is_backward), operations(std::move(list)) {
    std::vector<value_id> outputs;
    const auto add_output = [&](value_id v) { outputs.insert(std::lower_bound(outputs.begin(), outputs.end(), v), v); };
    const auto is_output = [&](value_id v) { return std::binary_search(outputs.begin(), outputs.end(), v); };
    const auto own = [&](value_id v) { return part != none && !p.is_source(v) && index.part(p.producer(v)) == part; };
    for (auto x : operations) {
      const auto& op = p.operations()[x];
      seconds += op.seconds;
      once = once || op.once;
      for (auto v : op.inputs)
        if (!own(v) && !is_output(v)) reads.push_back(v);
      for (auto v : op.outputs) {
        if (is_output(v)) continue;
        add_output(v);
        if (part == none || index.leaves(v)) makes.push_back(v);
      }
    }
    if (o) {
      workspace = backward ? o->backward_workspace : o->forward_workspace;
      if (backward) reads.insert(reads.end(), o->kept.begin(), o->kept.end());
    } else {
      workspace = p.operations()[this->operations[0]].workspace;
    }
    std::sort(reads.begin(), reads.end());
    reads.erase(std::unique(reads.begin(), reads.end()), reads.end());
  }
};

/// A problem in which every part has one operation for its forward and one for its backward, each in a chosen option.
///
/// The forward operation reads the values that its order reads from outside. It yields the values that leave the part and, as
/// one value, the bytes that it saves for the backward. So any schedule of the condensed problem expands to a schedule of the
/// whole problem: the orders replace the operations. The expanded schedule takes no more time. Its peak is no larger,
/// because the other memory of a part is in the workspace of its operations.
class condensed_problem {
 public:
  /// @param p      the whole problem
  /// @param index  index of the partition
  /// @param chosen an option for each part
  /// Complexity: O(values + edges log edges), where the edges include the recomputations in the options.
  condensed_problem(const problem& p, const part_index& index, const std::vector<const part_option*>& chosen) {
    std::vector<operation_id> run_of(p.values().size(), none);  // the run that yields a value
    const auto add = [&](condensed_run x) {
      std::erase_if(x.makes, [&](value_id v) { return run_of[v] != none; });
      for (auto v : x.makes) run_of[v] = static_cast<operation_id>(runs_.size());
      runs_.push_back(std::move(x));
    };
    for (part_id i = 0; i < chosen.size(); ++i)
      for (const bool backward : {false, true})
        if (const auto& list = backward ? chosen[i]->backward : chosen[i]->forward; !list.empty())
          add({p, index, i, backward, list, chosen[i]});
    for (auto o : needed_operations(p))
      if (index.part(o) == none) add({p, index, none, false, {o}, nullptr});
    build(p, chosen, run_of);
  }

  /// True if the parts have an order. Otherwise `why_impossible()` says why not.
  bool possible() const { return why_impossible_.empty(); }
  const std::string& why_impossible() const { return why_impossible_; }
  const problem& condensed() const { return condensed_; }
  /// The run behind each operation of `condensed()`.
  const std::vector<condensed_run>& runs() const { return runs_; }

  /// Expands an order of the condensed problem to an order of the whole problem.
  /// Complexity: O(values + edges executed).
  std::vector<operation_id> expand(const problem& p, const std::vector<operation_id>& order) const {
    std::vector<operation_id> all;
    for (auto u : order) all.insert(all.end(), runs_[u].operations.begin(), runs_[u].operations.end());
    return prune_order(p, all);
  }

 private:
  void build(const problem& p, const std::vector<const part_option*>& chosen, const std::vector<operation_id>& run_of) {
    // A topological order of the runs that stays close to the order of the problem.
    std::vector<std::vector<std::size_t>> inputs(runs_.size());
    std::vector<operation_id> forward_of(chosen.size(), none);
    const auto position = [&](std::size_t u) {  // position of a run: a backward may begin with recomputations of its forward
      const auto [first, last] = std::minmax_element(runs_[u].operations.begin(), runs_[u].operations.end());
      return runs_[u].backward ? *last : *first;
    };
    for (operation_id u = 0; u < runs_.size(); ++u) {
      const auto& x = runs_[u];
      if (x.part != none && !x.backward) forward_of[x.part] = u;
      for (auto v : x.reads)
        if (!p.is_source(v)) inputs[u].push_back(run_of[v]);
      if (x.backward && forward_of[x.part] != none) inputs[u].push_back(forward_of[x.part]);
    }
    const auto order = topological_order(inputs, position);
    if (order.size() < runs_.size()) {
      std::vector<bool> ordered(runs_.size(), false);
      for (auto u : order) ordered[u] = true;
      const auto u = static_cast<std::size_t>(std::find(ordered.begin(), ordered.end(), false) - ordered.begin());
      const auto& x = runs_[u];
      why_impossible_ = "partition: no order of the parts is possible; the " + std::string(x.backward ? "backward" : "forward") +
                        (x.part == none ? " of operation " + std::to_string(position(u)) : " of part " + std::to_string(x.part)) +
                        " depends on itself through others";
      return;
    }

    std::vector<value> values;
    std::vector<operation> operations;
    std::vector<condensed_run> sorted;
    std::vector<value_id> local(p.values().size(), none), saved(chosen.size(), none);
    const auto add = [&](value_id v) {
      if (local[v] == none) {
        local[v] = static_cast<value_id>(values.size());
        values.push_back({"", p.values()[v].bytes, p.values()[v].held});
      }
      return local[v];
    };
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.is_source(v)) add(v);
    for (auto u : order) {
      const auto& x = runs_[u];
      operation op{"", {}, {}, x.seconds, x.workspace, x.once};
      for (auto v : x.reads) op.inputs.push_back(add(v));
      for (auto v : x.makes) op.outputs.push_back(add(v));
      if (x.part != none && chosen[x.part]->saved > 0) {
        auto& s = saved[x.part];
        if (x.backward) {
          op.inputs.push_back(s);
        } else {
          op.outputs.push_back(s = static_cast<value_id>(values.size()));
          values.push_back({"", chosen[x.part]->saved, false});
        }
      }
      operations.push_back(std::move(op));
      sorted.push_back(x);
    }
    runs_ = std::move(sorted);
    std::vector<value_id> targets;
    for (auto v : p.targets()) targets.push_back(add(v));
    condensed_ = problem("condensed", std::move(values), std::move(operations), std::move(targets));
  }

  problem condensed_;
  std::vector<condensed_run> runs_;
  std::string why_impossible_;
};

}  // namespace remat::hierarchy
