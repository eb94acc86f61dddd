// SPDX-License-Identifier: Apache-2.0
/// @file
/// Planning in parts: any graph, any solver inside, any solver for the whole. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/part_chain.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/replay.hpp>
#include <remat/order/retain.hpp>
#include <remat/solver/improved.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/structure/canonical.hpp>
#include <remat/structure/partition.hpp>

namespace remat {

/// The problem with the costs of like operations made equal, so that equal layers whose measured costs differ by noise are seen
/// to be equal. Alike: same kind, sizes, workspace; costs are joined from below while they are within `tolerance` of the
/// smallest.
/// @param p         the problem
/// @param tolerance relative, >= 0; 0 leaves all as it is
/// Complexity: O((values + edges) log).
inline problem with_like_costs(const problem& p, double tolerance) {
  if (tolerance <= 0) return p;
  std::map<std::vector<std::int64_t>, std::vector<operation_id>> alike;
  auto ops = p.operations();
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
      const double most = p.operations()[list[from]].seconds * (1 + tolerance);
      for (; to < list.size() && p.operations()[list[to]].seconds <= most; ++to) sum += p.operations()[list[to]].seconds;
      if (p.operations()[list[from]].seconds < p.operations()[list[to - 1]].seconds)
        for (auto k = from; k < to; ++k) ops[list[k]].seconds = sum / static_cast<double>(to - from);
    }
  }
  return problem(p.name(), p.values(), std::move(ops), p.targets(), p.copies(), p.backward_start());
}

/// Cuts a graph into parts, finds several ways to run each, and chooses among them for the whole: for graphs of any size and
/// shape.
///
/// The parts come from `find_partition` or from the user. Each is a problem of its own (`part_problem`), which Inner solves
/// for several bounds on what is saved and on the peak; equal parts are solved once (`canonical`), and parts that are too large
/// are cut again. Of the ways those on the convex hull of seconds against bytes saved are used: a multiplier, seconds per byte,
/// goes through all parts at once and turns them, one after another, from the richest to the leanest. For some of these
/// selections the graph with its parts condensed to an operation each (`condensed_problem`) is given to Outer, which may compute
/// whole parts again; what comes back is a schedule of the whole, because the parts' memory is accounted for. In the end
/// `retain_more` uses the room that is left, and `local_search` searches around what was found.
///
/// Copies to the host are not used.
///
/// @tparam Inner the solver of the parts, such as `checkmate<highs::backend>`
/// @tparam Outer the solver of the condensed graph
///
/// Complexity: `saved` * `peaks` calls of Inner per distinct part, some twenty of Outer on a graph of two operations per part,
/// and O(operations log operations) for the rest but `retain_more` and `local_search`.
///
/// Reference: Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont, "HiRemate: Hierarchical Approach for Efficient
/// Re-materialization of Neural Networks", 2024, which chooses the ways by an ILP.
/// @code
/// remat::hierarchical method{checkmate(checkmate::options::fast()), remat::min_cut{}};
/// auto r = remat::solve(p, budget, method, {.seconds = 30});
/// @endcode
template <solver Inner = min_cut, solver Outer = min_cut>
class hierarchical {
 public:
  struct options {
    partition_options cut = {};           ///< how graphs are cut
    std::optional<partition> parts = {};  ///< of the whole, instead of cutting it
    std::size_t leaf_operations = 160;    ///< parts of more operations are cut again; where they cannot be, `min_cut` solves them
    std::size_t saved = 6;                ///< bounds on what a part saves that are tried, >= 1
    std::size_t peaks = 3;                ///< bounds on a part's peak that are tried, >= 1
    double tolerance = 0.1;               ///< relative difference of costs that does not make parts differ, >= 0
    bool bound = true;                    ///< prove a lower bound as well
    bool condensed = true;                ///< join the parts by Outer, on the condensed graph
    bool chain = true;                    ///< join them by the dynamic program of `persistent_table` as well
    std::size_t slots = 1000;             ///< of `persistent_table`, >= 1
    bool compete = false;                 ///< `min_cut` plans the whole first, and the faster schedule is returned
    /// In the end `local_search` works on the whole until `rounds` / operations of its rounds, 20 to 1000, bring nothing; 0:
    /// never.
    std::size_t rounds = 30000;
  };

