// SPDX-License-Identifier: Apache-2.0
// Chrome traces of schedules, read back: each step is on its lane at its time, and the memory is that of `evaluate`.
#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/solve.hpp>
#include <remat/io/chrome_trace.hpp>
#include <remat/solver/chen.hpp>
#include <remat/testing/generators.hpp>

#include "../tiers.hpp"

namespace {

struct arrow {
  std::string name;
  int from = 0, to = 0;  // lanes
  double begin = 0, end = 0;
};

struct trace {
  std::map<int, std::vector<nlohmann::json>> spans;  // by lane
  std::vector<std::pair<double, remat::bytes_t>> memory;
  std::map<int, std::string> lanes;
  std::map<int, arrow> arrows;                                                     // by id
  std::map<std::string, std::vector<std::pair<double, remat::bytes_t>>> counters;  // other than the memory of the device
};

trace read_trace(const std::string& text) {
  trace t;
  const auto document = nlohmann::json::parse(text);
  for (const auto& e : document.at("traceEvents")) {
    CHECK(e.at("pid") == 1);
    if (e.at("ph") == "X") t.spans[e.at("tid")].push_back(e);
    if (e.at("ph") == "s") t.arrows[e.at("id")] = {e.at("name"), e.at("tid"), 0, e.at("ts"), 0};
    if (e.at("ph") == "f") {
      CHECK(e.at("bp") == "e");
      t.arrows.at(e.at("id")).to = e.at("tid");
      t.arrows.at(e.at("id")).end = e.at("ts");
    }
    if (e.at("ph") == "C" && e.at("name") != "memory")
      t.counters[e.at("name")].emplace_back(e.at("ts"), e.at("args").at("bytes"));
    else if (e.at("ph") == "C")
      t.memory.emplace_back(e.at("ts"), e.at("args").at("bytes"));
    if (e.at("ph") == "M" && e.at("name") == "thread_name") t.lanes[e.at("tid")] = e.at("args").at("name");
  }
  return t;
}

}  // namespace

TEST_CASE("a Chrome trace of a schedule with recomputations") {
  std::mt19937_64 g(3);
  const auto p = remat::testing::random_training_chain(g, 12);
  const auto r = remat::solve(p, remat::evaluate(p, remat::store_all_schedule(p)).peak * 7 / 10, remat::chen());
  REQUIRE((r.found() && r.recomputed > 0));
  const auto t = read_trace(remat::chrome_trace(p, r.schedule));
  CHECK(t.lanes == std::map<int, std::string>{{1, "computations"}});
  REQUIRE(t.spans.size() == 1);
  const auto& computed = t.spans.at(1);
  const auto order = remat::compute_order(r.schedule);
  REQUIRE(computed.size() == order.size());
  double now = 0;
  std::size_t again = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    CHECK(computed[i].at("name") == p.operations()[order[i]].name);
    CHECK(computed[i].at("ts").get<double>() == Approx(now * 1e6).margin(1e-6));
    now += p.operations()[order[i]].seconds;
    again += computed[i].at("cat") == "recomputed";
  }
  CHECK(again == r.recomputed);
  CHECK(now == Approx(r.seconds));
  remat::bytes_t peak = 0;
  for (const auto& [at, bytes] : t.memory) peak = std::max(peak, bytes);
  CHECK(peak == r.peak);
  CHECK(t.memory.size() == r.schedule.steps.size() + 1);
}

TEST_CASE("a Chrome trace shows copies on lanes of their own, at the times of their streams") {
  // a (8 bytes, 1 s) goes to the host at 4 bytes/s and comes back at 2 bytes/s, with 1 s latency each, while b runs for 10 s.
  const remat::problem p("\"quoted\"", {{"a", 8}, {"b", 1}, {"c", 1}},
                         {{"a", {}, {0}, 1}, {"b", {0}, {1}, 10}, {"c", {0, 1}, {2}, 1}}, {2}, remat::copy_rates{4, 2, 1});
  remat::schedule s;
  s.compute(0);
  s.offload(0);
  s.compute(1);
  s.drop(0);
  s.prefetch(0);
  s.compute(2);
  const auto t = read_trace(remat::chrome_trace(p, s));
  CHECK(t.lanes.size() == 3);
  REQUIRE((t.spans.at(2).size() == 1 && t.spans.at(3).size() == 1));
  const auto times = [&](const nlohmann::json& e) {
    return std::pair{e.at("ts").get<double>() * 1e-6, e.at("dur").get<double>() * 1e-6};
  };
  const auto out = times(t.spans.at(2)[0]), back = times(t.spans.at(3)[0]), last = times(t.spans.at(1)[2]);
  CHECK((out.first == Approx(1) && out.second == Approx(3)));
  CHECK((back.first == Approx(11) && back.second == Approx(5)));
  CHECK((last.first == Approx(16) && last.second == Approx(1)));

  // One arrow leads from the copy out to the copy back, and one from the copy back to the computation. Each starts inside its
  // copy.
  REQUIRE(t.arrows.size() == 2);
  const auto &first = t.arrows.at(1), &second = t.arrows.at(2);
  CHECK((first.name == "a" && first.from == 2 && first.to == 3 && second.from == 3 && second.to == 1));
  CHECK((first.begin == Approx(2.5e6) && first.end == Approx(11e6) && second.begin == Approx(13.5e6) &&
         second.end == Approx(16e6)));
  const auto& held_there = t.counters.at("memory of the host");
  CHECK((held_there.front().second == 0 && held_there.back().second == 8));
}

TEST_CASE("a Chrome trace shows other tiers and streams on lanes of their own") {
  remat::testing::step_parts x;
  const auto t = read_trace(remat::chrome_trace(x.build(), remat::testing::host_step()));
  CHECK(t.lanes == std::map<int, std::string>{
                       {1, "computations"}, {2, "computations on the host"}, {3, "copies on up"}, {4, "copies on down"}});
  REQUIRE((t.spans.at(2).size() == 1 && t.spans.at(3).size() == 1 && t.spans.at(4).size() == 1));
  CHECK(t.spans.at(2)[0].at("name") == "adamw");
  CHECK(t.spans.at(2)[0].at("ts") == 9e6);  // when the gradient has arrived, one turn later
  CHECK(t.spans.at(4)[0].at("cat") == "prefetch");
}
