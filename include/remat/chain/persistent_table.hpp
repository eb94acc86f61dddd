// SPDX-License-Identifier: Apache-2.0
/// @file
/// The dynamic program over chains with several options per link: the top level of rotor and rockmate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain {

/// The fastest persistent schedules of a chain, for every budget at once. A schedule is persistent if each saved value stays
/// until the backward that reads it.
///
/// Let Opt(i, j, m) be the least seconds of links i to j with m bytes besides x_i. The m bytes include the gradient g_(j+1).
///
///     Opt(i, j, m) = min( later, now )
///     now   = min over k: forward_k + backward_k + Opt(i + 1, j, m - saved_k)
///             if m >= g_(j+1) + saved_k + forward_transient_k and m >= K(i+1..j) + g_(i+1) + saved_k + backward_transient_k
///     later = min over i < s <= j: sum of checkpoint_seconds of i..s-1 + Opt(s, j, m - x_s) + Opt(i, s-1, m - K(s..j))
///             if m >= g_(j+1) + (t > i ? x_t : 0) + x_(t+1) + checkpoint_transient_t for all t in i..s-1
///
/// k is an option of link i, and K(a..b) the sum of `kept` of links a to b. Memory is counted in units: the greatest common
/// divisor of all sizes, or a multiple of it. With a multiple, sizes are rounded up, so every schedule found fits. Each
/// Opt(i, j, .) is stored from the least m with a schedule to the least m beyond which more memory does not help.
/// `fastest_persistent` is exact in bytes for one budget, and takes chains of any length.
///
/// With `inputs_only`, `now` exists for i = j only. This is heterogeneous revolve: all values inside a link are made right before
/// its backward.
///
/// Complexity: O(L^2 (L + options) U) time at most and O(L^2 U) space, 8 bytes each, for L links and U units.
///
/// Reference: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", INRIA RR-9302
/// (2019); for options per link, "Rockmate", ICML 2023; for `inputs_only`, the dynamic program of Grimm, Pottier,
/// Rostaing-Schmidt, "Optimal time and minimum space-time product for reversing a certain class of programs" (1996).
class persistent_table {
 public:
  static constexpr std::size_t max_links = 2000;
  static constexpr bytes_t max_units = 1 << 20;

  struct options {
    std::size_t slots = 0;            ///< most units of the budget; 0: exact, with as many units as necessary
    std::function<bool()> stop = {};  ///< polled; true leaves the table incomplete
    bool inputs_only = false;         ///< save only inputs of links: a link runs now only if it is the last of its part (revolve)
  };

  /// @param c      the chain
  /// @param budget bytes, including x_0; the table answers all smaller budgets as well
  /// @param o      options
  /// @throws bad_option if the chain has more than `max_links` links, a link has no option, or the budget has more than
  ///         `max_units` units
  persistent_table(const heterogeneous_chain& c, bytes_t budget, const options& o)
      : chain_(c), inputs_only_(o.inputs_only), budget_(budget) {
    const auto n = chain_.size();
    if (n > max_links)
      throw bad_option("chain: " + std::to_string(n) + " links, at most " + std::to_string(max_links) + " are possible");
    choose_unit(o.slots);
    capacity_ = n == 0 ? 0 : floor_units(budget - chain_.input(0));
    if (capacity_ > max_units)
      throw bad_option("persistent_table.slots: " + std::to_string(capacity_) + " units, at most " + std::to_string(max_units) +
                       " are possible");
    table_.resize(n * (n + 1) / 2);
    complete_ = true;
    if (capacity_ < 0) return;
    best_.assign(static_cast<std::size_t>(capacity_) + 1, never);
    for (std::size_t j = 0; j < n; ++j)
      for (auto i = j + 1; i-- > 0;) {
        if (o.stop && o.stop()) {
          complete_ = false;
          return;
        }
        fill(i, j);
      }
    best_ = {};
  }

  /// False if `stop` ended the construction; the table then answers nothing.
  bool complete() const { return complete_; }
  /// True if no size was rounded. Then no persistent schedule is faster than `seconds`.
  bool exact() const { return exact_; }

  /// The least time within a budget, s; nothing if no persistent schedule fits, or the table is incomplete.
  /// @param budget bytes; at most the budget of the construction is used
  std::optional<double> seconds(bytes_t budget) const {
    if (chain_.size() == 0) return 0.0;
    if (!complete_) return std::nullopt;
    const double s = at(0, chain_.size() - 1, floor_units(std::min(budget, budget_) - chain_.input(0)));
    return s == never ? std::nullopt : std::optional<double>(s);
  }

  /// The least time as a step function of the budget.
  /// @return ascending: a budget, bytes, and the least time from this budget up to the next, s
  std::vector<std::pair<bytes_t, double>> front() const {
    if (chain_.size() == 0) return {};
    auto points = front(0, chain_.size() - 1);
    for (auto& x : points) x.first += chain_.input(0);
    return points;
  }

