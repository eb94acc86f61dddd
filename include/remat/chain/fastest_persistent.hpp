// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fastest persistent schedule of a chain for one budget, exact in bytes, without a table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/chain/lagrangian_bounds.hpp>
#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain {

/// Result of `fastest_persistent`.
struct chain_answer {
  std::vector<chain_step> steps;                             ///< of the fastest schedule found; empty if none was found
  double seconds = std::numeric_limits<double>::infinity();  ///< time of this schedule, s; infinity if none was found
  double bound = 0;  ///< lower bound on the time of persistent schedules within the budget, s; infinity: none fits

  bool found() const { return seconds < std::numeric_limits<double>::infinity(); }
  /// True if `steps` is proven to be the fastest persistent schedule, or no persistent schedule fits.
  bool exact() const { return bound >= seconds; }
};

/// How `fastest_persistent` searches.
struct fastest_persistent_options {
  std::size_t max_labels = 1 << 24;  ///< labels in memory, about 40 bytes each, >= 1; the search ends after 256 times as many
  std::function<bool()> stop = {};   ///< polled; true ends the search with the best answer so far
};

namespace detail {

/// The search behind `fastest_persistent`.
///
/// For a fixed last link j, the schedules of links i to j are paths in the recurrence of `persistent_table`. A path at link a
/// with m bytes left has two kinds of steps. It runs link a now with option k, and goes on at a + 1 with m - saved_k. Or it
/// splits at s: it runs the forwards of links a to s - 1 and, later, the schedule of (a, s - 1, m - K(s..j)), and goes on at s
/// with m - x_s. This is a shortest path problem with a resource. Labels (m, overhead) at each link solve it. A label is dropped
/// in two cases: another label is no worse in both; or its overhead and a lower bound on the rest (`lagrangian_bounds`) reach the
/// best complete path. The recomputed part of a split has no overhead with `ample` memory; otherwise it is a search of its own.
class fastest_persistent_search {
 public:
  fastest_persistent_search(const heterogeneous_chain& c, bytes_t budget, const fastest_persistent_options& o)
      : chain_(c), capacity_(budget - c.links[0].input), options_(o), bounds_(chain_, capacity_) {}

  chain_answer run() {
    const auto last = chain_.size() - 1;
    bounds_.choose([this] { return poll(); });
    part_answer best;
    double bound = stopped_ ? 0 : bounds_.lower_bound(0, last, capacity_);
    widen_beam(best, bound);
    chain_answer answer;
    answer.bound = chain_.ideal() + bound;
    if (best.plan == no_index) return answer;
    answer.seconds = chain_.ideal() + best.overhead;
    if (bound >= best.overhead) answer.bound = answer.seconds;
    append_steps(best.plan, answer.steps);
    return answer;
  }

 private:
  using id = std::uint32_t;
  static constexpr id no_index = std::numeric_limits<id>::max();
  static constexpr double never = std::numeric_limits<double>::infinity();
  static constexpr std::size_t max_nested = 64;  // depth of recomputed parts inside recomputed parts
  static constexpr std::size_t narrowest = 8;    // labels per link in the first pass, which always ends by itself

  /// Links i to j with m bytes besides x_i, including the gradient of x_(j+1).
  struct part {
    std::size_t i, j;
    bytes_t m;
  };
  /// The answer for a part.
  struct part_answer {
    double overhead = never;  ///< of the plan, s
    double bound = 0;         ///< lower bound on the overhead of every schedule of the part, s
    id plan = no_index;
  };
  /// A step along a path: run `link` now, or split at `to`.
  struct move {
    id link, option, to;  ///< option: `no_index` for a split; to: the next link on the path
    id inner;             ///< plan of the recomputed part of a split; `no_index`: the fastest option of each link
  };
  struct plan {
    std::vector<move> moves;
    bytes_t min_bytes;  ///< least bytes with which the plan works
  };
  struct label {
    bytes_t m;
    double overhead;
    id parent, link, option, inner;  ///< the last step, and the label before it
  };
  /// The state of one search.
  struct search {
    part whole;
    double cutoff;                         ///< paths of this overhead or more are of no interest, s
    std::size_t depth;                     ///< of nesting
    std::vector<std::vector<label>> open;  ///< labels at link i + k that have not been expanded
    std::vector<label> expanded;           ///< labels that have been expanded
    double min_cut_off = never;            ///< lower bound on the overhead of the paths that the beam has cut off, s
    label last{};                          ///< end of the best complete path
  };
  bool poll() { return stopped_ = stopped_ || (options_.stop && options_.stop()); }

