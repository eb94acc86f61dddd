// SPDX-License-Identifier: Apache-2.0
/// @file
/// Binomial checkpointing of equal steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/core/error.hpp>

namespace remat::chain {

namespace detail {

/// C(s + r, s), capped at `limit`.
inline std::uint64_t binomial(std::uint64_t s, std::uint64_t r, std::uint64_t limit) {
  if (s < r) std::swap(s, r);
  std::uint64_t c = 1;
  for (std::uint64_t i = 1; i <= r && c < limit; ++i) c = c * (s + i) / i;
  return std::min(c, limit);
}

/// The least r with C(slots + r, slots) >= steps. No step runs more than r times besides its run inside its backward step.
inline std::uint64_t repetitions(std::uint64_t steps, std::uint64_t slots) {
  std::uint64_t r = 0;
  for (std::uint64_t c = 1; c < steps; c = c * (slots + r) / r) ++r;
  return r;
}

inline void check_revolve(std::uint64_t steps, std::uint64_t slots) {
  constexpr std::uint64_t max_steps = std::uint64_t{1} << 31;
  if (steps < 1 || steps > max_steps) throw bad_option("revolve: steps must be in [1, 2^31], got " + std::to_string(steps));
  if (slots < 1) throw bad_option("revolve: slots must be >= 1, got 0");
}

}  // namespace detail

/// The least number of forward steps that reverse a chain. The forward step inside each backward step does not count.
///
///     t(l, s) = r l - C(s + r, s + 1),  r = min { r : C(s + r, s) >= l }
///
/// @param steps l, in [1, 2^31]
/// @param slots s >= 1: number of states that fit, including the initial one
/// @return t(l, s)
/// @throws bad_option if `steps` or `slots` is out of range
/// Complexity: O(r), at most O(sqrt(l)).
///
/// Reference: Griewank, Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
/// @code
/// const auto forwards = remat::chain::revolve_forwards(10, 3);  // 15
/// @endcode
inline std::uint64_t revolve_forwards(std::uint64_t steps, std::uint64_t slots) {
  detail::check_revolve(steps, slots);
  if (slots == 1) return steps * (steps - 1) / 2;  // r would be as large as the chain
  slots = std::min(slots, steps);                  // more slots are of no use
  const auto r = detail::repetitions(steps, slots);
  std::uint64_t c = 1;  // C(slots + r, slots); every partial product is divisible
  for (std::uint64_t i = 1; i <= r; ++i) c = c * (slots + i) / i;
  return r * steps - c * r / (slots + 1);
}

/// A schedule that reverses a chain of equal links with `revolve_forwards(links, slots)` checkpoint steps. A `checkpoint` step
/// runs link i without saving, from the state before it to the state after it. A `forward` step runs link i and saves everything
/// for its `backward`, which follows at once. The caller keeps each state until its last use before it is made again.
/// @param links number of links, in [1, 2^31]
/// @param slots >= 1: number of states that fit, including the initial one
/// @return the steps
/// @throws bad_option if `links` or `slots` is out of range
/// Complexity: O(slots) space and O(1) time per step, besides the result.
inline std::vector<chain_step> revolve_schedule(std::uint64_t links, std::uint64_t slots) {
  detail::check_revolve(links, slots);
  struct piece {
    std::uint64_t first, length, slots;
  };
  std::vector<chain_step> steps;
  std::vector<piece> stack = {{0, links, slots}};
  const auto add = [&](chain_step::kind what, std::uint64_t link) { steps.push_back({what, static_cast<std::size_t>(link), 0}); };
  while (!stack.empty()) {
    const auto top = stack.back();
    stack.pop_back();
    if (top.length == 1) {
      add(chain_step::kind::forward, top.first);
      add(chain_step::kind::backward, top.first);
      continue;
    }
    std::uint64_t left = top.length - 1;  // with one slot: all the way to the last link
    auto rest = top.slots;
    if (top.slots > 1) {
      rest = std::min(top.slots, top.length);
      const auto r = detail::repetitions(top.length, rest);
      left = std::min(detail::binomial(rest, r - 1, top.length), top.length - detail::binomial(rest - 1, r - 1, top.length));
    }
    for (std::uint64_t i = 0; i < left; ++i) add(chain_step::kind::checkpoint, top.first + i);
    stack.push_back({top.first, left, top.slots});
    stack.push_back({top.first + left, top.length - left, rest > 1 ? rest - 1 : 1});
  }
  return steps;
}

}  // namespace remat::chain
