// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <remat/io/timeline.hpp>

#include "../tiers.hpp"
#include "text.hpp"

using remat::action;
using remat::problem;

namespace {

/// w (held, 40) and a 1 s operation each for a (20) and b (40, reads a).
problem small_problem(bool copies = false) {
  return problem(
      "small", {{"w", 40, true}, {"a", 20}, {"b", 40}},
      {{.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1}, {.name = "b", .inputs = {1}, .outputs = {2}, .seconds = 1}},
      {1, 2}, copies ? std::optional(remat::copy_rates{10, 10, 0}) : std::nullopt);
}

const remat::schedule recomputing{{{action::compute, 0}, {action::compute, 1}, {action::drop, 1}, {action::compute, 0}}};

}  // namespace

TEST_CASE("a piece per computation") {
  const auto t = remat::trace_memory(small_problem(), recomputing);
  REQUIRE(t.pieces.size() == 3);
  CHECK(t.held == 40);
  CHECK(t.peak == 100);
  CHECK(t.seconds == 3);
  CHECK(t.pieces[0].bytes == 60);
  CHECK(t.pieces[1].bytes == 100);
  CHECK(t.pieces[2].bytes == 100);
  CHECK_FALSE(t.pieces[1].recomputed);
  CHECK(t.pieces[2].recomputed);
  CHECK(t.pieces[2].begin == 2);
  CHECK(t.pieces[2].end == 3);
}

TEST_CASE("waits for copies are pieces too, without gaps") {
  // The copy of a (2 s) ends at 3; the drop waits from 2 on; the prefetch takes until 5, the end.
  const auto t = remat::trace_memory(
      small_problem(true),
      {{{action::compute, 0}, {action::offload, 1}, {action::compute, 1}, {action::drop, 1}, {action::prefetch, 1}}});
  CHECK(t.seconds == 5);
  REQUIRE(t.pieces.size() == 5);
  CHECK(t.pieces[2].begin == 2);
  CHECK(t.pieces[2].end == 3);
  CHECK(t.pieces[2].bytes == 100);
  CHECK(t.pieces[4].end == 5);
  CHECK(t.pieces[4].bytes == 100);
  for (std::size_t i = 1; i < t.pieces.size(); ++i) CHECK(t.pieces[i].begin == t.pieces[i - 1].end);
}

TEST_CASE("invalid schedules are not drawn") {
  CHECK_THROWS_AS(remat::trace_memory(small_problem(), {{{action::compute, 1}}}), remat::bad_schedule);
}

TEST_CASE("text keeps its width and shows title, budget and recomputation") {
  const auto t = remat::trace_memory(small_problem(), recomputing);
  for (int width : {40, 57, 120}) {
    const auto all = lines(remat::timeline_text(t, {.title = "small at 150 B", .budget = 150}, width, 6));
    REQUIRE(all.size() == 10);  // title, rows, axis, recomputation, time
    for (const auto& line : all) CHECK(characters(line) <= width);
    CHECK(all[0] == "small at 150 B");
    CHECK_THAT(all[1], Catch::StartsWith("     150 B ┤") && Catch::Contains("┄"));
    CHECK(count(all[8], "▓") == (width - 12) / 3);
    CHECK_THAT(all[9], Catch::EndsWith("3 s"));
    CHECK(count(all[6], "█") == width - 12);  // the lowest row is full
  }
  CHECK_THAT(remat::timeline_text(remat::trace_memory(small_problem(), remat::store_all_schedule(small_problem())), {}),
             !Catch::Contains("recomputed"));
  CHECK_THROWS_AS(remat::timeline_text(t, {}, 39), remat::bad_option);
  CHECK_THROWS_AS(remat::timeline_text(t, {}, 80, 3), remat::bad_option);
}

TEST_CASE("nothing to draw, and nothing that takes time") {
  const problem empty("", {}, {}, {});
  CHECK_FALSE(remat::timeline_text(remat::trace_memory(empty, {}), {}).empty());
  CHECK_THAT(remat::timeline_svg(remat::trace_memory(empty, {}), {}), Catch::EndsWith("</svg>\n") && !Catch::Contains("nan"));
  const problem instant("", {{"a", 4}}, {{.name = "a", .inputs = {}, .outputs = {0}, .seconds = 0}}, {0});
  const auto t = remat::trace_memory(instant, remat::store_all_schedule(instant));
  CHECK_THAT(remat::timeline_text(t, {}), Catch::Contains("1 operations"));
  CHECK_THAT(remat::timeline_svg(t, {}), !Catch::Contains("nan") && !Catch::Contains("inf"));
}

TEST_CASE("SVG: title escaped, recomputation, held, budget and overlays there, size bounded") {
  const auto t = remat::trace_memory(small_problem(), recomputing);
  auto svg =
      remat::timeline_svg(t, {.title = "a < b & c", .budget = 90, .overlays = {{"measured", {{0, 60}, {1.5, 95}, {3, 95}}}}});
  CHECK_THAT(svg, Catch::StartsWith("<svg") && Catch::Contains("a &lt; b &amp; c") && Catch::Contains("while recomputing") &&
                      Catch::Contains("held 40 B") && Catch::Contains("budget 90 B") && Catch::Contains("measured") &&
                      Catch::Contains("time [s]"));
  CHECK_THAT(remat::timeline_svg(t, {}), !Catch::Contains("budget"));

  remat::memory_timeline many;
  remat::memory_series line{"line", {}};
  for (int i = 0; i < 200'000; ++i) {
    many.pieces.push_back({i * 1e-3, (i + 1) * 1e-3, 1000 + i * 7919 % 1000, i % 3 == 0});
    line.points.emplace_back(i * 1e-3, i * 7919 % 1500);
  }
  many.seconds = 200;
  many.peak = 1999;
  svg = remat::timeline_svg(many, {.overlays = {line}});
  CHECK(svg.size() < 150'000);
}

TEST_CASE("the memory of the device is followed where there are other tiers") {
  std::mt19937_64 g(31);
  int followed = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = remat::testing::random_tiers_problem(g);
    const auto s = remat::testing::tiers_walk(g, p).run();
    remat::evaluation e;
    try {
      e = remat::evaluate(p, s);
    } catch (const remat::bad_schedule&) {
      continue;
    }
    ++followed;
    const auto t = remat::trace_memory(p, s);
    double now = 0;
    auto most = p.source_bytes();
    for (const auto& [v, tier] : s.starts)
      if (tier == remat::device_tier) most += p.values()[v].bytes;
    for (const auto& x : t.pieces) {
      REQUIRE((x.begin == Approx(now).margin(1e-9) && x.end >= x.begin));
      now = x.end;
      most = std::max(most, x.bytes);
    }
    REQUIRE(now >= e.seconds * (1 - 1e-6));  // more in an execution that is longer than the mean
    if (p.next().empty()) REQUIRE(now == Approx(e.seconds).margin(1e-6 * e.seconds));
    REQUIRE((most == e.peak && t.peak == e.peak && t.held <= e.peak));
  }
  CHECK(followed > 150);
}
