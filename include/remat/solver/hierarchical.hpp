// SPDX-License-Identifier: Apache-2.0
/// @file
/// Planning in parts: for any graph, with any solver for the parts and any joiner for the whole. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/join_by_chain.hpp>
#include <remat/hierarchy/join_by_outer.hpp>
#include <remat/hierarchy/level.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/local_search.hpp>
#include <remat/order/replay.hpp>
#include <remat/order/retain_more.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/prove_bound.hpp>
#include <remat/structure/canonical.hpp>
#include <remat/structure/partition.hpp>

namespace remat {

/// The problem with equal costs for like operations, so that equal layers are recognised although their measured costs differ by
/// noise. Operations are alike if kind, sizes and workspace are equal. Their costs are averaged, from the smallest up, as long as
/// they are within `tolerance` of the smallest.
/// @param p         the problem
/// @param tolerance relative, finite, >= 0; 0 changes nothing
/// @throws bad_option for a tolerance out of range
/// Complexity: O((values + edges) log(values + edges)).
inline problem with_like_costs(const problem& p, double tolerance) {
  if (!(std::isfinite(tolerance) && tolerance >= 0))
    throw bad_option("with_like_costs.tolerance must be a finite number >= 0, got " + std::to_string(tolerance));
  if (tolerance == 0) return p;
  std::map<std::vector<std::int64_t>, std::vector<operation_id>> alike;
  const auto& ops = p.operations();
  std::vector<double> costs;
  for (const auto& op : ops) costs.push_back(op.seconds);
  for (operation_id o = 0; o < ops.size(); ++o) {
    std::vector<std::int64_t> key = {static_cast<std::int64_t>(std::hash<std::string>()(ops[o].kind)), ops[o].workspace};
    std::vector<std::int64_t> inputs;
    for (auto v : ops[o].inputs) inputs.push_back(p.values()[v].bytes);
    std::sort(inputs.begin(), inputs.end());
    for (auto v : ops[o].outputs) key.push_back(p.values()[v].bytes);
    key.push_back(-1);
    key.insert(key.end(), inputs.begin(), inputs.end());
    alike[std::move(key)].push_back(o);
  }
  for (auto& [key, list] : alike) {
    std::stable_sort(list.begin(), list.end(), [&](operation_id a, operation_id b) { return ops[a].seconds < ops[b].seconds; });
    for (std::size_t from = 0, to = 0; from < list.size(); from = to) {
      double sum = 0;
      const double limit = ops[list[from]].seconds * (1 + tolerance);
      for (; to < list.size() && ops[list[to]].seconds <= limit; ++to) sum += ops[list[to]].seconds;
      if (ops[list[from]].seconds < ops[list[to - 1]].seconds)
        for (auto k = from; k < to; ++k) costs[list[k]] = sum / static_cast<double>(to - from);
    }
  }
  return p.with_costs(costs);
}

/// `min_cut` with less effort than on its own; a default-constructed solver of any other type.
template <solver S>
S cheap_default() {
  if constexpr (std::is_same_v<S, min_cut>)
    return min_cut({.moments = 2, .cuts = 6, .mixtures = 2, .bound = false, .repairs = 3000, .effort = 0});
  else
    return S();
}

/// The default joiner of `hierarchical`: first the chain, then `min_cut` on the condensed graph, both with evictions.
class join_by_default {
 public:
  std::string name() const { return chain_.name() + "+" + outer_.name(); }
  void join(hierarchy::level& l, monitor& m) const {
    chain_.join(l, m);
    outer_.join(l, m);
  }

