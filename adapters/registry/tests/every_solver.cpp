// SPDX-License-Identifier: Apache-2.0
// Every solver of the program's table on problems at the edges of what is valid, on random ones, and from two threads at once.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <remat/core/pareto_curve.hpp>
#include <remat/core/solve.hpp>
#include <remat/registry/registry.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../../../tests/rounds.hpp"

using remat::bytes_t;
using remat::problem;
using remat::status;

namespace {

const remat::limits long_enough{.seconds = 60, .seed = 3};

/// The solvers that can run here, each with its name in the table.
std::vector<std::pair<std::string, remat::any_solver>> solvers() {
  std::vector<std::pair<std::string, remat::any_solver>> all;
  for (const auto& m : remat::registry::methods()) try {
      all.emplace_back(m.name, m.make("auto"));
    } catch (const remat::not_available&) {  // no MILP library
    }
  return all;
}

enum class child { did, did_not, threw, had_threads };

/// Waits until this process has no other thread. A MILP library may still be ending threads of its own after a call.
void wait_for_threads() {
  const std::filesystem::directory_iterator none;
  while (std::distance(std::filesystem::directory_iterator("/proc/self/task"), none) > 1)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// What `work` does in a child process that may have no more threads.
template <class F>
child without_threads(F&& work) {
  wait_for_threads();  // a lock that one of them holds would stay locked in the child
  const auto id = fork();
  if (id == 0) {
    alarm(60);
    if (getuid() == 0 && setresuid(54321, 54321, 54321) != 0)
      _exit(static_cast<int>(child::had_threads));  // no limit holds for root
    const rlimit none{0, 0};
    setrlimit(RLIMIT_NPROC, &none);
    auto end = child::had_threads;
    try {
      std::thread([] {}).join();
    } catch (const std::system_error&) {
      try {
        end = work() ? child::did : child::did_not;
      } catch (...) {
        end = child::threw;
      }
    }
    _exit(static_cast<int>(end));
  }
  int state = 0;
  REQUIRE(waitpid(id, &state, 0) == id);
  REQUIRE(WIFEXITED(state));
  return static_cast<child>(WEXITSTATUS(state));
}

bytes_t store_all_peak(const problem& p) { return remat::evaluate(p, remat::store_all_schedule(p)).peak; }

/// Numbers are numbers, and those of the schedule are those of `evaluate`.
void check_numbers(const problem& p, const remat::result& r) {
  REQUIRE(std::isfinite(r.bound));
  REQUIRE(r.bound >= 0);
  REQUIRE_FALSE(std::isnan(r.scope_bound));
  REQUIRE(r.budget_bound >= 0);
  REQUIRE((r.gap() >= 0 && r.gap() <= 1));
  REQUIRE_FALSE(r.solver.empty());
  if (!r.found()) {
    REQUIRE(r.schedule.steps.empty());
    return;
  }
  const auto e = remat::evaluate(p, r.schedule);
  REQUIRE(r.peak == e.peak);
  REQUIRE(r.seconds == e.seconds);
  REQUIRE(r.recomputed == e.recomputed);
  REQUIRE(r.peak <= r.budget);
  REQUIRE(r.budget_bound <= r.budget);
  REQUIRE(r.smallest_budget.has_value());
  REQUIRE(r.bound <= r.seconds * (1 + 1e-9));
}

/// The problem with everything scaled or removed.
problem changed(const problem& p, bytes_t bytes, double seconds, bool once) {
  auto x = p.members();
  for (auto& v : x.values) v.bytes *= bytes;
  for (auto& o : x.operations) o.seconds *= seconds, o.workspace *= bytes, o.once = o.once || once;
  return problem(std::move(x));
}

/// Training graphs small enough for all solvers, with what may be odd about them.
std::vector<problem> odd_training_graphs() {
  std::mt19937_64 g(5);
  const auto p = remat::testing::random_training_chain(g, 4);
  auto held = p.values();
  for (remat::value_id v = 0; v < held.size(); ++v) held[v].held = p.is_source(v);
  return {p,
          changed(p, 0, 1, false),                    // no bytes
          changed(p, 1, 0, false),                    // no costs
          changed(p, 0, 0, false),                    // nothing at all
          changed(p, 1, 1, true),                     // once only
          changed(p, bytes_t{1} << 40, 1e-9, false),  // large sizes, short times
          changed(p, 1, 1e12, false),
          problem("held", held, p.operations(), p.targets()),
          problem("copies", p.values(), p.operations(), p.targets(), remat::copy_rates{1e3, 1e3, 0})};
}

}  // namespace

TEST_CASE("the table: names differ, each has a summary") {
  std::vector<std::string_view> names;
  for (const auto& m : remat::registry::methods()) {
    CHECK_FALSE(m.summary.empty());
    CHECK(std::find(names.begin(), names.end(), m.name) == names.end());
    CHECK(&remat::registry::find(m.name) == &m);
    names.push_back(m.name);
  }
  CHECK_THROWS_WITH(remat::registry::find("magic"), Catch::Contains("magic") && Catch::Contains("min_cut"));
}

TEST_CASE("every solver on problems at the edges") {
  auto problems = odd_training_graphs();
  for (auto& p : remat::testing::detail::edge_problems()) problems.push_back(p);
  for (const auto& [name, s] : solvers())
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const auto& p = problems[i];
      const auto all = store_all_peak(p);
      INFO(name << " on problem " << i << ", " << p.name());
      for (const auto budget : {bytes_t{0}, p.held_bytes(), p.source_bytes(), all / 2, all - 1, all, all + 1}) {
        if (budget < 0) continue;
        INFO("budget " << budget);
        const auto r = remat::solve(p, budget, s, long_enough);
        check_numbers(p, r);
        if (budget < p.source_bytes()) REQUIRE(r.status == status::infeasible);
        if (budget >= all) {
          REQUIRE(r.status == status::optimal);
          REQUIRE(r.seconds == Approx(remat::bounds_without_search(p).seconds));
        }
      }
    }
}