  /// Searches with wider and wider beams until a beam cuts off nothing. The first passes are narrow and have no nested searches.
  /// They find good schedules, which make the wide passes short. To be short themselves, they assume a cutoff just above the
  /// bound.
  void widen_beam(part_answer& best, double& bound) {
    const part whole{0, chain_.size() - 1, capacity_};
    double assumed_overhead = std::max(0.02 * std::max(bound, 0.01 * chain_.all_forwards()), std::numeric_limits<double>::min());
    const auto widest = std::max<std::size_t>(1, options_.max_labels / chain_.size());
    for (std::size_t pass = 0; !stopped_ && bound < best.overhead; ++pass) {
      const bool narrow = pass < 3;
      max_nesting_ = narrow ? 0 : max_nested;
      beam_width_ = std::min(widest, narrow ? narrowest << (2 * pass) : 2 * narrowest << (2 * (pass - 3)));
      part_answer answer;
      for (; narrow && answer.plan == no_index && !stopped_ && assumed_overhead < 4 * chain_.all_forwards();
           assumed_overhead *= 4) {
        answer = solve(whole, std::min(best.overhead, bound + assumed_overhead), 0);
        if (best.plan != no_index) break;
      }
      if (!narrow) answer = solve(whole, best.overhead, 0);
      bound = std::max(bound, answer.bound);
      if (answer.plan != no_index) best = answer;
      if (!narrow && beam_width_ == widest) break;
    }
  }

  /// The least overhead of a part, if it is below `cutoff`.
  /// @param cutoff s
  /// @param depth  of nesting
  part_answer solve(const part& whole, double cutoff, std::size_t depth) {
    search x{whole, cutoff, depth, {}, {}};
    x.open.resize(whole.j - whole.i + 1);
    bounds_.at_all_prices(whole.i, whole.j);
    x.open[0].push_back({whole.m, 0, no_index, no_index, no_index, no_index});
    part_answer answer;
    for (auto a = whole.i; a <= whole.j; ++a) {
      if (poll()) break;
      const auto from = x.expanded.size();
      select_labels(x, a);
      if (x.expanded.size() == from) continue;
      expand_runs(x, a, from, answer);
      expand_splits(x, a, from);
    }
    answer.bound = stopped_ ? 0 : std::min(x.min_cut_off, x.cutoff);
    if (answer.overhead < never) answer.plan = store_plan(x);
    return answer;
  }

