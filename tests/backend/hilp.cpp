// SPDX-License-Identifier: Apache-2.0
// The hierarchical ILP against exhaustive search, with any MILP backend.
#include "checks.hpp"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/join_by_hilp.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/hiremate.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/structure/partition.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../rounds.hpp"
#include "../staged_oracle.hpp"

namespace remat::testing {

namespace {

using exact = checkmate<milp::any_backend>;

bytes_t between(const problem& p, double share) {
  const auto least = bounds_without_search(p).budget, all = evaluate(p, store_all_schedule(p)).peak;
  return least + static_cast<bytes_t>(share * static_cast<double>(all - least));
}

/// Answer of the ILP for one level: the objective, and the time of the schedule, which leaves out operations that nothing reads.
struct joined {
  double objective, seconds;
};
std::optional<joined> hilp_optimum(const milp::any_backend& library, const problem& p, bytes_t budget,
                                   const structure::partition& parts, const std::vector<hierarchy::part_options>& options) {
  const hierarchy::part_index index(p, parts);
  incumbent best(p, budget);
  hierarchy::level l(p, index, parts, options, best, true);
  hierarchy::hilp_model form(l, 100);
  const auto s = milp::solve(library, form.build(), {.gap = 0});
  if (!s.found()) return std::nullopt;
  REQUIRE(l.offer(form.order(s.x)));
  REQUIRE(best.seconds() <= s.objective * form.unit() * (1 + 1e-9));
  return joined{s.objective * form.unit(), best.seconds()};
}

}  // namespace

void check_hilp_of_operations(const milp::any_backend& library, std::uint64_t seed, int rounds) {
  std::mt19937_64 g(seed);
  int recomputing = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto p = random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 3, 8)),
                                      .sources = static_cast<std::size_t>(uniform(g, 1, 2)),
                                      .held = round % 2 ? 100 : 50,
                                      .once = round % 3 ? 0 : 20,
                                      .density = static_cast<int>(uniform(g, 20, 70))});
    for (const double share : {0.0, 0.3, 0.7}) {
      const auto budget = between(p, share);
      INFO("seed " << seed << ", round " << round << ", budget " << budget);
      const auto staged = staged_optimum(p, budget);
      const auto found = hilp_optimum(library, p, budget, {}, {});
      REQUIRE(found.has_value() == staged.has_value());
      if (!staged) continue;
      REQUIRE(found->objective == Approx(*staged).epsilon(1e-9));
      recomputing += *staged > bounds_without_search(p).seconds + 1e-9;
    }
  }
  CHECK(recomputing > rounds / 10);
}

void check_hilp_of_parts(const milp::any_backend& library, std::uint64_t seed, int rounds) {
  std::mt19937_64 g(seed);
  int found_any = 0, faster = 0, slower = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto p = round % 2 ? random_training_chain(g, static_cast<std::size_t>(uniform(g, 2, 4)))
                             : random_problem(g, {.operations = 8, .once = round % 3 ? 0 : 15});
    const auto parts = structure::find_partition(p, {.size = static_cast<std::size_t>(uniform(g, 2, 4))});
    const hierarchy::part_index index(p, parts);
    std::vector<hierarchy::part_options> options;
    for (const auto& piece : parts) {
      const hierarchy::part_problem b(p, index, piece);
      hierarchy::part_options list;
      const auto listed = needed_operations(b.bare());
      list.list = {b.measure(listed)};
      const auto peak = measure_order(b.bare(), listed).peak;
      for (const double f : {0.9, 0.6, 0.3}) {
        const auto saved = static_cast<bytes_t>(f * static_cast<double>(list.list[0].saved));
        const auto limited = b.with_boundary(std::max<bytes_t>(0, peak - b.crossing() - saved));
        if (const auto r = solve(limited, peak, exact({}, library)); r.found())
          list.list.push_back(b.measure(compute_order(r.schedule)));
      }
      list.checkpoint = b.checkpoint();
      options.push_back(std::move(list));
    }
    for (const double share : {0.0, 0.3, 0.6}) {
      const auto budget = between(p, share);
      INFO("seed " << seed << ", round " << round << ", budget " << budget);
      const auto found = hilp_optimum(library, p, budget, parts, options);
      const auto optimum = exhaustive_optimum(p, budget);
      double best = std::numeric_limits<double>::infinity();
      std::vector<std::size_t> which(parts.size(), 0);
      for (bool more = true; more;) {
        std::vector<const hierarchy::part_option*> chosen;
        for (std::size_t i = 0; i < parts.size(); ++i) chosen.push_back(&options[i].list[which[i]]);
        if (const hierarchy::condensed_problem c(p, index, chosen); c.possible() && c.condensed().values().size() <= 14)
          best = std::min(best, staged_optimum(c.condensed(), budget).value_or(best));
        more = false;
        for (std::size_t i = 0; i < parts.size() && !more; ++i) {
          which[i] = (which[i] + 1) % options[i].list.size();
          more = which[i] > 0;
        }
      }
      if (std::isfinite(best)) {
        REQUIRE(found);
        REQUIRE(found->objective <= best * (1 + 1e-9));
        faster += found->objective < best * (1 - 1e-9);
      }
      if (!found) continue;
      ++found_any;
      REQUIRE(optimum);
      REQUIRE(found->seconds >= *optimum * (1 - 1e-9));
      slower += found->seconds > *optimum * (1 + 1e-9);
    }
  }
  CHECK(found_any > rounds / 2);
  CHECK(faster > 0);  // schedules switch between options of a part, and forwards save nothing
  CHECK(slower > 0);  // the parts cost something
}

void check_hiremate(const milp::any_backend& library) {
  using method = hiremate<milp::any_backend, store_all>;
  const method tiny({.cut = {.size = 3, .most = 6}, .leaf_operations = 4, .saved = 2, .peaks = 2}, library, store_all());
  for (const auto& failure : check_solver(tiny, {.rounds = shortened(15)})) FAIL_CHECK(failure);

  // A single part, which the inner solver solves: the time is the optimum.
  std::mt19937_64 g(5);
  for (int round = 0; round < 10; ++round) {
    const auto p = random_problem(g, {.operations = 7});
    const auto budget = between(p, 0.4);
    hiremate<milp::any_backend> one({.cut = {.most = 1}}, library, exact({}, library));
    const auto r = solve(p, budget, one, {.gap = 0}), whole = solve(p, budget, exact({}, library), {.gap = 0});
    REQUIRE(r.found() == whole.found());
    if (r.found()) REQUIRE(r.seconds == Approx(whole.seconds));
  }

  // A network with larger parts, with an exact solver for the parts.
  const auto p = transformer_training_graph(3);
  const auto budget = between(p, 0.6);
  const auto r = solve(
      p, budget, hiremate<milp::any_backend>({.cut = {.size = 20, .most = 8}}, library, exact(exact::options::fast(), library)),
      {.seconds = 600, .gap = 0.01});
  CHECK(r.found());
  CHECK_THROWS_AS(method({.choices = 0}, library, store_all()), bad_option);
  CHECK_THROWS_AS(method({.saved = 0}, library, store_all()), bad_option);
}

}  // namespace remat::testing