TEST_CASE("every solver: no schedule below what is possible, none faster than the optimum") {
  std::mt19937_64 g(9);
  const auto all_solvers = solvers();
  for (int round = 0; round < remat::testing::shortened(40); ++round) {
    const auto p = remat::testing::random_problem(
        g, {.operations = static_cast<std::size_t>(3 + round % 4), .once = round % 3 == 0 ? 25 : 0});
    const auto all = store_all_peak(p), least = remat::bounds_without_search(p).budget;
    for (const auto budget : {least - 1, (least + all) / 2}) {
      if (budget < 0) continue;
      const auto optimum = remat::testing::exhaustive_optimum(p, budget);
      for (const auto& [name, s] : all_solvers) {
        INFO(name << ", round " << round << ", budget " << budget);
        const auto r = remat::solve(p, budget, s, long_enough);
        check_numbers(p, r);
        if (!optimum) {
          REQUIRE_FALSE(r.found());
          continue;
        }
        REQUIRE(r.status != status::infeasible);
        REQUIRE(r.budget_bound <= budget);
        REQUIRE(r.bound <= *optimum * (1 + 1e-9));
        if (r.found()) REQUIRE(r.seconds >= *optimum * (1 - 1e-9));
        if (r.status == status::optimal) REQUIRE(r.seconds <= *optimum * (1 + 2 * long_enough.gap));
      }
    }
  }
}

