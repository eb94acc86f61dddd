// SPDX-License-Identifier: Apache-2.0
// The strong form of the staged ILP.
#include <catch2/catch.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/staged/strong_form.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;

TEST_CASE("staged form: the store-all schedule is a solution if it fits") {
  const auto p = testing::transformer_training_graph(1);
  const auto s = with_drops(p, needed_operations(p));
  const auto e = evaluate(p, s);
  for (const auto& rules :
       {staged::staging{}, staged::staging{true, true, true, {}, 0}, staged::staging{false, true, false, {}, 0}}) {
    const staged::strong_form form(p, e.peak, rules, 5);
    const auto x = form.encode(s);
    REQUIRE(x);
    CHECK(milp::violation(form.model(), *x, 1e-9).empty());
    CHECK(form.model().objective(*x) * form.unit() == Approx(e.seconds));
    CHECK(form.extract(*x) == s);
    const staged::strong_form tighter(p, e.peak - 1, rules, 5);
    const auto y = tighter.encode(s);
    REQUIRE(y);
    CHECK_FALSE(milp::violation(tighter.model(), *y, 1e-9).empty());
  }
}
