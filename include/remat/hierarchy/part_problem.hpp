// SPDX-License-Identifier: Apache-2.0
/// @file
/// A part of a problem as a problem of its own, with the costs of its options: the basis of hierarchical planning.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/partition.hpp>

namespace remat::hierarchy {

/// A way to run a part, in operations and values of the whole problem.
struct part_option {
  std::vector<operation_id> forward, backward;  ///< orders of computations; `backward` may recompute operations of `forward`
  std::vector<value_id> kept;                   ///< values that leave `forward` and that `backward` reads
  double seconds = 0;                           ///< of both halves
  bytes_t saved = 0;                            ///< values made by `forward` for `backward` only
  bytes_t forward_workspace = 0;                ///< bytes besides inputs, outputs and `saved`
  bytes_t backward_workspace = 0;               ///< bytes besides inputs, outputs and `carried`
  bytes_t backward_transient = 0;  ///< bytes besides `carried` and inputs; below 0 if some of these bytes are not needed
  bytes_t carried = 0;             ///< `saved` and the bytes of `kept`
  bytes_t needs() const { return carried + std::max(forward_workspace, backward_workspace); }
};

/// The options of a part.
struct part_options {
  std::vector<part_option> list;  ///< at least one
  part_option checkpoint;         ///< the forward that saves nothing; no backward
};

/// The part of every operation, and the values that leave their part.
class part_index {
 public:
  /// @throws bad_option naming the part and the operation if an operation does not exist or is listed twice
  part_index(const problem& p, const structure::partition& parts)
      : part_(p.operations().size(), none), leaves_(p.values().size(), false) {
    const auto add = [&](operation_id o, part_id i) {
      const auto where = "partition: part " + std::to_string(i) + ": ";
      if (o >= part_.size()) throw bad_option(where + "no operation " + std::to_string(o));
      if (part_[o] != none)
        throw bad_option(where + "operation " + std::to_string(o) + " is in part " + std::to_string(part_[o]) + " already");
      part_[o] = i;
    };
    for (part_id i = 0; i < parts.size(); ++i) {
      for (auto o : parts[i].forward) add(o, i);
      for (auto o : parts[i].backward) add(o, i);
    }
    for (auto o : needed_operations(p))
      for (auto v : p.operations()[o].inputs)
        if (!p.is_source(v) && part_[p.producer(v)] != part_[o]) leaves_[v] = true;
    for (auto v : p.targets()) leaves_[v] = true;
  }

  /// The part of an operation, or `none`.
  part_id part(operation_id o) const { return part_[o]; }
  /// True if another part reads `v`, or `v` is a target.
  bool leaves(value_id v) const { return leaves_[v]; }

