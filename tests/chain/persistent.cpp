// SPDX-License-Identifier: Apache-2.0
// The dynamic program over chains, against the enumeration of all persistent schedules. Each schedule is simulated step by step.
#include <catch2/catch.hpp>

#include <map>
#include <thread>

#include <remat/chain/fastest_persistent.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/testing/generators.hpp>

#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;
using kind = chain::chain_step::kind;

namespace {

chain::heterogeneous_chain random_chain(std::mt19937_64& g, std::size_t links, std::int64_t options) {
  chain::heterogeneous_chain c;
  c.links.resize(links);
  for (auto& l : c.links) {
    l.input = uniform(g, 0, 9);
    l.gradient = uniform(g, 0, 9);
    l.checkpoint_seconds = static_cast<double>(uniform(g, 1, 9));
    l.checkpoint_transient = uniform(g, 0, 4);
    l.kept = uniform(g, 0, 3);
  }
  for (std::size_t i = 0; i < links; ++i)
    for (auto count = uniform(g, 1, options); count-- > 0;) {
      auto& l = c.links[i];
      l.options.push_back({(i + 1 < links ? c.links[i + 1].input : 0) + uniform(g, 0, 20), static_cast<double>(uniform(g, 1, 9)),
                           static_cast<double>(uniform(g, 1, 30)), uniform(g, 0, 5), l.gradient + l.kept + uniform(g, 0, 5)});
    }
  return c;
}

/// Time and peak of a sequence, simulated from the definition of its steps. A value x is on the device from its computation to
/// the last step that reads it before its next computation. Values saved by a forward stay until its backward, including the x
/// after it.
std::pair<double, bytes_t> simulate(const chain::heterogeneous_chain& c, const std::vector<chain::chain_step>& steps) {
  const auto n = c.links.size();
  double seconds = 0;
  bytes_t peak = 0, kept = 0;
  std::vector<bool> x(n + 1, false), saved(n, false);
  std::vector<std::size_t> option(n, 0);
  std::size_t gradient = n;  // the gradient on the device is that of x[gradient]
  x[0] = true;
  const auto bytes = [&](std::size_t i) { return i < n ? c.links[i].input : 0; };
  for (std::size_t at = 0; at < steps.size(); ++at) {
    const auto [what, i, k] = steps[at];
    REQUIRE((x[i] || (i > 0 && saved[i - 1])));
    bytes_t live = kept + (gradient < n ? c.links[gradient].gradient : 0);
    for (std::size_t t = 0; t < n; ++t) {
      if (saved[t] && !(what == kind::backward && t == i)) live += c.links[t].options[option[t]].saved;
      if (x[t] && !(t > 0 && saved[t - 1])) live += bytes(t);
    }
    const auto& l = c.links[i];
    const auto& o = l.options[k];
    if (what == kind::checkpoint) {
      peak = std::max(peak, live + bytes(i + 1) + l.checkpoint_transient);
      seconds += l.checkpoint_seconds;
      x[i + 1] = true;
    } else if (what == kind::forward) {
      peak = std::max(peak, live + o.saved + o.forward_transient);
      seconds += o.forward;
      saved[i] = true;
      option[i] = k;
    } else {
      REQUIRE(saved[i]);
      REQUIRE(gradient == i + 1);
      peak = std::max(peak, live + o.saved + o.backward_transient);
      seconds += o.backward;
      saved[i] = false;
      gradient = i;
      kept += l.kept;
      x[i + 1] = false;
    }
    for (std::size_t t = 1; t <= n; ++t) {  // values without a later reader
      if (!x[t]) continue;
      bool read = false;
      for (auto later = at + 1; later < steps.size() && !read; ++later) {
        if (steps[later].link == t) read = true;
        if (steps[later].link + 1 == t && steps[later].what != kind::backward) break;
      }
      x[t] = read;
    }
  }
  REQUIRE(gradient == 0);
  return {seconds, peak};
}

/// All persistent sequences for links i to j.
std::vector<std::vector<chain::chain_step>> all(const chain::heterogeneous_chain& c, std::size_t i, std::size_t j) {
  std::vector<std::vector<chain::chain_step>> list;
  for (std::size_t k = 0; k < c.links[i].options.size(); ++k)
    for (const auto& rest : i == j ? std::vector<std::vector<chain::chain_step>>(1) : all(c, i + 1, j)) {
      std::vector<chain::chain_step> s = {{kind::forward, i, k}};
      s.insert(s.end(), rest.begin(), rest.end());
      s.push_back({kind::backward, i, k});
      list.push_back(s);
    }
  for (auto split = i + 1; split <= j; ++split)
    for (const auto& right : all(c, split, j))
      for (const auto& left : all(c, i, split - 1)) {
        std::vector<chain::chain_step> s;
        for (auto t = i; t < split; ++t) s.push_back({kind::checkpoint, t, 0});
        s.insert(s.end(), right.begin(), right.end());
        s.insert(s.end(), left.begin(), left.end());
        list.push_back(s);
      }
  return list;
}

}  // namespace