  /// The least time of links i to j as a step function of the memory, in bytes besides x_i, including the gradient of x_(j+1).
  /// @return ascending: a memory, bytes, and the least time from this memory up to the next, s
  std::vector<std::pair<bytes_t, double>> front(std::size_t i, std::size_t j) const {
    std::vector<std::pair<bytes_t, double>> points;
    if (!complete_) return points;
    const auto& c = table_[index(i, j)];
    auto m = c.from;
    for (const auto s : c.seconds) {
      if (points.empty() || s < points.back().second) points.emplace_back(m * unit_, s);
      ++m;
    }
    return points;
  }

  /// A schedule that takes `seconds(budget)`.
  /// @throws bad_option if no persistent schedule fits
  /// Complexity: O(L) per step and split.
  std::vector<chain_step> steps(bytes_t budget) const {
    if (!seconds(budget)) throw bad_option("chain: no persistent schedule within " + std::to_string(budget) + " bytes");
    if (chain_.size() == 0) return {};
    return steps(0, chain_.size() - 1, std::min(budget, budget_) - chain_.input(0));
  }
  /// The steps of links `first` to `last`.
  /// @param bytes besides the input of link `first`; at least the smallest memory of `front(first, last)`
  std::vector<chain_step> steps(std::size_t first, std::size_t last, bytes_t bytes) const {
    std::vector<chain_step> list;
    struct task {
      std::size_t i, j;
      bytes_t m;
      std::optional<chain_step> step;  // if set, the task is to emit this step
    };
    std::vector<task> stack = {{first, last, floor_units(bytes), {}}};
    while (!stack.empty()) {
      const task top = stack.back();
      stack.pop_back();
      if (top.step) {
        list.push_back(*top.step);
        continue;
      }
      const auto i = top.i, j = top.j;
      const auto m = top.m;
      double best = never;
      std::size_t option = 0, split = 0;  // split 0: run link i now
      for (std::size_t k = 0; k < options_now(i, j); ++k) {
        const auto& o = chain_.link(i).options[k];
        if (m < units(chain_.threshold(i, j, o))) continue;
        const double t = o.forward + o.backward + (i == j ? 0 : at(i + 1, j, m - units(o.saved)));
        if (t < best) best = t, option = k;
      }
      chain_.splits(i, j, [&](std::size_t s, double forward, bytes_t need) {
        if (m < units(need)) return true;
        const double t = forward + (at(s, j, m - units(chain_.input(s))) + at(i, s - 1, m - units(chain_.kept(s, j))));
        if (t < best) best = t, split = s;
        return true;
      });
      if (split == 0) {
        list.push_back({chain_step::kind::forward, i, option});
        stack.push_back({0, 0, 0, chain_step{chain_step::kind::backward, i, option}});
        if (i < j) stack.push_back({i + 1, j, m - units(chain_.link(i).options[option].saved), {}});
      } else {
        for (auto t = i; t < split; ++t) list.push_back({chain_step::kind::checkpoint, t, 0});
        stack.push_back({i, split - 1, m - units(chain_.kept(split, j)), {}});
        stack.push_back({split, j, m - units(chain_.input(split)), {}});
      }
    }
    return list;
  }

 private:
  /// A non-increasing function of memory: `never` before `from`, constant after the last entry of `seconds`.
  struct curve {
    bytes_t from = 0;  // units
    std::vector<double> seconds;
  };
  static constexpr double never = std::numeric_limits<double>::infinity();

  bytes_t units(bytes_t bytes) const { return (bytes + unit_ - 1) / unit_; }
  bytes_t floor_units(bytes_t bytes) const { return bytes < 0 ? -1 : bytes / unit_; }
  std::size_t index(std::size_t i, std::size_t j) const { return j * (j + 1) / 2 + i; }

