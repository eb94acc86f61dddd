// SPDX-License-Identifier: Apache-2.0
/// @file
/// Random problems on several tiers. `tiers_walk.hpp` makes random schedules for them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/copies/placement.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/testing/generators.hpp>

namespace remat::testing {

inline constexpr tier_id device = device_tier, host = 1, disk = 2;
inline const limits no_hurry{.seconds = std::numeric_limits<double>::infinity()};

/// A step whose optimizer runs on the host, in place: the weight w starts and ends on the host.
struct step_parts {
  std::vector<value> values = {{.name = "w", .bytes = 10, .starts = host}, {"g", 10}, {.name = "w'", .bytes = 10, .ends = host}};
  std::vector<operation> operations = {
      {.name = "gradient", .inputs = {0}, .outputs = {1}, .seconds = 4},
      {.name = "adamw", .inputs = {0, 1}, .outputs = {2}, .seconds = 3, .on = host, .overwrites = {{2, 0}}}};
  std::vector<value_id> targets = {2};
  std::optional<copy_rates> copies = copy_rates{10, 10, 0};
  memory_system system = {};
  std::vector<carry> next = {{2, 0}};

  problem build() const { return {"step", values, operations, targets, copies, std::nullopt, system, next}; }
};

inline schedule host_step() {
  schedule s;
  s.prefetch(0);
  s.compute(0);
  s.drop(0);
  s.offload(1);
  s.drop(1);
  s.compute(1);
  s.drop(1, host);
  return s;
}

template <class List>
auto& pick(std::mt19937_64& g, List& list) {
  return list[static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(list.size()) - 1))];
}

/// The result of `evaluate`, or nothing if the schedule is invalid.
inline std::optional<evaluation> evaluated(const problem& p, const schedule& s) {
  try {
    return evaluate(p, s);
  } catch (const bad_schedule&) {
    return {};
  }
}

/// The problem with other budgets of its tiers.
inline problem with_budgets(const problem& p, const std::vector<std::optional<bytes_t>>& budgets) {
  auto x = p.members();
  for (std::size_t t = 0; t < budgets.size(); ++t) x.system.tiers[t].budget = budgets[t];
  return problem(std::move(x));
}

/// The problem with random budgets of its tiers other than the device.
/// @param percent the chance that a tier has a budget
inline problem with_some_budgets(std::mt19937_64& g, const problem& p, int percent, bytes_t least, bytes_t most) {
  std::vector<std::optional<bytes_t>> budgets(p.tiers().size());
  for (std::size_t t = 1; t < budgets.size(); ++t)
    if (chance(g, percent)) budgets[t] = uniform(g, least, most);
  return with_budgets(p, budgets);
}

/// Whether any tier has a budget.
inline bool limited(const problem& p) {
  return std::any_of(p.tiers().begin(), p.tiers().end(), [](const tier& t) { return t.budget.has_value(); });
}

inline memory_system random_system(std::mt19937_64& g, bool short_form) {
  memory_system system{{{"device"}, {"host"}}, {}};
  if (chance(g, 60)) system.tiers.push_back({"disk"});
  if (chance(g, 20)) std::swap(system.tiers[1], system.tiers.back());
  const auto memory = system.find("host");
  static const char* const streams[] = {"", "up", "down", "bus"};
  for (tier_id a = 0; a < system.tiers.size(); ++a)
    for (tier_id b = 0; b < system.tiers.size(); ++b) {
      if (a == b || (short_form && std::minmax(a, b) == std::minmax(device_tier, memory))) continue;
      if (!chance(g, a == memory || b == memory ? 95 : 30)) continue;
      system.links.push_back(
          {a, b, static_cast<double>(uniform(g, 1, 8)), static_cast<double>(uniform(g, 0, 3)) / 2, streams[uniform(g, 0, 3)]});
    }
  return system;
}

