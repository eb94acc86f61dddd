// SPDX-License-Identifier: Apache-2.0
/// @file
/// Finds the fastest order of a small problem, or proves that no order fits.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::order {

/// A* search through the orders of a small problem, from the end backwards. A state is a set of values that must be on the
/// device (see `liveness`), so the search never decides drops. Every operation that the set depends on has to run at least once
/// more. The sum of their seconds is the lower bound on the remaining time.
///
/// The search decides nearly all random problems of 40 operations and chains of 24 within some hundredths of a second.
///
/// Reference: Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of minimum cost paths", IEEE Transactions
/// on Systems Science and Cybernetics 4, 1968; Pohl, "Heuristic search viewed as path finding in a graph", Artificial
/// Intelligence 1, 1970 (the weight).
/// @code
/// if (remat::order::exact_order_search::supports(p)) {
///   const auto known = remat::order::exact_order_search(p, budget).fastest();
///   if (known.order) std::cout << "optimal: " << known.bound << " s\n";
/// }
/// @endcode
class exact_order_search {
 public:
  static constexpr std::size_t max_size = 64;  ///< limit on needed operations, and on values that are used and not held

  /// Result of a search.
  struct answer {
    std::optional<std::vector<operation_id>> order;  ///< fits the budget
    bool complete = false;                           ///< true if the search did not give up
    double bound = 0;  ///< no order within the budget is faster, s, up to rounding; infinity if no order fits
  };

  /// True if `p` is plain and small enough. Complexity: O(values + edges).
  static bool supports(const problem& p) {
    const numbering numbered(p);
    return p.plain() && numbered.operations.size() <= max_size && numbered.count <= max_size;
  }

  /// @param p      a problem that `supports` accepts
  /// @param budget bytes
  /// Complexity: O(values + edges), and some thousands of table entries.
  exact_order_search(const problem& p, bytes_t budget)
      : budget_(budget - p.held_bytes()), source_bytes_(p.source_bytes() - p.held_bytes()) {
    const numbering numbered(p);
    std::vector<set> needs(p.values().size(), 0);  // per value: operations that it depends on
    std::array<bytes_t, max_size> bytes{};
    std::array<set, max_size> needed{};
    for (auto o : numbered.operations) {
      const auto& op = p.operations()[o];
      const auto own = bit(runs_.size());
      packed_operation r{o, 0, 0, op.once ? own : 0, op.seconds, op.workspace};
      set before = own;
      for (auto v : op.inputs) r.inputs |= numbered.set_of(v), before |= needs[v];
      for (auto v : op.outputs) {
        r.outputs |= numbered.set_of(v), needs[v] = before;
        if (!numbered.set_of(v)) r.extra_bytes += p.values()[v].bytes;
      }
      runs_.push_back(r);
    }
    for (value_id v = 0; v < needs.size(); ++v) {
      if (!numbered.set_of(v)) continue;
      bytes[numbered.places[v]] = p.values()[v].bytes, needed[numbered.places[v]] = needs[v];
      if (p.is_source(v)) sources_ |= numbered.set_of(v);
      if (p.is_target(v)) targets_ |= numbered.set_of(v);
    }
    bytes_.fill([&](std::size_t i) { return bytes[i]; });
    needs_.fill([&](std::size_t i) { return needed[i]; });
    seconds_.fill([&](std::size_t i) { return i < runs_.size() ? runs_[i].seconds : 0; });
  }

  /// The fastest order.
  /// @param below limit on the time, s: slower orders do not count; if there is no faster one, this is the bound
  /// @param sets  gives up after that many sets of values, of about 100 bytes each
  /// @param stop  polled now and then; true gives up
  /// Complexity: O(sets * operations).
  answer fastest(double below = never, std::size_t sets = std::numeric_limits<index_t>::max(),
                 const std::function<bool()>& stop = {}) {
    return search(below, sets, 1, stop);
  }
  /// Finds any order, far sooner than `fastest`: states with little remaining time come first. The bound is 0 or infinity.
  /// Otherwise as `fastest`.
  answer any(std::size_t sets = std::numeric_limits<index_t>::max(), const std::function<bool()>& stop = {}) {
    return search(never, sets, 5, stop);
  }

 private:
  using set = std::uint64_t;
  static constexpr double never = std::numeric_limits<double>::infinity();
  static constexpr set bit(std::size_t i) { return set{1} << i; }

  /// The needed operations, and the values that they or the targets use.
  struct numbering {
    explicit numbering(const problem& p) : operations(needed_operations(p)), places(p.values().size(), none) {
      const auto add = [&](value_id v) {
        if (!p.values()[v].held && places[v] == none) places[v] = count++;
      };
      for (auto v : p.targets()) add(v);
      for (auto o : operations)
        for (auto v : p.operations()[o].inputs) add(v);
    }
    set set_of(value_id v) const { return places[v] < max_size ? bit(places[v]) : 0; }

