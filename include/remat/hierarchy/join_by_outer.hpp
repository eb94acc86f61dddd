// SPDX-License-Identifier: Apache-2.0
/// @file
/// Joins parts by solving the condensed graph of the parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/level.hpp>
#include <remat/order/eviction.hpp>

namespace remat {

/// Joins parts by a solver for the condensed graph. The joiner varies one multiplier, seconds per byte, for all parts at once.
/// Each part offers the options on the convex hull of seconds against bytes carried. As the multiplier grows, one part after
/// another takes its next leaner option.
///
/// For some of these selections, the joiner condenses each half of a part to one operation (`condensed_problem`). Outer solves
/// that graph and may recompute whole halves. The result is a schedule of the whole problem, because the condensed graph
/// accounts for the memory of the parts. The parts need not be a chain.
///
/// @tparam Outer the solver of the condensed graph
///
/// Complexity: at most 2 (`peaks` + 1) (`selections` + 1) calls of Outer, on a graph of two operations per part.
template <solver Outer>
class join_by_outer {
 public:
  struct options {
    std::size_t peaks = 3;       ///< steps from the largest to the smallest bound on option needs, >= 1; 1 for parts of parts
    std::size_t selections = 6;  ///< selections to try on either side of the richest one that fits, >= 1
    std::size_t selections_of_parts = 2;  ///< the same for a part that is joined from its own parts, >= 1
    double share = 0.1;                   ///< fraction of the remaining time for a call of Outer, in (0, 1]
    bool evictions = false;               ///< `eviction` also repairs the selections that do not fit
  };

  explicit join_by_outer(Outer outer = Outer()) : join_by_outer(std::move(outer), options{}) {}
  /// @throws bad_option naming the member that is out of range
  join_by_outer(Outer outer, const options& o) : outer_(std::move(outer)), options_(o) {
    if (o.peaks < 1) throw bad_option("join_by_outer.peaks must be >= 1, got 0");
    if (o.selections < 1) throw bad_option("join_by_outer.selections must be >= 1, got 0");
    if (o.selections_of_parts < 1) throw bad_option("join_by_outer.selections_of_parts must be >= 1, got 0");
    if (!(o.share > 0 && o.share <= 1)) throw bad_option("join_by_outer.share must be in (0, 1], got " + std::to_string(o.share));
  }

  std::string name() const { return outer_.name(); }

  /// @throws any exception of Outer
  void join(hierarchy::level& l, monitor& m) const {
    bytes_t min_needs = 0, max_needs = 0;
    for (const auto& part : l.options) {
      const auto less = [](const hierarchy::part_option& a, const hierarchy::part_option& b) { return a.needs() < b.needs(); };
      const auto [low, high] = std::minmax_element(part.list.begin(), part.list.end(), less);
      min_needs = std::max(min_needs, low->needs());
      max_needs = std::max(max_needs, high->needs());
    }
    const auto levels = l.whole_problem ? options_.peaks : 1;
    std::vector<hull> before;
    for (std::size_t k = 0; k <= levels && !m.stopped(); ++k) {
      const auto within = max_needs - static_cast<bytes_t>(static_cast<double>(max_needs - min_needs) * static_cast<double>(k) /
                                                           static_cast<double>(levels));
      std::vector<hull> hulls;
      for (const auto& part : l.options) hulls.push_back(hull_of(part.list, within));
      if (hulls != before) select(l, hulls, m);
      before = std::move(hulls);
    }
  }

 private:
  using hull = std::vector<const hierarchy::part_option*>;

  /// The options on the convex hull of seconds against bytes carried that need at most `limit` bytes while they run. If all need
  /// more, the option that needs the least. Most bytes carried first.
  static hull hull_of(const std::vector<hierarchy::part_option>& options, bytes_t limit) {
    hull line;
    const auto slope = [](const hierarchy::part_option& a, const hierarchy::part_option& x) {
      return (a.seconds - x.seconds) / static_cast<double>(x.carried - a.carried);
    };
    for (const auto& o : options) {
      if (o.needs() > limit || (!line.empty() && (o.seconds >= line.back()->seconds || o.carried == line.back()->carried)))
        continue;
      while (line.size() > 1 && slope(*line[line.size() - 2], *line.back()) <= slope(*line.back(), o)) line.pop_back();
      line.push_back(&o);
    }
    if (line.empty())
      line.push_back(
          &*std::min_element(options.begin(), options.end(), [](const auto& a, const auto& x) { return a.needs() < x.needs(); }));
    std::reverse(line.begin(), line.end());
    return line;
  }

  void select(hierarchy::level& l, const std::vector<hull>& hulls, monitor& m) const {
    // Each exchange replaces the option of a part by its next leaner one. The fewest seconds per byte come first.
    struct exchange {
      double price;
      std::size_t part;
    };
    std::vector<exchange> exchanges;
    for (std::size_t i = 0; i < hulls.size(); ++i)
      for (std::size_t k = 0; k + 1 < hulls[i].size(); ++k) {
        const auto &rich = *hulls[i][k], &lean = *hulls[i][k + 1];
        exchanges.push_back({(lean.seconds - rich.seconds) / static_cast<double>(rich.carried - lean.carried), i});
      }
    std::stable_sort(exchanges.begin(), exchanges.end(), [](const auto& a, const auto& b) { return a.price < b.price; });
    const auto condense = [&](std::size_t count) {
      std::vector<std::size_t> taken(hulls.size(), 0);
      for (std::size_t k = 0; k < count; ++k) ++taken[exchanges[k].part];
      std::vector<const hierarchy::part_option*> chosen;
      for (std::size_t i = 0; i < hulls.size(); ++i) chosen.push_back(hulls[i][taken[i]]);
      return hierarchy::condensed_problem(l.p, l.index, chosen);
    };
    const auto stop = m.stop_check();
    // Find the richest selection that fits if each part runs once.
    const auto fits = [&](std::size_t count) {
      const auto c = condense(count);
      if (!c.possible()) return false;
      auto order = c.expand(l.p, needed_operations(c.condensed()));
      const bool within = measure_order(l.p, order).peak <= l.budget();
      l.offer(std::move(order));
      return within;
    };
    std::size_t low = 0, high = exchanges.size();
    while (low < high && !stop()) {
      const auto middle = (low + high) / 2;
      if (fits(middle))
        high = middle;
      else
        low = middle + 1;
    }
    // Let Outer recompute parts in the condensed graph, and evictions recompute single operations.
    std::vector<std::size_t> counts;
    const auto steps = l.whole_problem ? options_.selections : options_.selections_of_parts;
    for (std::size_t k = 0; k <= steps; ++k) {
      counts.push_back(low + (exchanges.size() - low) * k / steps);
      counts.push_back(low * k / steps);
    }
    std::sort(counts.begin(), counts.end());
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    for (auto count : counts) {
      if (stop()) break;
      const auto c = condense(count);
      if (!c.possible()) continue;
      auto limits = m.limits_for_share(options_.share);
      limits.gap = std::max(limits.gap, 1e-4);
      if (const auto r = remat::solve(c.condensed(), l.budget(), outer_, limits, stop_with(m)); r.found())
        l.offer(c.expand(l.p, compute_order(r.schedule)));
      if (!options_.evictions || count > low || !l.whole_problem) continue;
      const auto start = c.expand(l.p, needed_operations(c.condensed()));
      order::evict_with_each_exponent(l.p, start, l.budget(), stop, [&](auto order) { l.offer(std::move(order)); });
    }
  }

  Outer outer_;
  options options_;
};

}  // namespace remat