 private:
  std::vector<part_id> part_;
  std::vector<bool> leaves_;
};

/// A part as a problem of its own. Between forward and backward stands the *boundary*, a once-only operation. It reads the
/// values that leave the forward and yields the values that arrive for the backward. A workspace of the boundary bounds the
/// bytes saved. Values from outside that exist before the forward have no size here: the whole problem counts them.
class part_problem {
 public:
  /// @param p     the whole problem
  /// @param index index of the partition
  /// @param piece the part, not empty
  part_problem(const problem& p, const part_index& index, const structure::part& piece)
      : p_(&p), index_(&index), part_(index.part(piece.forward.empty() ? piece.backward.at(0) : piece.forward[0])) {
    std::map<value_id, value_id> local;
    const auto contains = [](const std::vector<operation_id>& list, operation_id o) {
      return std::binary_search(list.begin(), list.end(), o);
    };
    const auto made_here = [&](value_id v) {
      return !p.is_source(v) && (contains(piece.forward, p.producer(v)) || contains(piece.backward, p.producer(v)));
    };
    const auto add_value = [&](value_id v, bool counted) {
      const auto [entry, added] = local.emplace(v, static_cast<value_id>(values_.size()));
      if (added) {
        values_.push_back({"", counted ? p.values()[v].bytes : 0, !counted});
        original_value_.push_back(v);
      }
      return entry->second;
    };
    const auto add_operation = [&](operation_id o) {
      const auto& op = p.operations()[o];
      operation copy{"", {}, {}, op.seconds, op.workspace, op.once, op.kind};
      for (auto v : op.inputs) copy.inputs.push_back(add_value(v, made_here(v)));
      for (auto v : op.outputs) copy.outputs.push_back(add_value(v, true));
      operations_.push_back(std::move(copy));
      original_operation_.push_back(o);
    };
    for (auto o : piece.forward) add_operation(o);
    boundary_ = static_cast<operation_id>(operations_.size());
    operation boundary;
    boundary.once = true;
    for (auto o : piece.forward)
      for (auto v : p.operations()[o].outputs)
        if (index.leaves(v)) {
          boundary.inputs.push_back(local.at(v));
          leaving_ += p.values()[v].bytes;
        }
    backward_begin_ = piece.backward.empty() ? operation_id() : piece.backward.front();
    // A value that the backward reads from outside may depend on the forward, unless it was made before the forward.
    const auto first = piece.forward.empty() ? operation_id() : piece.forward.front();
    for (auto o : piece.backward)
      for (auto v : p.operations()[o].inputs)
        if (!p.is_source(v) && !made_here(v) && p.producer(v) > first && !local.contains(v) && !is_read_elsewhere(v)) {
          boundary.outputs.push_back(add_value(v, true));
          arriving_ += p.values()[v].bytes;
        }
    boundary.outputs.push_back(static_cast<value_id>(values_.size()));
    targets_.push_back(boundary.outputs.back());
    values_.push_back({"boundary", 0, false});
    original_value_.push_back(none);
    operations_.push_back(std::move(boundary));
    original_operation_.push_back(none);
    for (auto o : piece.backward) {
      add_operation(o);
      for (auto v : p.operations()[o].outputs)
        if (index.leaves(v)) targets_.push_back(local.at(v));
    }
    bare_ = with_boundary(0);
  }

  /// The problem with `workspace` bytes at the boundary.
  problem with_boundary(bytes_t workspace) const {
    auto ops = operations_;
    ops[boundary_].workspace = workspace;
    return problem("part", values_, std::move(ops), targets_);
  }
  const problem& bare() const { return bare_; }
  /// The boundary: an operation of `bare()`.
  operation_id boundary() const { return boundary_; }
  /// Bytes that are on the device at the boundary in any case: values that leave or arrive.
  bytes_t crossing() const { return leaving_ + arriving_; }