/// A problem with features of several tiers: starts and ends on other tiers, operations on other tiers and in place, a next step.
inline problem random_tiers_problem(std::mt19937_64& g) {
  const auto p =
      random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 1, 7)), .sources = 3, .held = 25, .once = 8});
  const bool short_form = chance(g, 40), cyclic = chance(g, 50);
  auto system = random_system(g, short_form);
  const auto some_tier = [&] { return tier_id(uniform(g, 0, static_cast<std::int64_t>(system.tiers.size()) - 1)); };
  auto values = p.values();
  auto operations = p.operations();
  for (value_id v = 0; v < values.size(); ++v) {
    if (p.is_source(v) && chance(g, 60)) values[v].starts = chance(g, 40) ? any_tier : some_tier();
    values[v].movable = chance(g, 97);
    if (p.is_target(v) && chance(g, 40)) values[v].ends = chance(g, 40) ? any_tier : some_tier();
  }
  std::vector<carry> next;
  if (cyclic)
    for (value_id source = 0; source < values.size(); ++source) {
      if (!p.is_source(source) || values[source].held || !chance(g, 70)) continue;
      const auto target = pick(g, p.targets());
      const auto is_one = [&](const carry& c) { return c.target == target; };
      if (p.is_source(target) || std::any_of(next.begin(), next.end(), is_one)) continue;
      values[target].bytes = values[source].bytes;
      if (values[target].ends != any_tier && values[source].starts != any_tier) values[target].ends = values[source].starts;
      next.push_back({target, source});
    }
  for (auto& op : operations) {
    if (chance(g, 30)) op.on = system.find("host");
    for (auto out : op.outputs)
      if (chance(g, 25)) {
        const auto in = pick(g, op.inputs);
        const bool taken = std::any_of(op.overwrites.begin(), op.overwrites.end(), [&](const auto& x) { return x.input == in; });
        const bool carried = std::any_of(next.begin(), next.end(), [&](const carry& c) { return c.target == out; });
        if (taken || values[in].held || (carried && values[out].bytes != values[in].bytes)) continue;
        values[out].bytes = values[in].bytes;
        op.overwrites.push_back({out, in});
      }
  }
  std::optional<copy_rates> copies;
  if (short_form)
    copies = {.to_host = static_cast<double>(uniform(g, 1, 8)),
              .to_device = static_cast<double>(uniform(g, 1, 8)),
              .latency = static_cast<double>(uniform(g, 0, 3)) / 2};
  return {"tiers", values, operations, p.targets(), copies, std::nullopt, system, next};
}

/// Options of `random_step`.
struct step_shape {
  std::size_t layers = 4;
  bool cyclic = true;
  int host_optimizer = 50;  ///< in %: the chance that the update of a layer runs on the host
  int disk = 0;             ///< in %: the chance that a source off the device starts on a disk; 0: no disk
};

