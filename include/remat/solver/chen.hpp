// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkpoints at the ends of segments of the forward.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/replay.hpp>
#include <remat/structure/articulation.hpp>
#include <remat/structure/backward_start.hpp>

namespace remat {

/// Divides the forward into segments. Keeps checkpoints at their ends and all of the last segment, and recomputes everything else
/// when the backward needs it. Takes the fastest schedule that fits, of the divisions and variants that the options allow.
///
/// For graphs of any shape; how good the schedules are depends on how close the graph is to a chain. Results of once-only
/// operations are kept.
///
/// Complexity: O(divisions (values + edges executed)).
///
/// Reference: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016); the variants
/// for graphs that are no chains as in Jain et al., "Checkmate", MLSys 2020.
/// @code
/// auto r = remat::solve(p, budget, remat::chen{});
/// @endcode
class chen {
 public:
  /// Where a segment may end, and which of its values are kept.
  enum class variant {
    any,                  ///< all of the following; `last_node` only if nothing else fits
    crossing,             ///< after any operation; keeps all values that later segments read
    linearised,           ///< after any operation; keeps the outputs of this operation
    articulation_points,  ///< after articulation points of the forward; keeps their outputs
    last_node             ///< keeps only the outputs of the operation before: the least memory
  };
  /// How long the segments are.
  enum class division {
    any,          ///< all of the following
    square_root,  ///< segments end at every k-th candidate, k = floor(sqrt(candidates))
    equal,        ///< equal numbers of candidates per segment, for several numbers of segments
    greedy        ///< segments end at the first candidate after more than b bytes were made, for several b
  };
  struct options {
    std::optional<operation_id> backward_start =
        {};  ///< first operation of the backward; by default from `structure::backward_start`
    chen::variant variant = variant::any;
    chen::division division = division::any;
    std::size_t tries = 64;  ///< most numbers of segments, and most values of b, to try, >= 1
  };

  chen() : chen(options{}) {}
  /// @throws bad_option if `tries` is 0
  explicit chen(const options& o) : options_(o) {
    if (o.tries < 1) throw bad_option("chen.tries must be >= 1, got 0");
  }

  std::string name() const { return "chen"; }

