// SPDX-License-Identifier: Apache-2.0
/// @file
/// The dynamic program over chains with several ways to run each link: the top level of rotor and rockmate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat {

/// A chain of links, each with a forward and a backward. The forward of link i reads x_i and yields x_(i+1); its backward reads
/// x_i, what its forward saved and the gradient of x_(i+1), and yields the gradient of x_i. The loss is part of the last link.
struct chain {
  /// A way to run a link.
  struct option {
    bytes_t saved = 0;               ///< from forward to backward, x_(i+1) included
    double forward = 0;              ///< s
    double backward = 0;             ///< s, recomputation inside the link included
    bytes_t forward_transient = 0;   ///< needed by the forward besides x_i and `saved`
    bytes_t backward_transient = 0;  ///< needed by the backward besides x_i, `saved` and the gradient of x_(i+1)
  };
  struct link {
    bytes_t input = 0;                 ///< x_i
    bytes_t gradient = 0;              ///< the gradient of x_i
    std::vector<option> options;       ///< at least one
    double checkpoint_seconds = 0;     ///< forward that saves nothing
    bytes_t checkpoint_transient = 0;  ///< needed by it besides x_i and x_(i+1)
    bytes_t kept = 0;                  ///< what the backward leaves until the end, such as gradients of parameters
  };
  std::vector<link> links;
};

/// A step of a schedule of a chain.
struct chain_step {
  enum class kind { checkpoint, forward, backward } what;
  std::size_t link;
  std::size_t option;  ///< of `forward` and `backward`
  friend bool operator==(const chain_step&, const chain_step&) = default;
};

/// The fastest persistent schedules of a chain for every budget at once. Persistent: what is stored stays until the backward that
/// reads it.
///
/// With m bytes besides x_i, links i to j and the gradient g_(j+1) take
///
///     Opt(i, j, m) = min( later, now )
///     now   = min over k: forward_k + backward_k + Opt(i + 1, j, m - saved_k)
///             if m >= g_(j+1) + saved_k + forward_transient_k and m >= K(i+1..j) + g_(i+1) + saved_k + backward_transient_k
///     later = min over i < s <= j: sum of checkpoint_seconds of i..s-1 + Opt(s, j, m - x_s) + Opt(i, s-1, m - K(s..j))
///             if m >= g_(j+1) + (t > i ? x_t : 0) + x_(t+1) + checkpoint_transient_t for all t in i..s-1
///
/// with K(a..b) the sum of `kept`. Each Opt(i, j, .) is kept as a step function: exact in bytes, or with sizes rounded up to
/// `slots` units, which bounds time and space.
///
/// Complexity: O(L^2 (L + options) P) time and O(L^2 P) space for L links and P breakpoints per function, P <= slots.
///
/// Reference: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", INRIA RR-9302
/// (2019), and, for options per link, "Rockmate", ICML 2023, without their table over memory sizes.
class chain_table {
 public:
  static constexpr std::size_t most_links = 2000;

  struct options {
    std::size_t slots = 0;            ///< units the budget is cut into; 0: exact in bytes
    std::function<bool()> stop = {};  ///< polled; true leaves the table incomplete
  };

  /// @param c      the chain
  /// @param budget bytes, x_0 included; all smaller budgets are answered as well
  /// @param o      options
  /// @throws bad_option if the chain has more than `most_links` links or a link has no option
  chain_table(const chain& c, bytes_t budget, const options& o) : links_(c.links), budget_(budget) {
    const auto n = links_.size();
    if (n > most_links)
      throw bad_option("chain: " + std::to_string(n) + " links, at most " + std::to_string(most_links) + " are possible");
    for (std::size_t i = 0; i < n; ++i)
      if (links_[i].options.empty()) throw bad_option("chain: links[" + std::to_string(i) + "] has no option");
    unit_ = o.slots == 0 ? 1 : std::max<bytes_t>(1, (budget + static_cast<bytes_t>(o.slots) - 1) / static_cast<bytes_t>(o.slots));
    most_ = n == 0 ? 0 : floor_units(budget - links_[0].input);
    kept_.assign(n + 1, 0);
    for (std::size_t i = 0; i < n; ++i) kept_[i + 1] = kept_[i] + links_[i].kept;
    table_.resize(n * (n + 1) / 2);
    if (most_ < 0) {
      complete_ = true;
      return;
    }
    if (most_ <= dense_units) dense_.assign(static_cast<std::size_t>(most_) + 1, never);
    for (std::size_t length = 1; length <= n; ++length)
      for (std::size_t i = 0; i + length <= n; ++i) {
        if (o.stop && o.stop()) return;
        fill(i, i + length - 1);
      }
    complete_ = true;
    dense_ = {};
  }

