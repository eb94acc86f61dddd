// SPDX-License-Identifier: Apache-2.0
// Random schedules on several tiers. The period equals that of an unrolled schedule, no delay makes a tier need more than
// `evaluate` reports, and both sets of rules judge plain schedules alike.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>

#include "../tiers_walk.hpp"

using remat::action;
using remat::problem;
using remat::schedule;
using remat::tier_id;
using remat::value_id;
using remat::testing::chance;
using remat::testing::uniform;

namespace {

struct tiers_case {
  remat::problem problem;
  remat::schedule schedule;
  remat::evaluation costs;
};

/// A random valid schedule, and its problem.
tiers_case valid_case(std::mt19937_64& g, bool cyclic) {
  for (;;) {
    auto p = remat::testing::random_tiers_problem(g);
    if (p.next().empty() == cyclic) continue;
    auto s = remat::testing::tiers_walk(g, p).run();
    try {
      auto e = remat::evaluate(p, s);
      return {std::move(p), std::move(s), std::move(e)};
    } catch (const remat::bad_schedule&) {
    }
  }
}

/// A number of turns of a cyclic schedule, unrolled into one schedule. An operation that takes no time ends each turn.
struct unrolled {
  remat::problem problem;
  remat::schedule schedule;
  std::vector<std::size_t> marks;  // the steps that end the turns
};

unrolled unroll(const tiers_case& c, std::size_t turns) {
  const auto& p = c.problem;
  std::vector<tier_id> homes(p.values().size(), remat::any_tier);
  for (value_id v = 0; v < homes.size(); ++v)
    if (p.is_source(v)) homes[v] = p.values()[v].starts;
  for (const auto& [v, t] : c.schedule.starts) homes[v] = t;
  unrolled u;
  std::vector<remat::value> values;
  std::vector<remat::operation> operations;
  std::vector<value_id> now(p.values().size()), carried(p.values().size());  // the values of this turn
  std::vector<bool> is_carried(p.values().size(), false);
  for (const auto& x : p.next()) is_carried[x.target] = true;
  for (value_id v = 0; v < now.size(); ++v) {
    if (!p.is_source(v)) continue;
    now[v] = values.size();
    values.push_back(p.values()[v]);
    values.back().starts = homes[v];
    values.back().ends = remat::device_tier;
  }
  for (std::size_t turn = 0; turn < turns; ++turn) {
    for (const auto& x : p.next())
      if (turn > 0) carried[x.source] = now[x.target];
    for (const auto& x : p.next())
      if (turn > 0) now[x.source] = carried[x.source];
    for (value_id v = 0; v < now.size(); ++v) {
      if (p.is_source(v)) continue;
      now[v] = values.size();
      values.push_back({"", p.values()[v].bytes});
    }
    const auto first = static_cast<remat::index_t>(operations.size());
    for (auto op : p.operations()) {
      for (auto* list : {&op.inputs, &op.outputs})
        for (auto& v : *list) v = now[v];
      for (auto& x : op.overwrites) x = {now[x.output], now[x.input]};
      operations.push_back(std::move(op));
    }
    std::map<std::pair<value_id, tier_id>, bool> there;
    for (const auto& x : c.schedule.steps) {
      auto y = x;
      y.which = x.what == action::compute ? first + x.which : remat::index_t(now[x.value()]);
      u.schedule.steps.push_back(y);
      if (x.what == action::compute)
        for (auto v : p.operations()[x.which].outputs) there[{v, p.operations()[x.which].on}] = true;
      else if (x.what == action::drop)
        there[{x.value(), x.from}] = false;
      else
        there[{x.value(), x.what == action::copy ? x.to : x.what == action::offload ? p.host() : remat::device_tier}] = true;
      if (x.what == action::compute)
        for (const auto& o : p.operations()[x.which].overwrites) there[{o.input, p.operations()[x.which].on}] = false;
    }
    for (auto v : p.targets())
      for (tier_id t = 0; t < p.tiers().size(); ++t)
        if (!p.is_source(v) && !is_carried[v] && there[{v, t}]) u.schedule.drop(now[v], t);
    u.marks.push_back(u.schedule.steps.size());
    u.schedule.compute(operations.size());
    operations.push_back({"turn", {}, {}, 0});
  }
  u.problem = problem("unrolled", values, operations, {}, p.copies(), std::nullopt, p.members().system);
  return u;
}

/// Memory of each tier if every action takes up to three times as long. An action waits for its inputs, as in a runtime, and
/// takes its memory when it begins. A freed value gives its memory back once nothing uses it.
std::vector<remat::bytes_t> delayed_peaks(std::mt19937_64& g, const problem& p, const schedule& s) {
  struct state {
    double made = 0, used = 0;
  };
  struct change {
    double at;
    bool takes;
    remat::bytes_t bytes;
  };
  const auto tiers = p.tiers().size();
  const auto delayed = [&](double seconds) {
    return chance(g, 50) ? seconds : seconds * static_cast<double>(uniform(g, 1, 300)) / 100;
  };
  std::vector<std::vector<change>> changes(tiers);
  std::map<std::pair<value_id, tier_id>, state> there;
  std::vector<double> room(tiers, 0), busy(tiers, 0);
  std::map<std::string, double> queues;
  double now = 0;
  const auto take = [&](tier_id t, double at, remat::bytes_t bytes) { changes[t].push_back({at, true, bytes}); };
  const auto give = [&](tier_id t, double at, remat::bytes_t bytes) { changes[t].push_back({at, false, bytes}); };
  auto homes = std::vector<tier_id>(p.values().size(), remat::any_tier);
  for (const auto& [v, t] : s.starts) homes[v] = t;
  for (value_id v = 0; v < p.values().size(); ++v) {
    if (!p.is_source(v)) continue;
    const auto t = homes[v] == remat::any_tier ? p.values()[v].starts : homes[v];
    there[{v, t}] = {};
    take(t, 0, p.values()[v].bytes);
  }
  for (auto x : s.steps) {
    if (x.what == action::offload) x = {action::copy, x.which, remat::device_tier, p.host()};
    if (x.what == action::prefetch) x = {action::copy, x.which, p.host(), remat::device_tier};
    if (x.what == action::compute) {
      const auto& op = p.operations()[x.which];
      const auto t = op.on;
      double begin = t == remat::device_tier ? now : std::max({now, room[t], busy[t]});
      for (auto v : op.inputs) begin = std::max(begin, there.at({v, t}).made);
      for (const auto& o : op.overwrites) begin = std::max(begin, there.at({o.input, t}).used);
      const double end = begin + delayed(op.seconds);
      (t == remat::device_tier ? now : busy[t]) = end;
      for (auto v : op.inputs) there.at({v, t}).used = std::max(there.at({v, t}).used, end);
      take(t, begin, op.workspace);
      give(t, end, op.workspace);
      bool frees = op.workspace > 0;
      std::vector<value_id> in_place;
      for (const auto& o : op.overwrites) {
        there.erase({o.input, t});
        in_place.push_back(o.output);
      }
      for (auto v : op.outputs) {
        if (std::find(in_place.begin(), in_place.end(), v) == in_place.end()) take(t, begin, p.values()[v].bytes);
        if (there.contains({v, t})) {
          give(t, end, p.values()[v].bytes);
          frees = true;
        }
        there[{v, t}].made = end;
      }
      if (frees) room[t] = std::max(room[t], end);
    } else if (x.what == action::copy) {
      const auto& l = *p.link(x.from, x.to);
      auto& source = there.at({x.value(), x.from});
      auto& queue = queues[l.stream];
      const double begin = std::max({now, queue, source.made, x.to == remat::device_tier ? 0 : room[x.to]});
      queue = begin + delayed(l.latency + static_cast<double>(p.values()[x.which].bytes) / l.rate);
      source.used = std::max(source.used, queue);
      there[{x.value(), x.to}] = {queue, 0};
      take(x.to, begin, p.values()[x.which].bytes);
    } else {
      const auto& value = there.at({x.value(), x.from});
      auto& free = x.from == remat::device_tier ? now : room[x.from];
      const double quiet = std::max(value.made, value.used);
      free = std::max(free, quiet);
      give(x.from, x.from == remat::device_tier ? now : quiet, p.values()[x.which].bytes);
      there.erase({x.value(), x.from});
    }
  }
  std::vector<remat::bytes_t> peaks(tiers, 0);
  for (std::size_t t = 0; t < tiers; ++t) {
    std::stable_sort(changes[t].begin(), changes[t].end(),
                     [](const change& a, const change& b) { return a.at != b.at ? a.at < b.at : a.takes < b.takes; });
    remat::bytes_t live = 0;
    for (const auto& c : changes[t]) peaks[t] = std::max(peaks[t], live += c.takes ? c.bytes : -c.bytes);
  }
  return peaks;
}

}  // namespace

