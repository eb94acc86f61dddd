// SPDX-License-Identifier: Apache-2.0
// Documents of version 2: round trips, and errors that name the place.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/json.hpp>

#include "../tiers_walk.hpp"

using remat::problem;
using remat::testing::disk;
using remat::testing::host;
using remat::testing::step_parts;

namespace {

remat::problem_document read_tiers(const std::string& text) {
  std::istringstream in(text);
  return remat::read_problem_document(in);
}

std::string written(const problem& p, const remat::unknown_problem_members& unknown = {}) {
  std::ostringstream out;
  remat::write_problem(out, p, unknown);
  return out.str();
}

std::string written(const remat::result& r, const problem& p) {
  std::ostringstream out;
  remat::write_schedule(out, r, p);
  return out.str();
}

std::string replaced(std::string text, const std::string& a, const std::string& b) {
  const auto at = text.find(a);
  REQUIRE(at != std::string::npos);
  return text.replace(at, a.size(), b);
}

template <class Read>
std::string refusal_of(Read read) {
  try {
    read();
  } catch (const remat::error& why) {
    return why.what();
  }
  return "accepted";
}

/// The optimizer step on the host, in a system with a disk.
problem three_tier_step() {
  step_parts x;
  x.system = {{{"device"}, {"host", 64}, {"disk"}}, {{host, disk, 3, 0.5, "ssd"}, {disk, host, 6}}};
  return x.build();
}

}  // namespace

TEST_CASE("problems and schedules on several tiers survive a round trip") {
  std::mt19937_64 g(21);
  int valid = 0, second = 0;
  for (int round = 0; round < 400; ++round) {
    const auto p = remat::testing::random_tiers_problem(g);
    const auto text = written(p);
    const auto q = read_tiers(text).problem;
    REQUIRE(written(q) == text);
    REQUIRE((q.plain() == p.plain() && q.next() == p.next() && q.beyond_plain() == p.beyond_plain()));
    remat::result r;
    r.schedule = remat::testing::tiers_walk(g, p).run();
    try {
      r = remat::as_result(p, r.schedule);
    } catch (const remat::bad_schedule&) {
      continue;
    }
    ++valid;
    std::istringstream in(written(r, p));
    const auto d = remat::read_schedule(in, q);
    REQUIRE(d.result.schedule == r.schedule);
    REQUIRE(d.unknown.empty());
    const bool plain = p.plain() && r.schedule.plain();
    second += !plain;
    REQUIRE(d.result.peaks == (plain ? std::vector<remat::bytes_t>{} : r.peaks));
    const auto again = remat::evaluate(q, d.result.schedule);
    REQUIRE((again.peaks == r.peaks && again.seconds == r.seconds));
  }
  CHECK(valid > 150);
  CHECK(second > 150);
}

TEST_CASE("a problem without new features is written as version 1, and version 1 ignores members of version 2") {
  const problem plain("plain", {{"a", 1}}, {}, {0}, remat::copy_rates{1, 1, 0});
  CHECK_THAT(written(plain), Catch::Contains("\"version\": 1") && !Catch::Contains("tiers") && !Catch::Contains("links"));
  const auto upgraded = replaced(written(plain), "\"version\": 1", "\"version\": 2");
  CHECK(read_tiers(upgraded).problem.plain());
  CHECK(written(read_tiers(upgraded).problem) == written(plain));

  // Members of version 2 are unknown members in version 1: they have no effect and are written back.
  const auto text = replaced(written(plain), "{\"name\":\"a\",\"bytes\":1", "{\"name\":\"a\",\"bytes\":1,\"starts\":\"moon\"");
  const auto noted = replaced(text, "\"targets\"", "\"next\": 7,\n\"targets\"");
  const auto d = read_tiers(noted);
  CHECK(d.problem.plain());
  CHECK_THAT(written(d.problem, d.unknown), Catch::Contains("\"starts\":\"moon\"") && Catch::Contains("\"next\": 7"));

  remat::result r;
  r.schedule.offload(0);
  r.peaks = {1, 1};
  CHECK_THAT(written(r, plain), Catch::Contains("\"version\": 1") && !Catch::Contains("peaks"));
  r.schedule.drop(0, host);
  CHECK_THAT(written(r, plain), Catch::Contains("\"version\": 2") && Catch::Contains("[\"drop\",0,\"host\"]") &&
                                    Catch::Contains("\"peaks\": {\"device\":1,\"host\":1}"));
  std::ostringstream named;
  remat::write_schedule(named, r, "plain");
  CHECK(named.str() == written(r, plain));
  std::istringstream in(named.str());
  CHECK(remat::read_schedule(in).result.schedule == r.schedule);
  r.schedule.drop(0, disk);
  CHECK_THROWS_WITH(written(r, plain), "the schedule names a tier that is not one of the problem");
}

TEST_CASE("unknown members of tiers and links are written back") {
  auto text = replaced(written(three_tier_step()), "\"name\":\"disk\"", "\"name\":\"disk\",\"model\":\"x\"");
  text = replaced(text, "\"stream\":\"ssd\"", "\"stream\":\"ssd\",\"lanes\":4");
  const auto d = read_tiers(text);
  CHECK(d.unknown.tiers.size() == 3);
  CHECK(d.unknown.links.size() == 2);
  const auto again = written(d.problem, d.unknown);
  CHECK_THAT(again, Catch::Contains("\"model\":\"x\"") && Catch::Contains("\"lanes\":4"));
  CHECK(written(read_tiers(again).problem, read_tiers(again).unknown) == again);
}

