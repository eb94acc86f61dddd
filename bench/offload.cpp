// SPDX-License-Identifier: Apache-2.0
// Plans recomputation together with copies to the host. Prints a table in Markdown with extra times in % of store-all's time:
// bound / plan (recomputation alone; copies alone).
//
// A budget f stands for held + f (peak of store-all - held) bytes. A link rho moves (peak - held) bytes out, and then back, in
// rho times the time of store-all. Its two directions have the same rate, and a latency of 1/10 000 of the time of store-all, at
// most 10 us.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/slower_links.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/json.hpp>
#include <remat/registry/registry.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>

namespace {

struct plans {
  std::vector<std::string> instances;
  std::vector<double> budgets = {.5, .3, .2, .1}, links = {2, 1};
  bool step = false, joint = false;
  std::string solver = "offmate", weights;
  bool anywhere = false;
  double host = 0, disk = 4;
  double share = 1;
  remat::limits limits{.seconds = 10};
};

/// Adds an optimizer to a step. An operation reads each target of more than 512 bytes right after its producer, and makes five
/// passes over it at 2 TB/s. The target need not be kept.
remat::problem with_steps(const remat::problem& p) {
  auto values = p.values();
  std::vector<remat::operation> operations;
  std::vector<remat::value_id> targets;
  for (auto t : p.targets())
    if (p.is_source(t) || values[t].bytes <= 512) targets.push_back(t);
  for (const auto& op : p.operations()) {
    operations.push_back(op);
    for (auto v : op.outputs)
      if (p.is_target(v) && p.values()[v].bytes > 512) {
        targets.push_back(static_cast<remat::index_t>(values.size()));
        operations.push_back({"step", {v}, {targets.back()}, 5 * static_cast<double>(p.values()[v].bytes) / 2e12});
        values.push_back({"stepped " + p.values()[v].name, 0, false});
      }
  }
  return {p.name() + " + step", std::move(values), std::move(operations), std::move(targets)};
}

std::string percent(double seconds, double all) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", std::max(0.0, 100 * (seconds / all - 1)));
  return text;
}

/// Moves the weights of a step (held values of more than 512 bytes) to the host. A target counts as the gradient of a weight of
/// the same size.
/// @param kind "frozen": gradients end on the host. "host" or "device": AdamW runs in place on this tier, in steps that repeat.
/// Its states start on the host, with twice the bytes of the weight; it makes five passes at 200 GB/s (host) or 2 TB/s (device).
/// @param anywhere the planner chooses where weights and states start, and steps repeat also for "frozen"
remat::problem with_weights(const remat::problem& p, const std::string& kind, remat::copy_rates link, bool anywhere) {
  auto values = p.values();
  auto operations = p.operations();
  auto targets = p.targets();
  std::map<remat::bytes_t, std::vector<remat::value_id>>
      weights;  // by size in bytes; the weight whose last use is earliest comes last
  const remat::tier_id host = 1;
  for (remat::value_id v = 0; v < values.size(); ++v)
    if (values[v].held && values[v].bytes > 512) {
      values[v].starts = host;
      if (!p.consumers(v).empty()) weights[values[v].bytes].push_back(v);
    }
  for (auto& [bytes, list] : weights)
    std::sort(list.begin(), list.end(), [&](auto a, auto b) { return p.consumers(a).back() > p.consumers(b).back(); });
  auto gradients = targets;
  std::sort(gradients.begin(), gradients.end(), [&](auto a, auto b) { return p.producer(a) < p.producer(b); });
  std::vector<remat::carry> next;
  for (auto g : gradients) {
    auto& list = weights[values[g].bytes];
    if (list.empty() || p.is_source(g)) continue;
    const auto w = list.back();
    list.pop_back();
    if (kind == "frozen") {
      values[g].ends = host;
      continue;
    }
    const auto bytes = values[g].bytes;
    values[w].held = false;
    const remat::value_id s = values.size(), w2 = s + 1, s2 = s + 2;
    values.push_back({.name = "state", .bytes = 2 * bytes, .starts = host});
    values.push_back({.name = "weight'", .bytes = bytes, .ends = host});
    values.push_back({.name = "state'", .bytes = 2 * bytes, .ends = host});
    const bool there = kind == "host";
    operations.push_back({.name = "adamw",
                          .inputs = {g, w, s},
                          .outputs = {w2, s2},
                          .seconds = 5 * static_cast<double>(bytes) / (there ? 2e11 : 2e12),
                          .on = there ? host : remat::device_tier,
                          .overwrites = {{w2, w}, {s2, s}}});
    targets.erase(std::find(targets.begin(), targets.end(), g));
    for (const auto& [after, before] : {std::pair(w2, w), std::pair(s2, s)}) {
      targets.push_back(after);
      next.push_back({after, before});
    }
  }
  std::vector<std::pair<remat::operation_id, remat::operation>>
      placed;  // each update right after the operation that makes its gradient
  for (remat::operation_id o = 0; o < operations.size(); ++o)
    placed.push_back({o < p.operations().size() ? o : p.producer(operations[o].inputs[0]), operations[o]});
  std::stable_sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  operations.clear();
  for (auto& x : placed) operations.push_back(std::move(x.second));
  if (anywhere) {
    const auto count = static_cast<remat::index_t>(values.size());
    values.push_back({.name = "step", .bytes = 0});
    values.push_back({.name = "step'", .bytes = 0});
    operations.push_back({.name = "count", .inputs = {count}, .outputs = {count + 1}, .seconds = 0});
    targets.push_back(count + 1);
    next.push_back({count + 1, count});
    for (auto& v : values)
      if (v.starts == host) v.starts = remat::any_tier;
    for (const auto& c : next)
      if (values[c.source].starts == remat::any_tier) values[c.target].ends = remat::any_tier;
  }
  return {p.name(), std::move(values), std::move(operations), std::move(targets), link, std::nullopt, {}, std::move(next)};
}

