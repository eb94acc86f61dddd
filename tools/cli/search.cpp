// SPDX-License-Identifier: Apache-2.0
// The commands that search: solve, curve, compare.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/pareto_curve.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/io/curve.hpp>
#include <remat/io/json.hpp>
#include <remat/io/observers.hpp>
#include <remat/io/plan_document.hpp>
#include <remat/registry/registry.hpp>

#include "output.hpp"
#include "watcher.hpp"

namespace cli {

namespace {

exit_status status_of(const std::vector<remat::result>& results) {
  const auto any = [&](auto is) { return std::any_of(results.begin(), results.end(), is); };
  if (any([](const remat::result& r) { return r.found(); })) return success;
  return any([](const remat::result& r) { return r.status == remat::status::infeasible; }) ? infeasible : none_found;
}

/// Additional time relative to store-all, in per cent.
std::string extra(double seconds, double base) { return base > 0 ? "+" + percent(seconds / base - 1) : "-"; }

/// Curves as CSV: one row per point, numbers with all digits.
std::string csv(const std::vector<remat::labelled_curve>& curves) {
  std::string out = "solver,budget,status,seconds,bound,gap,peak,recomputed,budget_bound,elapsed\n";
  for (const auto& c : curves)
    for (const auto& r : c.points) {
      const auto number = [](double x) { return json(x).dump(); };
      out += c.label + "," + std::to_string(r.budget) + "," + std::string(remat::to_string(r.status)) + "," +
             (r.found() ? number(r.seconds) : "") + "," + number(r.bound) + "," + (r.found() ? number(r.gap()) : "") + "," +
             (r.found() ? std::to_string(r.peak) : "") + "," + (r.found() ? std::to_string(r.recomputed) : "") + "," +
             std::to_string(r.budget_bound) + "," + number(r.elapsed) + "\n";
    }
  return out;
}

/// Parses options of a solver.
/// @throws bad_option naming a text that is not `name=value`, or a name that is given twice
remat::registry::option_values options_of(const std::vector<std::string>& texts) {
  remat::registry::option_values given;
  for (const auto& text : texts) {
    const auto equals = text.find('=');
    if (equals == text.npos || equals == 0) throw remat::bad_option("--option takes name=value, got \"" + text + "\"");
    if (!given.emplace(text.substr(0, equals), text.substr(equals + 1)).second)
      throw remat::bad_option("--option " + text.substr(0, equals) + " is given twice");
  }
  return given;
}

}  // namespace

int solve(const arguments& a) {
  const auto document = remat::read_problem_document(a.problem);
  const auto& p = document.problem;
  const auto store_all = remat::measure_store_all(p);
  const auto budget = remat::parse_budget(a.budget, p);
  const auto solver = remat::registry::find(a.solver).make(a.backend, options_of(a.options));
  require_outputs(a);
  remat::result r;
  {
    watcher w;
    std::optional<remat::best_to_file> keep;
    if (!a.output.empty()) keep.emplace(a.output, p, budget, 1);
    const auto save = [&](const remat::progress& now) {
      if (keep) (*keep)(now);
    };
    if (a.start.empty())
      r = remat::solve(p, budget, solver, a.limits, w.observer(), save);
    else
      r = remat::solve(p, budget, solver, remat::start_from(remat::read_schedule(a.start, p).result.schedule), a.limits,
                       w.observer(), save);
    if (!r.found() && !interrupted) {  // tell which budget is enough
      auto share = a.limits;
      share.seconds = std::min(10.0, std::max(0.0, share.seconds - r.elapsed));
      const auto method = remat::registry::find(p.plain() ? "min_cut" : "offmate").make(a.backend);
      const auto least = remat::smallest_budget(p, method, share, 0.01, w.observer());
      if (least.found()) r.smallest_budget = std::min(least.peak, r.smallest_budget.value_or(least.peak));
      r.budget_bound = std::max(r.budget_bound, least.budget_bound);
    }
  }
  if (a.as_json) {
    auto out = summary(r);
    for (std::size_t t = 0; !p.plain() && t < r.peaks.size(); ++t) out["peaks"][p.tiers()[t].name] = r.peaks[t];
    out.update(json{
        {"operations", p.operations().size()}, {"store_all_peak", store_all.peak}, {"store_all_seconds", store_all.seconds}});
    std::cout << out.dump(2) << "\n";
  } else {
    std::cout << p.name() << ": " << remat::to_string(r.status) << ", " << r.solver << ", " << remat::format_seconds(r.elapsed)
              << "\n"
              << "  budget      " << exact(r.budget) << ", store-all needs " << exact(store_all.peak) << "\n";
    if (r.found()) {
      std::cout << "  peak        " << exact(r.peak) << "\n";
      for (std::size_t t = 1; !p.plain() && t < r.peaks.size(); ++t)
        std::cout << "              " << exact(r.peaks[t]) << " on the " << p.tiers()[t].name << "\n";
      std::cout << "  time        " << remat::format_seconds(r.seconds) << ", store-all takes "
                << remat::format_seconds(store_all.seconds) << "\n"
                << "  recomputed  " << r.recomputed << " computations beyond the first of " << p.operations().size()
                << " operations\n"
                << "  bound       " << remat::format_seconds(r.bound) << ", gap " << percent(r.gap()) << "\n";
      if (!r.scope.empty())
        std::cout << "              " << remat::format_seconds(r.scope_bound) << ", gap " << percent(r.scope_gap()) << ", among "
                  << r.scope << "\n";
    } else {
      if (!r.reason.empty()) std::cout << "  " << r.reason << "\n";
      std::cout << "  no schedule fits below  " << exact(r.budget_bound) << "\n";
      if (r.smallest_budget) std::cout << "  a schedule is known for " << exact(*r.smallest_budget) << "\n";
    }
  }
  if (!a.output.empty() && a.with_problem)
    remat::write_plan(a.output, r, p, document.unknown);
  else if (!a.output.empty())
    remat::write_schedule(a.output, r, p);
  if (r.found()) draw(a, document, r.schedule, r.budget);
  return status_of({r});
}

int curve(const arguments& a) {
  const auto p = remat::read_problem(a.problem);
  const auto store_all = remat::measure_store_all(p);
  std::vector<remat::bytes_t> budgets;
  for (const auto& text : a.budgets) budgets.push_back(remat::parse_budget(text, p));
  std::vector<std::pair<std::string, remat::any_solver>> solvers;
  for (const auto& name : a.solvers) solvers.emplace_back(name, remat::registry::find(name).make(a.backend));
  require_outputs(a);

  std::vector<remat::labelled_curve> curves;
  std::vector<remat::result> all;
  {
    watcher w;
    for (const auto& [name, solver] : solvers) {
      const auto watch = w.observer(name);
      curves.push_back({name, budgets.empty() ? remat::pareto_curve(p, remat::evenly{a.points}, solver, a.limits, watch)
                                              : remat::pareto_curve(p, budgets, solver, a.limits, watch)});
      all.insert(all.end(), curves.back().points.begin(), curves.back().points.end());
    }
  }
  json out = {
      {"problem", p.name()}, {"store_all_peak", store_all.peak}, {"store_all_seconds", store_all.seconds}, {"curves", {}}};
  for (const auto& c : curves) {
    json points = json::array();
    for (const auto& r : c.points) points.push_back(summary(r));
    out["curves"].push_back({{"solver", c.label}, {"points", points}});
  }
  const remat::curve_style style{.title = p.name() + ": time against budget", .base = store_all.seconds};
  if (a.as_json) {
    std::cout << out.dump(2) << "\n";
  } else {
    table t({"solver", "budget", "bytes", "status", "time", "extra", "gap", "peak"});
    for (const auto& c : curves)
      for (const auto& r : c.points) {
        const bool found = r.found();
        t.add({c.label, remat::format_bytes(r.budget), std::to_string(r.budget), std::string(remat::to_string(r.status)),
               found ? remat::format_seconds(r.seconds) : "-", found ? extra(r.seconds, store_all.seconds) : "-",
               found ? percent(r.gap()) : "-", found ? remat::format_bytes(r.peak) : "-"});
      }
    std::cout << t.text();
  }
  if (a.draw) (a.as_json ? std::cerr : std::cout) << remat::curve_text(curves, style);
  std::cout << std::flush;
  if (!a.output.empty()) {
    const bool wants_json = std::filesystem::path(a.output).extension() == ".json";
    remat::write_file(a.output, wants_json ? out.dump(2) + "\n" : csv(curves));
  }
  if (!a.svg.empty()) remat::write_file(a.svg, remat::curve_svg(curves, style));
  return status_of(all);
}

int compare(const arguments& a) {
  const auto p = remat::read_problem(a.problem);
  const auto store_all = remat::measure_store_all(p);
  const auto budget = remat::parse_budget(a.budget, p);
  std::vector<const remat::registry::method*> chosen;
  for (const auto& name : a.solvers) chosen.push_back(&remat::registry::find(name));
  if (chosen.empty())
    for (const auto& m : remat::registry::methods()) chosen.push_back(&m);

  struct row {
    std::string name, missing;  ///< why the solver could not run
    remat::result result;
  };
  std::vector<row> rows;
  {
    watcher w;
    for (const auto* m : chosen) {
      if (interrupted) break;
      rows.push_back({std::string(m->name), {}, {}});
      try {
        rows.back().result = remat::solve(p, budget, m->make(a.backend), a.limits, w.observer(rows.back().name));
      } catch (const remat::not_available& why) {
        rows.back().missing = why.what();
      } catch (const remat::too_large& why) {
        rows.back().result.status = remat::status::not_applicable;
        rows.back().result.reason = why.what();
      }
    }
  }
  double bound = 0;  // best bound of all solvers; each bound holds for every solver
  std::vector<remat::result> all;
  for (const auto& x : rows) bound = std::max(bound, x.result.bound), all.push_back(x.result);
  if (a.as_json) {
    json out = {{"problem", p.name()},
                {"budget", budget},
                {"bound", bound},
                {"store_all_peak", store_all.peak},
                {"store_all_seconds", store_all.seconds},
                {"solvers", json::array()}};
    for (const auto& x : rows) {
      json entry = {{"name", x.name}};
      entry.update(x.missing.empty() ? summary(x.result) : json{{"status", "not available"}, {"error", x.missing}});
      out["solvers"].push_back(std::move(entry));
    }
    std::cout << out.dump(2) << "\n";
  } else {
    std::cout << p.name() << ": budget " << exact(budget) << ", store-all needs " << exact(store_all.peak) << " and takes "
              << remat::format_seconds(store_all.seconds) << "\n";
    table t({"solver", "status", "time", "extra", "gap", "own bound", "peak", "elapsed"});
    for (const auto& x : rows) {
      const auto& r = x.result;
      if (!x.missing.empty())
        t.add({x.name, "not available", "-", "-", "-", "-", "-", "-"});
      else if (r.found())
        t.add({x.name, std::string(remat::to_string(r.status)), remat::format_seconds(r.seconds),
               extra(r.seconds, store_all.seconds), percent(r.seconds > bound ? 1 - bound / r.seconds : 0),
               remat::format_seconds(r.bound), remat::format_bytes(r.peak), remat::format_seconds(r.elapsed)});
      else
        t.add({x.name, std::string(remat::to_string(r.status)), "-", "-", "-", remat::format_seconds(r.bound), "-",
               remat::format_seconds(r.elapsed)});
    }
    std::cout << t.text();
    for (const auto& x : rows)
      if (!x.result.reason.empty()) std::cout << x.name << ": " << x.result.reason << "\n";
    std::cout << "Gaps are to the best bound that any of them proves, " << remat::format_seconds(bound) << ".\n";
  }
  return status_of(all);
}

}  // namespace cli
