// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recursive checkpoints: at the middle of the forward, at the middle of the second half, and so on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/order/replay.hpp>

namespace remat::order {

/// Makes an order by recursive bisection. It keeps the values that cross the middle of the forward, then those that cross the
/// middle of the second half, and so on. The last `leaf` operations of the forward are kept whole. The backward recomputes from
/// the last checkpoint, with checkpoints at the middles of the recomputed run.
///
/// So O(log(operations)) sets of crossing values are on the device at a time, and an operation runs O(log(operations)) times.
/// The method takes graphs of any shape. It is good if few values cross most positions of the forward.
/// @param p              the problem
/// @param needed         `needed_operations(p)`
/// @param backward_start position in `needed` of the first operation of the backward
/// @param leaf           operations that are kept whole, >= 1
/// @param limit          gives up after that many computations
/// @param stop           polled now and then; true gives up
/// @return the order, or nothing if it gave up or a once-only operation would have to run again
/// Complexity: O(operations log(operations / leaf)) computations and their edges.
///
/// Reference: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016), section 4.4.
inline std::optional<std::vector<operation_id>> recursive_checkpoints(const problem& p, const std::vector<operation_id>& needed,
                                                                      std::size_t backward_start, std::size_t leaf,
                                                                      std::size_t limit, const std::function<bool()>& stop = {}) {
  const auto& ops = p.operations();
  const operation_id end = backward_start < needed.size() ? needed[backward_start] : operation_id(ops.size());
  const auto read_within = [&](value_id v, operation_id first, operation_id last) {
    const auto readers = p.consumers(v);
    const auto at = std::lower_bound(readers.begin(), readers.end(), first);
    return at != readers.end() && *at <= last;
  };
  order_builder builder(p);
  // Forgets the outputs of `run` (operations of the forward), except those of its last `leaf` and those that cross its middles.
  const auto keep_middles = [&](const std::vector<operation_id>& run) {
    const auto whole = run.size() - std::min(leaf, run.size());
    auto middle = whole / 2;  // run[middle] is the first operation after the next checkpoint
    for (std::size_t k = 0; k < whole; ++k) {
      if (k >= middle) middle += std::max<std::size_t>(1, (whole - middle) / 2);
      for (auto v : ops[run[k]].outputs)
        if (!read_within(v, run[std::min(middle, run.size() - 1)], run.back())) builder.drop(v);
    }
  };
  std::vector<operation_id> forward_run;
  for (std::size_t k = 0; k < needed.size(); ++k) {
    if (builder.order().size() > limit || (k % 64 == 0 && stop && stop())) return std::nullopt;
    const auto from = builder.order().size();
    if (!builder.run(needed[k])) return std::nullopt;
    if (k + 1 < backward_start) continue;
    forward_run.clear();
    for (auto i = k + 1 == backward_start ? 0 : from; i < builder.order().size(); ++i)
      if (builder.order()[i] < end) forward_run.push_back(builder.order()[i]);
    if (!forward_run.empty()) keep_middles(forward_run);
  }
  return builder.finish();
}

}  // namespace remat::order
