// SPDX-License-Identifier: Apache-2.0
// Writes random schedules, valid and broken, with copies, and the verdict of `evaluate`: one JSON document per line.
// usage: emit COUNT SEED [tiers] > lines
#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/io/json.hpp>
#include <remat/testing/generators.hpp>

#include "../tiers_walk.hpp"

namespace {

using remat::action;
using remat::testing::chance;
using remat::testing::uniform;

remat::problem with_copies(std::mt19937_64& g, const remat::problem& p) {
  auto values = p.values();
  for (auto& v : values) v.movable = chance(g, 90);
  return {p.name(), std::move(values), p.operations(), p.targets(),
          remat::copy_rates{.to_host = static_cast<double>(uniform(g, 1, 8)),
                            .to_device = static_cast<double>(uniform(g, 1, 8)),
                            .latency = static_cast<double>(uniform(g, 0, 3)) / 2}};
}

/// A random walk that mostly takes allowed steps and computes everything at least once. Now and then it breaks a rule: it
/// recomputes a once-only operation, or reads a dropped input.
remat::schedule random_walk(std::mt19937_64& g, const remat::problem& p) {
  remat::schedule s;
  const auto values = static_cast<std::int64_t>(p.values().size());
  std::vector<bool> here(p.values().size()), host(p.values().size(), false);
  for (remat::value_id v = 0; v < values; ++v) here[v] = p.is_source(v);
  const auto ensure = [&](auto& self, remat::value_id v) -> void {
    if (here[v]) return;
    if (host[v] && chance(g, 60)) {
      s.steps.push_back({action::prefetch, v});
      here[v] = true;
    } else if (!p.is_source(v)) {
      const auto& o = p.operations()[p.producer(v)];
      for (auto u : o.inputs) self(self, u);
      s.compute(p.producer(v));
      for (auto u : o.outputs) here[u] = true;
    }
  };
  for (remat::operation_id o = 0; o < p.operations().size(); ++o) {
    for (auto v : p.operations()[o].inputs) ensure(ensure, v);
    s.compute(o);
    for (auto v : p.operations()[o].outputs) here[v] = true;
    for (auto n = uniform(g, 0, 3); n > 0; --n) {
      const auto v = static_cast<remat::index_t>(uniform(g, 0, values - 1));
      if (here[v] && p.copies() && chance(g, 40)) {
        s.steps.push_back({action::offload, v});
        host[v] = true;
      }
      if (here[v] && !p.values()[v].held && (!p.is_source(v) || host[v]) && chance(g, 60)) {
        s.drop(v);
        here[v] = false;
      }
      if (!here[v] && chance(g, 30)) ensure(ensure, v);
    }
  }
  for (auto v : p.targets()) ensure(ensure, v);
  return s;
}

/// Makes a schedule probably invalid: removes, adds, changes or moves a step.
void break_somewhere(std::mt19937_64& g, const remat::problem& p, remat::schedule& s) {
  if (s.steps.empty()) return;
  const auto at = s.steps.begin() + uniform(g, 0, static_cast<std::int64_t>(s.steps.size()) - 1);
  const remat::step other{static_cast<action>(uniform(g, 0, 3)),
                          static_cast<remat::index_t>(uniform(g, 0, static_cast<std::int64_t>(p.values().size())))};
  switch (uniform(g, 0, 3)) {
    case 0:
      s.steps.erase(at);
      break;
    case 1:
      s.steps.insert(at, other);
      break;
    case 2:
      *at = other;
      break;
    default:
      std::swap(*at, s.steps[static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(s.steps.size()) - 1))]);
  }
}

template <class Write>
nlohmann::json document(Write write) {
  std::ostringstream out;
  write(out);
  return nlohmann::json::parse(out.str());
}

/// A problem and a schedule for it, in version 1 of the formats.
std::pair<remat::problem, remat::schedule> plain_case(std::mt19937_64& g) {
  const auto once = chance(g, 20) ? 30 : 0;
  auto p =
      remat::testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 1, 8)), .sources = 3, .once = once});
  if (chance(g, 70)) p = with_copies(g, p);
  auto s = random_walk(g, p);
  if (chance(g, 40)) break_somewhere(g, p, s);
  return {p, s};
}

/// The same in version 2. Some tiers have budgets of about what the schedule needs.
std::pair<remat::problem, remat::schedule> tiers_case(std::mt19937_64& g) {
  auto p = remat::testing::random_tiers_problem(g);
  auto s = remat::testing::tiers_walk(g, p).run();
  if (chance(g, 25)) remat::testing::break_tiers(g, p, s);
  if (chance(g, 30)) {
    std::vector<std::optional<remat::bytes_t>> budgets(p.tiers().size());
    for (std::size_t t = 1; t < budgets.size(); ++t)
      if (chance(g, 50)) budgets[t] = uniform(g, 10, 60);
    p = remat::testing::with_budgets(p, budgets);
  }
  return {p, s};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  std::mt19937_64 g(std::strtoull(argv[2], nullptr, 10));
  for (long n = std::strtol(argv[1], nullptr, 10); n > 0; --n) {
    const auto [p, s] = argc == 3 ? plain_case(g) : tiers_case(g);
    remat::result r;
    r.schedule = s;
    nlohmann::json verdict;
    try {
      const auto e = remat::evaluate(p, s);
      verdict = {{"peak", e.peak}, {"seconds", e.seconds}, {"recomputed", e.recomputed}};
      for (std::size_t t = 0; t < e.peaks.size(); ++t) verdict["peaks"][p.tiers()[t].name] = e.peaks[t];
    } catch (const remat::bad_schedule& why) {
      verdict = {{"step", why.step}, {"why", why.what()}};
    }
    const auto& problem = p;
    std::cout << nlohmann::json{{"problem", document([&](std::ostream& out) { remat::write_problem(out, problem); })},
                                {"schedule", document([&](std::ostream& out) { remat::write_schedule(out, r, problem); })},
                                {"verdict", verdict}}
              << "\n";
  }
}