  void offer(search& x, std::size_t a, const label& l) {
    if (l.overhead + bounds_.lower_bound(a, x.whole.j, l.m) < x.cutoff) x.open[a - x.whole.i].push_back(l);
  }
  /// Moves the labels at link a that the beam keeps to `expanded`, m descending and overhead ascending.
  void select_labels(search& x, std::size_t a) {
    auto labels = std::move(x.open[a - x.whole.i]);
    std::sort(labels.begin(), labels.end(),
              [](const label& l, const label& r) { return l.m != r.m ? l.m > r.m : l.overhead < r.overhead; });
    std::vector<double> total;
    std::size_t count = 0;
    for (const auto& l : labels) {
      if (count > 0 && l.overhead >= labels[count - 1].overhead) continue;
      const auto sum = l.overhead + bounds_.lower_bound(a, x.whole.j, l.m);
      if (sum >= x.cutoff) continue;
      total.push_back(sum);
      labels[count++] = l;
    }
    double limit = x.cutoff;
    if (count > beam_width_) {
      auto sorted = total;
      std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(beam_width_), sorted.end());
      limit = sorted[beam_width_];
    }
    for (std::size_t k = 0; k < count; ++k) {
      const bool keep_spread = k % (count / beam_width_ + 1) == 0;  // some labels with much memory left, though they look slow
      if (total[k] < limit || keep_spread)
        x.expanded.push_back(labels[k]);
      else
        x.min_cut_off = std::min(x.min_cut_off, total[k]);
    }
  }
  void expand_runs(search& x, std::size_t a, std::size_t from, part_answer& answer) {
    const auto j = x.whole.j;
    for (std::size_t k = 0; k < chain_.link(a).options.size(); ++k) {
      const auto& o = chain_.link(a).options[k];
      const auto needed = chain_.threshold(a, j, o);
      const auto more = chain_.overhead(a, o);
      for (auto y = from; y < x.expanded.size() && x.expanded[y].m >= needed; ++y) {
        const label next{x.expanded[y].m - o.saved, x.expanded[y].overhead + more,
                         static_cast<id>(y),        static_cast<id>(a),
                         static_cast<id>(k),        no_index};
        if (a < j) {
          offer(x, a + 1, next);
        } else if (next.overhead < x.cutoff) {
          x.cutoff = answer.overhead = next.overhead;
          x.last = next;
        }
      }
    }
  }
  void expand_splits(search& x, std::size_t a, std::size_t from) {
    const auto j = x.whole.j;
    const auto bytes = x.expanded[from].m;
    lagrangian_bounds::priced lowest;
    lowest.fill(never);
    for (auto y = from; y < x.expanded.size(); ++y)
      for (std::size_t k = 0; k < lagrangian_bounds::prices; ++k)
        lowest[k] = std::min(lowest[k], x.expanded[y].overhead - bounds_.price(k) * static_cast<double>(x.expanded[y].m));
    chain_.splits(a, j, [&](const overheads::split& s) {
      if (s.forward >= x.cutoff) return false;
      const auto after = chain_.kept(s.s, j);
      const auto& rest = bounds_.at_all_prices(s.s, j);
      double best = 0;
      for (std::size_t k = 0; k < lagrangian_bounds::prices; ++k)
        best = std::max(best, lowest[k] + rest[k] + bounds_.price(k) * static_cast<double>(chain_.input(s.s)));
      if (s.forward + s.min_overhead(bytes - after) + best >= x.cutoff) return true;
      work_ += x.expanded.size() - from;
      if (work_ / 256 > options_.max_labels && (beam_width_ > narrowest || max_nesting_ > 0)) stopped_ = true;
      if (stopped_) return false;
      for (auto y = from; y < x.expanded.size() && x.expanded[y].m >= s.need; ++y) {
        const auto m = x.expanded[y].m;
        auto sum = x.expanded[y].overhead + s.forward;
        id inner = no_index;
        if (m - after < s.ample) {
          const auto remaining = bounds_.lower_bound(s.s, j, m - chain_.input(s.s));
          const auto room = x.cutoff - sum - remaining;
          if (s.min_overhead(m - after) >= room) continue;
          const auto answer = inner_part({a, s.s - 1, m - after}, room, x.depth + 1);
          if (answer.bound < std::min(answer.overhead, room))
            x.min_cut_off = std::min(x.min_cut_off, sum + answer.bound + remaining);
          if (answer.plan == no_index) continue;
          sum += answer.overhead;
          inner = answer.plan;
        }
        offer(x, s.s, {m - chain_.input(s.s), sum, static_cast<id>(y), static_cast<id>(a), no_index, inner});
      }
      return true;
    });
  }

