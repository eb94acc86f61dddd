// SPDX-License-Identifier: Apache-2.0
// `any_backend` passes on the models that the MILP library inside would get.
#include <catch2/catch.hpp>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/milp/any_backend.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/testing/generators.hpp>

using remat::milp::any_backend;

static_assert(remat::milp::backend<any_backend>);
static_assert(!std::is_constructible_v<any_backend, int>);

namespace {

using shapes = std::vector<std::pair<long, long>>;  // rows and columns

/// Solves nothing; records the sizes of the models.
struct recorder {
  std::shared_ptr<shapes> seen = std::make_shared<shapes>();
  std::string name() const { return "recorder"; }
  remat::milp::solution solve(const remat::milp::model& m, const remat::milp::options&) const {
    seen->emplace_back(m.rows(), m.columns());
    return {.status = remat::milp::status::limit, .x = {}};
  }
};

struct recorder_of_short_rows : recorder {
  static constexpr std::size_t longest_row = 3;
};

template <class B>
shapes shown_to(const B& b, const shapes& seen) {
  const auto p = remat::testing::unit_training_chain(6);
  remat::solve(p, 6, remat::checkmate<B>({}, b));
  REQUIRE_FALSE(seen.empty());
  return seen;
}

}  // namespace

TEST_CASE("any_backend knows the longest row of the backend inside") {
  CHECK(remat::milp::longest_row(any_backend(recorder_of_short_rows())) == 3);
  CHECK(remat::milp::longest_row(any_backend(recorder())) == remat::milp::longest_row(recorder()));
  const any_backend copy = recorder_of_short_rows();
  CHECK(remat::milp::longest_row(any_backend(copy)) == 3);
  CHECK(copy.name() == "recorder");
}

TEST_CASE("any_backend gets the models made for the backend inside") {
  const recorder_of_short_rows a, b;
  const recorder c;
  const auto direct = shown_to(a, *a.seen);
  CHECK(shown_to(any_backend(b), *b.seen) == direct);
  CHECK(shown_to(any_backend(c), *c.seen) != direct);  // the limit on rows makes a difference in this case
}