TEST_CASE("the table equals the enumeration of persistent schedules") {
  std::mt19937_64 g(11);
  int compared = 0;
  for (int round = 0; round < shortened(1500); ++round) {
    const auto c = random_chain(g, static_cast<std::size_t>(uniform(g, 1, 4)), 3);
    std::map<bytes_t, double> fronts;  // peak -> least time
    bytes_t largest = 0;
    for (const auto& s : all(c, 0, c.links.size() - 1)) {
      const auto [seconds, peak] = simulate(c, s);
      largest = std::max(largest, peak);
      const auto [at, added] = fronts.emplace(peak, seconds);
      if (!added) at->second = std::min(at->second, seconds);
    }
    const chain::persistent_table table(c, largest + 5, {}), coarse(c, largest + 5, {.slots = 20});
    REQUIRE(table.complete());
    double best = std::numeric_limits<double>::infinity();
    for (bytes_t budget = 0; budget <= largest + 3; ++budget) {
      if (fronts.count(budget)) best = std::min(best, fronts[budget]);
      const auto seconds = table.seconds(budget);
      const auto answer = chain::fastest_persistent(c, budget);
      REQUIRE(answer.exact());
      REQUIRE(answer.found() == seconds.has_value());
      REQUIRE(seconds.has_value() == (best < 1e9));
      if (const auto rough = coarse.seconds(budget)) {
        REQUIRE(*rough >= best);
        CHECK(simulate(c, coarse.steps(budget)).second <= budget);
      }
      if (!seconds) {
        CHECK_THROWS_AS(table.steps(budget), bad_option);
        continue;
      }
      ++compared;
      REQUIRE(*seconds == Approx(best));
      const auto [taken, peak] = simulate(c, table.steps(budget));
      REQUIRE(taken == Approx(*seconds));
      REQUIRE(peak <= budget);
      const auto [found, highest] = simulate(c, answer.steps);
      REQUIRE(answer.seconds == Approx(best));
      REQUIRE(found == Approx(best));
      REQUIRE(highest <= budget);
    }
    for (const auto& [budget, seconds] : table.front()) {
      CHECK(table.seconds(budget) == seconds);
      CHECK(table.seconds(budget - 1) != seconds);
    }
  }
  CHECK(compared > shortened(10000));
}

TEST_CASE("the table for chains of zero, one and many links") {
  CHECK(chain::persistent_table({}, 10, {}).seconds(10) == 0.0);
  CHECK(chain::persistent_table({}, 10, {}).steps(10).empty());
  std::mt19937_64 g(12);
  const auto c = random_chain(g, 200, 3);
  const chain::persistent_table table(c, 2000, {.slots = 100});
  REQUIRE(table.complete());
  const auto front = table.front();
  REQUIRE(!front.empty());
  const auto [seconds, peak] = simulate(c, table.steps(front.front().first));
  CHECK(seconds == Approx(front.front().second));
  CHECK(peak <= front.front().first);
  CHECK_FALSE(chain::persistent_table(c, 2000, {.slots = 0, .stop = [] { return true; }}).complete());
}

