// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <remat/io/allocation_csv.hpp>
#include <remat/layout/layout.hpp>
#include <string>

#include "exhaustive.hpp"

using namespace remat;

TEST_CASE("published hard instances fit into their capacity") {
  constexpr bytes_t capacity = 1 << 20;
  for (char name : std::string("ABCDFHJ")) {
    CAPTURE(name);
    const auto t = read_allocations(std::string(REMAT_SOURCE_DIR) + "/bench/layout/" + name + ".csv");
    const auto first = lay_out(t.list, {.alignment = 1, .tries = 0});
    layouts::check(t.list, first, 1);
    CHECK(first.arena > capacity);  // the heuristics alone fail
    const monitor patient({.seconds = 600});
    const auto r = fit_within(t.list, capacity, {.alignment = 1, .work = layout_options::unlimited}, patient);
    REQUIRE(r.status == fit_status::fits);
    layouts::check(t.list, r.best, 1);
    CHECK(r.best.arena <= capacity);
  }
}
