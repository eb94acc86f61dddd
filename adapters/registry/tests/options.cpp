// SPDX-License-Identifier: Apache-2.0
// Options of solvers by name: what they may be, and what they change.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>

#include <remat/core/solve.hpp>
#include <remat/registry/registry.hpp>
#include <remat/solver/twremat.hpp>
#include <remat/testing/generators.hpp>

using Catch::Contains;
using remat::registry::find;

namespace {

/// The middle of the least and the most that a problem may need.
remat::bytes_t middle(const remat::problem& p) {
  return (remat::measure_store_all(p).peak + remat::bounds_without_search(p).budget) / 2;
}

remat::result solved(const remat::problem& p, const char* solver, const remat::registry::option_values& options) {
  return remat::solve(p, middle(p), find(solver).make("auto", options), {.seconds = 60, .seed = 3});
}

/// Other values than the default that an option may have.
std::string another(const remat::registry::option& o) {
  if (o.standard == "true" || o.standard == "false") return o.standard == "true" ? "false" : "true";
  const auto words = o.range.substr(o.range.find("from ") + 5);
  return words.substr(0, words.find(' '));
}

}  // namespace

TEST_CASE("every option of every solver has a default, a range and a meaning, and is taken") {
  std::size_t options = 0;
  for (const auto& m : remat::registry::methods())
    for (const auto& o : m.options()) {
      INFO(m.name << ": " << o.name);
      ++options;
      CHECK_FALSE((o.standard.empty() || o.range.empty() || o.summary.empty()));
      CHECK_NOTHROW(m.make("auto", {{o.name, o.standard}}));
      CHECK_NOTHROW(m.make("auto", {{o.name, another(o)}}));
      for (const char* text : {"", "many", "1x", "-1", "1e99", " 1", "nan"})
        CHECK_THROWS_WITH(m.make("auto", {{o.name, text}}), Contains(std::string(m.name) + ": option " + o.name + " must be ") &&
                                                                Contains("got \"" + std::string(text) + "\""));
    }
  CHECK(options > 40);
}

TEST_CASE("an option that a solver does not have is named, with those that it has") {
  CHECK_THROWS_AS(find("rockmate").make("auto", {{"parts", "3"}}), remat::bad_option);
  CHECK_THROWS_WITH(find("rockmate").make("auto", {{"parts", "3"}}),
                    Contains("solver rockmate has no option \"parts\"") && Contains("cut.most"));
  CHECK_THROWS_WITH(find("store_all").make("auto", {{"parts", "3"}}), Contains("it has none"));
  CHECK_THROWS_WITH(find("rockmate").make("auto", {{"saved", "0"}}),
                    Contains("saved must be an integer from 1 to 100, got \"0\""));
}

TEST_CASE("the name of a solver tells its options") {
  CHECK(find("min_cut").make("auto").name() == "min_cut");
  CHECK(find("min_cut").make("auto", {{"effort", "0"}, {"cuts", "4"}}).name() == "min_cut (cuts=4, effort=0)");
}

TEST_CASE("options reach the solver") {
  std::mt19937_64 g(5);
  const auto p = remat::testing::random_training_chain(g, 12);
  const remat::twremat::options few{.shrink = 1.1, .repetitions = 2};
  const auto direct = remat::solve(p, middle(p), remat::twremat(few), {.seconds = 60, .seed = 3});
  const auto named = solved(p, "twremat", {{"shrink", "1.1"}, {"repetitions", "2"}});
  CHECK(named.schedule == direct.schedule);
  CHECK(named.status == direct.status);
}

TEST_CASE("sizes and budgets of parts change the plan of rockmate and hiremate") {
  const auto p = remat::testing::transformer_training_graph(6);
  for (const char* solver : {"rockmate", "hiremate"}) {
    INFO(solver);
    remat::result usual;
    try {
      usual = solved(p, solver, {});
    } catch (const remat::not_available&) {
      return;  // no MILP library
    }
    REQUIRE(usual.found());
    // One bound per part leaves each part one way to run, or none that fits.
    const auto one = solved(p, solver, {{"saved", "1"}, {"peaks", "1"}});
    CHECK((!one.found() || one.seconds > usual.seconds));
    const auto whole = solved(p, solver, {{"cut.most", "1"}, {"leaf_operations", "1"}});
    CHECK(whole.schedule != usual.schedule);
  }
}

TEST_CASE("a solver with options is warm started, and sweeps, as without") {
  std::mt19937_64 g(7);
  const auto p = remat::testing::random_training_chain(g, 8);
  const auto solver = find("min_cut").make("auto", {{"effort", "0"}, {"cuts", "2"}, {"moments", "1"}});
  const auto best = remat::solve(p, middle(p), find("automatic").make("auto"), {.seconds = 20, .seed = 3});
  REQUIRE(best.found());
  const auto started = remat::solve(p, middle(p), solver, remat::start_from(best.schedule), {.seconds = 20, .seed = 3});
  CHECK(started.seconds <= best.seconds * (1 + 1e-9));
  const std::vector<remat::bytes_t> budgets = {middle(p), remat::measure_store_all(p).peak};
  for (const auto& r : remat::pareto_curve(p, budgets, solver, {.seconds = 20, .seed = 3})) CHECK(r.found());
}