    std::vector<operation_id> operations;
    std::vector<index_t> places;  // per value; `none`: held, or never used
    index_t count = 0;
  };
  /// Sums over sets, or unions of sets, by table look-up of eight bits at a time.
  template <class T>
  class table {
   public:
    template <class F>
    void fill(const F& of) {
      for (std::size_t k = 0; k < sums_.size(); ++k)
        for (std::size_t s = 1; s < 256; ++s)
          sums_[k][s] = join(sums_[k][s & (s - 1)], of(8 * k + static_cast<std::size_t>(std::countr_zero(s))));
    }
    T operator()(set s) const {
      T sum{};
      for (std::size_t k = 0; s != 0; ++k, s >>= 8) sum = join(sum, sums_[k][s & 255]);
      return sum;
    }

   private:
    static T join(T a, T b) {
      if constexpr (std::is_same_v<T, set>)
        return a | b;
      else
        return a + b;
    }
    std::array<std::array<T, 256>, max_size / 8> sums_{};
  };
  /// An operation. `once` is its bit if it is once-only, otherwise 0. `extra_bytes` is its workspace and its unused outputs,
  /// bytes.
  struct packed_operation {
    operation_id operation;
    set inputs, outputs, once;
    double seconds;
    bytes_t extra_bytes;
  };
  /// The values that must be on the device, and the once-only operations that run after this point.
  struct search_state {
    set wanted, ran;
    friend bool operator==(const search_state&, const search_state&) = default;
  };
  struct hash {
    std::size_t operator()(const search_state& s) const {
      const auto x = (s.wanted ^ (s.ran * 0x9e3779b97f4a7c15U)) * 0xbf58476d1ce4e5b9U;
      return static_cast<std::size_t>(x ^ (x >> 31));
    }
  };
  struct node {
    search_state state;
    double seconds;     // from here to the end, s
    index_t next, run;  // the next node of the path, and the operation between the two
    bool closed = false;
  };
  struct entry {
    double estimate, remaining;
    index_t node;
    friend bool operator>(const entry& a, const entry& b) {
      if (a.estimate != b.estimate) return a.estimate > b.estimate;
      return a.remaining != b.remaining ? a.remaining > b.remaining : a.node < b.node;
    }
  };

  answer search(double below, std::size_t sets, double weight, const std::function<bool()>& stop) {
    if (source_bytes_ > budget_) return {std::nullopt, true, never};
    std::vector<node> nodes;
    std::unordered_map<search_state, index_t, hash> node_of;
    std::priority_queue<entry, std::vector<entry>, std::greater<>> open;
    const auto reach = [&](const search_state& s, double seconds, index_t next, index_t run) {
      const double remaining = seconds_(needs_(s.wanted));
      if (!(seconds + remaining < below)) return;
      const auto [place, added] = node_of.try_emplace(s, static_cast<index_t>(nodes.size()));
      if (added)
        nodes.push_back({s, seconds, next, run});
      else if (auto& n = nodes[place->second]; n.closed || n.seconds <= seconds)
        return;
      else
        n = {s, seconds, next, run};
      open.push({seconds + weight * remaining, remaining, place->second});
    };
    const auto proven = [&](double seconds) {  // rounding: a path has at most as many terms as there are nodes
      const auto terms = static_cast<double>(nodes.size() + 2 * max_size);
      return weight > 1 ? 0 : seconds * (1 - terms * std::numeric_limits<double>::epsilon());
    };
    reach({targets_, 0}, 0, none, none);
    for (std::size_t expanded = 1; !open.empty(); ++expanded) {
      const auto [estimate, remaining, current] = open.top();
      open.pop();
      if (std::exchange(nodes[current].closed, true)) continue;
      const auto n = nodes[current];
      if ((n.state.wanted & ~sources_) == 0) {
        answer found{std::vector<operation_id>(), true, proven(estimate)};
        for (auto i = current; nodes[i].run != none; i = nodes[i].next) found.order->push_back(runs_[nodes[i].run].operation);
        return found;
      }
      if (nodes.size() > sets || (expanded % 256 == 0 && stop && stop())) return {std::nullopt, false, proven(estimate)};
      const auto live = bytes_(n.state.wanted);
      for (std::size_t i = 0; i < runs_.size(); ++i) {
        const auto& r = runs_[i];
        if ((r.outputs & n.state.wanted) == 0 ||
            live + bytes_((r.inputs | r.outputs) & ~n.state.wanted) + r.extra_bytes > budget_)
          continue;
        const search_state before{(n.state.wanted & ~r.outputs) | r.inputs, n.state.ran | r.once};
        if ((needs_(before.wanted) & before.ran) == 0) reach(before, n.seconds + r.seconds, current, static_cast<index_t>(i));
      }
    }
    return {std::nullopt, true, below < never ? proven(below) : never};
  }

  bytes_t budget_, source_bytes_;  // without held values: the budget, and the bytes of the sources
  std::vector<packed_operation> runs_;
  set sources_ = 0, targets_ = 0;
  table<bytes_t> bytes_;   // of values
  table<set> needs_;       // operations that values depend on
  table<double> seconds_;  // of operations
};

}  // namespace remat::order
