// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include <remat/io/curve.hpp>

#include "text.hpp"

namespace {

remat::result point(remat::bytes_t budget, double seconds, double bound, remat::bytes_t least = 400) {
  remat::result r;
  r.status = seconds > 0 ? remat::status::feasible : remat::status::infeasible;
  r.budget = budget;
  r.peak = budget - 10;
  r.seconds = seconds;
  r.bound = bound;
  r.budget_bound = least;
  return r;
}

/// Store-all takes 10 s.
const std::vector<remat::labelled_curve> two = {
    {"first", {point(1000, 10, 10), point(800, 11, 10.5), point(500, 15, 12), point(300, 0, 10)}},
    {"second & last", {point(1000, 10, 10), point(800, 12, 10), point(500, 14, 13)}}};

}  // namespace

TEST_CASE("a schedule counts from its peak upwards, a bound up to its budget") {
  const remat::detail::curve_plane plane(two, 10);
  REQUIRE(plane.staircases.size() == 2);
  const auto& first = plane.staircases[0];
  CHECK(std::isnan(first.at(489)));
  CHECK(first.at(490) == Approx(0.5));
  CHECK(first.at(789) == Approx(0.5));
  CHECK(first.at(790) == Approx(0.1));
  CHECK(first.at(5000) == Approx(0));
  CHECK(plane.min_budget == 400);
  CHECK(std::isnan(plane.bound.at(399)));
  CHECK(plane.bound.at(400) == Approx(0.3));
  CHECK(plane.bound.at(500) == Approx(0.3));
  CHECK(plane.bound.at(501) == Approx(0.05));
  CHECK(plane.bound.at(801) == Approx(0));
  CHECK(plane.top >= 0.5);
}

TEST_CASE("curve_text keeps its width, and gives each curve a sign") {
  for (int width : {40, 80, 133}) {
    const auto all = lines(remat::curve_text(two, {.title = "a network", .base = 10}, width, 12));
    REQUIRE(all.size() == 16);  // title, rows, axis, ends, legend
    for (std::size_t i = 0; i + 1 < all.size(); ++i) CHECK(characters(all[i]) <= width);
    CHECK(all[0] == "a network");
    CHECK_THAT(all[12], Catch::StartsWith("       0 % ┤"));
    CHECK(count(all[11], "●") + count(all[12], "●") > 0);
    CHECK_THAT(all[15], Catch::Contains("● first") && Catch::Contains("○ second & last") && Catch::Contains("· bound"));
  }
  CHECK(lines(remat::curve_text(two, {.title = "x" + umlauts(30)}, 40))[0] == "x" + umlauts(19));  // no half characters
  CHECK_THROWS_AS(remat::curve_text(two, {}, 39), remat::bad_option);
  CHECK_THROWS_AS(remat::curve_text(two, {}, 80, 3), remat::bad_option);
}

TEST_CASE("curve_svg has curves, the bound, the impossible budgets, and a legend") {
  const auto svg = remat::curve_svg(two, {.title = "a < b", .base = 10});
  CHECK_THAT(svg, Catch::StartsWith("<svg") && Catch::EndsWith("</svg>\n") && Catch::Contains("a &lt; b") &&
                      Catch::Contains("second &amp; last") && Catch::Contains("proven bound") && Catch::Contains("no schedule") &&
                      Catch::Contains("budget [KiB]"));
  CHECK(count(svg, "<path") == 3);
}

TEST_CASE("curves without points, without schedules, and without time can be drawn") {
  const std::vector<std::vector<remat::labelled_curve>> odd = {{},
                                                               {{"empty", {}}},
                                                               {{"none", {point(300, 0, 10), point(200, 0, 10)}}},
                                                               {{"one", {point(700, 12, 11)}}},
                                                               {{"zero bytes", {remat::result{}}}}};
  for (const auto& curves : odd)
    for (double base : {0.0, 10.0}) {
      const auto svg = remat::curve_svg(curves, {.base = base});
      CHECK_THAT(svg, Catch::EndsWith("</svg>\n") && !Catch::Contains("nan") && !Catch::Contains("inf"));
      CHECK_THAT(remat::curve_text(curves, {.base = base}), !Catch::Contains("nan") && !Catch::Contains("inf"));
    }
}

TEST_CASE("a curve with an infinite ratio of times can be drawn") {
  remat::result r;
  r.status = remat::status::feasible;
  r.budget = 2;
  r.peak = 1;
  r.seconds = 1e10;
  for (const double base : {1e-300, 5e-324})
    CHECK_THAT(remat::curve_svg({{"slow", {r}}}, {.base = base}),
               Catch::EndsWith("</svg>\n") && !Catch::Contains("nan") && !Catch::Contains("inf"));
}