  chain_table(const chain& c, bytes_t budget) : chain_table(c, budget, options{}) {}

  /// False if `stop` ended the construction; nothing is known then.
  bool complete() const { return complete_; }

  /// The least time within `budget`, s, or nothing if no persistent schedule fits.
  /// @param budget bytes, at most that of the construction (more are not used)
  std::optional<double> seconds(bytes_t budget) const {
    if (links_.empty()) return 0.0;
    if (!complete_) return std::nullopt;
    const double s = at(0, links_.size() - 1, floor_units(std::min(budget, budget_) - links_[0].input));
    return s == never ? std::nullopt : std::optional<double>(s);
  }

  /// The budgets at which the least time changes, ascending, with the time from there on.
  std::vector<std::pair<bytes_t, double>> front() const {
    std::vector<std::pair<bytes_t, double>> points;
    if (links_.empty() || !complete_) return points;
    for (const auto& p : table_[index(0, links_.size() - 1)]) points.emplace_back(p.need * unit_ + links_[0].input, p.seconds);
    return points;
  }

  /// A schedule that takes `seconds(budget)`.
  /// @throws bad_option if there is none
  /// Complexity: O(L) per step and split.
  std::vector<chain_step> steps(bytes_t budget) const {
    if (!seconds(budget)) throw bad_option("chain: no persistent schedule within " + std::to_string(budget) + " bytes");
    std::vector<chain_step> list;
    if (links_.empty()) return list;
    struct task {
      std::size_t i, j;
      bytes_t m;
      std::optional<chain_step> step;  // to be emitted instead
    };
    std::vector<task> stack = {{0, links_.size() - 1, floor_units(std::min(budget, budget_) - links_[0].input), {}}};
    while (!stack.empty()) {
      const task now = stack.back();
      stack.pop_back();
      if (now.step) {
        list.push_back(*now.step);
        continue;
      }
      const auto i = now.i, j = now.j;
      const auto m = now.m;
      double best = never;
      std::size_t option = 0, split = 0;  // split 0: run link i now
      for (std::size_t k = 0; k < links_[i].options.size(); ++k) {
        const auto& o = links_[i].options[k];
        if (m < threshold(i, j, o)) continue;
        const double t = o.forward + o.backward + (i == j ? 0 : at(i + 1, j, m - units(o.saved)));
        if (t < best) best = t, option = k;
      }
      splits(i, j, [&](std::size_t s, double forward, bytes_t need) {
        if (m < need) return;
        const double t = forward + (at(s, j, m - units(links_[s].input)) + at(i, s - 1, m - units(kept_[j + 1] - kept_[s])));
        if (t < best) best = t, split = s;
      });
      if (split == 0) {
        list.push_back({chain_step::kind::forward, i, option});
        stack.push_back({0, 0, 0, chain_step{chain_step::kind::backward, i, option}});
        if (i < j) stack.push_back({i + 1, j, m - units(links_[i].options[option].saved), {}});
      } else {
        for (auto t = i; t < split; ++t) list.push_back({chain_step::kind::checkpoint, t, 0});
        stack.push_back({i, split - 1, m - units(kept_[j + 1] - kept_[split]), {}});
        stack.push_back({split, j, m - units(links_[split].input), {}});
      }
    }
    return list;
  }

 private:
  struct point {
    bytes_t need;  // units
    double seconds;
  };
  using curve = std::vector<point>;  // need ascending, seconds descending
  static constexpr double never = std::numeric_limits<double>::infinity();
  static constexpr bytes_t dense_units = 1 << 16;

  bytes_t units(bytes_t bytes) const { return (bytes + unit_ - 1) / unit_; }
  bytes_t floor_units(bytes_t bytes) const { return bytes < 0 ? -1 : bytes / unit_; }
  bytes_t input(std::size_t i) const { return i < links_.size() ? links_[i].input : 0; }
  bytes_t gradient(std::size_t i) const { return i < links_.size() ? links_[i].gradient : 0; }
  std::size_t index(std::size_t i, std::size_t j) const { return j * (j + 1) / 2 + i; }

