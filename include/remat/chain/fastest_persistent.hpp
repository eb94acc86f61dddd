// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fastest persistent schedule of a chain for one budget, exact in bytes, without a table.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/persistent_table.hpp>
#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain {

/// What `fastest_persistent` found.
struct chain_answer {
  std::vector<chain_step> steps;                             ///< of the fastest schedule found; empty if there is none
  double seconds = std::numeric_limits<double>::infinity();  ///< its time, s; infinity if there is none
  double bound = 0;  ///< no persistent schedule within the budget takes less, s; infinity: none fits

  bool found() const { return seconds < std::numeric_limits<double>::infinity(); }
  /// True if it is proven that no persistent schedule is faster, or that none fits.
  bool exact() const { return bound >= seconds; }
};

/// How `fastest_persistent` searches.
struct fastest_persistent_options {
  std::size_t most_labels = 1 << 24;  ///< kept at a time, some 40 bytes each, >= 1; 256 times as many are looked at
  std::size_t most_nested = 64;       ///< how often, at most, a part of a recomputed part is recomputed again
  std::function<bool()> stop = {};    ///< polled; true ends the search with what there is
};

namespace detail {

/// The search behind `fastest_persistent`. It works with overheads: seconds beyond those of each link's fastest option.
///
/// For a fixed last link j, the schedules of links i to j are paths in the recurrence of `persistent_table`: at link a with m
/// bytes left, either run it now with option k and go on at a + 1 with m - saved_k, or split at s: forwards of a..s-1 and the
/// schedule of (a, s - 1, m - K(s..j)), and go on at s with m - x_s. That is a shortest path with a resource, found with labels
/// (m, overhead) at each link. A label is dropped if another one is no worse in both, or if its overhead and a lower bound on the
/// rest together reach the best complete path. The recomputed part of a split has no overhead if it has `ample` memory; otherwise
/// it is a search of its own.
///
/// The lower bound is Lagrangian. With a price of lambda seconds per byte, D_lambda(a) is the least of the overhead and the price
/// of all bytes taken by a path from a to the end, so that D_lambda(a) - lambda m bounds the overhead from (a, m) on. Recomputed
/// parts enter it with `missing`.
class fastest_persistent_search {
 public:
  fastest_persistent_search(const heterogeneous_chain& c, bytes_t budget, const fastest_persistent_options& o)
      : links_(c.links), most_(budget - c.links[0].input), options_(o), bounds_(c.links.size()) {
    const auto n = links_.size();
    forward_.assign(n + 1, 0);
    kept_.assign(n + 1, 0);
    saved_.assign(n + 1, 0);
    for (std::size_t i = 0; i < n; ++i) {
      const auto& l = links_[i];
      const auto fastest = std::min_element(l.options.begin(), l.options.end(),
                                            [](const heterogeneous_chain::option& x, const heterogeneous_chain::option& y) {
                                              const auto one = x.forward + x.backward, other = y.forward + y.backward;
                                              return one != other ? one < other : x.saved < y.saved;
                                            });
      fastest_.push_back(static_cast<std::size_t>(fastest - l.options.begin()));
      forward_[i + 1] = forward_[i] + l.checkpoint_seconds;
      kept_[i + 1] = kept_[i] + l.kept;
      saved_[i + 1] = saved_[i] + fastest->saved;
      ideal_ += fastest->forward + fastest->backward;
      // The least seconds per byte that is gained at this link, whether by another option or by a recomputation.
      worth_.push_back(ratio(l.checkpoint_seconds, fastest->saved + fastest->forward_transient));
      for (const auto& k : l.options) {
        const auto transient = std::max(
            {bytes_t{0}, fastest->forward_transient - k.forward_transient, fastest->backward_transient - k.backward_transient});
        worth_[i] = std::min(worth_[i], ratio(overhead(i, k), fastest->saved - k.saved + transient));
      }
    }
  }