TEST_CASE("the search for one budget equals the table on longer chains", "[long]") {
  std::mt19937_64 g(13);
  int compared = 0;
  for (int round = 0; round < 60; ++round) {
    const auto c = random_chain(g, static_cast<std::size_t>(uniform(g, 5, 24)), 3);
    bytes_t all = c.links[0].input;
    for (const auto& l : c.links) all += l.options[0].saved + l.kept;
    const chain::persistent_table table(c, all, {});
    REQUIRE(table.exact());
    for (const int percent : {100, 70, 50, 35, 25}) {
      const auto budget = all * percent / 100;
      const auto answer = chain::fastest_persistent(c, budget);
      REQUIRE(answer.exact());
      REQUIRE(answer.found() == table.seconds(budget).has_value());
      if (!answer.found()) continue;
      ++compared;
      REQUIRE(answer.seconds == Approx(*table.seconds(budget)).epsilon(1e-9));
      const auto [seconds, peak] = simulate(c, answer.steps);
      REQUIRE(seconds == Approx(answer.seconds).epsilon(1e-9));
      REQUIRE(peak <= budget);
      // With few labels: a valid schedule and a valid bound.
      const auto rough = chain::fastest_persistent(c, budget, {.max_labels = 1});
      CHECK(rough.seconds >= answer.seconds * (1 - 1e-9));
      CHECK(rough.bound <= answer.seconds * (1 + 1e-9));
      if (rough.found()) CHECK(simulate(c, rough.steps).second <= budget);
    }
  }
  CHECK(compared > 150);
}

TEST_CASE("the search for one budget: degenerate chains, long chains, an early stop, and two threads") {
  CHECK(chain::fastest_persistent({}, 10).seconds == 0);
  std::mt19937_64 g(14);
  const auto c = random_chain(g, 60, 3);
  CHECK(chain::fastest_persistent(c, -1).exact());
  CHECK_FALSE(chain::fastest_persistent(c, -1).found());
  auto free = c;  // recomputation costs nothing
  for (auto& l : free.links) l.checkpoint_seconds = 0;
  const auto cheap = chain::fastest_persistent(free, 200, {.max_labels = 10000});
  CHECK(cheap.bound <= cheap.seconds);

  chain::chain_answer answers[2];
  std::thread other([&] { answers[0] = chain::fastest_persistent(c, 300); });
  answers[1] = chain::fastest_persistent(c, 300);
  other.join();
  REQUIRE(answers[0].found());
  CHECK(answers[0].steps == answers[1].steps);
  CHECK(answers[0].bound == answers[1].bound);
  for (int after : {0, 1, 100, 300, 1000}) {
    int polls = 0;
    const auto stopped = chain::fastest_persistent(c, 300, {.stop = [&] { return polls++ >= after; }});
    CHECK(stopped.bound <= answers[0].seconds * (1 + 1e-12));
    CHECK(stopped.seconds >= answers[0].seconds * (1 - 1e-12));
  }

  const auto many = random_chain(g, 10'000, 1);
  bytes_t all = many.links[0].input;
  for (const auto& l : many.links) all += l.options[0].saved + l.kept;
  int polls = 0;
  CHECK_FALSE(chain::fastest_persistent(many, all / 2, {.stop = [&] { return ++polls > 2000; }}).exact());
  CHECK(polls == 2001);
  const chain::heterogeneous_chain same{
      std::vector<chain::heterogeneous_chain::link>(400, {10, 10, {{60, 2, 4, 0, 10}}, 2, 0, 0})};
  const auto answer = chain::fastest_persistent(same, 400 * 30, {.max_labels = 1 << 18});
  REQUIRE(answer.found());
  CHECK(answer.seconds < 1.01 * answer.bound);
  CHECK(std::count_if(answer.steps.begin(), answer.steps.end(), [](const auto& s) { return s.what == kind::backward; }) == 400);
}

TEST_CASE("chains and options that are out of range are refused") {
  chain::heterogeneous_chain c;
  c.links.resize(2);
  CHECK_THROWS_WITH(chain::persistent_table(c, 10, {}), Catch::Contains("links[0]"));
  c.links.resize(chain::persistent_table::max_links + 1, {1, 1, {{1, 1, 1, 0, 0}}, 1, 0, 0});
  CHECK_THROWS_AS(chain::persistent_table(c, 10, {}), bad_option);
  c.links.resize(3);
  CHECK_THROWS_WITH(chain::fastest_persistent(c, 10), Catch::Contains("links[0]"));
  c.links.erase(c.links.begin(), c.links.begin() + 2);
  CHECK_THROWS_WITH(chain::persistent_table(c, chain::persistent_table::max_units + 10, {}), Catch::Contains("slots"));
  CHECK_THROWS_WITH(chain::fastest_persistent(c, 10, {.max_labels = 0}), Catch::Contains("max_labels"));
}
