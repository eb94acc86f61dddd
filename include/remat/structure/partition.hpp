// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parts of any graph: runs of forward operations, each paired with the run of backward operations that reads what it made.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/backward_start.hpp>

namespace remat::structure {

/// Operations that are planned together: `backward` comes after all of `forward`. Either may be empty.
struct part {
  std::vector<operation_id> forward, backward;  ///< ascending
  std::size_t size() const { return forward.size() + backward.size(); }
};

/// Disjoint parts of a problem, in the order of their forwards. Operations in no part stand alone.
using partition = std::vector<part>;

/// How `find_partition` cuts.
struct partition_options {
  std::optional<operation_id> backward_start =
      {};                 ///< first operation of the backward; by default as the problem says, or what gives the best cuts
  std::size_t size = 40;  ///< operations that a part should have, >= 1; a cut in a narrow place may be worth others
  std::size_t most = 64;  ///< most parts, >= 1

  /// @throws bad_option naming the member that is out of range
  void validate(const problem& p) const {
    if (backward_start && *backward_start >= p.operations().size())
      throw bad_option("partition.backward_start: no operation " + std::to_string(*backward_start));
    if (size < 1) throw bad_option("partition.size must be >= 1, got 0");
    if (most < 1) throw bad_option("partition.most must be >= 1, got 0");
  }
};

namespace detail {

/// Numbers on which intervals can be raised, with the smallest and its first place. A segment tree.
class raised_line {
 public:
  explicit raised_line(std::size_t n) : n_(n), least_(4 * n, 0), raise_(4 * n, 0), at_(4 * n, 0) { build(1, 0, n); }
  /// Raises [from, to). Complexity: O(log n).
  void raise(std::size_t from, std::size_t to, bytes_t by) {
    if (from < to && by != 0) raise(1, 0, n_, from, to, by);
  }
  bytes_t least() const { return least_[1]; }
  std::size_t where() const { return at_[1]; }

 private:
  void build(std::size_t node, std::size_t low, std::size_t high) {
    at_[node] = low;
    if (high - low < 2) return;
    const auto middle = (low + high) / 2;
    build(2 * node, low, middle);
    build(2 * node + 1, middle, high);
  }
  void raise(std::size_t node, std::size_t low, std::size_t high, std::size_t from, std::size_t to, bytes_t by) {
    if (to <= low || high <= from) return;
    if (from <= low && high <= to) {
      least_[node] += by;
      raise_[node] += by;
      return;
    }
    const auto middle = (low + high) / 2;
    raise(2 * node, low, middle, from, to, by);
    raise(2 * node + 1, middle, high, from, to, by);
    const auto best = least_[2 * node + 1] < least_[2 * node] ? 2 * node + 1 : 2 * node;
    least_[node] = least_[best] + raise_[node];
    at_[node] = at_[best];
  }