TEST_CASE("the period of a cyclic schedule equals that of many unrolled turns") {
  std::mt19937_64 g(11);
  constexpr std::size_t turns = 40;
  int settled = 0, hidden = 0;
  for (int round = 0; round < 600; ++round) {
    const auto c = valid_case(g, true);
    const auto u = unroll(c, turns);
    const auto e = remat::evaluate(u.problem, u.schedule);
    CHECK(e.peaks == c.costs.peaks);
    const auto length = [&](std::size_t turn) { return e.ends[u.marks[turn]] - e.ends[u.marks[turn - 1]]; };
    bool same = true;
    for (std::size_t turn = 17; turn < turns; ++turn) same = same && length(turn) == Approx(length(16)).margin(1e-9);
    if (same) CHECK(c.costs.seconds >= length(turns - 1) - 1e-9);  // more, where work that nothing waits for piles up elsewhere
    settled += c.costs.seconds == Approx(length(turns - 1)).margin(1e-9);
    hidden += e.ends[u.marks[0]] != Approx(length(turns - 1));
    for (std::size_t turn = 10; turn < 20 && c.costs.seconds == Approx(length(9)).margin(1e-9); ++turn)
      CHECK(length(turn) == Approx(length(9)).margin(1e-9));
  }
  CHECK(settled >= 570);
  CHECK(hidden >= 60);  // the first turn is not typical
}

