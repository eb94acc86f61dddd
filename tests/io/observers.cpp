// SPDX-License-Identifier: Apache-2.0
// The observers of the library: each gets a series of reports, and one search saves its best schedule.
#include <catch2/catch.hpp>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <sstream>
#include <string>

#include <unistd.h>

#include <remat/core/observers.hpp>
#include <remat/core/pareto_curve.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/observers.hpp>
#include <remat/solver/chen.hpp>
#include <remat/testing/generators.hpp>

#include "text.hpp"

using remat::control;
using remat::progress;

static_assert(remat::observer<remat::stop_at> && remat::observer<remat::progress_line> && remat::observer<remat::progress_log> &&
              remat::observer<remat::best_to_file>);

TEST_CASE("stop_at stops at its time, gap or patience") {
  const auto at = [](double elapsed, double best, double bound = 0, double idle = 0) {
    return progress{.stage = "", .elapsed = elapsed, .best = best, .bound = bound, .idle = idle};
  };
  const double unknown = std::numeric_limits<double>::infinity();
  remat::stop_at never;
  CHECK(never(at(1, unknown)) == control::go_on);
  CHECK(never(at(1e9, 5, 4.9)) == control::go_on);
  remat::stop_at time{.seconds = 4};
  CHECK(time(at(1, 4.1)) == control::go_on);
  CHECK(time(at(2, 4)) == control::stop);
  remat::stop_at gap{.gap = 0.1};
  CHECK(gap(at(1, unknown, 9)) == control::go_on);
  CHECK(gap(at(1, 10.1, 9)) == control::go_on);
  CHECK(gap(at(2, 10, 9)) == control::stop);
  remat::stop_at patience{.patience = 10};
  CHECK(patience(at(50, unknown, 0, 50)) == control::go_on);
  CHECK(patience(at(69, 8, 0, 9)) == control::go_on);
  CHECK(patience(at(71, 8, 0, 11)) == control::stop);
}

TEST_CASE("progress_line and progress_log write what has changed") {
  std::ostringstream line, log;
  {
    remat::progress_line show("cuts: ", line);
    remat::progress_log write(log);
    for (const auto& x : {progress{.stage = "a"}, progress{.stage = "b", .elapsed = 1, .best = 2, .bound = 1},
                          progress{.stage = "c \"quoted\"", .elapsed = 2, .best = 2, .bound = 1},
                          progress{.stage = "d", .elapsed = 3, .best = 1.5, .bound = 1}}) {
      show(x);
      write(x);
    }
  }
  CHECK_THAT(line.str(), Catch::Contains("1.0 s  cuts: best 2 s, bound 1 s, gap 50.00 %, b") && Catch::EndsWith("\r\033[K"));
  std::ostringstream cut;
  remat::progress_line("x", cut)(progress{.stage = umlauts(80)});
  CHECK_THAT(cut.str(), Catch::Contains("x" + umlauts(54)) && !Catch::Contains("x" + umlauts(54) + "\xc3"));
  const auto text = log.str();
  CHECK(std::count(text.begin(), text.end(), '\n') == 4);  // the header and three changed reports
  CHECK_THAT(text, Catch::StartsWith("elapsed,best,bound,peak,stage\n0,,0,,\"a\"\n1,2.000000,1,,\"b\"\n"));
}

TEST_CASE("best_to_file has saved the best schedule before the next observer runs, in solve and in curves") {
  std::mt19937_64 g(5);
  const auto p = remat::testing::random_training_chain(g, 30);
  const auto budget = remat::evaluate(p, remat::store_all_schedule(p)).peak * 3 / 5;
  const auto path = std::filesystem::temp_directory_path() / ("remat-best-" + std::to_string(getpid()) + ".json");
  double best = std::numeric_limits<double>::infinity();
  int seen = 0;
  const auto look = [&](const progress& now) {
    if (!now.schedule) return;
    CHECK(now.peak <= budget);
    best = std::min(best, now.best);
    const auto saved = remat::read_schedule(path).result;
    CHECK((saved.seconds == best && remat::evaluate(p, saved.schedule).seconds == best));
    ++seen;
  };
  const auto r = remat::solve(p, budget, remat::chen(), {}, remat::best_to_file(path, p, budget), look);
  REQUIRE(r.found());
  CHECK(seen > 0);
  CHECK(best == r.seconds);

  best = std::numeric_limits<double>::infinity();
  seen = 0;
  remat::pareto_curve(p, {budget}, remat::chen(), {}, remat::best_to_file(path, p, budget), look);
  CHECK(seen > 0);
  std::filesystem::remove(path);
}

TEST_CASE("best_to_file ends the search with an error that names the file") {
  const auto p = remat::testing::unit_training_chain(8);
  CHECK_THROWS_WITH(remat::solve(p, 7, remat::chen(), {}, remat::best_to_file("/nowhere/plan.json", p, 7)),
                    Catch::Contains("/nowhere/plan.json"));
}
