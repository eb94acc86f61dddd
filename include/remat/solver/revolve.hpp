// SPDX-License-Identifier: Apache-2.0
/// @file
/// Binomial checkpointing of chains, and the same for unequal steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/graph/chain.hpp>
#include <remat/solver/block_problem.hpp>
#include <remat/solver/chain_table.hpp>
#include <remat/solver/order.hpp>

namespace remat {

namespace detail {

/// C(s + r, s), or `limit` if that is less.
inline std::uint64_t binomial(std::uint64_t s, std::uint64_t r, std::uint64_t limit) {
  if (s < r) std::swap(s, r);
  std::uint64_t c = 1;
  for (std::uint64_t i = 1; i <= r && c < limit; ++i) c = c * (s + i) / i;
  return std::min(c, limit);
}

/// The least r with C(s + r, s) >= steps: how often a step is repeated at most.
inline std::uint64_t repetitions(std::uint64_t steps, std::uint64_t slots) {
  std::uint64_t r = 0;
  for (std::uint64_t c = 1; c < steps; c = c * (slots + r) / r) ++r;
  return r;
}

inline void check_revolve(std::uint64_t steps, std::uint64_t slots) {
  constexpr std::uint64_t most = std::uint64_t{1} << 31;
  if (steps < 1 || steps > most) throw bad_option("revolve: steps must be in [1, 2^31], got " + std::to_string(steps));
  if (slots < 1) throw bad_option("revolve: slots must be >= 1, got 0");
}

}  // namespace detail

/// The least number of forward steps with which a chain is reversed, those inside its backward steps excepted:
///
///     t(l, s) = r l - C(s + r, s + 1),  r = min { r : C(s + r, s) >= l }
///
/// @param steps l, in [1, 2^31]
/// @param slots s >= 1: states that fit, the initial one included
/// @return t(l, s)
/// @throws bad_option if one is out of range
/// Complexity: O(r), at most O(sqrt(l)).
///
/// Reference: Griewank, Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
/// @code
/// remat::revolve_forwards(10, 3);  // 15
/// @endcode
inline std::uint64_t revolve_forwards(std::uint64_t steps, std::uint64_t slots) {
  detail::check_revolve(steps, slots);
  if (slots == 1) return steps * (steps - 1) / 2;  // r would be as large as the chain
  slots = std::min(slots, steps);                  // more are of no use
  const auto r = detail::repetitions(steps, slots);
  std::uint64_t c = 1;  // C(slots + r, slots), in factors that leave no remainder
  for (std::uint64_t i = 1; i <= r; ++i) c = c * (slots + i) / i;
  return r * steps - c * r / (slots + 1);
}

/// A schedule that reverses a chain of equal links with `revolve_forwards(links, slots)` checkpoint steps: link i is run
/// without saving (`checkpoint`, from the state before it to the state after it), or saving everything (`forward`), which its
/// `backward` follows at once. A state is to be kept until its last use before it is made again.
/// @param links in [1, 2^31]
/// @param slots >= 1: states that fit, the initial one included
/// @throws bad_option if one is out of range
/// Complexity: O(slots) space and O(1) per step, besides the result.
inline std::vector<chain_step> revolve_schedule(std::uint64_t links, std::uint64_t slots) {
  detail::check_revolve(links, slots);
  struct piece {
    std::uint64_t first, length, slots;
  };
  std::vector<chain_step> steps;
  std::vector<piece> stack = {{0, links, slots}};
  const auto add = [&](chain_step::kind what, std::uint64_t link) { steps.push_back({what, static_cast<std::size_t>(link), 0}); };
  while (!stack.empty()) {
    const auto now = stack.back();
    stack.pop_back();
    if (now.length == 1) {
      add(chain_step::kind::forward, now.first);
      add(chain_step::kind::backward, now.first);
      continue;
    }
    std::uint64_t left = now.length - 1;  // with one slot: all the way to the last link
    auto rest = now.slots;
    if (now.slots > 1) {
      rest = std::min(now.slots, now.length);
      const auto r = detail::repetitions(now.length, rest);
      left = std::min(detail::binomial(rest, r - 1, now.length), now.length - detail::binomial(rest - 1, r - 1, now.length));
    }
    for (std::uint64_t i = 0; i < left; ++i) add(chain_step::kind::checkpoint, now.first + i);
    stack.push_back({now.first, left, now.slots});
    stack.push_back({now.first + left, now.length - left, rest > 1 ? rest - 1 : 1});
  }
  return steps;
}

/// The fastest schedules of a chain of unequal links that save nothing but inputs of links, everything inside a link being made
/// right before its backward: heterogeneous revolve.
///
/// With m bytes besides x_i, links i to j (notation of `chain_table`; its first option stands for a link) take
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
  revolve_table(const chain& c, bytes_t budget, std::size_t slots, const std::function<bool()>& stop = {})
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

  std::vector<chain::link> links_;
  bytes_t unit_;
  std::vector<bytes_t> kept_;  // prefix sums
  std::size_t columns_ = 0;    // values of m, in units from 0
  std::vector<double> table_;
  bool complete_ = false;
};