TEST_CASE("every solver: one object in two threads, on different problems, answers as it does alone") {
  std::mt19937_64 g(13);
  const auto first = remat::testing::random_training_chain(g, 5), second = remat::testing::random_training_chain(g, 3);
  const auto budget_of = [](const problem& p) { return (store_all_peak(p) + remat::bounds_without_search(p).budget) / 2; };
  for (const auto& [name, s] : solvers()) {
    INFO(name);
    const auto solver = s;  // structured bindings cannot be captured
    const auto alone = remat::solve(first, budget_of(first), solver, long_enough);
    const auto other_alone = remat::solve(second, budget_of(second), solver, long_enough);
    remat::result other;
    std::thread thread([&] { other = remat::solve(second, budget_of(second), solver, long_enough); });
    const auto again = remat::solve(first, budget_of(first), solver, long_enough);
    thread.join();
    CHECK(again.schedule == alone.schedule);
    CHECK(again.bound == alone.bound);
    CHECK(other.schedule == other_alone.schedule);
  }
}

TEST_CASE("every solver but those of MILPs finds a schedule where the system has no thread left") {
  const auto in_threads = [](const std::string& name) {  // as GLPK and HiGHS are asked to work in
    return name == "hiremate" || name == "moments" || name == "poet" || name.starts_with("checkmate");
  };
  const auto p = remat::testing::transformer_training_graph(3);
  for (const auto& [name, s] : solvers()) {
    INFO(name);
    const auto solver = s;  // structured bindings cannot be captured
    for (const auto& each : {p, p.with_copies(remat::copy_rates{1e9, 1e9, 0})}) {
      const auto budget = (store_all_peak(each) + remat::bounds_without_search(each).budget) / 2;
      const auto found = [&] { return remat::solve(each, budget, solver, {.seconds = 1, .threads = 3, .seed = 3}).found(); };
      const bool known = found();
      const auto end = without_threads(found);
      if (end == child::had_threads) {
        WARN("this user may have threads without end");
        return;
      }
      CHECK(end != child::threw);
      if (known && !in_threads(name)) CHECK(end == child::did);
    }
  }
}

TEST_CASE("every solver: curves are monotone, and at least as good as single searches") {
  std::mt19937_64 g(17);
  const auto p = remat::testing::random_training_chain(g, 2);
  const auto all = store_all_peak(p), least = remat::bounds_without_search(p).budget;
  std::vector<bytes_t> budgets;
  for (int i = 0; i <= 2; ++i) budgets.push_back(all - (all - least) * i / 2);
  for (const auto& [name, s] : solvers()) {
    INFO(name);
    const auto curve = remat::pareto_curve(p, budgets, s, long_enough);
    for (std::size_t i = 0; i < curve.size(); ++i) {
      check_numbers(p, curve[i]);
      const auto alone = remat::solve(p, curve[i].budget, s, long_enough);
      if (alone.found()) {
        REQUIRE(curve[i].found());
        CHECK(curve[i].seconds <= alone.seconds * (1 + 2 * long_enough.gap));
      }
      if (i > 0 && curve[i].found()) CHECK(curve[i - 1].seconds <= curve[i].seconds);
    }
  }
}

TEST_CASE("every solver without time, or stopped at once, ends") {
  const auto p = remat::testing::transformer_training_graph(4);
  const auto budget = p.held_bytes() + (store_all_peak(p) - p.held_bytes()) / 2;
  for (const auto& [name, s] : solvers()) {
    INFO(name);
    check_numbers(p, remat::solve(p, budget, s, {.seconds = 0}));
    check_numbers(p, remat::solve(p, budget, s, {.seconds = 20}, [](const remat::progress&) { return remat::control::stop; }));
  }
}

TEST_CASE("every solver stops soon if it has no time for a large graph, or refuses the graph") {
  const auto large = remat::testing::transformer_training_graph(700);
  const auto all = store_all_peak(large);
  const auto budget = large.held_bytes() + (all - large.held_bytes()) / 2;
  CHECK(large.operations().size() > 10'000);
  for (const auto& p : {large, large.with_copies(remat::copy_rates{1, 1, 0})})
    for (const auto& [name, s] : solvers()) {
      INFO(name << (p.copies() ? " with copies" : ""));
      const auto begin = std::clock();
      try {
        remat::solve(p, budget, s, {.seconds = 0});
      } catch (const remat::too_large&) {
      }
      CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 5);  // without a limit, most need minutes
    }
}
