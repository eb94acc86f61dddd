// SPDX-License-Identifier: Apache-2.0
// The staged ILP with a backend that gives false answers. The tests of the adapters use real backends.
#include <catch2/catch.hpp>

#include <string>

#include <remat/core/solve.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;

namespace {

/// Returns a given answer.
struct scripted_backend {
  milp::solution answer = {};
  std::string name() const { return "scripted"; }
  milp::solution solve(const milp::model&, const milp::options& o) const {
    auto s = answer;
    if (o.start) s.x = *o.start;
    return s;
  }
};

static_assert(solver<checkmate<scripted_backend>>);

}  // namespace

TEST_CASE("checkmate finds nothing with false answers of a backend, and claims no proof") {
  const auto p = testing::unit_training_chain(4);
  for (auto claim : {milp::status::failed, milp::status::optimal, milp::status::unbounded, milp::status::limit}) {
    const auto r = solve(p, 4, checkmate<scripted_backend>({}, scripted_backend{{claim, Eigen::Vector2d(1, 1), 0, 0}}));
    CHECK(r.status == (claim == milp::status::limit ? status::time_limit : status::not_found));
    CHECK(r.reason.empty() == (claim == milp::status::limit));
    CHECK(r.scope_bound < 12);
  }
}
