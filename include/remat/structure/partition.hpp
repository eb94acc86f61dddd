// SPDX-License-Identifier: Apache-2.0
/// @file
/// Divides any graph into parts: runs of forward operations, each paired with the backward operations that read its values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/backward_start.hpp>
#include <remat/structure/nested_cuts.hpp>

namespace remat::structure {

/// Operations that are planned together: `backward` comes after all of `forward`. Either may be empty.
struct part {
  std::vector<operation_id> forward, backward;  ///< ascending
  std::size_t size() const { return forward.size() + backward.size(); }
};

/// Disjoint parts of a problem, in the order of their forwards. Operations in no part stand alone.
using partition = std::vector<part>;

/// Message of chain methods for a graph that cannot be cut into blocks.
inline constexpr const char* no_chain = "the graph has no chain of blocks";

/// Options of `find_partition`.
struct partition_options {
  std::optional<operation_id> backward_start =
      {};                 ///< first operation of the backward; by default the one of the problem, or the guess with the best cuts
  std::size_t size = 40;  ///< operations that a part should have, >= 1; a part may differ from it if a cut nearby is thin
  std::size_t most = 64;  ///< largest number of parts, >= 1
  std::size_t interface = 0;  ///< in a chain of blocks: most values that the forward passes from block to block; 0: any parts

  /// @throws bad_option naming the member that is out of range
  void validate(const problem& p) const {
    if (backward_start && *backward_start >= p.operations().size())
      throw bad_option("partition.backward_start: no operation " + std::to_string(*backward_start));
    if (size < 1) throw bad_option("partition.size must be >= 1, got 0");
    if (most < 1) throw bad_option("partition.most must be >= 1, got 0");
  }
};

namespace detail {

/// A run without the once-only operations that can run before or after all other operations of the run.
inline std::vector<operation_id> without_once_at_ends(const problem& p, std::vector<operation_id> run) {
  const auto in_run = [&](operation_id o) { return o != none && std::binary_search(run.begin(), run.end(), o); };
  const auto read_here = [&](value_id v) {
    const auto readers = p.consumers(v);
    return std::any_of(readers.begin(), readers.end(), in_run);
  };
  for (auto k = run.size(); k-- > 0;) {
    const auto& op = p.operations()[run[k]];
    if (op.once && std::none_of(op.outputs.begin(), op.outputs.end(), read_here))
      run.erase(run.begin() + static_cast<std::ptrdiff_t>(k));
  }
  for (std::size_t k = 0; k < run.size();) {
    const auto& op = p.operations()[run[k]];
    const bool alone =
        op.once && std::none_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return in_run(p.producer(v)); });
    if (alone)
      run.erase(run.begin() + static_cast<std::ptrdiff_t>(k));
    else
      ++k;
  }
  return run;
}

/// The search behind `find_partition`: tries starts of the backward, and keeps the cuts of the best one.
class partition_search {
 public:
  /// @param p      the problem; must outlive the search, like the other arguments
  /// @param needed `needed_operations(p)`, at least two
  /// @param o      valid options
  /// @param stop   polled between starts
  partition_search(const problem& p, const std::vector<operation_id>& needed, const partition_options& o,
                   const std::function<bool()>& stop)
      : p_(p),
        needed_(needed),
        options_(o),
        stop_(stop),
        thinnest_(o.interface == 0 && o.size >= 20),
        memory_(measure_order(p, needed)),
        tiny_(memory_.peak / 1000) {}

  void run() {
    try_starts();
    if (options_.interface > 0 && chosen_.empty()) {  // in a long chain, every value is tiny
      tiny_ = 0;
      try_starts();
    }
    limit_parts();
  }

  /// The parts between the chosen cuts.
  partition parts() const {
    partition parts;
    const auto n = needed_.size(), backward_start = candidates_.size() - 1;
    const auto run = [&](std::size_t from, std::size_t to) {
      return without_once_at_ends(
          p_, {needed_.begin() + static_cast<std::ptrdiff_t>(from), needed_.begin() + static_cast<std::ptrdiff_t>(to)});
    };
    for (std::size_t i = 0; i <= chosen_.size(); ++i) {
      const bool first = i == 0, last = i == chosen_.size();
      part x{run(first ? 0 : chosen_[i - 1].forward, last ? backward_start : chosen_[i].forward),
             run(last ? backward_start : chosen_[i].backward, first ? n : chosen_[i - 1].backward)};
      if (x.size() > (options_.interface > 0 ? 0u : 1u)) parts.push_back(std::move(x));
    }
    return parts;
  }

 private:
  /// Tries the start that is known. If there is none, it tries guesses.
  void try_starts() {
    if (options_.backward_start || p_.backward_start()) return try_start(backward_start(p_, needed_, options_.backward_start));
    try_near_peak();
    try_innermost_part();
    try_largest_memory();
  }

