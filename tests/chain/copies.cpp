// SPDX-License-Identifier: Apache-2.0
// The dynamic program over chains with copies, against the enumeration of all its choices. Each choice is simulated in time.
#include <catch2/catch.hpp>

#include <limits>
#include <random>
#include <vector>

#include <remat/chain/fastest_persistent.hpp>
#include <remat/chain/fastest_with_copies.hpp>
#include <remat/testing/generators.hpp>

#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;
using step_kind = chain::chain_step::kind;

namespace {

constexpr double no_time = std::numeric_limits<double>::infinity();

chain::heterogeneous_chain chain_to_copy(std::mt19937_64& g, std::size_t links, std::int64_t options) {
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
    for (auto count = uniform(g, 1, options); count-- > 0;)
      c.links[i].options.push_back({(i + 1 < links ? c.links[i + 1].input : 0) + uniform(g, 0, 20),
                                    static_cast<double>(uniform(g, 1, 9)), static_cast<double>(uniform(g, 1, 30)),
                                    uniform(g, 0, 5), c.links[i].gradient + uniform(g, 0, 5)});
  return c;
}

/// A queue of bytes that drains at a fixed rate, with a clock.
struct stream {
  double rate, waiting = 0, now = 0;
  void pass(double seconds) {
    now += seconds;
    waiting = std::max(0.0, waiting - rate * seconds);
  }
  /// Waits until at most `room` bytes are queued.
  bool drain_to(double room) {
    if (room < 0) return false;
    if (waiting > room) now += (waiting - room) / rate, waiting = room;
    return true;
  }
};

/// All choices for the links from i on. The forward is simulated from the first link, the backward from its end.
struct every_choice {
  const chain::heterogeneous_chain& c;
  const chain::persistent_table& table;
  double budget;
  bool copies;
  double best = no_time;

  double kept_from(std::size_t i) const {
    double sum = 0;
    for (auto t = i; t < c.links.size(); ++t) sum += static_cast<double>(c.links[t].kept);
    return sum;
  }
  double at(bytes_t b) const { return static_cast<double>(b); }

  void go(std::size_t i, double input, double stays, stream out, stream in) {
    const auto n = c.links.size();
    if (i == n) {
      out.drain_to(0);
      in.drain_to(0);
      best = std::min(best, out.now + in.now);
      return;
    }
    const auto& l = c.links[i];
    for (const bool moved : {false, true}) {
      if (moved && !copies) continue;
      const double after = stays + (moved ? 0 : input);
      for (const auto& o : l.options) {
        auto f = out, b = in;
        if (!f.drain_to(budget - stays - input - at(o.saved + o.forward_transient))) continue;
        const double gradient = i + 1 < n ? at(c.links[i + 1].gradient) : 0;
        if (!b.drain_to(budget - stays - input - kept_from(i + 1) - gradient - at(o.saved + o.backward_transient))) continue;
        if (moved) f.waiting += input;  // queued behind the earlier bytes; the copy may start while the forward reads the value

        f.pass(o.forward);
        b.pass(o.backward);
        if (moved) b.waiting += input;
        go(i + 1, at(o.saved), after, f, b);
      }
      auto f = out;
      if (moved) f.waiting += input;
      for (auto s = i + 1; s < n; ++s) {
        const auto& t = c.links[s - 1];
        const bool first = s == i + 1;
        const double need = (first ? 0 : at(t.input)) + at(c.links[s].input + t.checkpoint_transient);
        // At the first link the whole input counts, even bytes that have left.
        const double room = budget - stays - need - (first || !moved ? input : 0);
        if (room < 0 || !f.drain_to(room + (first && moved ? input : 0))) break;
        f.pass(t.checkpoint_seconds);
        const auto free = static_cast<bytes_t>(budget - stays - input - kept_from(s));
        for (bytes_t memory = 0; memory <= free; ++memory) {
          const auto seconds = seconds_of(i, s - 1, memory);
          if (seconds == no_time) continue;
          auto b = in;
          b.drain_to(static_cast<double>(free - memory));
          b.pass(seconds);
          if (moved) b.waiting += input;
          go(s, at(c.links[s].input), after, f, b);
        }
      }
    }
  }
  double seconds_of(std::size_t i, std::size_t j, bytes_t memory) const {
    double seconds = no_time;
    for (const auto& [least, s] : table.front(i, j))
      if (least <= memory) seconds = s;
    return seconds;
  }
};

}  // namespace