  chain_answer run() {
    const auto last = links_.size() - 1;
    found best;
    choose_prices();
    double bound = stopped_ ? 0 : least(last, 0, most_);
    // Narrow passes without nested searches find good schedules, which make the wide ones short. The first ones pretend to know
    // a schedule that is nearly as good as the bound.
    double pretended = 0.02 * std::max(bound, 0.01 * forward_.back());
    const auto widest = std::max<std::size_t>(1, options_.most_labels / links_.size());
    for (std::size_t pass = 0; !stopped_ && bound < best.overhead; ++pass) {
      const bool narrow = pass < 3;
      nested_ = narrow ? 0 : options_.most_nested;
      width_ = std::min(widest, narrow ? narrowest << (2 * pass) : 2 * narrowest << (2 * (pass - 3)));
      found now;
      for (; narrow && now.plan == none_ && !stopped_ && pretended < 4 * forward_.back(); pretended *= 4) {
        now = solve({0, last, most_}, std::min(best.overhead, bound + pretended), 0);
        if (best.plan != none_) break;
      }
      if (!narrow) now = solve({0, last, most_}, best.overhead, 0);
      bound = std::max(bound, now.bound);
      if (now.plan != none_) best = now;
      if (!narrow && width_ == widest) break;
    }
    chain_answer answer;
    answer.bound = ideal_ + bound;
    if (best.plan == none_) return answer;
    answer.seconds = ideal_ + best.overhead;
    if (bound >= best.overhead) answer.bound = answer.seconds;
    emit(best.plan, answer.steps);
    return answer;
  }

 private:
  using id = std::uint32_t;
  static constexpr id none_ = std::numeric_limits<id>::max();
  static constexpr double never = std::numeric_limits<double>::infinity();
  static constexpr std::size_t prices = 32;
  static constexpr std::size_t narrowest = 8;  // labels per link in the first pass, which is always finished
  using priced = std::array<double, prices>;

  /// Links i to j with m bytes besides x_i and the gradient after them.
  struct part {
    std::size_t i, j;
    bytes_t m;
  };
  /// The answer to a part.
  struct found {
    double overhead = never;  ///< of the plan, s
    double bound = 0;         ///< no schedule has less overhead
    id plan = none_;
  };
  /// A step along a path: run `link` now, or split.
  struct move {
    id link, option, to;  ///< option: `none_` for a split at `to`
    id inner;             ///< plan of the recomputed part of a split; `none_`: each link's fastest option
  };
  struct plan {
    std::vector<move> moves;
    bytes_t least;  ///< bytes with which it works
  };
  struct label {
    bytes_t m;
    double overhead;
    id parent, link, option, inner;  ///< how it was reached: from which label at which link
  };
  /// The state of one search.
  struct search {
    part whole;
    double cutoff;                       ///< only less overhead is of interest
    std::size_t depth;                   ///< of nesting
    std::vector<std::vector<label>> at;  ///< labels at link i + k that have not been expanded
    std::vector<label> kept;             ///< those that have
    double lost = never;                 ///< lower bound on all that was given up for want of room
    label last{};                        ///< of the best complete path
  };
  /// A split of (i, j) and what depends on i and s only.
  struct split {
    std::size_t s;
    double forward;  ///< s, of the checkpoint forwards
    bytes_t need;    ///< bytes they need
    bytes_t ample;   ///< bytes with which (i, s - 1) has no overhead
    double worth;    ///< s that (i, s - 1) costs at least for each byte less
  };

  static double ratio(double seconds, bytes_t bytes) { return bytes <= 0 ? never : seconds / static_cast<double>(bytes); }
  bytes_t input(std::size_t i) const { return i < links_.size() ? links_[i].input : 0; }
  bytes_t gradient(std::size_t i) const { return i < links_.size() ? links_[i].gradient : 0; }
  bytes_t kept(std::size_t from, std::size_t to) const { return kept_[to] - kept_[from]; }
  double overhead(std::size_t i, const heterogeneous_chain::option& o) const {
    const auto& f = links_[i].options[fastest_[i]];
    return (o.forward + o.backward) - (f.forward + f.backward);
  }
  bytes_t threshold(std::size_t i, std::size_t j, const heterogeneous_chain::option& o) const {
    return o.saved + std::max(gradient(j + 1) + o.forward_transient, kept(i + 1, j + 1) + gradient(i + 1) + o.backward_transient);
  }
  bool poll() { return stopped_ = stopped_ || (options_.stop && options_.stop()); }

  /// Calls `visit(split)` for each split of (i, j), ascending, until it answers false.
  template <class Visit>
  void splits(std::size_t i, std::size_t j, Visit&& visit) const {
    split x{i, 0, 0, 0, never};
    bytes_t forward = 0, backward = std::numeric_limits<bytes_t>::min();
    for (auto t = i; t < j; ++t) {
      const auto& l = links_[t];
      const auto& o = l.options[fastest_[t]];
      x.s = t + 1;
      x.forward = forward_[t + 1] - forward_[i];
      x.need = std::max(x.need, gradient(j + 1) + (t > i ? input(t) : 0) + input(t + 1) + l.checkpoint_transient);
      forward = std::max(forward, saved_[t + 1] + o.forward_transient);
      backward = std::max(backward, saved_[t + 1] - kept_[t + 1] + gradient(t + 1) + o.backward_transient);
      x.ample = std::max(forward + gradient(t + 1), backward + kept_[t + 1]) - saved_[i];
      x.worth = std::min(x.worth, worth_[t]);
      if (!visit(x)) return;
    }
  }
  /// The recomputed part of a split has at least so much overhead with m bytes.
  static double missing(const split& x, bytes_t m) { return m >= x.ample ? 0 : x.worth * static_cast<double>(x.ample - m); }