  /// The forward ends near the peak.
  void try_near_peak() {
    const auto peak = backward_start(p_, needed_);
    for (const double f : {1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1})
      try_start(std::min(needed_.size() - 1, static_cast<std::size_t>(f * static_cast<double>(peak))));
  }

  /// A wrong guess spoils only the innermost part, so the search continues there.
  void try_innermost_part() {
    for (int round = 0; round < 6; ++round) {
      const double before = min_cost_;
      const auto [from, to] = innermost_part();
      constexpr std::size_t tries = 12;
      for (std::size_t k = 0; k < tries; ++k) try_start(from + (to - from) * k / tries);
      if (!(min_cost_ < before)) break;
    }
  }

  /// Within the innermost part the start matters little to the cuts. Prefers the position with the largest memory.
  void try_largest_memory() {
    const auto [from, to] = innermost_part();
    if (options_.interface == 0) min_cost_ *= 1.1;
    if (from < to) {
      const auto first = memory_.memory.begin() + static_cast<std::ptrdiff_t>(from);
      const auto largest = std::max_element(first, memory_.memory.begin() + static_cast<std::ptrdiff_t>(to));
      try_start(static_cast<std::size_t>(largest - memory_.memory.begin()));
    }
  }

  /// Chooses cuts for a start of the backward. Keeps them if they are the best so far.
  void try_start(std::size_t backward_start) {
    if (!candidates_.empty() && stop_ && stop_()) return;
    auto candidates = options_.interface > 0 ? chain_cuts(p_, needed_, backward_start, options_.interface, tiny_)
                                             : nested_cuts(p_, needed_, backward_start);
    double cost = 0;
    auto chosen = choose_cuts(candidates, needed_.size(), static_cast<double>(options_.size), thinnest_, cost);
    if (cost < min_cost_) min_cost_ = cost, candidates_ = std::move(candidates), chosen_ = std::move(chosen);
  }

  /// The positions [first, second) inside the last cut.
  std::pair<std::size_t, std::size_t> innermost_part() const {
    if (chosen_.empty()) return {0, needed_.size()};
    return {chosen_.back().forward, chosen_.back().backward};
  }

  /// Chooses fewer cuts if there are too many parts.
  void limit_parts() {
    const auto n = needed_.size();
    auto size = 2 * options_.size;
    while (chosen_.size() >= options_.most && n / size / 8 > options_.most) size *= 2;  // even these sizes leave too many parts
    for (; chosen_.size() >= options_.most; size *= 2)
      chosen_ = choose_cuts(candidates_, n, static_cast<double>(size), thinnest_, min_cost_);
  }

  const problem& p_;
  const std::vector<operation_id>& needed_;
  const partition_options& options_;
  const std::function<bool()>& stop_;
  bool thinnest_;  // false: small parts may have to be cut anywhere
  order_cost memory_;
  bytes_t tiny_;
  std::vector<nested_cut> candidates_, chosen_;  // at every position of the forward; those that divide the parts
  double min_cost_ = std::numeric_limits<double>::infinity();
};

}  // namespace detail

/// Cuts the needed operations of `p`, in their order, into nested parts at places where few bytes cross.
///
/// A cut is a position of the forward with a partner in the backward. The operations between the two are inside. Values made on
/// one side and read on the other cross the cut. A dynamic program weighs the crossing bytes, relative to the mean of the cuts
/// around, against the sizes of the parts.
///
/// On a chain, the cuts are its cut points, which one activation and its gradient cross. A skip connection adds its bytes to
/// every cut that it spans. So encoder and decoder levels, dense blocks and branches come apart where they are thinnest. If no
/// place is thin, the parts have balanced sizes. Equal layers are cut alike.
///
/// A once-only operation stands alone unless it is needed in the middle of a part. So the rest of the part can be recomputed.
///
/// With `interface`, the parts are the blocks of a chain. At a cut, few values cross in the forward. The backward of a block
/// reads no other values from the forward outside.
///
/// @param p    the problem
/// @param o    options
/// @param stop polled between guesses of the start of the backward; true ends the search after at least one guess
/// @return the parts; none if there is no place to cut
/// @throws bad_option if `backward_start` is no operation, or `size` or `most` is 0
/// Complexity: O(edges log operations).
inline partition find_partition(const problem& p, const partition_options& o = {}, const std::function<bool()>& stop = {}) {
  o.validate(p);
  const auto needed = needed_operations(p);
  if (needed.size() < 2) return {};
  detail::partition_search search(p, needed, o, stop);
  search.run();
  return search.parts();
}

/// The parts without their once-only operations, which then stand alone. All remaining operations can be recomputed.
/// Complexity: O(operations).
inline partition without_once(const problem& p, partition parts) {
  const auto once = [&](operation_id o) { return p.operations()[o].once; };
  for (auto& x : parts) {
    std::erase_if(x.forward, once);
    std::erase_if(x.backward, once);
  }
  std::erase_if(parts, [](const part& x) { return x.size() == 0; });
  return parts;
}

}  // namespace remat::structure