  /// @throws bad_option if `backward_start` is no operation
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (options_.backward_start && *options_.backward_start >= p.operations().size())
      throw bad_option("chen.backward_start: no operation " + std::to_string(*options_.backward_start));
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed) && !needed.empty())
      search(p, needed, structure::backward_start(p, needed, options_.backward_start), best, m);
    best.put_into(r);
    return r;
  }

 private:
  using positions = std::vector<std::size_t>;  // indices into the list of needed operations

  void search(const problem& p, const std::vector<operation_id>& needed, std::size_t backward_start, incumbent& best,
              monitor& m) const {
    const auto wanted = [&](variant v) { return options_.variant == variant::any || options_.variant == v; };
    positions all(backward_start), articulation;
    for (std::size_t k = 0; k < backward_start; ++k) all[k] = k;
    if (wanted(variant::articulation_points)) {
      const auto points = structure::articulation_points(p, {needed.data(), backward_start});
      for (std::size_t k = 0; k < backward_start; ++k)
        if (std::binary_search(points.begin(), points.end(), needed[k])) articulation.push_back(k);
    }
    for (const auto& [v, candidates] :
         {std::pair{variant::crossing, &all}, {variant::linearised, &all}, {variant::articulation_points, &articulation}}) {
      if (!wanted(v)) continue;
      for (const auto& ends : divisions(p, needed, backward_start, *candidates)) {
        if (m.stopped()) return;
        const auto order = order_for(p, needed, backward_start, ends, v, m);
        if (order && best.offer(*order)) best.report(m, std::to_string(ends.size() + 1) + " segments");
      }
    }
    if (options_.variant == variant::last_node || (options_.variant == variant::any && !best.found()))
      if (const auto order = order_for(p, needed, 0, {}, variant::last_node, m); order && best.offer(*order))
        best.report(m, "last node");
  }

  /// The distinct sets of segment ends to try.
  std::set<positions> divisions(const problem& p, const std::vector<operation_id>& needed, std::size_t backward_start,
                                const positions& candidates) const {
    std::set<positions> sets;
    const auto n = candidates.size();
    if (n == 0) return sets;
    const auto wanted = [&](division d) { return options_.division == division::any || options_.division == d; };
    if (wanted(division::square_root)) {
      positions ends;
      const auto k = static_cast<std::size_t>(std::sqrt(static_cast<double>(n)));
      for (auto i = k; i <= n; i += k) ends.push_back(candidates[i - 1]);
      sets.insert(std::move(ends));
    }
    if (wanted(division::equal))
      for (std::size_t count = 2; count <= std::min(options_.tries, n) + 1; ++count) {
        positions ends;
        for (std::size_t i = 1; i < count; ++i) ends.push_back(candidates[(i * n + count - 1) / count - 1]);
        sets.insert(std::move(ends));
      }
    if (wanted(division::greedy)) {
      double total = 0;
      std::vector<double> output_bytes(backward_start);
      for (std::size_t k = 0; k < backward_start; ++k) {
        for (auto v : p.operations()[needed[k]].outputs) output_bytes[k] += static_cast<double>(p.values()[v].bytes);
        total += output_bytes[k];
      }
      for (std::size_t count = 2; count <= std::min(options_.tries, n) + 1; ++count) {
        positions ends;
        double bytes_since_end = 0;
        auto candidate = candidates.begin();
        for (std::size_t k = 0; k < backward_start; ++k) {
          bytes_since_end += output_bytes[k];
          while (candidate != candidates.end() && *candidate < k) ++candidate;
          if (candidate == candidates.end() || *candidate != k || bytes_since_end * static_cast<double>(count) <= total) continue;
          ends.push_back(k);
          bytes_since_end = 0;
        }
        sets.insert(std::move(ends));
      }
    }
    return sets;
  }

  /// Runs the forward, drops all values that are not kept, and runs the backward. Missing values are recomputed on demand.
  /// @return the order; nothing if stopped, if the order is uselessly long, or if a once-only operation would have to run again
  static std::optional<std::vector<operation_id>> order_for(const problem& p, const std::vector<operation_id>& needed,
                                                            std::size_t backward_start, const positions& ends, variant v,
                                                            const monitor& m) {
    const auto& ops = p.operations();
    const auto backward = ends.size() + 1;
    std::vector<std::size_t> segment(ops.size(), backward);  // per operation
    for (std::size_t k = 0, s = 0; k < backward_start; ++k) {
      segment[needed[k]] = s;
      if (s < ends.size() && ends[s] == k) ++s;
    }
    std::vector<bool> retained(p.values().size(), false);
    for (value_id x = 0; x < retained.size(); ++x) {
      if (p.is_source(x) || p.is_target(x) || ops[p.producer(x)].once) {
        retained[x] = true;
        continue;
      }
      const auto own = segment[p.producer(x)];
      const auto reads = p.consumers(x);
      retained[x] = own == ends.size() || (v == variant::crossing && std::any_of(reads.begin(), reads.end(), [&](operation_id o) {
                                             return segment[o] < backward && segment[o] != own;
                                           }));
    }
    if (v != variant::crossing)
      for (auto k : ends)
        for (auto x : ops[needed[k]].outputs) retained[x] = true;

    order::order_builder builder(p);
    const auto drop = [&](operation_id o) {
      for (auto x : ops[o].outputs)
        if (!retained[x]) builder.drop(x);
    };
    const auto max_length =
        v == variant::last_node ? std::min<std::size_t>(needed.size() * needed.size(), 10'000'000) : 20 * needed.size();
    operation_id previous = none;
    for (std::size_t k = 0; k < needed.size(); ++k) {
      const auto o = needed[k];
      if (k == backward_start)
        for (std::size_t i = 0; i < backward_start; ++i) drop(needed[i]);
      std::size_t last_segment = 0;  // the last segment from which the operation reads
      for (auto x : ops[o].inputs)
        if (!p.is_source(x) && segment[p.producer(x)] < backward) last_segment = std::max(last_segment, segment[p.producer(x)]);
      const auto from = builder.order().size();
      if (!builder.run(o) || builder.order().size() > max_length || m.stopped()) return std::nullopt;
      // Drop the values of earlier segments that were recomputed only to reach this one.
      if (v != variant::crossing && k >= backward_start)
        for (auto i = from; i + 1 < builder.order().size(); ++i)
          if (const auto x = builder.order()[i]; v == variant::last_node || segment[x] < last_segment) drop(x);
      if (v == variant::last_node && previous != none) drop(previous);
      previous = o;
    }
    return builder.finish();
  }

  options options_;
};

}  // namespace remat