  std::size_t n_;
  std::vector<bytes_t> least_, raise_;
  std::vector<std::size_t> at_;
};

/// A place to cut: positions [forward, backward) are inside, the rest outside.
struct nested_cut {
  std::size_t forward, backward;
  bytes_t crossing;  ///< bytes of the values made on one side and read on the other
};

/// The best partner of every position before `backward_start`: for each q the q' >= backward_start with the fewest bytes between
/// [q, q') and the rest. Targets do not count where they are made: they stay to the end anyway. Complexity: O(edges log
/// operations).
inline std::vector<nested_cut> nested_cuts(const problem& p, const std::vector<operation_id>& needed,
                                           std::size_t backward_start) {
  const auto n = needed.size();
  const auto& values = p.values();
  std::vector<std::size_t> next(values.size(), n), last(values.size(), 0);  // reads at or after q; n: none
  std::vector<bool> inside(values.size(), false);                           // made at or after q
  raised_line line(n + 1 - backward_start);                                 // place q' - backward_start
  const auto raise = [&](std::size_t from, std::size_t to, bytes_t by) {    // q' in [from, to)
    line.raise(std::max(from, backward_start) - backward_start, std::max(to, backward_start) - backward_start, by);
  };
  for (auto k = n; k-- > 0;)
    for (auto v : p.operations()[needed[k]].inputs)
      if (last[v] == 0) last[v] = k;
  std::vector<nested_cut> cuts(backward_start + 1);
  for (auto q = n; q-- > 0;) {
    const auto& op = p.operations()[needed[q]];
    for (auto v : op.outputs) {
      inside[v] = true;
      if (next[v] < n) raise(next[v] + 1, n + 1, -values[v].bytes);                    // no longer comes in
      if (last[v] > q && !p.is_target(v)) raise(q + 1, last[v] + 1, values[v].bytes);  // goes out
    }
    for (auto v : op.inputs) {
      if (!values[v].held) raise(q + 1, next[v] < n ? next[v] + 1 : n + 1, values[v].bytes);  // comes in
      next[v] = q;
    }
    if (q <= backward_start) cuts[q] = {q, line.where() + backward_start, line.least()};
  }
  return cuts;
}

/// Chooses cuts with few bytes in them and about `size` operations between them, by dynamic programming.
/// @param cost receives the value of what is minimised
/// Complexity: O(cuts).
inline std::vector<nested_cut> choose_cuts(const std::vector<nested_cut>& all, std::size_t n, double size, double& cost) {
  // Only places no wider than their neighbours; a cut is judged against the mean of what is around it.
  const auto backward_start = all.size() - 1;
  const auto around = static_cast<std::size_t>(2 * size) + 2;
  std::vector<double> sum(backward_start + 2, 0);
  for (std::size_t q = 0; q <= backward_start; ++q) sum[q + 1] = sum[q] + static_cast<double>(all[q].crossing);
  struct state {
    nested_cut cut;
    double price, best;
    std::size_t before;
  };
  std::vector<state> states = {{{0, n, 0}, 0, 0, 0}};
  for (std::size_t q = 1; q < backward_start; ++q) {
    if (all[q].crossing > all[q - 1].crossing || all[q].crossing > all[q + 1].crossing) continue;
    const auto from = q > around ? q - around : 0, to = std::min(backward_start + 1, q + around + 1);
    const double mean = (sum[to] - sum[from]) / static_cast<double>(to - from);
    states.push_back({all[q], 0.1 + (mean > 0 ? 2 * static_cast<double>(all[q].crossing) / mean : 0), 0, 0});
  }
  states.push_back({{backward_start, backward_start, 0}, 0, 0, 0});
  constexpr std::size_t reach = 96;  // candidates looked back; more only where they do not nest
  for (std::size_t j = 1; j < states.size(); ++j) {
    auto& s = states[j];
    s.best = std::numeric_limits<double>::infinity();
    for (auto i = j; i-- > 0;) {
      const auto& outer = states[i];
      if (outer.cut.backward < s.cut.backward) continue;
      const auto operations = s.cut.forward - outer.cut.forward + (outer.cut.backward - s.cut.backward);
      const double total = outer.best + s.price + std::pow(static_cast<double>(operations) / size, 2);
      if (total < s.best) s.best = total, s.before = i;
      if (j - i > reach && s.best < std::numeric_limits<double>::infinity()) break;
    }
  }
  cost = states.back().best;
  std::vector<nested_cut> chosen;
  for (auto j = states.back().before; j > 0; j = states[j].before) chosen.push_back(states[j].cut);
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

/// A run of operations without those once-only ones that can be computed before or after all others of the run.
inline std::vector<operation_id> without_once(const problem& p, std::vector<operation_id> run) {
  const auto has = [&](operation_id o) { return o != none && std::binary_search(run.begin(), run.end(), o); };
  const auto read_here = [&](value_id v) {
    const auto readers = p.consumers(v);
    return std::any_of(readers.begin(), readers.end(), has);
  };
  for (auto k = run.size(); k-- > 0;) {
    const auto& op = p.operations()[run[k]];
    if (op.once && std::none_of(op.outputs.begin(), op.outputs.end(), read_here))
      run.erase(run.begin() + static_cast<std::ptrdiff_t>(k));
  }
  for (std::size_t k = 0; k < run.size();) {
    const auto& op = p.operations()[run[k]];
    const bool alone =
        op.once && std::none_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return has(p.producer(v)); });
    if (alone)
      run.erase(run.begin() + static_cast<std::ptrdiff_t>(k));
    else
      ++k;
  }
  return run;
}

}  // namespace detail

