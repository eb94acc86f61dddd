// SPDX-License-Identifier: Apache-2.0
/// @file
/// Static memory layout: a byte offset for every allocation of a program with known live ranges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/monitor.hpp>
#include <remat/layout/allocation.hpp>
#include <remat/layout/best_fit.hpp>
#include <remat/layout/packing_portfolio.hpp>
#include <remat/layout/skyline.hpp>

namespace remat {

/// Effort of `lay_out` and `fit_within`. With a time limit, `tries` and `work` may be `unlimited`.
struct layout_options {
  static constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

  bytes_t alignment = 64;          ///< alignment of every offset, bytes; a power of two. Sizes are rounded up to it
  std::size_t tries = 400;         ///< runs of the tree search after the heuristics; 0 for none
  std::size_t work = 500'000'000;  ///< allocations that these runs may visit in total; the default takes about a second
  double seconds = std::numeric_limits<double>::infinity();  ///< time limit of these runs if no monitor is given, s
  std::uint64_t seed = 0;                                    ///< seed of the search
};

/// Offsets of all allocations.
struct layout {
  std::vector<bytes_t> offsets;  ///< per allocation, bytes
  bytes_t arena = 0;             ///< end of the highest allocation: bytes to reserve
  bytes_t live_peak = 0;         ///< largest sum of (rounded) bytes live at one time
  bytes_t bound = 0;             ///< lower bound on the arena, bytes: `live_peak`, or more if the search has proven more
};

/// Outcome of `fit_within`.
enum class fit_status {
  fits,       ///< a layout was found
  overload,   ///< no layout fits: more bytes are live at one time
  exhausted,  ///< no layout fits: the search is complete
  unknown     ///< the effort or the time ran out
};

/// Answer of `fit_within`.
struct fit_result {
  fit_status status = fit_status::unknown;
  peak_load load;  ///< largest sum of live bytes, with rounded sizes
  layout best;     ///< a layout within the capacity if the status is `fits`; otherwise the layout of the heuristics
};

namespace detail {

/// The best layout so far, and the searches that improve it.
class layout_search {
 public:
  /// Runs the heuristics.
  /// @param list        allocations with rounded sizes
  /// @param good_enough no more heuristics once the arena is as small as this, bytes
  layout_search(std::vector<allocation> list, bytes_t good_enough) : list_(std::move(list)), load_(peak_load_of(list_)) {
    best_.live_peak = best_.bound = load_.bytes;
    best_.offsets = skyline_layout(list_);
    for (std::size_t i = 0; i < list_.size(); ++i) best_.arena = std::max(best_.arena, best_.offsets[i] + list_[i].bytes);
    constexpr std::size_t short_list = 3000;  // a quadratic heuristic takes milliseconds
    if (list_.size() > short_list) return;
    auto offsets = best_.offsets;
    for (int key = 0; key < 4 && best_.arena > std::max(load_.bytes, good_enough); ++key) {
      const auto arena = best_fit(list_, best_fit_order(list_, key), best_.arena - 1, offsets);
      if (arena < best_.arena) set_best(arena, offsets);
    }
  }

  const peak_load& load() const { return load_; }
  const layout& best() const { return best_; }

  /// Prepares the tree search. @return false if the list is too long for the search
  bool prepare(std::uint64_t seed) {
    constexpr std::size_t max_pairs = std::size_t{1} << 22;
    problem_ = packing_problem_of(list_, max_pairs);
    if (problem_) portfolio_.emplace(*problem_, seed);
    return problem_.has_value();
  }

  /// Smallest difference between the arenas of two layouts, bytes.
  bytes_t unit() const { return problem_->unit; }

  /// Searches for a layout within a capacity in bytes.
  packing_search::outcome fit(bytes_t capacity, std::size_t runs, packing_effort& effort, const monitor& m) {
    const auto answer = portfolio_->fit(capacity / unit(), runs, effort, m);
    if (answer == packing_search::outcome::exhausted) best_.bound = std::max(best_.bound, (capacity / unit() + 1) * unit());
    if (answer != packing_search::outcome::found) return answer;
    std::vector<bytes_t> offsets(list_.size(), 0);
    bytes_t arena = 0;
    for (index_t k = 0; k < problem_->allocation_of.size(); ++k) {
      const auto i = problem_->allocation_of[k];
      offsets[i] = portfolio_->offset(k) * unit();
      arena = std::max(arena, offsets[i] + list_[i].bytes);
    }
    set_best(arena, offsets);
    return answer;
  }