TEST_CASE("the recurrence with copies equals the enumeration of its choices", "[long]") {
  std::mt19937_64 g(31);
  int compared = 0, moved = 0, both = 0;
  for (int round = 0; round < 700; ++round) {
    const auto c = chain_to_copy(g, static_cast<std::size_t>(uniform(g, 1, 4)), 2);
    bytes_t all = c.links[0].input;
    for (const auto& l : c.links) all += l.options[0].saved + l.kept;
    const auto budget = uniform(g, all / 4, all + 5);
    const chain::persistent_table table(c, budget + c.links[0].input, {});
    const copy_rates rates{0.25 * static_cast<double>(uniform(g, 1, 12)), 0.25 * static_cast<double>(uniform(g, 1, 12)), 0};
    every_choice oracle{c, table, static_cast<double>(budget), true};
    oracle.go(0, static_cast<double>(c.links[0].input), 0, {rates.to_host}, {rates.to_device});
    const auto answer = chain::fastest_with_copies(c, budget, rates, table);
    INFO("round " << round);
    REQUIRE(answer.exact);
    REQUIRE(answer.found() == (oracle.best < no_time));
    if (!answer.found()) continue;
    REQUIRE(answer.seconds == Approx(oracle.best).epsilon(1e-9));
    ++compared;
    const auto forwards =
        std::count_if(answer.steps.begin(), answer.steps.end(), [](const auto& s) { return s.what == step_kind::checkpoint; });
    const auto moves = std::count(answer.moved.begin(), answer.moved.end(), true);
    moved += moves > 0;
    both += moves > 0 && forwards > 0;
    // A narrow search is not faster.
    CHECK(chain::fastest_with_copies(c, budget, rates, table, {.max_labels = 1}).seconds >= answer.seconds * (1 - 1e-9));
  }
  CAPTURE(compared, moved, both);
  CHECK(compared > 200);
  CHECK(moved > 70);
  CHECK(both > 20);
}

TEST_CASE("with a dead link the recurrence gives persistent schedules, with a fast link nothing is recomputed") {
  std::mt19937_64 g(32);
  int found = 0, freed = 0;
  for (int round = 0; round < shortened(100); ++round) {
    const auto c = chain_to_copy(g, static_cast<std::size_t>(uniform(g, 2, 20)), 1);
    bytes_t all = c.links[0].input;
    for (const auto& l : c.links) all += l.options[0].saved + l.kept;
    const auto budget = all * uniform(g, 40, 100) / 100;
    const chain::persistent_table table(c, budget + c.links[0].input, {});
    const auto alone = chain::fastest_persistent(c, budget);
    const auto dead = chain::fastest_with_copies(c, budget, {1e-9, 1e-9, 0}, table);
    if (alone.found()) {
      ++found;
      CHECK(dead.exact);
      CHECK(dead.seconds == Approx(alone.seconds).epsilon(1e-9));
      CHECK(std::count(dead.moved.begin(), dead.moved.end(), true) == 0);
    }
    const auto fast = chain::fastest_with_copies(c, budget, {1e15, 1e15, 0}, table);
    double once = 0;
    for (const auto& l : c.links) once += l.options[0].forward + l.options[0].backward;
    if (alone.found()) REQUIRE(fast.found());
    if (fast.found()) CHECK(fast.seconds <= dead.seconds);
    freed += fast.found() && fast.seconds <= once * (1 + 1e-6);  // the other chains have a link whose forward does not fit
  }
  CHECK(found > shortened(50));
  CHECK(freed > shortened(80));
}

TEST_CASE("the search with copies: empty chains, long chains, and an early stop") {
  const chain::heterogeneous_chain none_at_all;
  CHECK(chain::fastest_with_copies(none_at_all, 0, {1, 1, 0}, chain::persistent_table(none_at_all, 0, {})).exact);
  std::mt19937_64 g(33);
  const auto c = chain_to_copy(g, 120, 1);
  bytes_t all = 0;
  for (const auto& l : c.links) all += l.options[0].saved + l.kept;
  const chain::persistent_table table(c, all, {.slots = 200});
  const copy_rates rates{0.5, 0.5, 0};
  CHECK_THROWS_WITH(chain::fastest_with_copies(c, all, rates, table, {.max_labels = 0}), Catch::Contains("max_labels"));
  const auto wide = chain::fastest_with_copies(c, all / 2, rates, table, {.max_labels = 400});
  const auto narrow = chain::fastest_with_copies(c, all / 2, rates, table, {.max_labels = 20});
  REQUIRE((wide.found() && narrow.found()));
  CHECK(wide.seconds <= narrow.seconds);
  CHECK(std::count_if(wide.steps.begin(), wide.steps.end(), [](const auto& s) { return s.what == step_kind::backward; }) == 120);
  CHECK_FALSE(chain::fastest_with_copies(c, all / 2, rates, table, {.stop = [] { return true; }}).found());
}