/// Checkpoints of a chain of blocks: inputs of blocks are all that is stored, and a block is computed again right before its
/// backward. Blocks of equal cost by the binomial rule, with as many slots as fit; unequal ones by dynamic programming. The
/// fastest that fits is taken. `rotor` may also save the inside of a block and does at least as well on most networks.
///
/// A graph without a chain is one block; then there is a schedule only if store-all fits, and the progress reports say so.
///
/// Complexity: that of `find_blocks` and of `revolve_table`, and O(log(blocks) (values + edges executed)).
///
/// Reference: Griewank, Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
/// @code
/// auto r = remat::solve(p, budget, remat::revolve{});
/// @endcode
class revolve {
 public:
  struct options {
    block_options blocks = {.most = 4000, .least = 1};  ///< how the graph is cut for the binomial rule
    std::size_t links = 128;                            ///< most blocks for the dynamic program, >= 1; the graph is cut again
    std::size_t slots = 500;                            ///< of the dynamic program, in [1, 10 000]
  };

  revolve() : revolve(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit revolve(const options& o) : options_(o) {
    if (o.links < 1) throw bad_option("revolve.links must be >= 1, got 0");
    if (o.slots < 1 || o.slots > 10'000) throw bad_option("revolve.slots must be in [1, 10000], got " + std::to_string(o.slots));
  }

  std::string name() const { return "revolve"; }

  /// @throws bad_option if the options of the blocks are out of range
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    incumbent best(p, budget);
    if (!best.offer(needed_operations(p))) {
      auto blocks = find_blocks(p, options_.blocks);
      const auto n = blocks.blocks.size();
      m.report({.stage = n < 2 ? "the graph has no chain of blocks" : "chain of " + std::to_string(n) + " blocks"});
      if (n > 1) {
        binomial(p, std::move(blocks), best, m);
        auto cut = options_.blocks;
        cut.most = std::min(cut.most, options_.links);
        std::size_t before = 0;
        for (int coarser = 0; coarser < 3 && !m.stopped(); ++coarser, cut.least *= 4) {
          auto links = find_blocks(p, cut);
          if (links.blocks.size() != std::exchange(before, links.blocks.size())) unequal(p, budget, std::move(links), best, m);
        }
      }
    }
    best.put_into(r);
    return r;
  }

 private:
  /// Moves operations at the beginning of a block's backward into the block after it if they read, of the forward, only what that
  /// block reads: they then need nothing to be made again.
  static void shift(const problem& p, block_chain& c) {
    const auto last = c.blocks.size() - 1;
    std::vector<bool> backward(p.operations().size(), false);
    for (const auto& b : c.blocks)
      for (auto o : b.backward) backward[o] = true;
    for (auto i = last; i-- > 0;) {
      auto &b = c.blocks[i].backward, &after = c.blocks[i + 1].backward;
      const auto there = [&](index_t v) {
        const auto holds = [&](const std::vector<index_t>& list) { return std::find(list.begin(), list.end(), v) != list.end(); };
        return p.is_source(v) || backward[p.producer(v)] || holds(c.blocks[i + 1].inputs) || holds(c.pinned);
      };
      const auto end = std::find_if(b.begin(), b.end(), [&](index_t o) {
        const auto& inputs = p.operations()[o].inputs;
        return !std::all_of(inputs.begin(), inputs.end(), there);
      });
      after.insert(after.end(), b.begin(), end);
      b.erase(b.begin(), end);
    }
    std::vector<std::size_t> block_of(p.operations().size(), 0), earliest(p.values().size(), last);
    for (std::size_t i = 0; i <= last; ++i)
      for (auto o : c.blocks[i].backward) {
        block_of[o] = i;
        for (auto v : p.operations()[o].inputs) earliest[v] = std::min(earliest[v], i);
      }
    for (auto& b : c.blocks) b.gradients.clear();
    for (index_t v = 0; v < p.values().size(); ++v)
      if (!p.is_source(v) && backward[p.producer(v)])
        for (auto i = earliest[v]; i < block_of[p.producer(v)]; ++i) c.blocks[i].gradients.push_back(v);
  }

  static void binomial(const problem& p, block_chain blocks, incumbent& best, monitor& m) {
    shift(p, blocks);
    const block_joint joint(p, blocks);
    const auto n = blocks.blocks.size();
    // The most slots that fit, by bisection: more slots take more memory and less time.
    const auto fits = [&](std::size_t slots) {
      const auto known = best.seconds();
      const auto order = joint.order(revolve_schedule(n, slots));
      if (best.offer(order)) m.report({.stage = std::to_string(slots) + " slots", .best = best.seconds()});
      return best.seconds() < known;
    };
    std::size_t low = 1, high = n;
    while (low <= high && !m.stopped()) {
      const auto middle = low + (high - low) / 2;
      if (fits(middle))
        low = middle + 1;
      else
        high = middle - 1;
    }
  }

  void unequal(const problem& p, bytes_t budget, block_chain blocks, incumbent& best, monitor& m) const {
    shift(p, blocks);
    const block_joint joint(p, blocks);
    // The table is cautious: schedules for somewhat larger budgets are evaluated as well.
    const auto most = std::max<bytes_t>(0, budget - joint.aside()) + (budget - p.held_bytes()) / 4;
    const revolve_table table(joint.links(), most, options_.slots, [&] { return m.stopped(); });
    const auto front = table.front();
    std::size_t more = 40;
    for (auto at = front.rbegin(); at != front.rend() && more > 0 && !m.stopped(); ++at) {
      if (best.offer(joint.order(table.steps(at->first)))) m.report({.stage = "unequal blocks", .best = best.seconds()});
      if (best.found()) --more;
    }
  }

  options options_;
};

}  // namespace remat
