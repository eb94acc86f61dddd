// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkpointing of unequal steps by dynamic programming.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain {

/// The fastest schedules of a chain of unequal links that save nothing but inputs of links, everything inside a link being made
/// right before its backward: heterogeneous revolve.
///
/// With m bytes besides x_i, links i to j (notation of `persistent_table`; its first option stands for a link) take
///
///     Opt(i, i, m) = forward_i + backward_i
///     Opt(i, j, m) = min over i < s <= j: sum of checkpoint_seconds of i..s-1 + Opt(s, j, m - x_s) + Opt(i, s-1, m - K(s..j))
///
/// where m suffices for the steps. Sizes are rounded up to `slots` units: what fits the table fits the budget.
///
/// Complexity: O(L^3 slots) time and O(L^2 slots) space for L links.
///
/// Reference: the dynamic program of Grimm, Pottier, Rostaing-Schmidt, "Optimal time and minimum space-time product for reversing
/// a certain class of programs" (1996), with sizes in bytes as in Beaumont et al., INRIA RR-9302 (2019).
class revolve_table {
 public:
  /// @param c      the chain
  /// @param budget bytes, x_0 included; all smaller budgets are answered as well
  /// @param slots  units the budget is cut into, >= 1
  /// @param stop   polled; true leaves the table incomplete
  revolve_table(const heterogeneous_chain& c, bytes_t budget, std::size_t slots, const std::function<bool()>& stop = {})
      : links_(c.links), unit_(std::max<bytes_t>(1, (budget + static_cast<bytes_t>(slots) - 1) / static_cast<bytes_t>(slots))) {
    const auto n = links_.size();
    kept_.assign(n + 1, 0);
    for (std::size_t i = 0; i < n; ++i) kept_[i + 1] = kept_[i] + links_[i].kept;
    const auto most = n == 0 || budget < links_[0].input ? 0 : (budget - links_[0].input) / unit_ + 1;
    columns_ = static_cast<std::size_t>(most);
    if (columns_ == 0) return;
    table_.assign(n * (n + 1) / 2 * columns_, never);
    for (std::size_t length = 1; length <= n; ++length)
      for (std::size_t i = 0; i + length <= n; ++i) {
        if (stop && stop()) return;
        fill(i, i + length - 1);
      }
    complete_ = true;
  }

  /// The budgets at which the least time changes, ascending, with the time from there on; none if construction was stopped.
  std::vector<std::pair<bytes_t, double>> front() const {
    std::vector<std::pair<bytes_t, double>> points;
    if (!complete_) return points;
    const auto* row = at(0, links_.size() - 1);
    for (std::size_t m = 0; m < columns_; ++m)
      if (row[m] != never && (points.empty() || row[m] < points.back().second))
        points.emplace_back(static_cast<bytes_t>(m) * unit_ + links_[0].input, row[m]);
    return points;
  }

  /// A schedule within `budget`, one of the front.
  /// Complexity: O(L) per step.
  std::vector<chain_step> steps(bytes_t budget) const {
    struct piece {
      std::size_t i, j, m;
    };
    std::vector<chain_step> list;
    std::vector<piece> stack = {{0, links_.size() - 1, static_cast<std::size_t>((budget - links_[0].input) / unit_)}};
    while (!stack.empty()) {
      const auto [i, j, m] = stack.back();
      stack.pop_back();
      if (i == j) {
        list.push_back({chain_step::kind::forward, i, 0});
        list.push_back({chain_step::kind::backward, i, 0});
        continue;
      }
      std::size_t split = i + 1;
      double best = never;
      splits(i, j, [&, first = i, last = j, room = m](std::size_t s, double forward, std::size_t need) {
        if (room < need) return;
        const double t = forward + at(s, last)[room - input(s)] + at(first, s - 1)[room - kept(s, last)];
        if (t < best) best = t, split = s;
      });
      for (auto t = i; t < split; ++t) list.push_back({chain_step::kind::checkpoint, t, 0});
      stack.push_back({i, split - 1, m - kept(split, j)});
      stack.push_back({split, j, m - input(split)});
    }
    return list;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  std::size_t units(bytes_t bytes) const { return static_cast<std::size_t>((bytes + unit_ - 1) / unit_); }
  std::size_t input(std::size_t i) const { return units(links_[i].input); }
  std::size_t kept(std::size_t i, std::size_t j) const { return units(kept_[j + 1] - kept_[i]); }
  bytes_t gradient(std::size_t i) const { return i < links_.size() ? links_[i].gradient : 0; }
  const double* at(std::size_t i, std::size_t j) const { return table_.data() + (j * (j + 1) / 2 + i) * columns_; }
  double* at(std::size_t i, std::size_t j) { return table_.data() + (j * (j + 1) / 2 + i) * columns_; }

  /// Calls `visit(s, seconds of the checkpoint steps, units that are needed)` for each s.
  template <class Visit>
  void splits(std::size_t i, std::size_t j, Visit&& visit) const {
    double forward = 0;
    bytes_t need = 0;
    for (auto s = i + 1; s <= j; ++s) {
      const auto& l = links_[s - 1];
      forward += l.checkpoint_seconds;
      need = std::max(need, gradient(j + 1) + (s - 1 > i ? l.input : 0) + links_[s].input + l.checkpoint_transient);
      visit(s, forward, std::max({units(need), input(s), kept(s, j)}));
    }
  }
  void fill(std::size_t i, std::size_t j) {
    auto* row = at(i, j);
    if (i == j) {
      const auto& o = links_[i].options[0];
      const auto need = units(o.saved + gradient(i + 1) + std::max(o.forward_transient, o.backward_transient));
      for (auto m = need; m < columns_; ++m) row[m] = o.forward + o.backward;
      return;
    }
    splits(i, j, [&](std::size_t s, double forward, std::size_t need) {
      if (need >= columns_) return;
      const auto count = columns_ - need;
      const auto *later = at(s, j) + (need - input(s)), *earlier = at(i, s - 1) + (need - kept(s, j));
      auto* best = row + need;
      for (std::size_t m = 0; m < count; ++m) best[m] = std::min(best[m], forward + later[m] + earlier[m]);
    });
  }

  std::vector<heterogeneous_chain::link> links_;
  bytes_t unit_;
  std::vector<bytes_t> kept_;  // prefix sums
  std::size_t columns_ = 0;    // values of m, in units from 0
  std::vector<double> table_;
  bool complete_ = false;
};

}  // namespace remat::chain