 private:
  join_by_chain chain_{{.evictions = true}};
  join_by_outer<min_cut> outer_{cheap_default<min_cut>(), {.evictions = true}};
};

/// Cuts a graph into parts, finds several options for each part, and joins them. For graphs of any size and shape.
///
/// The parts come from `find_partition` or from the user. Each part is a problem of its own (`part_problem`). Inner solves it for
/// several bounds on the bytes saved and on the peak. Equal parts are solved once (`canonical`). Parts that are too large are cut
/// again and joined in the same way. Joiner makes a schedule of the whole: by a dynamic program over the chain of parts
/// (`join_by_chain`: `rockmate`), by a solver for the condensed graph (`join_by_outer`), or by an ILP (`join_by_hilp`:
/// `hiremate`).
///
/// By default, minimum cuts and evictions add options of parts, `retain_more` uses the memory that is left, and `local_search`
/// improves the result. `rockmate` and `hiremate` turn this off. Does not use copies to the host.
///
/// @tparam Inner  the solver of the parts, such as `checkmate<highs::backend>`
/// @tparam Joiner makes schedules of the whole from the options of the parts
///
/// Complexity: `saved` * `peaks` calls of Inner per distinct part, and one call of Joiner; the same for each distinct part that
/// is cut again. O(operations log operations) for the rest but `retain_more` and `local_search`.
/// @code
/// using checkmate = remat::checkmate<remat::highs::backend>;
/// remat::hierarchical method{checkmate(checkmate::options::fast()), remat::join_by_chain{}};
/// auto r = remat::solve(p, budget, method, {.seconds = 30});
/// @endcode
template <solver Inner = min_cut, hierarchy::joiner Joiner = join_by_default>
class hierarchical {
 public:
  struct options {
    structure::partition_options cut = {};           ///< how graphs are cut
    std::optional<structure::partition> parts = {};  ///< partition of the whole graph; by default the graph is cut
    std::size_t leaf_operations = 160;  ///< parts of more operations are cut again, or solved by `min_cut` if they cannot be cut
    std::size_t saved = 6;              ///< number of bounds to try on the bytes that a part saves, >= 1
    std::size_t peaks = 3;              ///< number of bounds to try on the peak of a part, >= 1
    double tolerance = 0.1;             ///< relative difference of costs up to which parts count as equal, finite, >= 0
    bool bound = true;                  ///< prove a lower bound as well
    bool cuts = true;          ///< add options by minimum cuts and evictions; the bytes saved by cuts are then the bounds to try
    std::size_t retained = 6;  ///< number of fastest schedules to improve by `retain_more`
    std::size_t effort = 30000;  ///< effort of the final `local_search`, for `order::patience_for`; 0: none

    /// Only parts, Inner and Joiner: for methods as published.
    static options plain() { return {.bound = false, .cuts = false, .retained = 0, .effort = 0}; }
    /// The same, with the options of a published method.
    template <class Published>
    static options plain(const Published& o) {
      auto x = plain();
      x.cut = o.cut, x.leaf_operations = o.leaf_operations, x.saved = o.saved, x.peaks = o.peaks;
      return x;
    }
  };