  /// Searches for the smallest arena. It tries the lower bound first, then bisects, and repeats this with longer runs while
  /// there is effort left.
  void improve(packing_effort effort, const monitor& m) {
    for (std::size_t runs = 3; best_.bound < best_.arena && !effort.spent() && !m.stopped(); runs *= 2) {
      auto target = best_.bound;
      for (auto least = target; least < best_.arena && !effort.spent() && !m.stopped();) {
        if (fit(target, runs, effort, m) != packing_search::outcome::found) least = target + unit();
        target = std::max(best_.bound, least + (best_.arena - least) / 2 / unit() * unit());
      }
    }
  }

 private:
  void set_best(bytes_t arena, const std::vector<bytes_t>& offsets) {
    best_.arena = arena;
    best_.offsets = offsets;
  }

  std::vector<allocation> list_;
  peak_load load_;
  layout best_;
  std::optional<packing_problem> problem_;
  std::optional<packing_portfolio> portfolio_;
};

}  // namespace detail

/// Gives every allocation an offset such that no two allocations overlap that are live at the same time.
///
/// Heuristics give a first layout within milliseconds: a skyline, and for at most 3000 allocations best fit in four orders. If
/// its arena exceeds the live peak, a tree search follows. The search tries to reach the live peak, then finds the smallest
/// arena by bisection. It ends when the arena is proven to be the smallest, or when the effort or the time runs out. There is no
/// tree search if more than four million pairs of allocations are live together.
///
/// @param list n allocations
/// @param o    alignment and effort
/// @param m    time limit and request to stop
/// @return offsets, arena, live peak and bound; equal arguments give equal results unless the time ends the search
/// @throws bad_option if the alignment is no power of two; bad_problem naming an allocation that dies before it is born or has a
///         negative size or an instant beyond 2^62, or if the sizes exceed 2^53 bytes
/// Complexity: O(n log n) without `tries` if n > 3000, O(n^2) for shorter lists; plus `work`. Memory: O(n + pairs live
/// together).
/// @code
/// auto l = remat::lay_out(std::vector<remat::allocation>{{0, 2, 100}, {1, 3, 50}, {2, 4, 100}});
/// // l.arena == 192: the third takes the place of the first
/// @endcode
inline layout lay_out(std::span<const allocation> list, const layout_options& o, const monitor& m) {
  detail::require_alignment(o.alignment);
  detail::layout_search search(detail::rounded(list, o.alignment), 0);
  const auto& best = search.best();
  if (o.tries > 0 && best.arena > best.live_peak && search.prepare(o.seed)) search.improve({o.tries, o.work}, m);
  return best;
}

/// The same with a time limit of `o.seconds`.
inline layout lay_out(std::span<const allocation> list, const layout_options& o = {}) {
  return lay_out(list, o, monitor({.seconds = o.seconds}));
}

/// Searches for a layout within a capacity, or for a proof that there is none.
///
/// @param list     allocations
/// @param capacity bytes, >= 0
/// @param o        alignment and effort; give `layout_options::unlimited` tries and work to leave the effort to `m`
/// @param m        time limit and request to stop
/// @return the layout or the proof; equal arguments give equal results unless `m` stops the search
/// @throws bad_option and bad_problem as `lay_out`; bad_option if the capacity is negative
/// Complexity: that of `lay_out`.
/// @code
/// remat::monitor m({.seconds = 30});
/// auto r = remat::fit_within(list, 1 << 20, {.alignment = 1}, m);
/// if (r.status == remat::fit_status::overload) std::cout << r.load.bytes << " bytes are alive at " << r.load.when;
/// @endcode
inline fit_result fit_within(std::span<const allocation> list, bytes_t capacity, const layout_options& o, const monitor& m) {
  detail::require_alignment(o.alignment);
  if (capacity < 0) throw bad_option("the capacity must be >= 0, got " + std::to_string(capacity));
  detail::layout_search search(detail::rounded(list, o.alignment), capacity);
  fit_result r;
  r.load = search.load();
  if (r.load.bytes > capacity) {
    r.status = fit_status::overload;
  } else if (search.best().arena > capacity && o.tries > 0 && search.prepare(o.seed)) {
    detail::packing_effort effort{o.tries, o.work};
    if (search.fit(capacity, o.tries, effort, m) == detail::packing_search::outcome::exhausted) r.status = fit_status::exhausted;
  }
  r.best = search.best();
  if (r.best.arena <= capacity) r.status = fit_status::fits;
  return r;
}

}  // namespace remat