  void choose_unit(std::size_t slots) {
    bytes_t divisor = 0;
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      const auto& l = chain_.link(i);
      for (auto b : {l.input, l.gradient, l.checkpoint_transient, l.kept}) divisor = std::gcd(divisor, b);
      for (const auto& o : l.options)
        for (auto b : {o.saved, o.forward_transient, o.backward_transient}) divisor = std::gcd(divisor, b);
    }
    unit_ = std::max<bytes_t>(1, divisor);
    if (slots == 0 || budget_ <= 0) return;
    const auto count = static_cast<bytes_t>(slots);
    const auto multiple = (budget_ / unit_ + count - 1) / count;
    exact_ = multiple <= 1;
    if (!exact_) unit_ *= multiple;
  }

  /// Opt(i, j, m), s.
  double at(std::size_t i, std::size_t j, bytes_t m) const {
    const auto& c = table_[index(i, j)];
    if (c.seconds.empty() || m < c.from) return never;
    return c.seconds[std::min(static_cast<std::size_t>(m - c.from), c.seconds.size() - 1)];
  }
  /// The number of options with which link i may run now.
  std::size_t options_now(std::size_t i, std::size_t j) const {
    return inputs_only_ && i < j ? 0 : chain_.link(i).options.size();
  }

  /// Computes Opt(i, j, .) in `best_`, which is non-increasing, and stores its part between the first finite and the last change.
  void fill(std::size_t i, std::size_t j) {
    const curve nothing = {0, {0.0}};
    for (std::size_t k = 0; k < options_now(i, j); ++k) {
      const auto& o = chain_.link(i).options[k];
      lower(units(chain_.threshold(i, j, o)), o.forward + o.backward, i == j ? nothing : table_[index(i + 1, j)], units(o.saved),
            nothing, 0);
    }
    chain_.splits(i, j, [&](std::size_t s, double forward, bytes_t need) {
      lower(units(need), forward, table_[index(s, j)], units(chain_.input(s)), table_[index(i, s - 1)], units(chain_.kept(s, j)));
      return true;
    });
    const auto first = std::find_if(best_.begin(), best_.end(), [](double s) { return s != never; });
    if (first == best_.end()) return;
    const auto last = std::partition_point(first, best_.end(), [&](double s) { return s > best_.back(); });
    table_[index(i, j)] = {first - best_.begin(), std::vector<double>(first, last + 1)};
    std::fill(first, best_.end(), never);
  }

  /// best_[m] = min(best_[m], seconds + f(m - f_shift) + g(m - g_shift)) for all m >= least.
  void lower(bytes_t least, double seconds, const curve& f, bytes_t f_shift, const curve& g, bytes_t g_shift) {
    if (f.seconds.empty() || g.seconds.empty()) return;
    const auto from = std::max({least, f.from + f_shift, g.from + g_shift});
    if (from > capacity_) return;
    // Beyond `to`, `best_` is already as low as the sum can be.
    const double lowest = seconds + (f.seconds.back() + g.seconds.back());
    const auto to = std::partition_point(best_.begin() + from, best_.end(), [&](double s) { return s > lowest; }) - best_.begin();
    const auto f_end = f.from + f_shift + static_cast<bytes_t>(f.seconds.size()) - 1;  // constant from there on
    const auto g_end = g.from + g_shift + static_cast<bytes_t>(g.seconds.size()) - 1;
    const auto both_end = std::min<bytes_t>(to, std::min(f_end, g_end)), one_end = std::min<bytes_t>(to, std::max(f_end, g_end));
    auto m = from;
    if (m < both_end) {
      const auto *rest = &f.seconds[static_cast<std::size_t>(m - f.from - f_shift)],
                 *other = &g.seconds[static_cast<std::size_t>(m - g.from - g_shift)];
      lower(&best_[static_cast<std::size_t>(m)], both_end - m, [=](bytes_t k) { return seconds + (rest[k] + other[k]); });
      m = both_end;
    }
    if (m < one_end) {
      const auto& changing = f_end < g_end ? g : f;
      const auto* rest = &changing.seconds[static_cast<std::size_t>(m - changing.from - (f_end < g_end ? g_shift : f_shift))];
      lower(&best_[static_cast<std::size_t>(m)], one_end - m,
            [=, fixed = seconds + (f_end < g_end ? f : g).seconds.back()](bytes_t k) { return fixed + rest[k]; });
      m = one_end;
    }
    if (m < to) std::fill(best_.begin() + m, best_.begin() + to, lowest);
  }
  // The inner loops, in pieces that compilers vectorise. A piece that cannot lower `best` is skipped.
  static constexpr bytes_t chunk = 16;
  template <class Sum>
  static void lower(double* best, bytes_t count, const Sum& sum) {
    bytes_t k = 0;
    for (; k + chunk <= count; k += chunk) {
      if (best[k] <= sum(k + chunk - 1)) continue;
      double sums[chunk];
      for (bytes_t i = 0; i < chunk; ++i) sums[i] = sum(k + i);
      for (bytes_t i = 0; i < chunk; ++i) sums[i] = sums[i] < best[k + i] ? sums[i] : best[k + i];
      for (bytes_t i = 0; i < chunk; ++i) best[k + i] = sums[i];
    }
    for (; k < count; ++k) best[k] = std::min(best[k], sum(k));
  }

  recurrence chain_;
  bool inputs_only_;
  bytes_t budget_, unit_ = 1, capacity_ = 0;
  std::vector<curve> table_;
  std::vector<double> best_;  // curve in computation
  bool complete_ = false, exact_ = true;
};

}  // namespace remat::chain
