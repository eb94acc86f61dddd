// SPDX-License-Identifier: Apache-2.0
// MILP models, and the contract of backends.
#include <catch2/catch.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <remat/milp/backend.hpp>

using namespace remat;

namespace {

/// Returns a given answer.
struct scripted {
  milp::solution answer = {};
  std::string name() const { return "scripted"; }
  milp::solution solve(const milp::model&, const milp::options& o) const {
    auto s = answer;
    if (o.start) s.x = *o.start;
    return s;
  }
};
static_assert(milp::backend<scripted>);

/// Returns a given answer, and ignores the start.
struct stubborn {
  milp::solution answer = {};
  std::string name() const { return "stubborn"; }
  milp::solution solve(const milp::model&, const milp::options&) const { return answer; }
};
static_assert(!milp::backend<int>);

/// max 3 x + y, 2 x + y <= 5, x in {0, 1}, 0 <= y <= 4.
milp::model small() {
  milp::builder b;
  auto x = b.binary(-3), y = b.column(-1, 0, 4);
  b.at_most(2.0 * x + y, 5);
  return b.build(1);
}

Eigen::VectorXd point(double x, double y) { return Eigen::Vector2d(x, y); }

}  // namespace

TEST_CASE("milp: the builder sums terms and moves constants to the bounds") {
  milp::builder b;
  auto x = b.column(1, -1, 1), y = b.binary(2);
  b.row(0, x + y - 2.0 * (x - milp::expression{{}, 3}), 10);
  b.equal(x - x, 0);
  CHECK(b.upper_bound(x - 2.0 * y) == 1);
  CHECK(b.upper_bound(y - 2.0 * x + milp::expression{{}, 3}) == 6);
  const auto m = b.build();
  CHECK(m.columns() == 2);
  CHECK(m.rows() == 2);
  CHECK(m.matrix.coeff(0, 0) == -1);
  CHECK(m.matrix.coeff(0, 1) == 1);
  CHECK(m.matrix.nonZeros() == 2);
  CHECK(m.row_lower[0] == -6);
  CHECK(m.row_upper[0] == 4);
  CHECK(m.integer == std::vector<bool>{false, true});
}

TEST_CASE("milp: the error for an invalid model names the place") {
  auto m = small();
  m.cost[1] = std::nan("");
  CHECK_THROWS_WITH(m.validate(), Catch::Contains("cost[1]"));
  m = small();
  m.lower[0] = 2;
  CHECK_THROWS_WITH(m.validate(), Catch::Contains("column 0"));
  m = small();
  m.row_upper[0] = -milp::infinity;
  CHECK_THROWS_WITH(m.validate(), Catch::Contains("row 0"));
  m = small();
  m.matrix.coeffRef(0, 0) = milp::infinity;
  CHECK_THROWS_AS(m.validate(), bad_problem);
  m = small();
  m.upper.resize(1);
  CHECK_THROWS_AS(m.validate(), bad_problem);
}

TEST_CASE("milp: a model beyond the numeric range of backends is not solved, and proves nothing") {
  const scripted refuting{{.status = milp::status::infeasible, .x = {}, .bound = milp::infinity}};
  CHECK(milp::solve(refuting, small()).status == milp::status::infeasible);
  std::vector<milp::model> beyond(5, small());
  beyond[0].matrix.coeffRef(0, 0) = 1e16;
  beyond[1].matrix.coeffRef(0, 0) = -1e-16;
  beyond[2].cost[0] = -1e20;
  beyond[3].upper[1] = 1e300;
  beyond[4].row_upper[0] = 1e20;
  for (const auto& m : beyond) {
    const auto s = milp::solve(refuting, m);
    CHECK(s.status == milp::status::failed);
    CHECK(s.bound == -milp::infinity);
  }
  milp::options started;
  started.start = point(1, 3);
  CHECK(milp::solve(refuting, beyond[2], started).status == milp::status::feasible);
}

TEST_CASE("milp: units avoid overflow and the loss of small costs") {
  const double least = std::numeric_limits<double>::denorm_min();
  CHECK(milp::unit_of(5, 1000) == 0.005);
  CHECK(milp::unit_of(0, 1000) == 1);
  CHECK(std::isfinite(1e306 * least / milp::unit_of(least, 1000)));
  CHECK(milp::in_units(3, 0.5) == 6);
  CHECK(milp::in_units(1e-10, 1) == 0);
  CHECK(milp::in_units(1e300, 1e-300) == 1e12);
}