  hierarchical() : hierarchical(cheap_default<Inner>()) {}
  explicit hierarchical(Inner inner, Joiner joiner = Joiner()) : hierarchical(std::move(inner), std::move(joiner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  hierarchical(Inner inner, Joiner joiner, const options& o) : inner_(std::move(inner)), joiner_(std::move(joiner)), options_(o) {
    if (o.saved < 1) throw bad_option("hierarchical.saved must be >= 1, got 0");
    if (o.peaks < 1) throw bad_option("hierarchical.peaks must be >= 1, got 0");
    if (!(std::isfinite(o.tolerance) && o.tolerance >= 0))
      throw bad_option("hierarchical.tolerance must be a finite number >= 0, got " + std::to_string(o.tolerance));
  }

  std::string name() const { return "hierarchical/" + std::string(inner_.name()) + "/" + std::string(joiner_.name()); }

  /// @throws bad_option if the partition given is invalid: an operation does not exist or is listed twice, a part is empty, or
  ///         the parts have no topological order; any exception of Inner and Joiner
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    incumbent best(p, budget);
    std::optional<structure::partition> given;
    if (options_.parts) given = checked(p, *options_.parts);
    if (!best.offer(needed_operations(p))) {
      if (options_.bound) prove_bound(p, budget, r, m.stop_check());
      if (r.status == status::infeasible) return r;
      search state{m, r.bound, {}};
      const auto alike = with_like_costs(p, options_.tolerance);
      const auto parts = given ? *given : structure::find_partition(alike, options_.cut, m.stop_check());
      if (parts.size() < 2 && p.operations().size() > options_.leaf_operations)
        r = refused("the graph cannot be cut into parts", std::move(r));
      join(alike, parts, best, state, m);
      if (p.operations().size() <= options_.leaf_operations && !m.stopped())
        if (const auto whole = remat::solve(p, budget, inner_, m.limits_for_share(1), stop_with(m)); whole.found())
          best.offer(compute_order(whole.schedule));
      if (options_.effort > 0 && best.found() && !m.stopped())
        order::local_search(p, best.order(), best, m, {.patience = order::patience_for(p, options_.effort)}, r.bound);
    }
    best.put_into(r);
    return r;
  }

 protected:
  const Inner& inner() const { return inner_; }

 private:
  using orders = std::vector<std::vector<operation_id>>;
  static constexpr std::size_t max_depth = 16;  ///< of parts of parts; each is mostly a small piece of the part that is cut

  /// State of one call of `solve`.
  struct search {
    monitor& m;
    double bound;
    std::unordered_map<std::size_t, std::vector<std::pair<structure::canonical_form, orders>>>
        solved;  // by hash; orders in canonical positions
    std::size_t depth = 0;
  };

  /// Sorts the user's partition, and checks that its parts have a topological order.
  static structure::partition checked(const problem& p, structure::partition parts) {
    for (auto& piece : parts) {
      std::sort(piece.forward.begin(), piece.forward.end());
      std::sort(piece.backward.begin(), piece.backward.end());
    }
    const hierarchy::part_index index(p, parts);
    std::vector<hierarchy::part_option> listed;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& piece = parts[i];
      const auto where = "partition: part " + std::to_string(i);
      if (piece.size() == 0) throw bad_option(where + " is empty");
      for (auto o : piece.forward)
        for (auto v : p.operations()[o].inputs)
          if (!p.is_source(v) && std::binary_search(piece.backward.begin(), piece.backward.end(), p.producer(v)))
            throw bad_option(where + ": operation " + std::to_string(o) + " of the forward reads what operation " +
                             std::to_string(p.producer(v)) + " of the backward yields");
      const hierarchy::part_problem b(p, index, piece);
      listed.push_back(b.measure(needed_operations(b.bare())));
    }
    std::vector<const hierarchy::part_option*> chosen;
    for (const auto& o : listed) chosen.push_back(&o);
    if (const hierarchy::condensed_problem c(p, index, chosen); !c.possible()) throw bad_option(c.why_impossible());
    return parts;
  }

  /// A request to Inner: the most bytes saved, the largest peak to try, and an order to start from.
  struct target {
    bytes_t saved, peak;
    std::vector<operation_id> start;
  };
  /// Requests with falling bounds on the bytes saved: those of minimum cuts, or evenly spaced.
  std::vector<target> targets(const hierarchy::part_problem& b, const std::function<bool()>& stop) const {
    std::vector<target> list;
    const auto needed = needed_operations(b.bare());
    const auto add = [&](std::vector<operation_id> order) {
      const auto saved = b.measure(order).saved;
      const auto peak = measure_order(b.bare(), order).peak;
      list.push_back({saved, peak, std::move(order)});
    };
    if (!options_.cuts) {
      add(needed);
      for (std::size_t k = 1; k < options_.saved; ++k) {
        list.push_back(list[0]);
        list[k].saved -= static_cast<bytes_t>(static_cast<double>(list[0].saved) * static_cast<double>(k) /
                                              static_cast<double>(options_.saved - 1));
      }
      return list;
    }
    bound::retention_cut cut(b.bare(), needed, b.boundary(), nullptr, stop);
    for (const auto& c : cut.breakpoints(options_.saved + 1))
      if (auto order = order::replay(b.bare(), {b.boundary()}, {c.retained})) add(std::move(*order));
    return list;
  }