  /// D(i) for the last link j and all prices.
  const priced& bounds(std::size_t j, std::size_t i) {
    auto& d = bounds_[j];  // D(j), D(j - 1), ...
    while (d.size() <= j - i) {
      const auto a = j - d.size();
      priced least;
      least.fill(never);
      for (const auto& o : links_[a].options) {
        const auto seconds = overhead(a, o);
        const auto bytes = static_cast<double>(a == j ? threshold(a, j, o) : o.saved);
        for (std::size_t k = 0; k < prices; ++k)
          least[k] = std::min(least[k], seconds + price_[k] * bytes + (a == j ? 0 : d.back()[k]));
      }
      const auto most = most_ - (a > 0 ? input(a) : 0);
      splits(a, j, [&](const split& x) {
        const auto seconds = x.forward + missing(x, most - kept(x.s, links_.size()));
        const auto bytes = static_cast<double>(input(x.s));
        const auto& rest = d[j - x.s];
        for (std::size_t k = 0; k < prices; ++k) least[k] = std::min(least[k], seconds + price_[k] * bytes + rest[k]);
        return true;
      });
      d.push_back(least);
    }
    return d[j - i];
  }
  /// Links i to j have at least so much overhead with m bytes.
  double least(std::size_t j, std::size_t i, bytes_t m) {
    const auto& d = bounds(j, i);
    const auto bytes = static_cast<double>(m);
    double best = 0;
    for (std::size_t k = 0; k < prices; ++k) best = std::max(best, d[k] - price_[k] * bytes);
    return best;
  }
  /// Prices around the one that gives the whole chain its highest bound.
  void choose_prices() {
    const auto last = links_.size() - 1;
    double usual = forward_.back();
    for (std::size_t i = 0; i <= last; ++i)
      for (const auto& o : links_[i].options) usual += overhead(i, o);
    usual /= std::max(1.0, static_cast<double>(saved_.back()));
    price_.fill(0);
    if (usual <= 0) return;
    double low = usual / 1024, high = usual * 1024;
    for (int round = 0; round < 3; ++round) {
      for (std::size_t k = 0; k < prices; ++k) price_[k] = low * std::pow(high / low, static_cast<double>(k) / (prices - 1));
      bounds_[last].clear();
      for (auto i = last + 1; i-- > 0;) {
        if (poll()) return;
        bounds(last, i);
      }
      std::size_t best = 0;
      const auto& d = bounds(last, 0);
      const auto value = [&](std::size_t k) { return d[k] - price_[k] * static_cast<double>(most_); };
      for (std::size_t k = 1; k < prices; ++k)
        if (value(k) > value(best)) best = k;
      low = price_[best > 0 ? best - 1 : 0];
      high = price_[std::min(best + 1, prices - 1)];
    }
    for (std::size_t k = 0; k < prices; ++k)  // dense in the middle
      price_[k] = (low + high) / 2 * std::exp(6 * std::pow(2 * static_cast<double>(k) / (prices - 1) - 1, 3));
    bounds_[last].clear();
  }

  /// The least overhead of a part, if it is below `cutoff`.
  found solve(const part& whole, double cutoff, std::size_t depth) {
    search x{whole, cutoff, depth, {}, {}};
    x.at.resize(whole.j - whole.i + 1);
    bounds(whole.j, whole.i);
    x.at[0].push_back({whole.m, 0, none_, none_, none_, none_});
    found answer;
    for (auto a = whole.i; a <= whole.j; ++a) {
      if (poll()) break;
      const auto from = x.kept.size();
      select(x, a);
      if (x.kept.size() == from) continue;
      run_now(x, a, from, answer);
      run_later(x, a, from);
    }
    answer.bound = stopped_ ? 0 : std::min(x.lost, x.cutoff);
    if (answer.overhead < never) answer.plan = remember(x);
    return answer;
  }