TEST_CASE("delays never make a tier need more memory than evaluate reports") {
  std::mt19937_64 g(12);
  int reached = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto c = valid_case(g, round % 3 == 0);
    const bool cyclic = !c.problem.next().empty();
    const auto u = cyclic ? unroll(c, 4) : unrolled{c.problem, c.schedule, {}};
    for (int again = 0; again < 3; ++again) {
      const auto peaks = delayed_peaks(g, u.problem, u.schedule);
      for (std::size_t t = 0; t < peaks.size(); ++t) REQUIRE(peaks[t] <= c.costs.peaks[t]);
      reached += peaks == c.costs.peaks;
    }
  }
  CHECK(reached > 1000);
}

TEST_CASE("both sets of rules judge plain schedules alike") {
  std::mt19937_64 g(13);
  int valid = 0, broken = 0, copied = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto made = remat::testing::random_problem(g, {.operations = 6, .sources = 3, .once = 10});
    const problem p("plain", made.values(), made.operations(), made.targets(),
                    remat::copy_rates{static_cast<double>(uniform(g, 1, 8)), static_cast<double>(uniform(g, 1, 8)), 0.1});
    auto walk = remat::testing::tiers_walk(g, p).run();
    if (chance(g, 30)) remat::testing::break_tiers(g, p, walk);
    schedule s;
    std::vector<bool> sent(p.values().size() + 1, false);
    for (auto x : walk.steps) {
      if (x.what == action::drop && x.from != remat::device_tier) continue;
      if (x.what == action::copy) x = {x.to == remat::device_tier ? action::prefetch : action::offload, x.which};
      if (x.what == action::offload) {
        const auto v = std::min<std::size_t>(x.which, sent.size() - 1);
        if (sent[v]) continue;
        sent[v] = true;
      }
      s.steps.push_back(x);
    }
    remat::evaluation a, b;
    std::size_t step_a = remat::none, step_b = remat::none;
    try {
      a = remat::evaluate(p, s);
    } catch (const remat::bad_schedule& why) {
      step_a = why.step;
    }
    try {
      b = remat::detail::evaluate_tiers(p, s);
    } catch (const remat::bad_schedule& why) {
      step_b = why.step;
    }
    REQUIRE(step_a == step_b);
    REQUIRE((a.peak == b.peak && a.peaks == b.peaks && a.seconds == b.seconds && a.memory == b.memory && a.ends == b.ends));
    REQUIRE((a.computed == b.computed && a.recomputed == b.recomputed && a.copies.size() == b.copies.size()));
    for (std::size_t i = 0; i < a.copies.size(); ++i)
      REQUIRE(
          (a.copies[i].step == b.copies[i].step && a.copies[i].begin == b.copies[i].begin && a.copies[i].end == b.copies[i].end));
    valid += step_a == remat::none;
    broken += step_a != remat::none;
    copied += !a.copies.empty();
  }
  CHECK(std::min({valid, broken, copied}) > 300);
}
