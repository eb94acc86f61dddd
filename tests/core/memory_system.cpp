// SPDX-License-Identifier: Apache-2.0
// Tiers, links, places and the next step: inconsistent problems are refused, and the message names the culprit.
#include <catch2/catch.hpp>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>

#include "../tiers.hpp"

using remat::any_tier;
using remat::problem;
using remat::testing::device;
using remat::testing::disk;
using remat::testing::host;
using remat::testing::step_parts;

namespace {

std::string step_refusal(const std::function<void(step_parts&)>& change) {
  step_parts x;
  change(x);
  try {
    x.build();
  } catch (const remat::bad_problem& why) {
    return why.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("a problem tells which of its features are beyond version 1 of the format") {
  CHECK(problem().plain());
  CHECK(problem().tiers().size() == 2);
  CHECK(problem().host() == host);
  step_parts x;
  x.values = {{"w", 10}, {"g", 10}, {"w'", 10}};
  x.operations[1] = {.name = "adamw", .inputs = {0, 1}, .outputs = {2}, .seconds = 3};
  x.next = {};
  const auto plain = x.build();
  CHECK(plain.plain());
  CHECK(plain.beyond_plain().empty());
  REQUIRE(plain.links().size() == 2);
  CHECK(plain.links()[1].stream == "down");
  CHECK(plain.link(device, host) == plain.links().data());
  CHECK(plain.link(host, disk) == nullptr);
  CHECK(plain.members().system.links.empty());
  x.system.tiers = {{"device"}, {"host"}};
  CHECK(x.build().plain());

  using change = std::pair<std::string, std::function<void(step_parts&)>>;
  for (const auto& [member, apply] : std::vector<change>{{"tiers",
                                                          [](auto& y) {
                                                            y.system.tiers = {{"device"}, {"host", 100}};
                                                          }},
                                                         {"tiers",
                                                          [](auto& y) {
                                                            y.system.tiers = {{"gpu"}, {"host"}};
                                                          }},
                                                         {"links",
                                                          [](auto& y) {
                                                            y.copies.reset(), y.system.links = {{device, host, 1}};
                                                          }},
                                                         {"values[0].starts", [](auto& y) { y.values[0].starts = any_tier; }},
                                                         {"values[2].ends", [](auto& y) { y.values[2].ends = host; }},
                                                         {"operations[0].on", [](auto& y) { y.operations[0].on = host; }},
                                                         {"operations[1].overwrites",
                                                          [](auto& y) {
                                                            y.operations[1].overwrites = {{2, 0}};
                                                          }},
                                                         {"next", [](auto& y) {
                                                            y.next = {{2, 0}};
                                                          }}}) {
    auto y = x;
    apply(y);
    CHECK(y.build().beyond_plain() == member);
  }
}

TEST_CASE("with_costs keeps tiers, links and the next step") {
  const step_parts x;
  const std::vector<double> seconds = {1, 2};
  const auto p = x.build().with_costs(seconds);
  CHECK((p.next() == x.next && p.links().size() == 2 && p.total_seconds() == 3));
}

TEST_CASE("with_copies changes the rates of copies and nothing else") {
  step_parts x;
  x.system = {{{"device"}, {"host", 100}, {"disk"}}, {{host, disk, 3}}};
  const auto p = x.build();
  const auto slower = p.with_copies(remat::copy_rates{5, 6, 7}), without = p.with_copies({});
  CHECK(slower.copies() == remat::copy_rates{5, 6, 7});
  REQUIRE(slower.links().size() == 3);
  CHECK((slower.link(host, device)->rate == 6 && slower.link(host, disk)->rate == 3));
  CHECK_FALSE(without.copies());
  REQUIRE(without.links().size() == 1);
  CHECK(without.link(host, disk)->rate == 3);
  for (const auto* q : {&slower, &without})
    CHECK((q->name() == p.name() && q->tiers()[host].budget == 100 && q->next() == x.next && q->targets() == p.targets() &&
           q->values()[0].starts == host && q->operations()[1].on == host));
  CHECK(slower.with_copies(p.copies()).link(device, host)->rate == 10);
  CHECK_THROWS_WITH(p.with_copies(remat::copy_rates{0, 1}), Catch::StartsWith("offload.to_host"));
}

TEST_CASE("inconsistent tiers and links are refused") {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto system = [&](remat::memory_system s) {
    return step_refusal([&](auto& x) { x.copies.reset(), x.system = std::move(s); });
  };
  const std::vector<remat::tier> two = {{"device"}, {"host"}};
  CHECK(system({two, {{device, host, 1}}}) == "accepted");
  CHECK(system({{{"device"}, {""}}, {}}) == "tiers[1].name: \"\" is no name of a tier");
  CHECK(system({{{"device"}, {"any"}}, {}}) == "tiers[1].name: \"any\" is no name of a tier");
  CHECK(system({{{"device"}, {"host"}, {"host"}}, {}}) == "tiers[2].name: tier 1 is called \"host\" already");
  CHECK(system({{{"device", 8}, {"host"}}, {}}) == "tiers[0].budget: that of the device is not a part of the problem");
  CHECK(system({{{"device"}, {"host", -1}}, {}}) == "tiers[1].budget is negative: -1");
  CHECK(system({{{"device"}, {"host", std::numeric_limits<remat::bytes_t>::max()}}, {}}) == "accepted");
  CHECK(system({std::vector<remat::tier>(65, {"x"}), {}}) == "tiers: more than 64");
  CHECK(system({two, {{device, disk, 1}}}) == "links[0].to: no tier 2");
  CHECK(system({two, {{any_tier, host, 1}}}) == "links[0].from: no tier 255");
  CHECK(system({two, {{host, host, 1}}}) == "links[0]: from the host to itself");
  CHECK(system({two, {{device, host, 1}, {device, host, 2}}}) == "links[1]: from the device to the host there is one already");
  for (double bad : {0.0, -1.0, infinity, std::nan("")})
    CHECK(system({two, {{device, host, bad}}}) == "links[0].rate is not a finite number > 0");
  for (double bad : {-1.0, infinity, std::nan("")})
    CHECK(system({two, {{device, host, 1}, {host, device, 1, bad}}}) == "links[1].latency is not a finite number >= 0");
  CHECK(step_refusal([](auto& x) {
          x.system.links = {{host, device, 1}};
        }) == "links[0]: offload links the device and the host already");
  CHECK(step_refusal([](auto& x) {
          x.system.tiers = {{"host"}, {"disk"}};
        }) == "offload: no tier beyond the device is called \"host\"");
}

TEST_CASE("inconsistent places, overwrites and next steps are refused") {
  CHECK(step_refusal([](auto&) {}) == "accepted");
  CHECK(step_refusal([](auto& x) { x.values[0].starts = disk; }) == "values[0].starts: no tier 2");
  CHECK(step_refusal([](auto& x) { x.values[2].ends = disk; }) == "values[2].ends: no tier 2");
  CHECK(step_refusal([](auto& x) { x.values[1].starts = host; }) ==
        "values[1].starts: only sources start somewhere, but operation 0 produces it");
  CHECK(step_refusal([](auto& x) { x.values[1].ends = any_tier; }) ==
        "values[1].ends: only targets end somewhere, and it is none");
  CHECK(step_refusal([](auto& x) { x.operations[1].on = disk; }) == "operations[1].on: no tier 2");
  const auto overwrites = [](std::vector<remat::overwrite> list) {
    return step_refusal([&](auto& x) { x.operations[1].overwrites = std::move(list); });
  };
  CHECK(overwrites({{0, 1}}) == "operations[1].overwrites: value 0 is no output");
  CHECK(overwrites({{2, 2}}) == "operations[1].overwrites: value 2 is no input");
  CHECK(overwrites({{2, 0}, {2, 1}}) == "operations[1].overwrites: value 2 takes two places");
  CHECK(step_refusal([](auto& x) {
          x.values.push_back({"v", 10});
          x.operations[1].outputs = {2, 3};
          x.operations[1].overwrites = {{2, 0}, {3, 0}};
        }) == "operations[1].overwrites: value 0 is overwritten twice");
  CHECK(step_refusal([](auto& x) { x.values[0].held = true; }) == "operations[1].overwrites: value 0 is held");
  CHECK(step_refusal([](auto& x) { x.values[0].bytes = 9; }) == "operations[1].overwrites: values 2 and 0 differ in bytes");
  const auto next = [](std::vector<remat::carry> list) {
    return step_refusal([&](auto& x) { x.operations[1].overwrites = {}, x.next = std::move(list); });
  };
  CHECK(next({{2, 3}}) == "next[0]: no value 3");
  CHECK(next({{1, 0}}) == "next[0]: value 1 is no target that an operation produces");
  CHECK(next({{2, 1}}) == "next[0]: value 1 is no source");
  CHECK(next({{2, 0}, {2, 0}}) == "next[1]: value 2 is two sources of the next step");
  CHECK(step_refusal([](auto& x) { x.operations[1].overwrites = {}, x.values[0].held = true; }) == "next[0]: value 0 is held");
  CHECK(step_refusal([](auto& x) { x.operations[1].overwrites = {}, x.values[2].bytes = 9; }) ==
        "next[0]: value 2 and value 0 differ in bytes");
  CHECK(step_refusal([](auto& x) { x.values[2].ends = device; }) ==
        "next[0]: value 2 ends on another tier than value 0 starts on");
  CHECK(step_refusal([](auto& x) {
          x.values.push_back({"v", 10});
          x.operations[0].outputs = {1, 3};
          x.values[0].starts = x.values[2].ends = any_tier;
          x.targets = {2, 3};
          x.next = {{2, 0}, {3, 0}};
        }) == "next[1]: value 0 is two targets of the step before");
}