  void offer(search& x, std::size_t a, const label& l) {
    if (l.overhead + least(x.whole.j, a, l.m) < x.cutoff) x.at[a - x.whole.i].push_back(l);
  }
  /// Moves the labels at link a that are worth it to `kept`, m descending and overhead ascending.
  void select(search& x, std::size_t a) {
    auto here = std::move(x.at[a - x.whole.i]);
    std::sort(here.begin(), here.end(),
              [](const label& l, const label& r) { return l.m != r.m ? l.m > r.m : l.overhead < r.overhead; });
    std::vector<double> total;
    std::size_t count = 0;
    for (const auto& l : here) {
      if (count > 0 && l.overhead >= here[count - 1].overhead) continue;
      const auto sum = l.overhead + least(x.whole.j, a, l.m);
      if (sum >= x.cutoff) continue;
      total.push_back(sum);
      here[count++] = l;
    }
    double limit = x.cutoff;
    if (count > width_) {
      auto sorted = total;
      std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(width_), sorted.end());
      limit = sorted[width_];
    }
    for (std::size_t k = 0; k < count; ++k) {
      const bool spread = k % (count / width_ + 1) == 0;  // some with much memory left, though they look slow
      if (total[k] < limit || spread)
        x.kept.push_back(here[k]);
      else
        x.lost = std::min(x.lost, total[k]);
    }
  }
  void run_now(search& x, std::size_t a, std::size_t from, found& answer) {
    const auto j = x.whole.j;
    for (std::size_t k = 0; k < links_[a].options.size(); ++k) {
      const auto& o = links_[a].options[k];
      const auto needed = threshold(a, j, o);
      const auto more = overhead(a, o);
      for (auto y = from; y < x.kept.size() && x.kept[y].m >= needed; ++y) {
        const label next{x.kept[y].m - o.saved, x.kept[y].overhead + more, static_cast<id>(y),
                         static_cast<id>(a),    static_cast<id>(k),        none_};
        if (a < j) {
          offer(x, a + 1, next);
        } else if (next.overhead < x.cutoff) {
          x.cutoff = answer.overhead = next.overhead;
          x.last = next;
        }
      }
    }
  }
  void run_later(search& x, std::size_t a, std::size_t from) {
    const auto j = x.whole.j;
    const auto most = x.kept[from].m;
    priced lowest;
    lowest.fill(never);
    for (auto y = from; y < x.kept.size(); ++y)
      for (std::size_t k = 0; k < prices; ++k)
        lowest[k] = std::min(lowest[k], x.kept[y].overhead - price_[k] * static_cast<double>(x.kept[y].m));
    splits(a, j, [&](const split& s) {
      if (s.forward >= x.cutoff) return false;
      const auto after = kept(s.s, j + 1);
      const auto& rest = bounds(j, s.s);
      double best = 0;
      for (std::size_t k = 0; k < prices; ++k)
        best = std::max(best, lowest[k] + rest[k] + price_[k] * static_cast<double>(input(s.s)));
      if (s.forward + missing(s, most - after) + best >= x.cutoff) return true;
      work_ += x.kept.size() - from;
      if (work_ / 256 > options_.most_labels && (width_ > narrowest || nested_ > 0)) stopped_ = true;
      if (stopped_) return false;
      for (auto y = from; y < x.kept.size() && x.kept[y].m >= s.need; ++y) {
        const auto m = x.kept[y].m;
        auto sum = x.kept[y].overhead + s.forward;
        id inner = none_;
        if (m - after < s.ample) {
          const auto remaining = least(j, s.s, m - input(s.s));
          const auto room = x.cutoff - sum - remaining;
          if (missing(s, m - after) >= room) continue;
          const auto answer = inner_part({a, s.s - 1, m - after}, room, x.depth + 1);
          if (answer.bound < std::min(answer.overhead, room)) x.lost = std::min(x.lost, sum + answer.bound + remaining);
          if (answer.plan == none_) continue;
          sum += answer.overhead;
          inner = answer.plan;
        }
        offer(x, s.s, {m - input(s.s), sum, static_cast<id>(y), static_cast<id>(a), none_, inner});
      }
      return true;
    });
  }