TEST_CASE("the error for a bad problem on several tiers names the place") {
  const auto text = written(three_tier_step());
  const auto refused = [&](const std::string& a, const std::string& b) {
    return refusal_of([&] { read_tiers(replaced(text, a, b)); });
  };
  CHECK(refused("\"version\": 2", "\"version\": 3") == "version: only versions 1 and 2 are known, got 3");
  CHECK(refused("{\"name\":\"host\",\"budget\":64}", "7") == "tiers[1]: not an object");
  CHECK(refused("\"budget\":64", "\"budget\":6.5") == "tiers[1].budget: not an integer of 64 bits");
  CHECK(refused("\"budget\":64", "\"budget\":null") == "accepted");
  CHECK(refused("\"name\":\"disk\"", "\"name\":\"host\"") == "tiers[2].name: tier 1 is called \"host\" already");
  CHECK(refused("\"from\":\"host\"", "\"from\":\"moon\"") == "links[0].from: no tier \"moon\"");
  CHECK(refused("\"to\":\"disk\"", "\"to\":2") == "links[0].to: not a string");
  CHECK(refused("\"to\":\"disk\",", "") == "links[0].to: missing");
  CHECK(refused("\"rate\":3.0,", "") == "links[0].rate: missing");
  CHECK(refused("\"rate\":3.0", "\"rate\":0") == "links[0].rate is not a finite number > 0");
  CHECK(refused("\"starts\":\"host\"", "\"starts\":\"moon\"") == "values[0].starts: no tier \"moon\"");
  CHECK(refused("\"ends\":\"host\"", "\"ends\":1") == "values[2].ends: not a string");
  CHECK(refused("\"on\":\"host\"", "\"on\":\"any\"") == "operations[1].on: no tier \"any\"");
  CHECK(refused("\"overwrites\":[[2,0]]", "\"overwrites\":[[2]]") == "operations[1].overwrites[0]: not a pair of indices");
  CHECK(refused("\"overwrites\":[[2,0]]", "\"overwrites\":[[2,9]]") == "operations[1].overwrites[0][1]: no value 9");
  CHECK(refused("\"overwrites\":[[2,0]]", "\"overwrites\":{}") == "operations[1].overwrites: not an array");
  CHECK(refused("\n  [2,0]]", "[2,0], [2]]") == "next[1]: not a pair of indices");
  CHECK(refused("\n  [2,0]]", "[2,1]]") == "next[0]: value 1 is no source");
  CHECK(refusal_of([] {
          read_tiers(R"({"format":"remat-problem","version":2,"tiers":[],"values":[],"operations":[],"targets":[]})");
        }) == "tiers: none, not even the device");
}

TEST_CASE("the error for a bad schedule on several tiers names the step") {
  const auto p = three_tier_step();
  const auto refused = [&](const std::string& steps, const std::string& rest = "") {
    return refusal_of([&] {
      std::istringstream in(R"({"format":"remat-schedule","version":2,"steps":)" + steps + rest + "}");
      remat::read_schedule(in, p);
    });
  };
  CHECK(refused(R"([["copy",0,"host","disk"],["drop",0,"device"],["drop",0],["compute",0]])") == "accepted");
  CHECK(refused(R"([["copy",0,"host"]])") == "step 0 (copy 0): a copy goes from one tier to another");
  CHECK(refused(R"([["copy",0]])") == "step 0 (copy 0): a copy goes from one tier to another");
  CHECK(refused(R"([["drop",0],["copy",0,"host","moon"]])") == "step 1 (copy 0): no tier \"moon\"");
  CHECK(refused(R"([["drop",0,"host","disk"]])") == "step 0 (drop 0): too many tiers");
  CHECK(refused(R"([["compute",0,"host"]])") == "step 0 (compute 0): too many tiers");
  CHECK(refused(R"([["drop",0,1]])") == "steps[0]: not an action and an index, or tiers after them");
  CHECK(refused(R"([["move",0]])") == "step 0 (\"move\" 0): no such action");
  CHECK(refused("[]", R"(,"starts":[[0,"host"],[1]])") == "starts[1]: not the index of a value and a tier");
  CHECK(refused("[]", R"(,"starts":[[-1,"host"]])") == "starts[0]: not the index of a value and a tier");
  CHECK(refused("[]", R"(,"starts":[[0,"moon"]])") == "starts[0]: no tier \"moon\"");
  CHECK(refused("[]", R"(,"starts":[[4294967295,"host"]])") == "starts[0]: no value 4294967295");
  CHECK(refused("[]", R"(,"peaks":{"device":0.5})") == "peaks.device: not an integer of 64 bits");
  CHECK(refused("[]", R"(,"peaks":7)") == "peaks: not an object");
  const auto in_first = [&](const std::string& steps) {
    return refusal_of([&] {
      std::istringstream in(R"({"format":"remat-schedule","version":1,"steps":)" + steps + "}");
      remat::read_schedule(in, p);
    });
  };
  CHECK(in_first(R"([["copy",0]])") == "step 0 (\"copy\" 0): no such action");
  CHECK(in_first(R"([["drop",0,"host"]])") == "steps[0]: not an action and an index");
  std::istringstream in(R"({"format":"remat-schedule","version":2,"steps":[["drop",0,"disk"]]})");
  CHECK_THROWS_WITH(remat::read_schedule(in), "step 0 (drop 0): no tier \"disk\"");  // read without its problem
}