/// Adds a disk behind the host. Values that started or ended on the host start or end on the disk instead.
/// @param share rates between host and disk, relative to the rates between device and host
remat::problem with_disk(const remat::problem& p, remat::bytes_t host_budget, double share) {
  const remat::tier_id host = 1, disk = 2;
  auto values = p.values();
  for (auto& v : values) {
    if (v.starts == host) v.starts = disk;
    if (v.ends == host) v.ends = disk;
  }
  const auto& r = *p.copies();
  remat::memory_system system{{{"device"}, {"host", host_budget}, {"disk"}},
                              {{host, disk, share * r.to_host, r.latency}, {disk, host, share * r.to_device, r.latency}}};
  return {p.name(), std::move(values), p.operations(), p.targets(), r, std::nullopt, std::move(system), p.next()};
}

/// Prints the row of a step with weights off the device. Budgets are shares of the peak of store-all, weights included.
void print_weights(const plans& x, const std::string& name, const remat::problem& plain, double rho) {
  const auto all = remat::evaluate(plain, remat::store_all_schedule(plain));
  const double rate = 2 * static_cast<double>(all.peak - plain.held_bytes()) / (rho * all.seconds);
  auto p = with_weights(plain, x.weights, {rate, rate, std::min(1e-5, 1e-4 * all.seconds)}, x.anywhere);
  const auto least = remat::measure_store_all(p);
  if (x.host > 0) p = with_disk(p, static_cast<remat::bytes_t>(x.host * static_cast<double>(least.peak)), 1 / x.disk);
  std::cout << "| " << name << " (" << p.operations().size() << ") | " << rho << " |";
  for (const double f : x.budgets) {
    const auto budget = static_cast<remat::bytes_t>(f * static_cast<double>(least.peak));
    const auto cell = [&](const remat::result& r) { return r.found() ? percent(r.seconds, least.seconds) : "-"; };
    const auto joint = remat::solve(p, budget, remat::registry::find(x.solver).make("auto"), x.limits);
    std::cout << " " << percent(joint.bound, least.seconds) << " / " << cell(joint);
    if (!x.joint) std::cout << " (" << cell(remat::solve(p, budget, remat::offload_only(), x.limits)) << ")";
    std::cout << " |" << std::flush;
  }
  std::cout << std::endl;
}