  /// Opt(i, j, m), s.
  double at(std::size_t i, std::size_t j, bytes_t m) const {
    const auto& c = table_[index(i, j)];
    const auto after = std::upper_bound(c.begin(), c.end(), m, [](bytes_t x, const point& p) { return x < p.need; });
    return after == c.begin() ? never : std::prev(after)->seconds;
  }
  /// Units that `o` needs at link i while links i to j are to be done.
  bytes_t threshold(std::size_t i, std::size_t j, const chain::option& o) const {
    return units(o.saved + std::max(gradient(j + 1) + o.forward_transient,
                                    kept_[j + 1] - kept_[i + 1] + gradient(i + 1) + o.backward_transient));
  }
  /// Calls `visit(s, seconds of the checkpoint forwards, units they need)` for each split s.
  template <class Visit>
  void splits(std::size_t i, std::size_t j, Visit&& visit) const {
    double forward = 0;
    bytes_t need = 0;
    for (auto s = i + 1; s <= j; ++s) {
      const auto t = s - 1;
      forward += links_[t].checkpoint_seconds;
      need = std::max(need, gradient(j + 1) + (t > i ? input(t) : 0) + input(t + 1) + links_[t].checkpoint_transient);
      visit(s, forward, units(need));
    }
  }

  void offer(bytes_t need, double seconds) {
    if (need > most_) return;
    if (dense_.empty())
      sparse_.push_back({need, seconds});
    else if (auto& best = dense_[static_cast<std::size_t>(need)]; seconds < best)
      best = seconds;
  }
  void fill(std::size_t i, std::size_t j) {
    for (const auto& o : links_[i].options) {
      const auto least = threshold(i, j, o), saved = units(o.saved);
      const double here = o.forward + o.backward;
      if (i == j) {
        offer(least, here);
        continue;
      }
      for (const auto& p : table_[index(i + 1, j)]) {
        if (p.need + saved > most_) break;
        offer(std::max(least, p.need + saved), here + p.seconds);
      }
    }
    splits(i, j, [&](std::size_t s, double forward, bytes_t need) {
      add(table_[index(s, j)], units(links_[s].input), table_[index(i, s - 1)], units(kept_[j + 1] - kept_[s]), forward, need);
    });
    table_[index(i, j)] = reduce();
  }
  /// Offers the sum of two step functions, shifted.
  void add(const curve& f, bytes_t shift_f, const curve& g, bytes_t shift_g, double forward, bytes_t least) {
    if (f.empty() || g.empty()) return;
    std::size_t a = 0, b = 0;
    bytes_t m = std::max({f[0].need + shift_f, g[0].need + shift_g, least});
    while (m <= most_) {
      while (a + 1 < f.size() && f[a + 1].need + shift_f <= m) ++a;
      while (b + 1 < g.size() && g[b + 1].need + shift_g <= m) ++b;
      offer(m, forward + (f[a].seconds + g[b].seconds));
      const bytes_t next_a = a + 1 < f.size() ? f[a + 1].need + shift_f : most_ + 1;
      const bytes_t next_b = b + 1 < g.size() ? g[b + 1].need + shift_g : most_ + 1;
      m = std::min(next_a, next_b);
    }
  }
  /// The lower envelope of what was offered since the last call.
  curve reduce() {
    curve c;
    const auto keep = [&](bytes_t need, double seconds) {
      if (c.empty() || seconds < c.back().seconds) c.push_back({need, seconds});
    };
    for (std::size_t m = 0; m < dense_.size(); ++m)
      if (dense_[m] != never) {
        keep(static_cast<bytes_t>(m), dense_[m]);
        dense_[m] = never;
      }
    std::sort(sparse_.begin(), sparse_.end(),
              [](const point& a, const point& b) { return a.need != b.need ? a.need < b.need : a.seconds < b.seconds; });
    for (const auto& p : sparse_) keep(p.need, p.seconds);
    sparse_.clear();
    c.shrink_to_fit();
    return c;
  }

  std::vector<chain::link> links_;
  bytes_t budget_, unit_ = 1, most_ = 0;
  std::vector<bytes_t> kept_;  // prefix sums
  std::vector<curve> table_;
  std::vector<double> dense_;
  std::vector<point> sparse_;
  bool complete_ = false;
};

}  // namespace remat