  hierarchical() : hierarchical(light<Inner>()) {}
  explicit hierarchical(Inner inner, Outer outer = light<Outer>())
      : hierarchical(std::move(inner), std::move(outer), options{}) {}
  /// @throws bad_option naming the member that is out of range
  hierarchical(Inner inner, Outer outer, const options& o) : inner_(std::move(inner)), outer_(std::move(outer)), options_(o) {
    if (o.saved < 1) throw bad_option("hierarchical.saved must be >= 1, got 0");
    if (o.peaks < 1) throw bad_option("hierarchical.peaks must be >= 1, got 0");
    if (o.slots < 1) throw bad_option("hierarchical.slots must be >= 1, got 0");
    if (!(o.tolerance >= 0)) throw bad_option("hierarchical.tolerance must be >= 0, got " + std::to_string(o.tolerance));
  }

  /// `min_cut` with less effort than where it is on its own.
  template <solver S>
  static S light() {
    if constexpr (std::is_same_v<S, min_cut>)
      return min_cut({.moments = 2, .cuts = 6, .mixtures = 2, .bound = false, .repairs = 3000, .rounds = 0});
    else
      return S();
  }

  std::string name() const { return "hierarchical/" + std::string(inner_.name()) + "/" + std::string(outer_.name()); }

  /// @throws bad_option if the partition is none: an operation that does not exist or is listed twice, or parts that depend on
  ///         themselves through others; what Inner and Outer throw
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    incumbent best(p, budget);
    std::optional<partition> given;
    if (options_.parts) given = checked(p, *options_.parts);
    if (!best.offer(needed_operations(p))) {
      if (options_.bound) prove_bound(p, budget, r, [&] { return m.stopped(); });
      if (r.status == status::infeasible) return r;
      search now{m, r.bound, {}};
      if (options_.compete) {
        monitor first(m, 0.3, [&](progress x) {
          x.bound = r.bound;
          m.report(x);
          return control::go_on;
        });
        if (const auto cut = min_cut({.bound = false}).solve(p, budget, first); cut.found())
          best.offer(compute_order(cut.schedule));
        if (m.stopped() || best.seconds() * (1 - m.limits().gap) <= r.bound) {
          best.put_into(r);
          return r;
        }
      }
      const auto alike = with_like_costs(p, options_.tolerance);
      join(alike, budget, given ? *given : find_partition(alike, options_.cut), best, now);
      if (p.operations().size() <= options_.leaf_operations && !m.stopped())
        if (const auto whole = remat::solve(p, budget, inner_, share(m, 1), now.stop()); whole.found())
          best.offer(compute_order(whole.schedule));
      if (options_.rounds > 0 && best.found() && !m.stopped())
        order::local_search(p, best.order(), best, m,
                            {.patience = std::clamp<std::size_t>(options_.rounds / p.operations().size(), 20, 1000)}, r.bound);
    }
    best.put_into(r);
    return r;
  }

 private:
  using orders = std::vector<std::vector<operation_id>>;

  /// What one call of `solve` works with.
  struct search {
    monitor& m;
    double bound;
    std::unordered_map<std::size_t, std::vector<std::pair<canonical_form, orders>>> solved;  // orders in canonical positions
    std::size_t depth = 0;

    auto stop() {
      return [this](const progress&) { return m.stopped() ? control::stop : control::go_on; };
    }
  };

  static limits share(const monitor& m, double part) {
    auto l = m.limits();
    l.seconds = m.remaining() * part;
    return l;
  }

  /// The user's partition, sorted; every part a forward and a backward that can be put in an order.
  static partition checked(const problem& p, partition parts) {
    for (auto& piece : parts) {
      std::sort(piece.forward.begin(), piece.forward.end());
      std::sort(piece.backward.begin(), piece.backward.end());
    }
    const part_index index(p, parts);
    std::vector<part_option> ways;  // all as listed
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& piece = parts[i];
      const auto where = "partition: part " + std::to_string(i);
      if (piece.size() == 0) throw bad_option(where + " is empty");
      for (auto o : piece.forward)
        for (auto v : p.operations()[o].inputs)
          if (!p.is_source(v) && std::binary_search(piece.backward.begin(), piece.backward.end(), p.producer(v)))
            throw bad_option(where + ": operation " + std::to_string(o) + " of the forward reads what operation " +
                             std::to_string(p.producer(v)) + " of the backward yields");
      const part_problem b(p, index, piece);
      ways.push_back(b.measure(needed_operations(b.bare())));
    }
    std::vector<const part_option*> chosen;
    for (const auto& w : ways) chosen.push_back(&w);
    if (const condensed_problem c(p, index, chosen); !c.possible()) throw bad_option(c.stuck());
    return parts;
  }

  /// Orders of a part that retain across the turn what minimum cuts say, most bytes first.
  orders cut_orders(const part_problem& b) const {
    const auto needed = needed_operations(b.bare());
    retention_cut cut(b.bare(), needed, b.turn());
    std::vector<retention_cut::choice> found = {cut.retain_all(), cut.retain_least()};
    for (std::size_t i = 0; i + 1 < found.size() && found.size() <= options_.saved;) {
      const auto &rich = found[i], &lean = found[i + 1];
      const auto bytes = static_cast<double>(rich.bytes - lean.bytes);
      auto between = bytes > 0 && lean.seconds > rich.seconds ? cut.minimum((lean.seconds - rich.seconds) / bytes) : rich;
      if (between.bytes < rich.bytes && between.bytes > lean.bytes)
        found.insert(found.begin() + static_cast<std::ptrdiff_t>(i) + 1, std::move(between));
      else
        ++i;
    }
    orders list;
    for (const auto& c : found)
      if (auto order = replay_across(b.bare(), needed, b.turn(), c.retained, c.later)) list.push_back(std::move(*order));
    return list;
  }

  /// Orders in which to run a part: from minimum cuts, and from Inner (or, for what is too large, from parts of the part) under
  /// bounds on what is saved, those of the cuts, and on the peak.
  orders solve_part(const part_problem& b, search& now) const {
    const auto& bare = b.bare();
    const auto plain = needed_operations(bare);
    const auto floor = bounds_without_search(bare).budget;
    const auto cuts = cut_orders(b);
    orders found = {plain};
    found.insert(found.end(), cuts.begin(), cuts.end());
    partition pieces;
    const bool large = bare.operations().size() > options_.leaf_operations;
    if (large) {
      auto finer = options_.cut;
      finer.turn = b.turn();
      pieces = find_partition(bare, finer);
    }
    auto each = share(now.m, 0.5 / static_cast<double>(options_.peaks * (options_.saved + 1)));
    each.gap = std::max(each.gap, 1e-3);
    const auto stop = [&] { return now.m.stopped(); };
    for (const auto& start : cuts) {
      const auto saved = b.measure(start).saved;
      const auto peak = measure_order(bare, start).peak;
      for (std::size_t i = 0; i < options_.peaks && !stop(); ++i) {
        const auto within = peak - static_cast<bytes_t>(static_cast<double>(peak - floor) * static_cast<double>(i) /
                                                        static_cast<double>(options_.peaks));
        const auto limited = b.with_turn(std::max<bytes_t>(0, within - b.crossing() - saved));
        if (i > 0)
          if (auto order = eviction(limited, start).run(within, {}, stop)) found.push_back(std::move(*order));
        const auto add = [&](const result& r) {
          if (r.found()) found.push_back(compute_order(r.schedule));
        };
        if (pieces.size() > 1) {
          incumbent best(limited, within);
          join(limited, within, pieces, best, now);
          if (best.found()) found.push_back(best.order());
        } else if (large) {
          add(remat::solve(limited, within, light<min_cut>(), each, now.stop()));
        } else {
          add(remat::solve(limited, within, inner_, each, now.stop()));
        }
      }
    }
    return found;
  }

  /// Ways to run a part. Equal parts are solved once.
  std::vector<part_option> ways_for(const part_problem& b, search& now) const {
    const auto form = canonical(b.bare());
    const auto known = [&]() -> const orders* {
      for (const auto& [other, found] : now.solved[form.hash])
        if (other == form) return &found;
      return nullptr;
    };
    if (!known()) {
      std::vector<operation_id> place(form.operations.size());
      for (operation_id k = 0; k < place.size(); ++k) place[form.operations[k]] = k;
      auto found = solve_part(b, now);
      for (auto& order : found)
        for (auto& o : order) o = place[o];
      std::sort(found.begin(), found.end());
      found.erase(std::unique(found.begin(), found.end()), found.end());
      now.solved[form.hash].emplace_back(form, std::move(found));
    }
    std::vector<part_option> ways;
    for (auto order : *known()) {
      for (auto& o : order) o = form.operations[o];
      ways.push_back(b.measure(order));
    }
    std::stable_sort(ways.begin(), ways.end(), [](const part_option& a, const part_option& x) {
      return std::tuple(a.carried, a.seconds, a.needs()) < std::tuple(x.carried, x.seconds, x.needs());
    });
    return ways;
  }

  /// Those ways on the convex hull of seconds against bytes carried that need no more than `most` bytes while they run; if all
  /// need more, the one that needs the least. Most bytes carried first.
  static std::vector<const part_option*> hull(const std::vector<part_option>& ways, bytes_t most) {
    std::vector<const part_option*> line;
    const auto slope = [](const part_option& a, const part_option& x) {
      return (a.seconds - x.seconds) / static_cast<double>(x.carried - a.carried);
    };
    for (const auto& w : ways) {
      if (w.needs() > most || (!line.empty() && (w.seconds >= line.back()->seconds || w.carried == line.back()->carried)))
        continue;
      while (line.size() > 1 && slope(*line[line.size() - 2], *line.back()) <= slope(*line.back(), w)) line.pop_back();
      line.push_back(&w);
    }
    if (line.empty())
      line.push_back(
          &*std::min_element(ways.begin(), ways.end(), [](const auto& a, const auto& x) { return a.needs() < x.needs(); }));
    std::reverse(line.begin(), line.end());
    return line;
  }

  /// Plans `p`, cut into `parts`, and offers what it finds.
  void join(const problem& p, bytes_t budget, const partition& parts, incumbent& best, search& now) const {
    auto& m = now.m;
    const bool top = now.depth++ == 0;
    const auto report = [&](const std::string& stage) {
      if (top) best.report(m, stage, now.bound);
    };
    const part_index index(p, parts);
    std::vector<std::vector<part_option>> ways;
    bytes_t least = 0, most = 0;
    for (std::size_t i = 0; i < parts.size() && !m.stopped(); ++i) {
      ways.push_back(ways_for(part_problem(p, index, parts[i]), now));
      const auto [low, high] =
          std::minmax_element(ways[i].begin(), ways[i].end(), [](const auto& a, const auto& x) { return a.needs() < x.needs(); });
      least = std::max(least, low->needs());
      most = std::max(most, high->needs());
      if (i % 16 == 0) report("part " + std::to_string(i + 1) + " of " + std::to_string(parts.size()));
    }
    if (options_.chain && ways.size() == parts.size()) chain_join(p, budget, index, parts, ways, best, now, report);
    const auto levels = top ? options_.peaks : 1;
    std::vector<std::vector<const part_option*>> before;
    for (std::size_t k = 0; k <= levels && options_.condensed && !m.stopped(); ++k) {
      const auto within =
          most - static_cast<bytes_t>(static_cast<double>(most - least) * static_cast<double>(k) / static_cast<double>(levels));
      std::vector<std::vector<const part_option*>> lines;
      for (const auto& w : ways) lines.push_back(hull(w, within));
      if (lines != before) select(p, budget, index, lines, best, now, report);
      before = std::move(lines);
    }
    --now.depth;
  }

  /// The parts as a chain. Its memory model is cautious, so larger budgets of it are tried as well, and what does not fit is
  /// played with `eviction`.
  template <class Report>
  void chain_join(const problem& p, bytes_t budget, const part_index& index, const partition& parts,
                  const std::vector<std::vector<part_option>>& ways, incumbent& best, search& now, const Report& report) const {
    if (parts.size() < 2) return;
    const auto stop = [&] { return now.m.stopped(); };
    const part_chain model(p, index, parts, ways);
    const auto most = std::max<bytes_t>(0, budget - model.aside()) + (budget - p.held_bytes()) / 3;
    const persistent_table table(model.links(), most, {.slots = options_.slots, .stop = stop});
    if (!table.complete()) return;
    orders good, over;
    std::vector<chain_step> before;
    const int tries = now.depth == 1 ? 48 : 12;
    for (int k = 0; k <= tries && !stop(); ++k) {
      const auto within = most - static_cast<bytes_t>(static_cast<double>(most) * k / (1.5 * tries));
      if (!table.seconds(within)) break;
      auto steps = table.steps(within);
      if (steps == before) continue;
      auto order = model.order(steps);
      before = std::move(steps);
      const auto needs = measure_order(p, order);
      if (needs.peak <= budget) {
        if (best.offer(order)) report("chain of parts");
        good.push_back(std::move(order));
      } else if (needs.seconds < best.seconds()) {
        over.push_back(std::move(order));
      }
    }
    for (std::size_t i = over.size(); i-- > 0 && i + 4 >= over.size() && !stop();)
      for (const double distance : {1.0, 0.5, 2.0})
        if (auto order = eviction(p, over[i]).run(budget, {.distance = distance}, stop)) {
          if (best.offer(*order)) report("chain of parts");
          good.push_back(std::move(*order));
        }
    retain(p, budget, std::move(good), best, now, report);
  }

  /// Improves the best of `good`.
  template <class Report>
  static void retain(const problem& p, bytes_t budget, orders good, incumbent& best, search& now, const Report& report) {
    if (now.depth > 1) return;
    const auto stop = [&] { return now.m.stopped(); };
    std::vector<std::pair<double, std::size_t>> fastest;
    for (std::size_t i = 0; i < good.size(); ++i) fastest.emplace_back(measure_order(p, good[i]).seconds, i);
    std::sort(fastest.begin(), fastest.end());
    for (std::size_t k = 0; k < fastest.size() && k < 3 && fastest[k].first < 1.02 * best.seconds() && !stop(); ++k)
      if (best.offer(retain_more(p, std::move(good[fastest[k].second]), budget, stop))) report("retention");
  }

  template <class Report>
  void select(const problem& p, bytes_t budget, const part_index& index, const std::vector<std::vector<const part_option*>>& ways,
              incumbent& best, search& now, const Report& report) const {
    // One part after another takes its next leaner way, those first that lose the fewest seconds per byte.
    struct turn {
      double price;
      std::size_t part;
    };
    std::vector<turn> turns;
    for (std::size_t i = 0; i < ways.size(); ++i)
      for (std::size_t k = 0; k + 1 < ways[i].size(); ++k)
        turns.push_back(
            {(ways[i][k + 1]->seconds - ways[i][k]->seconds) / static_cast<double>(ways[i][k]->carried - ways[i][k + 1]->carried),
             i});
    std::stable_sort(turns.begin(), turns.end(), [](const turn& a, const turn& b) { return a.price < b.price; });
    const auto condense = [&](std::size_t count) {
      std::vector<std::size_t> taken(ways.size(), 0);
      for (std::size_t k = 0; k < count; ++k) ++taken[turns[k].part];
      std::vector<const part_option*> chosen;
      for (std::size_t i = 0; i < ways.size(); ++i) chosen.push_back(ways[i][taken[i]]);
      return condensed_problem(p, index, chosen);
    };
    const auto stop = [&] { return now.m.stopped(); };
    // Each part run once: the richest selection that fits.
    const auto fits = [&](std::size_t count) {
      const auto c = condense(count);
      if (!c.possible()) return false;
      const auto order = c.expand(p, needed_operations(c.condensed()));
      best.offer(order);
      return measure_order(p, order).peak <= budget;
    };
    std::size_t low = 0, high = turns.size();
    while (low < high && !stop()) {
      const auto middle = (low + high) / 2;
      if (fits(middle))
        high = middle;
      else
        low = middle + 1;
    }
    report("parts joined");
    // Parts computed again, by Outer on the condensed graph, or operations, by evictions.
    std::vector<std::size_t> counts;
    const std::size_t steps = now.depth == 1 ? 6 : 2;
    for (std::size_t k = 0; k <= steps; ++k) counts.push_back(low + (turns.size() - low) * k / steps);
    for (std::size_t k = 0; k <= steps; ++k) counts.push_back(low * k / steps);
    std::sort(counts.begin(), counts.end());
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    orders good;
    const auto take = [&](std::vector<operation_id> order) {
      if (best.offer(order)) report("parts joined");
      good.push_back(std::move(order));
    };
    for (auto count : counts) {
      if (stop()) break;
      const auto c = condense(count);
      if (!c.possible()) continue;
      auto l = share(now.m, 0.1);
      l.gap = std::max(l.gap, 1e-4);
      if (const auto r = remat::solve(c.condensed(), budget, outer_, l, now.stop()); r.found())
        take(c.expand(p, compute_order(r.schedule)));
      if (count > low || now.depth > 1) continue;
      const auto start = c.expand(p, needed_operations(c.condensed()));
      for (const double distance : {1.0, 0.5, 2.0})
        if (auto order = eviction(p, start).run(budget, {.distance = distance}, stop)) take(std::move(*order));
    }
    retain(p, budget, std::move(good), best, now, report);
  }

  Inner inner_;
  Outer outer_;
  options options_;
};

}  // namespace remat
