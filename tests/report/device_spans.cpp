// SPDX-License-Identifier: Apache-2.0
// Spans of values on the device, against `evaluate`, and the fate of each value.
#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/report/device_spans.hpp>
#include <remat/solver/chen.hpp>
#include <remat/testing/generators.hpp>

#include "../tiers.hpp"

namespace {

/// The largest sum of live bytes after any event.
remat::bytes_t largest_sum(const std::vector<remat::device_span>& spans) {
  std::map<std::int64_t, remat::bytes_t> changes;
  for (const auto& x : spans) {
    CHECK(changes.emplace(x.birth, x.bytes).second);  // one change per event
    if (x.death != remat::device_span::to_the_end) CHECK(changes.emplace(x.death, -x.bytes).second);
  }
  remat::bytes_t live = 0, most = 0;
  for (const auto& [event, bytes] : changes) most = std::max(most, live += bytes);
  return most;
}

}  // namespace

TEST_CASE("device spans have the peak of the schedule") {
  std::mt19937_64 g(5);
  for (int i = 0; i < 20; ++i) {
    const auto p = remat::testing::random_training_chain(g, 10);
    const auto all = remat::store_all_schedule(p);
    const auto e = remat::evaluate(p, all);
    CHECK(largest_sum(remat::device_spans(p, all)) == e.peak);
    const auto r = remat::solve(p, e.peak * 8 / 10, remat::chen());
    if (r.found()) CHECK(largest_sum(remat::device_spans(p, r.schedule)) == r.peak);
  }
  remat::testing::step_parts x;
  const auto p = x.build();
  CHECK(largest_sum(remat::device_spans(p, remat::testing::host_step())) == remat::evaluate(p, remat::testing::host_step()).peak);
}

TEST_CASE("a recomputed value lies beside its old copy while it is computed") {
  const remat::problem p("again", {{"a", 8}, {"b", 1}}, {{"a", {}, {0}, 1, 4}, {"b", {0}, {1}, 1}}, {1});
  remat::schedule s;
  s.compute(0);
  s.compute(0);
  s.compute(1);
  s.drop(0);
  const auto spans = remat::device_spans(p, s);
  CHECK(largest_sum(spans) == 20);
  CHECK(remat::evaluate(p, s).peak == 20);
}

TEST_CASE("device spans tell kept, recomputed, moved and temporary values apart") {
  // x is held. The backward reads a and c. Only the forward reads b. d is moved.
  const remat::problem p(
      "fates", {{"x", 1, true}, {"a", 8}, {"b", 8}, {"c", 8}, {"d", 8}, {"g", 1}},
      {{"a", {0}, {1}, 1}, {"b", {1}, {2}, 1}, {"c", {2}, {3}, 1}, {"d", {3}, {4}, 1}, {"g", {1, 3, 4}, {5}, 1}}, {5},
      remat::copy_rates{1, 1, 0}, remat::operation_id(4));
  remat::schedule s;
  s.compute(0);
  s.compute(1);
  s.drop(1);
  s.compute(2);
  s.drop(2);
  s.compute(3);
  s.offload(4);
  s.drop(4);
  s.prefetch(4);
  s.compute(0);
  s.compute(4);
  using remat::fate;
  CHECK(remat::fates(p, s) ==
        std::vector{fate::held, fate::recomputed, fate::temporary, fate::kept, fate::moved, fate::temporary});
}