TEST_CASE("milp: violation finds bounds, integrality and rows") {
  const auto m = small();
  CHECK(milp::violation(m, point(1, 3)).empty());
  CHECK_THAT(milp::violation(m, point(1, 3.1)), Catch::Contains("row 0"));
  CHECK_THAT(milp::violation(m, point(0.5, 1)), Catch::Contains("not integer"));
  CHECK_THAT(milp::violation(m, point(0, 4.5)), Catch::Contains("column 1"));
  CHECK_THAT(milp::violation(m, point(0, std::nan(""))), Catch::Contains("column 1"));
  CHECK_FALSE(milp::violation(m, Eigen::VectorXd(3)).empty());
}

TEST_CASE("milp: the answer of a backend is checked") {
  const auto m = small();
  scripted b{{milp::status::optimal, point(1 - 1e-7, 3), 77, -5}};
  auto s = milp::solve(b, m);
  CHECK(s.status == milp::status::optimal);
  CHECK(s.x[0] == 1);
  CHECK(s.objective == -5);
  b.answer.x = point(1, 4);
  CHECK(milp::solve(b, m).status == milp::status::failed);
  b.answer.x = point(0, 4);
  b.answer.bound = 0;  // above the objective of its own answer
  CHECK(milp::solve(b, m).bound == -3);
  CHECK(milp::solve(b, m, {.cutoff = -3}).status == milp::status::cutoff);
  CHECK(milp::solve(b, m, {.start = point(1, 3)}).objective == -5);
  CHECK(milp::solve(b, m, {.start = point(1, 5)}).objective == -3);  // an infeasible start is not passed on
  b.answer = {milp::status::optimal, point(0, 4), -3, -7};           // a bound that does not prove optimality
  CHECK(milp::solve(b, m).status == milp::status::feasible);
  b.answer.bound = std::nan("");
  CHECK(milp::solve(b, m).bound == -milp::infinity);
  b.answer = {milp::status::infeasible, {}, 3, 4};
  CHECK(milp::solve(b, m).bound == milp::infinity);
}

TEST_CASE("milp: a feasible start overrides answers that contradict it") {
  const auto m = small();
  for (auto claim : {milp::status::infeasible, milp::status::limit, milp::status::cutoff, milp::status::failed}) {
    const auto s = milp::solve(stubborn{{claim, {}, 0, 3}}, m, {.start = point(1, 2)});
    CHECK(s.status == milp::status::feasible);
    CHECK(s.objective == -4);
    CHECK(s.bound <= -4);
  }
  const auto worse = milp::solve(stubborn{{milp::status::optimal, point(0, 1), 0, 0}}, m, {.start = point(1, 2)});
  CHECK(worse.objective == -4);
  CHECK(milp::solve(stubborn{{milp::status::cutoff, {}, 0, 0}}, m, {.cutoff = -4, .start = point(1, 2)}).status ==
        milp::status::cutoff);
}

TEST_CASE("milp: options out of range are named") {
  const auto m = small();
  const scripted b;
  CHECK_THROWS_WITH(milp::solve(b, m, {.seconds = -1}), Catch::Contains("seconds"));
  CHECK_THROWS_WITH(milp::solve(b, m, {.gap = 1}), Catch::Contains("gap"));
  CHECK_THROWS_WITH(milp::solve(b, m, {.cutoff = std::nan("")}), Catch::Contains("cutoff"));
  CHECK_THROWS_WITH(milp::solve(b, m, {.threads = 0}), Catch::Contains("threads"));
}

TEST_CASE("milp: the builder sums duplicate entries, omits zeros, and keeps the order of rows") {
  std::mt19937_64 g(7);
  std::uniform_int_distribution<int> pick(0, 5), factor(-2, 2);
  for (int round = 0; round < 2000; ++round) {
    remat::milp::builder b;
    std::vector<remat::milp::expression> x;
    for (int j = 0; j < 6; ++j) x.push_back(b.column(j, 0, 1));
    Eigen::MatrixXd dense = Eigen::MatrixXd::Zero(4, 6);
    for (int i = 0; i < 4; ++i) {
      remat::milp::expression e;
      for (int k = pick(g); k > 0; --k) {
        const int j = pick(g), f = factor(g);
        e.terms.emplace_back(j, f);
        dense(i, j) += f;
      }
      b.at_most(e, 1);
    }
    const auto m = b.build();
    REQUIRE(Eigen::MatrixXd(m.matrix) == dense);
    CHECK(m.matrix.nonZeros() == (dense.array() != 0).count());
    for (int j = 0; j < 6; ++j) {
      int last = -1;
      for (Eigen::SparseMatrix<double>::InnerIterator a(m.matrix, j); a; ++a) {
        CHECK(a.row() > last);
        last = static_cast<int>(a.row());
      }
    }
  }
}