void print_row(const plans& x, const std::string& name, const remat::problem& plain, double rho) {
  const auto all = remat::evaluate(plain, remat::store_all_schedule(plain));
  const double rate = 2 * static_cast<double>(all.peak - plain.held_bytes()) / (rho * all.seconds);
  const auto p = plain.with_copies(remat::copy_rates{rate, rate, std::min(1e-5, 1e-4 * all.seconds)});
  std::cout << "| " << name << " (" << p.operations().size() << ") | " << rho << " |";
  for (const double f : x.budgets) {
    const auto budget = p.held_bytes() + static_cast<remat::bytes_t>(f * static_cast<double>(all.peak - p.held_bytes()));
    const auto cell = [&](const remat::result& r) { return r.found() ? percent(r.seconds, all.seconds) : "-"; };
    const auto joint = remat::solve(p, budget, remat::registry::find(x.solver).make("auto"), x.limits);
    if (!joint.found()) {
      std::cout << " - |";
      continue;
    }
    if (x.share < 1) {
      const auto slower = remat::with_slower_links(p, x.share);
      const auto less = remat::solve(p, budget, remat::offmate<>({}, {.rate_share = x.share}), x.limits);
      const auto at = [&](const remat::problem& q, const remat::result& r) {
        return percent(remat::evaluate(q, r.schedule).seconds, all.seconds);
      };
      std::cout << " " << at(p, joint) << " / " << at(slower, joint) << "; " << at(p, less) << " / " << at(slower, less) << " |"
                << std::flush;
      continue;
    }
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", joint.elapsed);
    std::cout << " " << percent(joint.bound, all.seconds) << " / " << cell(joint) << " ";
    if (!x.joint)
      std::cout << "(" << cell(remat::solve(plain, budget, remat::min_cut(), x.limits)) << "; "
                << cell(remat::solve(p, budget, remat::offload_only(), x.limits)) << ") ";
    std::cout << seconds << " s |" << std::flush;
  }
  std::cout << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  plans x;
  CLI::App app{
      "Plans recomputation and copies together; prints extra time in % of store-all's, bound / plan (recomputation alone; copies "
      "alone)."};
  app.add_option("problems", x.instances, "remat-problem files")->required()->check(CLI::ExistingFile);
  app.add_option("-b,--budgets", x.budgets, "shares of what store-all needs beyond the held sources")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("-r,--links", x.links, "time to move that out and back, in store-all's time")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("-t,--seconds", x.limits.seconds, "time limit of each search")->capture_default_str();
  app.add_option("--threads", x.limits.threads, "of each search")->capture_default_str();
  app.add_flag("--step", x.step, "with an optimizer that takes each gradient at once");
  app.add_option("-s,--solver", x.solver, "that plans both together")->capture_default_str();
  app.add_flag("--joint", x.joint, "neither recomputation alone nor copies alone");
  app.add_option("--slower", x.share, "prints instead: planned for the rates / run at this share; planned for it, alike")
      ->check(CLI::Range(1e-3, 1.0));
  app.add_option("--weights", x.weights, "weights start on the host; gradients go there, or AdamW runs on a tier")
      ->check(CLI::IsMember({"frozen", "host", "device"}));
  app.add_flag("--anywhere", x.anywhere, "with --weights: they start where the planner says, and steps repeat");
  app.add_option("--host", x.host,
                 "with --weights: budget of the host, of all bytes; weights and states start on a disk beyond it")
      ->check(CLI::Range(1e-3, 1e3));
  app.add_option("--disk", x.disk, "how many times as slow that disk's links are")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    std::cout << "| instance (operations) | link |";
    for (const double f : x.budgets) std::cout << " " << 100 * f << " % |";
    std::cout << "\n|---|---|";
    for (std::size_t i = 0; i < x.budgets.size(); ++i) std::cout << "---|";
    std::cout << std::endl;
    for (const double rho : x.links)
      for (const std::filesystem::path file : x.instances) {
        const auto p = remat::read_problem(file).with_copies({});
        if (!x.weights.empty())
          print_weights(x, file.stem().string(), p, rho);
        else
          print_row(x, file.stem().string() + (x.step ? " + step" : ""), x.step ? with_steps(p) : p, rho);
      }
  } catch (const std::exception& why) {
    std::cerr << "offload: " << why.what() << "\n";
    return 1;
  }
}