  /// Measures an order of `bare()`.
  ///
  /// Let M(k) be the bytes on the device while the k-th computation runs, counting only values made in this part. `left` are the
  /// bytes that leave the forward, `arriving` those that arrive for the backward, `results` those that leave the backward.
  /// `longer(k)` are the bytes that other parts still read after the last use in this part. Then
  ///
  ///     saved              = bytes made before the boundary, read after it, that do not leave the part
  ///     carried            = saved + bytes that leave the forward and are read after the boundary, too
  ///     forward workspace  = max over k before the boundary of M(k) - left - saved
  ///     backward workspace = max over k after it of M(k) + longer(k) - arriving - carried - results
  ///
  /// A caller counts the inputs, outputs and `saved` of both halves while they exist, and the workspaces while the halves run.
  /// This count never falls below the true memory.
  ///
  /// Example: a forward x -> a -> b -> c of 10, 30 and 5 bytes, of which c leaves; a backward that reads a and the gradient of
  /// c, 5 bytes, and yields a value of 10. In the order as listed M = 10, 40, 45 before the boundary, `saved` = 10 (a) and
  /// `left` = 5. The forward workspace is 45 - 5 - 10 = 30, the size of b. After the boundary M = 10 + 5 + 10, and the backward
  /// workspace is 25 - 5 - 10 - 10 = 0. If a is recomputed instead, M = 10, 40, 35 before the boundary, `saved` = 0, and the
  /// workspaces are 40 - 5 and 25 - 5 - 10.
  /// @param order computations of `bare()`, first those before the boundary, then those after it
  /// @return the option, in operations of the whole problem
  /// Complexity: O(values + edges executed).
  part_option measure(const std::vector<operation_id>& order) const {
    const auto memory = measure_order(bare_, order).memory;
    const auto boundary = static_cast<std::size_t>(std::find(order.begin(), order.end(), boundary_) - order.begin());
    std::vector<bool> in_forward(values_.size(), false), in_backward(values_.size(), false), crosses(values_.size(), false);
    std::vector<std::size_t> last(values_.size(), 0);  // last read of a value that crossed the boundary
    part_option w;
    bytes_t before = 0, after = 0, left = 0, results = 0, kept = 0;
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (k == boundary) continue;
      const auto& op = operations_[order[k]];
      const bool forward = k < boundary;
      w.seconds += op.seconds;
      (forward ? w.forward : w.backward).push_back(original_operation_[order[k]]);
      if (forward) before = std::max(before, memory[k]);
      for (auto v : op.inputs)
        if (!forward && in_forward[v] && !in_backward[v]) crosses[v] = true, last[v] = k;
      for (auto v : op.outputs) {
        if (forward)
          left += leaves(v) && !in_forward[v] ? values_[v].bytes : 0;
        else
          results += leaves(v) && !in_forward[v] && !in_backward[v] ? values_[v].bytes : 0;
        (forward ? in_forward : in_backward)[v] = true;
      }
    }
    std::vector<bytes_t> longer(order.size() + 1, 0);  // bytes that from here on only other parts read
    for (value_id v = 0; v < values_.size(); ++v)
      if (crosses[v] && leaves(v) && is_read_elsewhere(original_value_[v])) longer[last[v] + 1] += values_[v].bytes;
    bytes_t more = 0;
    for (auto k = boundary + 1; k < order.size(); ++k) {
      more += longer[k];
      after = std::max(after, memory[k] + more);
    }
    for (value_id v = 0; v < values_.size(); ++v)
      if (crosses[v]) {
        (leaves(v) ? kept : w.saved) += values_[v].bytes;
        if (leaves(v)) w.kept.push_back(original_value_[v]);
      }
    w.carried = w.saved + kept;
    w.forward_workspace = std::max<bytes_t>(0, before - left - w.saved);
    w.backward_transient = after - arriving_ - w.carried;
    w.backward_workspace = std::max<bytes_t>(0, w.backward_transient - results);
    return w;
  }

  /// The option whose forward makes the values that leave it and saves nothing. It has no backward.
  /// Complexity: O(values + edges).
  part_option checkpoint() const {
    std::vector<bool> wanted(values_.size(), false);
    std::vector<operation_id> order = {boundary_};
    for (auto v : operations_[boundary_].inputs) wanted[v] = true;
    for (auto o = boundary_; o-- > 0;) {
      const auto& op = operations_[o];
      if (std::none_of(op.outputs.begin(), op.outputs.end(), [&](value_id v) { return wanted[v]; })) continue;
      for (auto v : op.inputs) wanted[v] = true;
      order.push_back(o);
    }
    std::reverse(order.begin(), order.end());
    auto w = measure(order);
    bytes_t results = 0;  // of the backward: `measure` counts them as live, but this order does not make them
    for (auto v : targets_) results += values_[v].bytes;
    w.forward_workspace = std::max<bytes_t>(0, w.forward_workspace - results);
    return w;
  }

 private:
  /// True if an operation outside this part may read `v` after the backward has begun.
  bool is_read_elsewhere(value_id v) const {
    const auto readers = p_->consumers(v);
    return p_->is_target(v) || std::any_of(readers.begin(), readers.end(),
                                           [&](operation_id o) { return o > backward_begin_ && index_->part(o) != part_; });
  }
  bool leaves(value_id local) const { return original_value_[local] != none && index_->leaves(original_value_[local]); }

  const problem* p_;
  const part_index* index_;
  std::vector<value> values_;
  std::vector<operation> operations_;
  std::vector<value_id> targets_, original_value_;
  std::vector<operation_id> original_operation_;
  part_id part_;
  operation_id boundary_, backward_begin_;
  bytes_t leaving_ = 0, arriving_ = 0;
  problem bare_;
};

}  // namespace remat::hierarchy