  /// The answer for the recomputed part of a split: a known answer if it suffices, else a new search.
  /// @param room overhead from which on the part is of no interest, s
  part_answer inner_part(const part& x, double room, std::size_t depth) {
    part_answer best;
    best.bound = x.m < 0 ? never : bounds_.lower_bound(x.i, x.j, x.m);
    if (best.bound >= room) return best;
    auto& known = known_parts_[{x.i, x.j}];
    for (const auto& [m, answer] : known) {
      if (x.m <= m) best.bound = std::max(best.bound, answer.bound);
      if (answer.plan == no_index || x.m < plans_[answer.plan].min_bytes || answer.overhead >= best.overhead) continue;
      best.overhead = answer.overhead;
      best.plan = answer.plan;
    }
    if (best.bound >= std::min(best.overhead, room) || depth > max_nesting_) return best;
    auto solved = solve(x, std::min(room, best.overhead), depth);
    best.bound = std::max(best.bound, solved.bound);
    solved.bound = best.bound;
    if (solved.plan != no_index) best = solved;
    known_parts_[{x.i, x.j}].push_back({x.m, solved});
    return best;
  }
  /// Stores the best path of a search as a plan.
  id store_plan(const search& x) {
    plan p;
    auto to = static_cast<id>(x.whole.j + 1);
    bytes_t min_bytes = 0;  // bytes of the label in question
    for (auto l = x.last; l.link != no_index; l = x.expanded[l.parent]) {
      p.moves.push_back({l.link, l.option, to, l.inner});
      if (l.option != no_index) {
        const auto& o = chain_.link(l.link).options[l.option];
        min_bytes = std::max(min_bytes + o.saved, chain_.threshold(l.link, x.whole.j, o));
      } else {
        chain_.splits(l.link, x.whole.j, [&](const overheads::split& s) {
          if (s.s < to) return true;
          const auto inner = l.inner == no_index ? s.ample : plans_[l.inner].min_bytes;
          min_bytes = std::max({min_bytes + chain_.input(to), s.need, inner + chain_.kept(to, x.whole.j)});
          return false;
        });
      }
      to = l.link;
    }
    std::reverse(p.moves.begin(), p.moves.end());
    p.min_bytes = min_bytes;
    plans_.push_back(std::move(p));
    return static_cast<id>(plans_.size() - 1);
  }
  /// Appends the steps of a plan. Recursive, as deep as the plans are nested.
  void append_steps(id which, std::vector<chain_step>& list) const {
    using enum chain_step::kind;
    const auto& moves = plans_[which].moves;
    for (const auto& x : moves)
      if (x.option != no_index)
        list.push_back({forward, x.link, x.option});
      else
        for (std::size_t t = x.link; t < x.to; ++t) list.push_back({checkpoint, t, 0});
    for (auto x = moves.rbegin(); x != moves.rend(); ++x)
      if (x->option != no_index) {
        list.push_back({backward, x->link, x->option});
      } else if (x->inner != no_index) {
        append_steps(x->inner, list);
      } else {
        for (std::size_t t = x->link; t < x->to; ++t) list.push_back({forward, t, chain_.fastest(t)});
        for (std::size_t t = x->to; t-- > x->link;) list.push_back({backward, t, chain_.fastest(t)});
      }
  }

  struct known_part {
    bytes_t m;
    part_answer answer;
  };
  overheads chain_;
  bytes_t capacity_;
  fastest_persistent_options options_;
  lagrangian_bounds bounds_;
  std::map<std::pair<std::size_t, std::size_t>, std::vector<known_part>> known_parts_;  // per first and last link
  std::vector<plan> plans_;
  std::size_t beam_width_ = 0, max_nesting_ = 0, work_ = 0;
  bool stopped_ = false;
};

}  // namespace detail

/// The fastest persistent schedule of a chain within a budget, exact in bytes. See `persistent_table` for the recurrence. This
/// search is for one budget, needs no table, takes any number of links, and proves a bound.
///
/// It searches with wider and wider beams until a beam cuts off nothing. Chains of 1 000 links take seconds. Chains of 10 000
/// links take a minute to reach a small gap.
///
/// @param c      the chain; sizes and times >= 0
/// @param budget bytes, including x_0
/// @param o      options
/// @return the schedule, its time, and a bound on the time of all persistent schedules
/// @throws bad_option if a link has no option, or `max_labels` is 0
/// Complexity: O(L^2) for the bounds of L links; the search is exponential at worst, and limited by `max_labels` and `stop`.
///
/// Reference: for labels with two criteria, Desrochers and Soumis, "A generalized permanent labelling algorithm for the shortest
/// path problem with time windows", INFOR 26 (1988); for bounds by prices, Handler and Zang, "A dual algorithm for the
/// constrained shortest path problem", Networks 10 (1980).
/// @code
/// const auto answer = remat::chain::fastest_persistent(c, 1 << 30);
/// if (answer.exact()) run(answer.steps);
/// @endcode
inline chain_answer fastest_persistent(const heterogeneous_chain& c, bytes_t budget, const fastest_persistent_options& o = {}) {
  if (o.max_labels < 1) throw bad_option("fastest_persistent_options.max_labels must be >= 1, got 0");
  chain_answer answer;
  if (c.links.empty()) {
    answer.seconds = 0;
    return answer;
  }
  if (budget < c.links[0].input) {
    answer.bound = std::numeric_limits<double>::infinity();
    return answer;
  }
  return detail::fastest_persistent_search(c, budget, o).run();
}

}  // namespace remat::chain