/// Cuts the needed operations of `p`, in their order, into nested parts, at places where few bytes cross.
///
/// A cut is a position of the forward with its partner in the backward: what lies between them is inside. It crosses those values
/// that are made on one side and read on the other, and a dynamic program weighs their bytes, against the mean around, with the
/// sizes of the parts. On a chain these are its cut points, the bytes of one activation and its gradient; a skip connection adds
/// its bytes to every cut that it spans, so that encoder and decoder levels, dense blocks and branches come apart where they are
/// thinnest; and where nothing is thin the parts are balanced. Equal layers are cut alike.
///
/// Once-only operations that a part does not need in its middle stand alone, so that the rest can be computed again.
///
/// @param p the problem
/// @param o options
/// @return the parts; none where there is nothing to cut
/// @throws bad_option if `backward_start` is no operation, or `size` or `most` is 0
/// Complexity: O(edges log operations).
inline partition find_partition(const problem& p, const partition_options& o = {}) {
  o.validate(p);
  const auto needed = needed_operations(p);
  const auto n = needed.size();
  if (n < 2) return {};
  std::vector<detail::nested_cut> all, chosen;
  double least = std::numeric_limits<double>::infinity();
  const auto attempt = [&](std::size_t backward_start) {
    auto cuts = detail::nested_cuts(p, needed, backward_start);
    double cost = 0;
    auto some = detail::choose_cuts(cuts, n, static_cast<double>(o.size), cost);
    if (cost < least) least = cost, all = std::move(cuts), chosen = std::move(some);
  };
  if (o.backward_start || p.backward_start()) {
    attempt(backward_start(p, needed, o.backward_start));
  } else {
    // The forward ends somewhere near the peak; a guess that is off spoils the innermost part only, within which it is sought
    // again.
    const auto memory = measure_order(p, needed).memory;
    const auto peak = backward_start(p, needed);
    for (const double f : {1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1})
      attempt(std::min(n - 1, static_cast<std::size_t>(f * static_cast<double>(peak))));
    const auto innermost = [&] {
      return chosen.empty() ? std::pair{std::size_t{0}, n} : std::pair{chosen.back().forward, chosen.back().backward};
    };
    for (int round = 0; round < 6; ++round) {
      const double before = least;
      const auto [from, to] = innermost();
      constexpr std::size_t tries = 12;
      for (std::size_t k = 0; k < tries; ++k) attempt(from + (to - from) * k / tries);
      if (!(least < before)) break;
    }
    // Within the innermost part it makes no difference to the cuts: it is where most is on the device.
    const auto [from, to] = innermost();
    least *= 1.1;
    if (from < to)
      attempt(static_cast<std::size_t>(
          std::max_element(memory.begin() + static_cast<std::ptrdiff_t>(from), memory.begin() + static_cast<std::ptrdiff_t>(to)) -
          memory.begin()));
  }
  for (auto size = 2 * o.size; chosen.size() >= o.most; size *= 2)
    chosen = detail::choose_cuts(all, n, static_cast<double>(size), least);

  partition parts;
  const auto backward_start = all.size() - 1;
  for (std::size_t i = 0; i <= chosen.size(); ++i) {
    const auto run = [&](std::size_t from, std::size_t to) {
      return detail::without_once(
          p, {needed.begin() + static_cast<std::ptrdiff_t>(from), needed.begin() + static_cast<std::ptrdiff_t>(to)});
    };
    const bool first = i == 0, last = i == chosen.size();
    part piece{run(first ? 0 : chosen[i - 1].forward, last ? backward_start : chosen[i].forward),
               run(last ? backward_start : chosen[i].backward, first ? n : chosen[i - 1].backward)};
    if (piece.size() > 1) parts.push_back(std::move(piece));
  }
  return parts;
}

}  // namespace remat::structure