/// A training step of a chain of layers. Weights and optimizer states start on either tier or anywhere. Updates run on either
/// tier, in place or not, one by one or after a norm of all gradients.
inline problem random_step(std::mt19937_64& g, const step_shape& shape) {
  std::vector<value> values;
  std::vector<operation> forward, backward, updates;
  std::vector<value_id> targets;
  std::vector<carry> next;
  const auto add = [&](value v) {
    values.push_back(std::move(v));
    return value_id(values.size() - 1);
  };
  const auto seconds = [&] { return static_cast<double>(uniform(g, 0, 6)); };
  const auto place = [&] {
    const auto t = chance(g, 25) ? any_tier : chance(g, 60) ? host : device;
    return shape.disk > 0 && t == host && chance(g, shape.disk) ? disk : t;
  };
  auto x = add({.name = "x", .bytes = uniform(g, 0, 4), .held = chance(g, 30), .starts = place()});
  std::vector<value_id> inputs = {x}, gradients;
  struct layer_values {
    value_id weight, state, gradient;
  };
  std::vector<layer_values> layers;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const auto bytes = uniform(g, 0, 6);
    const auto w = add({.name = "w", .bytes = bytes, .starts = place()});
    const auto s = add({.name = "s", .bytes = 2 * bytes, .starts = place()});
    const auto a = add({.name = "a", .bytes = uniform(g, 1, 9)});
    forward.push_back(
        {.name = "forward", .inputs = {inputs.back(), w}, .outputs = {a}, .seconds = seconds(), .workspace = uniform(g, 0, 2)});
    inputs.push_back(a);
    layers.push_back({w, s, 0});
  }
  auto d = inputs.back();
  for (auto l = shape.layers; l-- > 0;) {
    auto& [w, s, gradient] = layers[l];
    gradient = add({.name = "g", .bytes = values[w].bytes});
    const auto before = add({.name = "d", .bytes = values[inputs[l]].bytes});
    backward.push_back({.name = "backward",
                        .inputs = {d, inputs[l], w},
                        .outputs = {gradient, before},
                        .seconds = seconds(),
                        .once = chance(g, 20)});
    gradients.push_back(gradient);
    d = before;
  }
  if (chance(g, 30)) {
    const auto norm = add({.name = "norm", .bytes = uniform(g, 0, 1)});
    backward.push_back(
        {.name = "norm", .inputs = gradients, .outputs = {norm}, .seconds = 1, .on = chance(g, 50) ? host : device});
    d = norm;
  }
  const bool clipped = backward.back().name == "norm", interleaved = !clipped && chance(g, 50);
  for (const auto& [w, s, gradient] : layers) {
    if (chance(g, 15)) {  // frozen
      if (chance(g, 50)) values[w].held = true;
      continue;
    }
    const auto nw = add({.name = "w'", .bytes = values[w].bytes}), ns = add({.name = "s'", .bytes = values[s].bytes});
    operation update{.name = "update", .inputs = {gradient, w, s}, .outputs = {nw, ns}, .seconds = seconds()};
    if (clipped) update.inputs.push_back(d);
    if (chance(g, shape.host_optimizer)) {
      update.on = host;
      update.workspace = chance(g, 10) ? 1 : 0;
    }
    if (chance(g, 80)) update.overwrites = {{nw, w}, {ns, s}};
    for (const auto& [after, before] : {std::pair(nw, w), std::pair(ns, s)}) {
      values[after].ends = chance(g, 20) ? any_tier : values[before].starts;
      targets.push_back(after);
      if (shape.cyclic) next.push_back({after, before});
    }
    updates.push_back(std::move(update));
  }
  auto operations = std::move(forward);
  for (auto& op : backward) {
    operations.push_back(std::move(op));
    for (auto u = updates.begin(); interleaved && u != updates.end(); ++u)
      if (u->inputs[0] == operations.back().outputs[0]) {
        operations.push_back(std::move(*u));
        updates.erase(u);
        break;
      }
  }
  for (auto& u : updates) operations.push_back(std::move(u));
  if (chance(g, 50)) values[d].ends = chance(g, 50) ? device : any_tier, targets.push_back(d);
  const auto rate = [&] { return static_cast<double>(uniform(g, 1, 8)) / 2; };
  const auto latency = static_cast<double>(uniform(g, 0, 2)) / 2;
  memory_system system;
  if (shape.disk > 0) {
    const bool shared = chance(g, 30);
    system = {{{"device"}, {"host"}, {"disk"}},
              {{host, disk, rate(), latency, shared ? "bus" : "write"}, {disk, host, rate(), latency, shared ? "bus" : "read"}}};
  }
  if (chance(g, 50))
    return {"step", values, operations, targets, copy_rates{rate(), rate(), latency}, std::nullopt, system, next};
  const bool shared = chance(g, 30);
  if (system.tiers.empty()) system.tiers = {{"gpu"}, {"memory"}};
  system.links.push_back({device, host, rate(), latency, shared ? "bus" : "up"});
  system.links.push_back({host, device, rate(), latency, shared ? "bus" : "down"});
  return {"step", values, operations, targets, std::nullopt, std::nullopt, system, next};
}

/// A random problem on several tiers that can be planned: a training step, or any problem.
inline problem plannable_problem(std::mt19937_64& g, bool step) {
  for (;;) {
    auto p = step ? random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 4)),
                                    .cyclic = chance(g, 50),
                                    .disk = 40 * static_cast<int>(uniform(g, 0, 1))})
                  : random_tiers_problem(g);
    if (!p.plain() && copies::why_unplannable(p).empty()) return p;
  }
}

}  // namespace remat::testing