  /// Orders of a part: the order of the problem, and schedules of Inner under bounds on the bytes saved and on the peak. A part
  /// that is too large is cut into parts instead, or solved by `min_cut`.
  orders solve_part(const hierarchy::part_problem& b, search& state) const {
    const auto& bare = b.bare();
    const auto floor = bounds_without_search(bare).budget;
    orders candidates = {needed_operations(bare)};
    structure::partition pieces;
    const bool large = bare.operations().size() > options_.leaf_operations;
    if (large && state.depth <= max_depth) {
      auto finer = options_.cut;
      finer.backward_start = b.boundary();
      pieces = structure::find_partition(bare, finer, state.m.stop_check());
    }
    const double part_of_time = 0.5 / static_cast<double>(options_.peaks * (options_.saved + 1));
    auto each = state.m.limits_for_share(part_of_time);
    each.gap = std::max(each.gap, 1e-3);
    const auto stop = state.m.stop_check();
    for (const auto& t : targets(b, stop)) {
      if (options_.cuts) candidates.push_back(t.start);
      for (std::size_t i = 0; i < options_.peaks && !stop(); ++i) {
        const auto within = t.peak - static_cast<bytes_t>(static_cast<double>(t.peak - floor) * static_cast<double>(i) /
                                                          static_cast<double>(options_.peaks));
        const auto limited = b.with_boundary(std::max<bytes_t>(0, within - b.crossing() - t.saved));
        if (i > 0 && options_.cuts)
          if (auto order = order::eviction(limited, t.start).run(within, {}, stop)) candidates.push_back(std::move(*order));
        const auto add = [&](const result& r) {
          if (r.found()) candidates.push_back(compute_order(r.schedule));
        };
        if (pieces.size() > 1) {
          incumbent best(limited, within);
          monitor part(state.m, part_of_time, [](const progress&) { return control::go_on; });
          join(limited, pieces, best, state, part);
          if (best.found()) candidates.push_back(best.order());
        } else if (large) {
          add(remat::solve(limited, within, cheap_default<min_cut>(), each, stop_with(state.m)));
        } else {
          add(remat::solve(limited, within, inner_, each, stop_with(state.m)));
        }
      }
    }
    return candidates;
  }

  /// Options of a part, sorted by bytes carried. Equal parts are solved once.
  hierarchy::part_options options_of(const hierarchy::part_problem& b, search& state) const {
    const auto form = structure::canonical(b.bare());
    const auto known = [&]() -> const orders* {
      for (const auto& [other, known_orders] : state.solved[form.hash])
        if (other == form) return &known_orders;
      return nullptr;
    };
    if (!known()) {
      std::vector<operation_id> place(form.operations.size());
      for (operation_id k = 0; k < place.size(); ++k) place[form.operations[k]] = k;
      auto candidates = solve_part(b, state);
      for (auto& order : candidates)
        for (auto& o : order) o = place[o];
      std::sort(candidates.begin(), candidates.end());
      candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
      state.solved[form.hash].emplace_back(form, std::move(candidates));
    }
    hierarchy::part_options all;
    for (auto order : *known()) {
      for (auto& o : order) o = form.operations[o];
      all.list.push_back(b.measure(order));
    }
    std::stable_sort(all.list.begin(), all.list.end(), [](const hierarchy::part_option& a, const hierarchy::part_option& x) {
      return std::tuple(a.carried, a.seconds, a.needs()) < std::tuple(x.carried, x.seconds, x.needs());
    });
    all.checkpoint = b.checkpoint();
    return all;
  }

  /// Plans `p`, cut into `parts`, and offers the schedules to `best`.
  void join(const problem& p, const structure::partition& parts, incumbent& best, search& state, monitor& m) const {
    const bool whole = state.depth++ == 0;
    const auto report = [&](const std::string& stage) {
      if (whole) best.report(m, stage, state.bound);
    };
    const hierarchy::part_index index(p, parts);
    std::vector<hierarchy::part_options> choices;
    for (std::size_t i = 0; i < parts.size() && !m.stopped(); ++i) {
      choices.push_back(options_of(hierarchy::part_problem(p, index, parts[i]), state));
      if (i % 16 == 0) report("part " + std::to_string(i + 1) + " of " + std::to_string(parts.size()));
    }
    if (choices.size() == parts.size()) {
      hierarchy::level l(p, index, parts, choices, best, whole, [&] { report("parts joined"); });
      joiner_.join(l, m);
      auto& fastest = l.fitting();
      std::sort(fastest.begin(), fastest.end());
      constexpr double near = 1.02;  // times the fastest; slower schedules do not catch up
      for (std::size_t k = 0; whole && k < std::min(fastest.size(), options_.retained) && !m.stopped(); ++k)
        if (fastest[k].first < near * best.seconds() &&
            best.offer(order::retain_more(p, fastest[k].second, best.budget(), m.stop_check())))
          report("retention");
    }
    --state.depth;
  }

  Inner inner_;
  Joiner joiner_;
  options options_;
};

}  // namespace remat
