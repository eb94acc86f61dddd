// SPDX-License-Identifier: Apache-2.0
// Invalid problems are refused, and the message names the culprit.
#include <catch2/catch.hpp>

#include <cmath>
#include <ctime>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <remat/core/problem.hpp>

using remat::bad_problem;
using remat::problem;

namespace {

/// x (held) -> a -> b, and c reads both a and b.
struct parts {
  std::vector<remat::value> values = {{"x", 10, true}, {"a", 20}, {"b", 30}, {"c", 40}};
  std::vector<remat::operation> operations = {{.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1},
                                              {.name = "b", .inputs = {1}, .outputs = {2}, .seconds = 2, .workspace = 5},
                                              {.name = "c", .inputs = {2, 1, 2}, .outputs = {3}, .seconds = 4}};
  std::vector<remat::value_id> targets = {3, 3};
  std::optional<remat::copy_rates> copies = std::nullopt;

  problem build() const { return problem("small", values, operations, targets, copies); }
};

std::string refusal(const parts& x) {
  try {
    x.build();
  } catch (const bad_problem& why) {
    return why.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("a valid problem and its derived quantities") {
  const auto p = parts{}.build();
  CHECK(p.name() == "small");
  CHECK(p.operations()[2].inputs == std::vector<remat::value_id>{1, 2});
  CHECK(p.targets() == std::vector<remat::value_id>{3});
  CHECK(p.producer(2) == 1);
  CHECK(p.producer(0) == remat::none);
  CHECK(p.is_source(0));
  CHECK_FALSE(p.is_source(1));
  CHECK(std::vector<remat::operation_id>(p.consumers(1).begin(), p.consumers(1).end()) == std::vector<remat::operation_id>{1, 2});
  CHECK(p.consumers(3).empty());
  CHECK(p.held_bytes() == 10);
  CHECK(p.source_bytes() == 10);
  CHECK(p.total_seconds() == 7);
  CHECK(problem().values().empty());
}

TEST_CASE("problems may have no operations, only sources, or operations without outputs") {
  const problem nothing("nothing", {}, {}, {});
  CHECK(nothing.source_bytes() == 0);
  CHECK(nothing.total_seconds() == 0);
  const problem sources("sources", {{"held", 8, true}, {"other", 4}}, {}, {1, 0});
  CHECK(sources.source_bytes() == 12);
  CHECK(sources.held_bytes() == 8);
  CHECK(sources.targets() == std::vector<remat::value_id>{0, 1});
  const problem useless("useless", {{"a", 8}}, {{.name = "reads", .inputs = {0}, .outputs = {}, .seconds = 3}}, {});
  CHECK(useless.consumers(0).size() == 1);
  parts x;
  x.values.clear();
  CHECK_THAT(refusal(x), Catch::Contains("operations[0].outputs") && Catch::Contains("no value 1"));
}

TEST_CASE("the error for a cost out of range names the member") {
  const double infinity = std::numeric_limits<double>::infinity();
  for (double seconds : {-1.0, std::nan(""), infinity, -infinity}) {
    parts x;
    x.operations[1].seconds = seconds;
    CHECK_THAT(refusal(x), Catch::Contains("operations[1].seconds"));
  }
  parts x;
  x.values[2].bytes = -1;
  CHECK_THAT(refusal(x), Catch::Contains("values[2].bytes") && Catch::Contains("-1"));
  x = {};
  x.operations[0].workspace = -7;
  CHECK_THAT(refusal(x), Catch::Contains("operations[0].workspace") && Catch::Contains("-7"));
  x = {};
  x.operations[0].seconds = x.operations[1].seconds = std::numeric_limits<double>::max();
  CHECK_THAT(refusal(x), Catch::StartsWith("operations[1].seconds makes the sum of seconds exceed"));
}

TEST_CASE("sizes are limited one by one and in total") {
  parts x;
  x.values[3].bytes = remat::max_bytes - 60;
  CHECK(refusal(x) == "accepted");
  x.values[3].bytes += 1;
  CHECK_THAT(refusal(x), Catch::Contains("values[3].bytes") && Catch::Contains("2^53"));
  x.values[3].bytes = std::numeric_limits<remat::bytes_t>::max();
  CHECK_THAT(refusal(x), Catch::Contains("values[3].bytes"));
  x = {};
  x.operations[2].workspace = remat::max_bytes + 1;
  CHECK_THAT(refusal(x), Catch::Contains("operations[2].workspace"));
}

TEST_CASE("errors for bad indices, second producers and wrong orders name the operation and the value") {
  parts x;
  x.operations[1].inputs = {9};
  CHECK_THAT(refusal(x), Catch::Contains("operations[1].inputs") && Catch::Contains("no value 9"));
  x = {};
  x.operations[2].outputs = {4};
  CHECK_THAT(refusal(x), Catch::Contains("operations[2].outputs") && Catch::Contains("no value 4"));
  x = {};
  x.targets = {remat::none};
  CHECK_THAT(refusal(x), Catch::Contains("targets"));
  x = {};
  x.operations[2].outputs = {1};
  CHECK_THAT(refusal(x),
             Catch::Contains("operations[2].outputs") && Catch::Contains("value 1") && Catch::Contains("operation 0"));
  x = {};
  x.operations[2].outputs = {3, 3};
  CHECK_THAT(refusal(x), Catch::Contains("operations[2].outputs"));
  x = {};
  x.operations[0].inputs = {2};
  CHECK_THAT(refusal(x), Catch::Contains("operations[0].inputs") && Catch::Contains("topological"));
  x = {};
  x.operations[1].inputs = {2};
  CHECK_THAT(refusal(x), Catch::Contains("operations[1].inputs"));
  x = {};
  x.values[1].held = true;
  CHECK_THAT(refusal(x), Catch::Contains("values[1].held"));
}

TEST_CASE("backward_start must be an operation") {
  const parts x;
  const auto make = [&](remat::operation_id first) {
    return remat::problem("", x.values, x.operations, x.targets, x.copies, first);
  };
  CHECK(make(2).backward_start() == std::optional<remat::operation_id>(2));
  CHECK_FALSE(remat::problem("", x.values, x.operations, x.targets).backward_start());
  CHECK_THROWS_WITH(make(3), "backward_start: no operation 3");
}

TEST_CASE("with_costs changes costs and nothing else") {
  const parts x;
  const remat::problem p("p", x.values, x.operations, x.targets, remat::copy_rates{1, 2, 3}, 1);
  const std::vector<double> seconds = {5, 6, 7};
  const auto q = p.with_costs(seconds);
  CHECK(q.total_seconds() == 18);
  CHECK((q.name() == "p" && q.targets() == p.targets() && q.copies() && q.backward_start() == p.backward_start()));
  for (std::size_t o = 0; o < 3; ++o) {
    CHECK((q.operations()[o].seconds == seconds[o] && q.operations()[o].workspace == p.operations()[o].workspace));
    CHECK((q.operations()[o].inputs == p.operations()[o].inputs && q.operations()[o].outputs == p.operations()[o].outputs));
  }
  CHECK(p.with_costs(seconds, std::vector<remat::bytes_t>{1, 2, 9}).operations()[2].workspace == 9);
  CHECK_THROWS_AS(p.with_costs(std::vector<double>{1, 2}), remat::bad_option);
  CHECK_THROWS_AS(p.with_costs(seconds, std::vector<remat::bytes_t>{1}), remat::bad_option);
  CHECK_THROWS_WITH(p.with_costs(std::vector<double>{1, 2, -3}), Catch::StartsWith("operations[2].seconds"));
}

TEST_CASE("the error for a bad rate of copies names the member") {
  const double infinity = std::numeric_limits<double>::infinity();
  parts x;
  for (double bad : {0.0, -1.0, infinity, std::nan("")}) {
    x.copies = {.to_host = bad, .to_device = 1, .latency = 0};
    CHECK_THAT(refusal(x), Catch::Contains("offload.to_host"));
    x.copies = {.to_host = 1, .to_device = bad, .latency = 0};
    CHECK_THAT(refusal(x), Catch::Contains("offload.to_device"));
  }
  for (double bad : {-1.0, infinity, std::nan("")}) {
    x.copies = {.to_host = 1, .to_device = 1, .latency = bad};
    CHECK_THAT(refusal(x), Catch::Contains("offload.latency"));
  }
}

TEST_CASE("an operation may overwrite many values, each output in the place of one input") {
  constexpr std::size_t count = 400'000;
  std::vector<remat::value> values(2 * count, {"v", 1});
  remat::operation update{.name = "update", .inputs = {}, .outputs = {}};
  for (std::size_t i = 0; i < count; ++i) {
    update.inputs.push_back(i);
    update.outputs.push_back(count + i);
    update.overwrites.push_back({count + i, i});
  }
  const auto begin = std::clock();
  CHECK(problem("update", values, {update}, {}).new_bytes(0) == 0);
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 20);  // pairwise comparisons take minutes
}
