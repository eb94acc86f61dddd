// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputation alone, within a budget that grows and shrinks over time by the bytes that copies have moved.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <remat/copies/order_with_copies.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies {

/// A problem without copies, with another order of operations and with a budget that varies over time. The budget of `problem()`
/// is constant. While the given budget is smaller, a value named *ballast* fills the difference. Operations of zero seconds take
/// and release the ballast. An order of `problem()` without them is an order of the given problem, and the other way round.
///
/// An operation that the given order lists earlier than `p` may be made to run once. Without copies, keeping the outputs of an
/// operation never pays if the operation can run late as well. With copies it may pay: the copies have more time before the peak,
/// and the operation may run while the device waits.
/// @code
/// const std::vector<remat::bytes_t> budgets = {8 << 20, 12 << 20, 8 << 20};
/// const remat::copies::virtual_problem q(p, remat::needed_operations(p), budgets);
/// const auto r = remat::solve(q.problem(), q.budget(), remat::min_cut());  // with 12 MiB in the middle third of the time
/// const auto order = q.unwrap(remat::compute_order(r.schedule)).order;
/// @endcode
class virtual_problem {
 public:
  /// An order without the ballast operations. `positions` tells where each of its computations, and its end, were in the order
  /// with ballast.
  struct unwrapped {
    std::vector<operation_id> order;
    std::vector<std::size_t> positions;
  };

  /// @param p       a plain problem, without copies
  /// @param order   all operations that a target needs, once each, in a topological order
  /// @param budgets bytes, >= 0, for equal parts of the time; at least one. They rise first, then fall
  /// @param early_once true: an operation runs once if `order` has it before an operation that `p` lists before it
  /// Complexity: O(values + edges + budgets).
  virtual_problem(const remat::problem& p, std::span<const operation_id> order, std::span<const bytes_t> budgets,
                  bool early_once = false)
      : virtual_operation_(p.operations().size(), none),
        takes_(p.operations().size(), none),
        releases_(p.operations().size(), none) {
    double total = 0;
    for (auto o : order) total += p.operations()[o].seconds;
    auto values = p.values();
    auto targets = p.targets();
    std::vector<operation> operations;
    const auto add = [&](operation op, operation_id given_operation) {
      operations.push_back(std::move(op));
      given_operation_.push_back(given_operation);
      return static_cast<operation_id>(operations.size() - 1);
    };
    const auto add_value = [&](const char* name, bytes_t bytes, bool target) {
      values.push_back({.name = name, .bytes = bytes});
      const auto v = static_cast<value_id>(values.size() - 1);
      if (target) targets.push_back(v);
      return v;
    };
    std::vector<bool> runs_early(p.operations().size(), false), computed(values.size(), false);
    for (auto o = order.rbegin(), first = o; o != order.rend(); ++o)
      if (*first < *o)
        runs_early[*o] = true;
      else
        first = o;
    for (auto o : order)
      for (auto v : p.operations()[o].outputs) computed[v] = true;
    for (value_id v = 0; v < values.size(); ++v)
      if (!p.is_source(v) && !computed[v]) values[v].bytes = 0;  // nothing makes it here: it is a source
    bytes_t level = budget_ = budgets.front();
    operation_id before = none;  // the last operation with an output
    double begin = 0;
    for (auto o : order) {
      auto op = p.operations()[o];
      const auto interval = total > 0 ? static_cast<std::size_t>(begin / total * static_cast<double>(budgets.size())) : 0;
      begin += op.seconds;
      op.once = op.once || (early_once && runs_early[o]);
      const auto next = budgets[std::min(interval, budgets.size() - 1)];
      if (next > level && before != none) {
        const auto ballast = add_value("ballast", next - level, false), done = add_value("released", 0, true);
        releases_[before] = add(
            {.name = "release", .inputs = {ballast, p.operations()[before].outputs[0]}, .outputs = {done}, .once = true}, none);
        level = budget_ = next;
      } else if (next < level) {
        const auto ballast = add_value("ballast", level - next, true), done = add_value("taken", 0, false);
        takes_[o] = add({.name = "take", .inputs = {}, .outputs = {ballast, done}, .once = true}, none);
        op.inputs.push_back(done);
        level = next;
      }
      if (!op.outputs.empty()) before = o;
      virtual_operation_[o] = add(std::move(op), o);
    }
    std::optional<operation_id> backward;
    if (p.backward_start() && virtual_operation_[*p.backward_start()] != none) backward = virtual_operation_[*p.backward_start()];
    problem_ = {p.name(), std::move(values), std::move(operations), std::move(targets), std::nullopt, backward};
  }

  const remat::problem& problem() const { return problem_; }
  bytes_t budget() const { return budget_; }  ///< of `problem()`, bytes: the largest that is reached