  /// The answer to the recomputed part of a split, from memory where possible.
  found inner_part(const part& x, double room, std::size_t depth) {
    found best;
    best.bound = x.m < 0 ? never : least(x.j, x.i, x.m);
    if (best.bound >= room) return best;
    auto& known = known_[{x.i, x.j}];
    for (const auto& [m, answer] : known) {
      if (x.m <= m) best.bound = std::max(best.bound, answer.bound);
      if (answer.plan == none_ || x.m < plans_[answer.plan].least || answer.overhead >= best.overhead) continue;
      best.overhead = answer.overhead;
      best.plan = answer.plan;
    }
    if (best.bound >= std::min(best.overhead, room) || depth > nested_) return best;
    // Asked again and again with a little more room, it would be solved many times: so there is more room each time.
    const auto wider = room * std::pow(4, static_cast<double>(known.size()));
    auto now = solve(x, std::min(wider, best.overhead), depth);
    best.bound = std::max(best.bound, now.bound);
    now.bound = best.bound;
    if (now.plan != none_) best = now;
    known_[{x.i, x.j}].push_back({x.m, now});
    return best;
  }
  /// The best path of a search as a plan.
  id remember(const search& x) {
    plan p;
    auto to = static_cast<id>(x.whole.j + 1);
    bytes_t least = 0;  // what the label at hand must have
    for (auto l = x.last; l.link != none_; l = x.kept[l.parent]) {
      p.moves.push_back({l.link, l.option, to, l.inner});
      if (l.option != none_) {
        const auto& o = links_[l.link].options[l.option];
        least = std::max(least + o.saved, threshold(l.link, x.whole.j, o));
      } else {
        splits(l.link, x.whole.j, [&](const split& s) {
          if (s.s < to) return true;
          const auto inner = l.inner == none_ ? s.ample : plans_[l.inner].least;
          least = std::max({least + input(to), s.need, inner + kept(to, x.whole.j + 1)});
          return false;
        });
      }
      to = l.link;
    }
    std::reverse(p.moves.begin(), p.moves.end());
    p.least = least;
    plans_.push_back(std::move(p));
    return static_cast<id>(plans_.size() - 1);
  }
  /// Appends the steps of a plan; as deep as plans are nested.
  void emit(id which, std::vector<chain_step>& list) const {
    using enum chain_step::kind;
    const auto& moves = plans_[which].moves;
    for (const auto& x : moves)
      if (x.option != none_)
        list.push_back({forward, x.link, x.option});
      else
        for (std::size_t t = x.link; t < x.to; ++t) list.push_back({checkpoint, t, 0});
    for (auto x = moves.rbegin(); x != moves.rend(); ++x)
      if (x->option != none_) {
        list.push_back({backward, x->link, x->option});
      } else if (x->inner != none_) {
        emit(x->inner, list);
      } else {
        for (std::size_t t = x->link; t < x->to; ++t) list.push_back({forward, t, fastest_[t]});
        for (std::size_t t = x->to; t-- > x->link;) list.push_back({backward, t, fastest_[t]});
      }
  }

  struct memory {
    bytes_t m;
    found answer;
  };
  const std::vector<heterogeneous_chain::link>& links_;
  bytes_t most_;
  fastest_persistent_options options_;
  double ideal_ = 0;                   // s, of the fastest options
  std::vector<double> forward_;        // prefix sums
  std::vector<bytes_t> kept_, saved_;  // prefix sums
  std::vector<std::size_t> fastest_;
  std::vector<double> worth_;
  priced price_{};
  std::vector<std::vector<priced>> bounds_;                                   // per last link
  std::map<std::pair<std::size_t, std::size_t>, std::vector<memory>> known_;  // per first and last link
  std::vector<plan> plans_;
  std::size_t width_ = 0, nested_ = 0, work_ = 0;
  bool stopped_ = false;
};

}  // namespace detail

/// The fastest persistent schedule of a chain within a budget, exact in bytes: see `persistent_table` for the recurrence. For one
/// budget it needs no table, takes any number of links, and says how far its answer is from the best possible.
///
/// Wider and wider beams are searched until one has lost nothing; chains of 1 000 links take seconds, of 10 000 links a minute to
/// within a small gap.
///
/// @param c      the chain; sizes and times >= 0
/// @param budget bytes, x_0 included
/// @param o      options
/// @return the schedule, its time and a bound on the time of all persistent ones
/// @throws bad_option if a link has no option, or `most_labels` is 0
/// Complexity: O(L^2) for the bounds of L links; the search is exponential at worst, and limited by `most_labels` and `stop`.
///
/// Reference: for labels with two criteria, Desrochers and Soumis, "A generalized permanent labelling algorithm for the shortest
/// path problem with time windows", INFOR 26 (1988); for bounds by prices, Handler and Zang, "A dual algorithm for the
/// constrained shortest path problem", Networks 10 (1980).
/// @code
/// const auto answer = remat::fastest_persistent(c, 1 << 30);
/// if (answer.exact()) run(answer.steps);
/// @endcode
inline chain_answer fastest_persistent(const heterogeneous_chain& c, bytes_t budget, const fastest_persistent_options& o = {}) {
  if (o.most_labels < 1) throw bad_option("fastest_persistent_options.most_labels must be >= 1, got 0");
  for (std::size_t i = 0; i < c.links.size(); ++i)
    if (c.links[i].options.empty()) throw bad_option("chain: links[" + std::to_string(i) + "] has no option");
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
