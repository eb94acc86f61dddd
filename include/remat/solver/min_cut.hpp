// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules for any graph from minimum cuts and evictions. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/min_cut.hpp>
#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// Retains across the heaviest moments what minimum cuts say, makes the rest again where it is used, and evicts where that does
/// not fit. For graphs of any shape, also of thousands of operations; proves a bound besides.
///
/// Which sets are retained comes from `retention_cut` at the breakpoints of its multiplier, and from mixtures of neighbouring
/// ones: the leaner for the first part of the graph, the richer for the rest. Each is played as it is and with `eviction`;
/// `retain_more` improves the best. Copies to the host are not used.
///
/// Complexity: some dozens of maximum flows, and `options::mixtures` * 10 evaluations per moment with their evictions.
/// @code
/// auto r = remat::solve(p, budget, remat::min_cut{}, {.seconds = 10});
/// if (r.found()) std::cout << r.seconds << " s, at most " << 100 * r.gap() << " % above the optimum\n";
/// @endcode
class min_cut {
 public:
  struct options {
    std::size_t moments = 3;   ///< operations across which retention is optimised, >= 1
    std::size_t cuts = 16;     ///< most cuts per moment, >= 2
    std::size_t mixtures = 6;  ///< mixtures of each two neighbouring cuts, >= 1
    bool bound = true;         ///< prove a lower bound as well
  };

  min_cut() : min_cut(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit min_cut(const options& o) : options_(o) {
    if (o.moments < 1) throw bad_option("min_cut.moments must be >= 1, got 0");
    if (o.cuts < 2) throw bad_option("min_cut.cuts must be >= 2, got " + std::to_string(o.cuts));
    if (o.mixtures < 1) throw bad_option("min_cut.mixtures must be >= 1, got 0");
  }

  std::string name() const { return "min_cut"; }

  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed)) {
      const auto stop = [&] { return m.stopped(); };
      if (options_.bound) prove_bound(p, budget, r, stop);
      if (r.status == status::infeasible) return r;
      search(p, needed, budget, best, m, r.bound);
    }
    best.put_into(r);
    return r;
  }

 private:
  using choice = retention_cut::choice;

  /// The cuts at the breakpoints of the multiplier, most bytes first.
  std::vector<choice> breakpoints(retention_cut& cut) const {
    std::vector<choice> found = {cut.retain_all(), cut.retain_least()};
    std::vector<bool> closed = {false};  // between found[i] and found[i + 1] there is no other
    while (found.size() < options_.cuts) {
      std::size_t widest = closed.size();
      for (std::size_t i = 0; i < closed.size(); ++i)
        if (!closed[i] &&
            (widest == closed.size() || found[i].bytes - found[i + 1].bytes > found[widest].bytes - found[widest + 1].bytes))
          widest = i;
      if (widest == closed.size()) break;
      const auto &rich = found[widest], &lean = found[widest + 1];
      if (rich.bytes <= lean.bytes || rich.seconds >= lean.seconds) {
        closed[widest] = true;
        continue;
      }
      const double lambda = (lean.seconds - rich.seconds) / static_cast<double>(rich.bytes - lean.bytes);
      auto between = cut.minimum(lambda);
      if (between.bytes >= rich.bytes || between.bytes <= lean.bytes) {
        closed[widest] = true;
        continue;
      }
      const auto at = static_cast<std::ptrdiff_t>(widest) + 1;
      found.insert(found.begin() + at, std::move(between));
      closed.insert(closed.begin() + at, false);
    }
    return found;
  }

  /// The lean choice for what the first `count` operations make, the rich one for the rest.
  static choice mix(const problem& p, const choice& lean, const choice& rich, index_t count) {
    choice c = rich;
    for (index_t v = 0; v < c.retained.size(); ++v)
      if (!p.is_source(v) && p.producer(v) < count) c.retained[v] = lean.retained[v];
    for (index_t o = 0; o < count; ++o) c.later[o] = lean.later[o];
    return c;
  }

  void search(const problem& p, const std::vector<index_t>& needed, bytes_t budget, incumbent& best, monitor& m,
              double bound) const {
    const auto stop = [&] { return m.stopped(); };
    const auto report = [&](const char* stage) { m.report({.stage = stage, .best = best.seconds(), .bound = bound}); };
    std::vector<std::vector<index_t>> starts = {needed};
    for (const auto& cut : retention_cuts(p, budget, options_.moments)) {
      if (stop()) break;
      const auto choices = breakpoints(*cut);
      for (std::size_t i = 0; i + 1 < choices.size() && !stop(); ++i)
        for (std::size_t part = 0; part <= options_.mixtures; ++part) {
          if (part == 0 && i > 0) continue;
          const auto count = static_cast<index_t>(cut->tau() * part / options_.mixtures);
          const auto mixed = mix(p, choices[i + 1], choices[i], count);
          auto order = order_across(p, needed, cut->tau(), mixed.retained, mixed.later);
          if (!order) continue;
          best.offer(*order);
          starts.push_back(std::move(*order));
        }
    }
    report("cuts");
    std::vector<std::vector<index_t>> good;  // to be improved
    if (best.found()) good.push_back(best.order());
    // Evictions for less than the budget sometimes end up faster; on small graphs they cost little.
    const bool small = starts.size() * needed.size() < 20000;
    for (const double part : {1.0, 0.95, 0.9, 0.8})
      for (const double distance : {1.0, 0.5, 2.0})
        for (std::size_t i = 0; i < starts.size() && !stop() && (part == 1 || small); ++i) {
          const auto within = static_cast<bytes_t>(part * static_cast<double>(budget));
          auto order = eviction(p, starts[i]).run(within, {.distance = distance}, stop);
          if (order && best.offer(*order)) {
            report("evictions");
            good.push_back(std::move(*order));
          }
        }
    for (std::size_t i = good.size(); i-- > 0 && i + 4 >= good.size();)
      if (best.offer(retain_more(p, good[i], budget, stop))) report("retention");
  }

  options options_;
};

}  // namespace remat
