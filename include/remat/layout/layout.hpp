// SPDX-License-Identifier: Apache-2.0
/// @file
/// Static memory layout: a byte offset for every allocation of a program whose lifetimes are known.
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

/// How `lay_out` and `fit_within` work. A caller with a time limit may leave the effort to it.
struct layout_options {
  static constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

  bytes_t alignment = 64;          ///< of every offset, bytes; a power of two. Sizes are rounded up to it
  std::size_t tries = 400;         ///< runs of the search behind the heuristics; 0 for none
  std::size_t work = 500'000'000;  ///< allocations that these runs look at, about: a second or so
  double seconds = std::numeric_limits<double>::infinity();  ///< of these runs, where no monitor is given
  std::uint64_t seed = 0;                                    ///< of the search
};

/// Where everything lies.
struct layout {
  std::vector<bytes_t> offsets;  ///< per allocation
  bytes_t arena = 0;             ///< end of the highest allocation: bytes to reserve
  bytes_t live_peak = 0;         ///< largest sum of (rounded) bytes alive at one time
  bytes_t bound = 0;             ///< no layout has a smaller arena: `live_peak`, or more where the search has proven more
};

/// Why a layout fits, or why there is none.
enum class fit_status {
  fits,       ///< it was found
  overload,   ///< there is none: more bytes are alive at one time
  exhausted,  ///< there is none: the search has tried all
  unknown     ///< the effort or the time was spent
};

/// The answer of `fit_within`.
struct fit_result {
  fit_status status = fit_status::unknown;
  peak_load load;  ///< of the rounded sizes
  layout best;     ///< if the status is `fits`, one within the capacity; otherwise that of the heuristics
};

namespace detail {

/// A layout under improvement.
class layout_search {
 public:
  /// Makes the layout of the heuristics.
  /// @param list  rounded
  layout_search(std::vector<allocation> list, bytes_t good_enough) : list_(std::move(list)), load_(peak_load_of(list_)) {
    best_.live_peak = best_.bound = load_.bytes;
    best_.offsets = skyline_layout(list_);
    for (std::size_t i = 0; i < list_.size(); ++i) best_.arena = std::max(best_.arena, best_.offsets[i] + list_[i].bytes);
    constexpr std::size_t short_list = 3000;  // whose square takes milliseconds
    if (list_.size() > short_list) return;
    auto offsets = best_.offsets;
    for (int key = 0; key < 4 && best_.arena > std::max(load_.bytes, good_enough); ++key) {
      const auto arena = best_fit(list_, best_fit_order(list_, key), best_.arena - 1, offsets);
      if (arena < best_.arena) take(arena, offsets);
    }
  }

  const peak_load& load() const { return load_; }
  const layout& best() const { return best_; }

  /// Makes the tree search ready. @return false if the list is too long for it
  bool prepare(std::uint64_t seed) {
    constexpr std::size_t most_pairs = std::size_t{1} << 22;
    problem_ = packing_problem_of(list_, most_pairs);
    if (problem_) portfolio_.emplace(*problem_, seed);
    return problem_.has_value();
  }

  /// Bytes between an arena and the next larger one.
  bytes_t unit() const { return problem_->unit; }

  /// Looks for a layout within a capacity.
  packing_search::outcome fit(bytes_t capacity, std::size_t runs, packing_effort& left, const monitor& m) {
    const auto answer = portfolio_->fit(capacity / unit(), runs, left, m);
    if (answer == packing_search::outcome::exhausted) best_.bound = std::max(best_.bound, (capacity / unit() + 1) * unit());
    if (answer != packing_search::outcome::found) return answer;
    std::vector<bytes_t> offsets(list_.size(), 0);
    bytes_t arena = 0;
    for (index_t k = 0; k < problem_->which.size(); ++k) {
      const auto i = problem_->which[k];
      offsets[i] = portfolio_->offset(k) * unit();
      arena = std::max(arena, offsets[i] + list_[i].bytes);
    }
    take(arena, offsets);
    return answer;
  }

  /// Looks for the smallest arena: the bound at first, then by bisection, and so on with longer runs while there is effort.
  void improve(packing_effort left, const monitor& m) {
    for (std::size_t runs = 3; best_.bound < best_.arena && !left.spent() && !m.stopped(); runs *= 2) {
      auto target = best_.bound;
      for (auto least = target; least < best_.arena && !left.spent() && !m.stopped();) {
        if (fit(target, runs, left, m) != packing_search::outcome::found) least = target + unit();
        target = std::max(best_.bound, least + (best_.arena - least) / 2 / unit() * unit());
      }
    }
  }

 private:
  void take(bytes_t arena, const std::vector<bytes_t>& offsets) {
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

/// Gives every allocation an offset such that no two that are alive at the same time overlap.
///
/// Heuristics give a first layout within milliseconds: a skyline, and for lists of at most 3000 allocations best fit in four
/// orders. If its arena exceeds the live peak, a tree search looks for a layout of the live peak, and then for the smallest arena
/// by bisection. It ends when the arena is proven to be the smallest, or the effort or the time is spent. Lists with more than
/// four million pairs of allocations that are alive together are left to the heuristics.
///
/// @param list allocations
/// @param o    alignment and effort
/// @param m    time limit and request to stop
/// @return offsets, arena, live peak and bound; equal arguments give equal results unless the time ends the search
/// @throws bad_option if the alignment is no power of two; bad_problem naming an allocation that dies before it is born or has a
///         negative size or an instant beyond 2^62, or if the sizes exceed 2^53 bytes
/// Complexity: O(n log n) without `tries` where n > 3000, O(n^2) below; + `work`. O(n + pairs alive together) memory.
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

/// The same within `o.seconds`.
inline layout lay_out(std::span<const allocation> list, const layout_options& o = {}) {
  return lay_out(list, o, monitor({.seconds = o.seconds}));
}

/// Looks for a layout within a capacity, or a proof that there is none.
///
/// @param list     allocations
/// @param capacity bytes, >= 0
/// @param o        alignment and effort; give `layout_options::unlimited` tries and work to leave the effort to `m`
/// @param m        time limit and request to stop
/// @return the layout, or the proof; equal arguments give equal results unless `m` stops the search
/// @throws what `lay_out` throws; bad_option if the capacity is negative
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
    detail::packing_effort left{o.tries, o.work};
    if (search.fit(capacity, o.tries, left, m) == detail::packing_search::outcome::exhausted) r.status = fit_status::exhausted;
  }
  r.best = search.best();
  if (r.best.arena <= capacity) r.status = fit_status::fits;
  return r;
}

}  // namespace remat
