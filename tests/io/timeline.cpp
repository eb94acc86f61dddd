// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <remat/io/timeline.hpp>

#include "../tiers_walk.hpp"
#include "text.hpp"

using remat::action;
using remat::problem;

namespace {

/// w (held, 40), and two operations of 1 s each: a (20), and b (40), which reads a.
problem small_problem(bool copies = false) {
  return problem(
      "small", {{"w", 40, true}, {"a", 20}, {"b", 40}},
      {{.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1}, {.name = "b", .inputs = {1}, .outputs = {2}, .seconds = 1}},
      {1, 2}, copies ? std::optional(remat::copy_rates{10, 10, 0}) : std::nullopt);
}

const remat::schedule recomputing{{{action::compute, 0}, {action::compute, 1}, {action::drop, 1}, {action::compute, 0}}};

}  // namespace

TEST_CASE("the memory of a trace has one piece per computation") {
  const auto t = remat::trace(small_problem(), recomputing).memory;
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

TEST_CASE("the memory of a trace has pieces of waits for copies too, without gaps") {
  // The copy of a (2 s) ends at 3; the drop waits for it from 2 on; the prefetch ends at 5, with the schedule.
  const auto t =
      remat::trace(small_problem(true),
                   {{{action::compute, 0}, {action::offload, 1}, {action::compute, 1}, {action::drop, 1}, {action::prefetch, 1}}})
          .memory;
  CHECK(t.seconds == 5);
  REQUIRE(t.pieces.size() == 5);
  CHECK(t.pieces[2].begin == 2);
  CHECK(t.pieces[2].end == 3);
  CHECK(t.pieces[2].bytes == 100);
  CHECK(t.pieces[4].end == 5);
  CHECK(t.pieces[4].bytes == 100);
  for (std::size_t i = 1; i < t.pieces.size(); ++i) CHECK(t.pieces[i].begin == t.pieces[i - 1].end);
}

TEST_CASE("trace refuses invalid schedules") {
  CHECK_THROWS_AS(remat::trace(small_problem(), {{{action::compute, 1}}}).memory, remat::bad_schedule);
}

TEST_CASE("timeline_text keeps its width, and shows title, budget and recomputation") {
  const auto t = remat::trace(small_problem(), recomputing).memory;
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
  CHECK_THAT(remat::timeline_text(remat::trace(small_problem(), remat::store_all_schedule(small_problem())).memory, {}),
             !Catch::Contains("recomputed"));
  CHECK(lines(remat::timeline_text(t, {.title = "x" + umlauts(30)}, 40))[0] == "x" + umlauts(19));  // no half characters
  CHECK_THROWS_AS(remat::timeline_text(t, {}, 39), remat::bad_option);
  CHECK_THROWS_AS(remat::timeline_text(t, {}, 80, 3), remat::bad_option);
}

TEST_CASE("timelines of empty problems and of instant operations can be drawn") {
  const problem empty("", {}, {}, {});
  CHECK_FALSE(remat::timeline_text(remat::trace(empty, {}).memory, {}).empty());
  CHECK_THAT(remat::timeline_svg(remat::trace(empty, {}).memory, {}), Catch::EndsWith("</svg>\n") && !Catch::Contains("nan"));
  const problem instant("", {{"a", 4}}, {{.name = "a", .inputs = {}, .outputs = {0}, .seconds = 0}}, {0});
  const auto t = remat::trace(instant, remat::store_all_schedule(instant)).memory;
  CHECK_THAT(remat::timeline_text(t, {}), Catch::Contains("1 operations"));
  const auto least = remat::trace(small_problem().with_costs(std::vector<double>{5e-324, 0}), recomputing).memory;
  CHECK_THAT(remat::timeline_text(least, {}), Catch::Contains("3 operations"));
  CHECK_THAT(remat::timeline_svg(t, {}), !Catch::Contains("nan") && !Catch::Contains("inf"));
}

TEST_CASE("timeline_svg has an escaped title, recomputation, held bytes, budget and overlays, and a bounded size") {
  const auto t = remat::trace(small_problem(), recomputing).memory;
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

TEST_CASE("trace follows the memory of the device if there are other tiers") {
  std::mt19937_64 g(31);
  int followed = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = remat::testing::random_tiers_problem(g);
    const auto s = remat::testing::tiers_walk(g, p).run();
    const auto valid = remat::testing::evaluated(p, s);
    if (!valid) continue;
    const auto& e = *valid;
    ++followed;
    const auto t = remat::trace(p, s).memory;
    double now = 0;
    auto most = p.source_bytes();
    for (const auto& [v, tier] : s.starts)
      if (tier == remat::device_tier) most += p.values()[v].bytes;
    for (const auto& x : t.pieces) {
      REQUIRE((x.begin == Approx(now).margin(1e-9) && x.end >= x.begin));
      now = x.end;
      most = std::max(most, x.bytes);
    }
    REQUIRE(now >= e.seconds * (1 - 1e-6));  // more for an execution that is longer than the mean period
    if (p.next().empty()) REQUIRE(now == Approx(e.seconds).margin(1e-6 * e.seconds));
    REQUIRE((most == e.peak && t.peak == e.peak && t.held <= e.peak));
  }
  CHECK(followed > 150);
}

TEST_CASE("trace shows computations, copies, waits, and the memory of the host") {
  // As above: a runs until 1, b until 2; a is copied out until 3 and back until 5.
  const auto p = small_problem(true);
  const remat::schedule s{
      {{action::compute, 0}, {action::offload, 1}, {action::compute, 1}, {action::drop, 1}, {action::prefetch, 1}}};
  const auto lanes = remat::trace(p, s).lanes;
  REQUIRE(lanes.size() == 3);
  using work = remat::lane::work;
  const auto spans_are = [](const remat::lane& l, const std::vector<remat::lane::span>& expected) {
    return std::equal(l.spans.begin(), l.spans.end(), expected.begin(), expected.end(), [](const auto& x, const auto& y) {
      return x.begin == Approx(y.begin) && x.end == Approx(y.end) && x.what == y.what;
    });
  };
  CHECK(lanes[0].label == "device");
  CHECK(spans_are(lanes[0], {{0, 1, work::computed}, {1, 2, work::computed}, {2, 3, work::waited}, {3, 5, work::waited}}));
  CHECK((lanes[1].label == "to host" && spans_are(lanes[1], {{1, 3, work::copied}})));
  CHECK((lanes[2].label == "to device" && spans_are(lanes[2], {{3, 5, work::copied}})));
  const auto tiers = remat::trace(p, s).tiers;
  REQUIRE(tiers.size() == 1);
  CHECK((tiers[0].label == "host" && tiers[0].peak == 20 && !tiers[0].budget));
  CHECK(tiers[0].points == std::vector<std::pair<double, remat::bytes_t>>{{0, 0}, {1, 20}, {5, 20}});
  CHECK(remat::trace(p, recomputing).tiers.empty());
  CHECK(remat::trace(p, recomputing).lanes[0].spans.back().what == work::recomputed);

  const remat::timeline_style style{.lanes = lanes, .tiers = tiers};
  const auto text = lines(remat::timeline_text(remat::trace(p, s).memory, style, 62, 6));
  REQUIRE(text.size() == 12);  // rows, axis, lanes, the host, time
  CHECK(text[7] == "    device  " + std::string("██████████████████████████████").substr(0, 20 * 3) + [] {
    std::string waits;
    for (int i = 0; i < 30; ++i) waits += "·";
    return waits;
  }());
  CHECK((count(text[8], "━") == 20 && count(text[9], "━") == 20 && count(text[10], "█") == 40));
  const auto svg = remat::timeline_svg(remat::trace(p, s).memory, style);
  CHECK_THAT(svg, Catch::Contains(">waits<") && Catch::Contains(">copies<") && Catch::Contains("to device") &&
                      Catch::Contains("host: 20 B") && Catch::Contains("height=\"552\""));
  auto limited = style;
  limited.tiers[0].budget = 40;
  CHECK_THAT(remat::timeline_svg(remat::trace(p, s).memory, limited), Catch::Contains("host: 20 B of 40 B"));
}

TEST_CASE("lanes of random schedules never overlap, show all computations, and have the peak of each tier") {
  std::mt19937_64 g(32);
  int followed = 0, copied = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = remat::testing::random_tiers_problem(g);
    const auto s = remat::testing::tiers_walk(g, p).run();
    if (!remat::testing::evaluated(p, s)) continue;
    ++followed;
    double computed = 0, expected = 0;
    for (const auto& x : s.steps)
      if (x.what == action::compute) expected += p.operations()[x.operation()].seconds;
    const auto t = remat::trace(p, s);
    for (const auto& l : t.lanes) {
      double last = 0;
      for (const auto& x : l.spans) {
        REQUIRE((x.begin >= 0 && x.end > x.begin));
        if (p.next().empty()) REQUIRE(x.begin >= last - 1e-9);
        last = x.end;
        if (x.what == remat::lane::work::computed || x.what == remat::lane::work::recomputed) computed += x.end - x.begin;
        copied += x.what == remat::lane::work::copied;
      }
    }
    if (p.next().empty()) REQUIRE(computed == Approx(expected).margin(1e-9));
    for (const auto& x : t.tiers) {
      remat::bytes_t most = 0;
      for (const auto& [at, bytes] : x.points) most = std::max(most, bytes);
      REQUIRE(most == x.peak);
      REQUIRE(std::is_sorted(x.points.begin(), x.points.end(), [](const auto& a, const auto& b) { return a.first < b.first; }));
    }
  }
  CHECK(followed > 150);
  CHECK(copied > 300);
}
