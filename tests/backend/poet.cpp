// SPDX-License-Identifier: Apache-2.0
// POET's MILP against exhaustive search, with any backend.
#include "checks.hpp"

#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/solver/poet.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/tier_oracle.hpp>

namespace remat::testing {
namespace {

/// State within a stage: the place of each value, and the ticks for which the streams and the copies of values on the device
/// remain busy.
struct staged_place {
  std::uint32_t device = 0, host = 0;
  std::int64_t to_host = 0, to_device = 0;
  std::array<std::int64_t, 32> leaves{}, arrives{};
  std::uint32_t stage = 0, next = 0;  ///< the operations that may still run in this stage
  bool begun = false;                 ///< something has been computed in this stage
  auto operator<=>(const staged_place&) const = default;

  /// Advances the time by `ticks`.
  void pass(std::int64_t ticks) {
    const auto shorten = [&](std::int64_t& t) { t = std::max<std::int64_t>(0, t - ticks); };
    shorten(to_host);
    shorten(to_device);
    for (auto& t : leaves) shorten(t);
    for (auto& t : arrives) shorten(t);
  }
};

/// The least time of the schedules in the scope of poet's bound, by Dijkstra's algorithm. There is one stage for each needed
/// operation and one more at the end. Copies to the device come first in a stage. A drop follows the computation that reads or
/// makes the value, or ends the stage.
/// @return s; infinity if there is no schedule; nothing if there are more than `most` states
std::optional<double> staged_optimum_with_copies(const problem& p, bytes_t budget, std::size_t most) {
  const auto nv = p.values().size();
  const auto needed = needed_operations(p);
  const auto bit = [](std::size_t i) { return std::uint32_t{1} << i; };
  const auto ticks = [](double seconds) { return std::llround(seconds * 1e6); };
  std::uint32_t stays = 0, targets = 0;
  staged_place first;
  for (value_id v = 0; v < nv; ++v) {
    if (p.is_source(v)) first.device |= bit(v);
    if (p.values()[v].held || (p.is_source(v) && p.is_target(v))) stays |= bit(v);
    if (p.is_target(v)) targets |= bit(v);
  }
  if (p.source_bytes() > budget) return std::numeric_limits<double>::infinity();
  const auto bytes_on = [&](std::uint32_t set) {
    bytes_t sum = 0;
    for (std::size_t v = 0; v < nv; ++v)
      if (set & bit(v)) sum += p.values()[v].bytes;
    return sum;
  };
  using entry = std::pair<std::int64_t, const staged_place*>;
  const auto later = [](const entry& a, const entry& b) { return a.first > b.first; };
  std::priority_queue<entry, std::vector<entry>, decltype(later)> queue(later);
  std::map<staged_place, std::int64_t> least;
  const auto reach = [&](const staged_place& x, std::int64_t now) {
    const auto [at, added] = least.emplace(x, now);
    if (!added && at->second <= now) return;
    at->second = now;
    queue.emplace(now, &at->first);
  };
  reach(first, 0);
  auto best = std::numeric_limits<std::int64_t>::max();
  while (!queue.empty()) {
    const auto [now, at] = queue.top();
    queue.pop();
    if (now >= best) break;
    const staged_place x = *at;
    if (now > least.at(x)) continue;
    if (least.size() > most) return std::nullopt;
    const bool last_stage = x.stage == needed.size(), over = !last_stage && x.next == x.stage + 1;
    if (last_stage && (x.device & targets) == targets) {
      std::int64_t wait = 0;
      for (auto v : p.targets()) wait = std::max(wait, x.arrives[v]);
      best = std::min(best, now + wait);
    }
    const auto live = bytes_on(x.device);
    for (std::size_t i = x.next; i < needed.size() && i <= x.stage; ++i) {
      const auto& op = p.operations()[needed[i]];
      if (i < x.stage && op.once) continue;
      std::uint32_t inputs = 0, outputs = 0;
      std::int64_t wait = 0;
      for (auto v : op.inputs) inputs |= bit(v), wait = std::max(wait, x.arrives[v]);
      for (auto v : op.outputs) outputs |= bit(v);
      if ((inputs & ~x.device) || live + bytes_on(outputs) + op.workspace > budget) continue;
      const auto took = wait + ticks(op.seconds);
      auto y = x;
      y.pass(took);
      y.device |= outputs;
      for (auto v : op.outputs) y.arrives[v] = 0;
      y.next = static_cast<std::uint32_t>(i + 1);
      y.begun = true;
      reach(y, now + took);
    }
    if (over) {
      auto y = x;
      ++y.stage;
      y.next = 0;
      y.begun = false;
      reach(y, now);
    }
    for (std::size_t v = 0; v < nv; ++v) {
      const bool here = x.device & bit(v);
      if (here && x.begun && !(stays & bit(v))) {
        const auto& op = p.operations()[needed[x.next - 1]];
        const auto has = [&](const auto& list) { return std::find(list.begin(), list.end(), v) != list.end(); };
        if (over || has(op.inputs) || has(op.outputs)) {
          const auto wait = std::max(x.leaves[v], x.arrives[v]);
          auto y = x;
          y.pass(wait);
          y.device &= ~bit(v);
          reach(y, now + wait);
        }
      }
      const auto& copies = *p.copies();
      const auto size = static_cast<double>(p.values()[v].bytes);
      if (here && p.values()[v].movable && !(stays & bit(v)) && !(x.host & bit(v))) {
        auto y = x;
        y.to_host = y.leaves[v] = std::max(x.to_host, x.arrives[v]) + ticks(copies.latency + size / copies.to_host);
        y.host |= bit(v);
        reach(y, now);
      }
      if (!here && !x.begun && (x.host & bit(v)) && live + p.values()[v].bytes <= budget) {
        auto y = x;
        y.to_device = y.arrives[v] = x.to_device + ticks(copies.latency + size / copies.to_device);
        y.device |= bit(v);
        reach(y, now);
      }
    }
  }
  return best == std::numeric_limits<std::int64_t>::max() ? std::numeric_limits<double>::infinity()
                                                          : static_cast<double>(best) * 1e-6;
}

}  // namespace

void check_poet_against_oracles(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  int compared = 0, tight = 0, met = 0, optimal = 0, copied = 0, empty = 0;
  for (int k = 0; k < count; ++k) {
    const auto plain = random_problem(
        g, {.operations = static_cast<std::size_t>(uniform(g, 2, 4)), .sources = 1, .outputs = 1, .once = k % 3 == 0 ? 20 : 0});
    const auto rate = [&] { return static_cast<double>(uniform(g, 1, 4)); };
    const auto p = plain.with_copies(copy_rates{rate(), rate(), 0.5 * static_cast<double>(uniform(g, 0, 1))});
    const auto least = bounds_without_search(p).budget;
    const auto all = measure_order(p, needed_operations(p)).peak;
    if (least >= all) continue;
    const auto budget = uniform(g, least, all - 1);
    const auto any = exhaustive_optimum_on_tiers(p, budget, 20'000);
    const auto staged = staged_optimum_with_copies(p, budget, 60'000);
    if (!any || !staged) continue;
    const auto r = solve(p, budget, poet<milp::any_backend>({}, library), {.gap = 0});
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    REQUIRE(*staged >= any->seconds - 1e-6);
    REQUIRE(r.found());
    CHECK(r.seconds >= any->seconds - 1e-5);
    CHECK(r.bound <= any->seconds + 1e-5);
    CHECK(r.scope_bound <= *staged * (1 + 1e-5) + 1e-5);
    if (r.status == status::optimal) CHECK(r.seconds <= any->seconds + 1e-5);
    ++compared;
    empty += std::isinf(r.scope_bound);
    tight += r.scope_bound >= *staged * (1 - 1e-5) - 1e-5;
    met += r.seconds <= *staged + 1e-5;
    optimal += r.seconds <= any->seconds + 1e-5;
    copied +=
        std::any_of(r.schedule.steps.begin(), r.schedule.steps.end(), [](const step& s) { return s.what == action::prefetch; });
  }
  CAPTURE(compared, tight, met, optimal, copied, empty);
  CHECK(10 * compared > count);
  CHECK(2 * tight > compared);
  CHECK(2 * met > compared);
  CHECK(3 * optimal > compared);
  CHECK(4 * copied > compared);
}

}  // namespace remat::testing