  /// Adds the ballast operations to an order of the given problem. Complexity: O(order).
  std::vector<operation_id> wrap(std::span<const operation_id> order) const {
    std::vector<bool> has_run(virtual_operation_.size(), false);
    std::vector<operation_id> list;
    for (auto o : order) {
      if (!has_run[o] && takes_[o] != none) list.push_back(takes_[o]);
      list.push_back(virtual_operation_[o]);
      if (!has_run[o] && releases_[o] != none) list.push_back(releases_[o]);
      has_run[o] = true;
    }
    return list;
  }
  /// Removes the ballast operations from an order of `problem()`. Complexity: O(order).
  unwrapped unwrap(std::span<const operation_id> order) const {
    unwrapped list;
    for (std::size_t k = 0; k < order.size(); ++k)
      if (given_operation_[order[k]] != none) {
        list.order.push_back(given_operation_[order[k]]);
        list.positions.push_back(k);
      }
    list.positions.push_back(order.size());
    return list;
  }

 private:
  remat::problem problem_;
  bytes_t budget_ = 0;
  std::vector<operation_id> virtual_operation_, takes_,
      releases_;                               // of each operation of the given problem; `none` if there is none
  std::vector<operation_id> given_operation_;  // of each operation of `problem_`; `none` for ballast operations
};

/// The needed operations in an order in which `tau` runs as late as possible, so that copies have more time before it. An
/// operation that is neither an ancestor nor a descendant of `tau` runs right after its operands.
/// @param p   the problem
/// @param tau an operation that a target needs
/// Complexity: O(values + edges + operations log(operations)).
inline std::vector<operation_id> early_order(const problem& p, operation_id tau) {
  auto order = needed_operations(p);
  std::vector<operation_id> stands_behind(p.operations().size());  // the operation behind which it stands
  std::vector<bool> depends_on_tau(stands_behind.size(), false);
  for (auto o : order) {
    const auto& inputs = p.operations()[o].inputs;
    const auto computed = [&](value_id v) { return p.producer(v) != none; };
    depends_on_tau[o] = o == tau || std::any_of(inputs.begin(), inputs.end(),
                                                [&](auto v) { return computed(v) && depends_on_tau[p.producer(v)]; });
    stands_behind[o] = o;
    if (o <= tau || depends_on_tau[o] || std::none_of(inputs.begin(), inputs.end(), computed)) continue;
    stands_behind[o] = 0;
    for (auto v : inputs)
      if (computed(v)) stands_behind[o] = std::max(stands_behind[o], stands_behind[p.producer(v)]);
  }
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return stands_behind[a] < stands_behind[b]; });
  return order;
}

/// Changes an order so that the last copy to the host has more time: operations that the copied value does not depend on run
/// after the operation that makes the value.
/// @param p     the problem
/// @param order a valid order of computations
/// @param laid  the copies laid over `order`
/// @return the order; empty if the step does not end with a wait for a copy to the host, or if no operation can move
/// Complexity: O(edges computed).
inline std::vector<operation_id> early_end(const problem& p, const std::vector<operation_id>& order,
                                           const order_with_copies& laid) {
  if (laid.to_host.empty() || laid.waits.empty()) return {};
  if (laid.waits.back().arrival || laid.waits.back().position != order.size()) return {};
  const auto duration = [](const order_with_copies::transfer& x) { return x.end - x.begin; };
  auto last = laid.to_host.end() - 1;
  for (auto x = last; x != laid.to_host.begin() && (x - 1)->end >= x->begin * (1 - 1e-9); --x)
    if (duration(*(x - 1)) > duration(*last)) last = x - 1;
  const auto last_run = std::find(order.rbegin(), order.rend(), p.producer(last->value));
  if (last_run == order.rend()) return {};
  const auto end = static_cast<std::size_t>(order.rend() - last_run);
  std::vector<bool> wanted(p.values().size(), false);
  std::vector<operation_id> moved, kept;  // from the end to the start
  auto remaining_wait = laid.waits.back().seconds;
  for (auto j = order.size(); j-- > 0;) {
    const auto& op = p.operations()[order[j]];
    const bool needed = std::any_of(op.outputs.begin(), op.outputs.end(), [&](auto v) { return wanted[v]; });
    if (j + 1 < end && !needed && remaining_wait > 0) {
      moved.push_back(order[j]);
      remaining_wait -= op.seconds;
      continue;
    }
    if (j + 1 == end) moved.insert(moved.begin(), kept.begin(), kept.end()), kept.clear();
    kept.push_back(order[j]);
    for (auto v : op.outputs) wanted[v] = false;
    for (auto v : op.inputs) wanted[v] = true;
  }
  if (moved.size() == order.size() - end) return {};
  kept.insert(kept.begin(), moved.begin(), moved.end());
  return {kept.rbegin(), kept.rend()};
}

}  // namespace remat::copies
