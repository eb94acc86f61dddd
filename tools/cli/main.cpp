// SPDX-License-Identifier: Apache-2.0
/// @file
/// The command-line program: solves, checks and describes problems in the exchange formats.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <limits>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/json.hpp>
#include <remat/io/timeline.hpp>
#include <remat/solver/min_cut.hpp>

#include "methods.hpp"

namespace {

using json = nlohmann::ordered_json;

/// Exit statuses.
enum exit_status { success = 0, not_valid = 1, bad_input = 2, infeasible = 3, none_found = 4 };

/// What the command line says; each command reads its part.
struct arguments {
  std::string problem, schedule, budget, output;
  std::string solver = "rockmate", backend = "auto";
  remat::limits limits;
  std::string svg;
  bool as_json = false, draw = false;
};

std::atomic<bool> interrupted = false;

std::string percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %%", fraction * 100);
  return text;
}

/// One line that is rewritten while a search runs, on terminals only.
class status_line {
 public:
  void show(const remat::progress& p) {
    if (!terminal_) return;
    std::string text = p.stage;
    if (p.best < std::numeric_limits<double>::infinity()) text += ", best " + remat::format_seconds(p.best);
    if (p.bound > 0) text += ", bound " + remat::format_seconds(p.bound);
    std::fprintf(stderr, "\r\033[K%.1f s  %s", p.elapsed, text.c_str());
    shown_ = true;
  }
  ~status_line() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
};

/// Draws a schedule where the command line asks for it.
void draw(const arguments& a, const remat::problem& p, const remat::schedule& s, std::optional<remat::bytes_t> budget) {
  if (!a.draw && a.svg.empty()) return;
  const auto timeline = remat::trace_memory(p, s);
  remat::timeline_style style{.title = p.name(), .budget = budget};
  if (a.draw) (a.as_json ? std::cerr : std::cout) << remat::timeline_text(timeline, style);
  if (a.svg.empty()) return;
  style.overlays = {remat::as_series(remat::trace_memory(p, remat::store_all_schedule(p)), "store-all")};
  remat::write_file(a.svg, remat::timeline_svg(timeline, style));
}

int solve(const arguments& a) {
  const auto p = remat::read_problem(a.problem);
  const auto store_all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto budget = remat::parse_budget(a.budget, p);
  remat::result r;
  {
    status_line line;
    std::signal(SIGINT, [](int) { interrupted = true; });
    r = cli::find_method(a.solver).run({p, budget, a.limits, a.backend, [&](const remat::progress& now) {
                                          line.show(now);
                                          return interrupted ? remat::control::stop : remat::control::go_on;
                                        }});
    std::signal(SIGINT, SIG_DFL);
  }
  if (!r.found() && !interrupted) {  // say what would do
    const auto least = remat::smallest_budget(p, remat::min_cut(), {.seconds = std::min(10.0, a.limits.seconds)});
    r.smallest_budget = std::min(least.peak, r.smallest_budget.value_or(least.peak));
    r.budget_bound = std::max(r.budget_bound, least.budget_bound);
  }
  if (a.as_json) {
    json out = {{"status", remat::to_string(r.status)},
                {"solver", r.solver},
                {"budget", r.budget},
                {"budget_bound", r.budget_bound},
                {"bound", r.bound},
                {"elapsed", r.elapsed},
                {"operations", p.operations().size()},
                {"store_all_peak", store_all.peak},
                {"store_all_seconds", store_all.seconds}};
    if (r.found()) out.update(json{{"peak", r.peak}, {"seconds", r.seconds}, {"recomputed", r.recomputed}, {"gap", r.gap()}});
    if (r.smallest_budget) out["smallest_budget"] = *r.smallest_budget;
    if (!r.scope.empty()) out.update(json{{"scope", r.scope}, {"scope_bound", r.scope_bound}, {"scope_gap", r.scope_gap()}});
    std::cout << out.dump(2) << "\n";
  } else {
    const auto exact = [](remat::bytes_t b) { return remat::format_bytes(b) + " (" + std::to_string(b) + " bytes)"; };
    std::cout << p.name() << ": " << remat::to_string(r.status) << ", " << r.solver << ", " << remat::format_seconds(r.elapsed)
              << "\n"
              << "  budget      " << exact(r.budget) << ", store-all needs " << exact(store_all.peak) << "\n";
    if (r.found()) {
      std::cout << "  peak        " << exact(r.peak) << "\n"
                << "  time        " << remat::format_seconds(r.seconds) << ", store-all takes "
                << remat::format_seconds(store_all.seconds) << "\n"
                << "  recomputed  " << r.recomputed << " computations beyond the first of " << p.operations().size()
                << " operations\n"
                << "  bound       " << remat::format_seconds(r.bound) << ", gap " << percent(r.gap()) << "\n";
      if (!r.scope.empty())
        std::cout << "              " << remat::format_seconds(r.scope_bound) << ", gap " << percent(r.scope_gap()) << ", among "
                  << r.scope << "\n";
    } else {
      std::cout << "  no schedule fits below  " << exact(r.budget_bound) << "\n";
      if (r.smallest_budget) std::cout << "  a schedule is known for " << exact(*r.smallest_budget) << "\n";
    }
  }
  std::cout << std::flush;  // before a file that cannot be written is reported
  if (!a.output.empty()) remat::write_schedule(a.output, r, p.name());
  if (r.found()) draw(a, p, r.schedule, r.budget);
  return r.found() ? success : r.status == remat::status::infeasible ? infeasible : none_found;
}

int check(const arguments& a) {
  const auto p = remat::read_problem(a.problem);
  auto report = [&](const json& out, const std::string& text) {
    std::cout << (a.as_json ? out.dump(2) : text) << "\n";
    return out["valid"] == true && out.value("within_budget", true) ? success : not_valid;
  };
  remat::schedule s;
  remat::evaluation e;
  try {
    s = remat::read_schedule(a.schedule).result.schedule;
    e = remat::evaluate(p, s);
  } catch (const remat::bad_schedule& why) {
    std::cerr << "remat: invalid: " << why.what() << "\n";
    return report({{"valid", false}, {"step", why.step}, {"error", why.what()}}, "invalid");
  }
  json out = {{"valid", true}, {"peak", e.peak}, {"seconds", e.seconds}, {"recomputed", e.recomputed}};
  std::string text = "valid: peak " + remat::format_bytes(e.peak) + " (" + std::to_string(e.peak) + " bytes), " +
                     remat::format_seconds(e.seconds) + ", " + std::to_string(e.recomputed) + " recomputed";
  std::optional<remat::bytes_t> budget;
  if (!a.budget.empty()) {
    budget = remat::parse_budget(a.budget, p);
    out["budget"] = *budget;
    out["within_budget"] = e.peak <= *budget;
    if (e.peak > *budget) {
      const auto first = std::find_if(e.memory.begin(), e.memory.end(), [&](auto bytes) { return bytes > *budget; });
      const bool at_start = p.source_bytes() > *budget || first == e.memory.end();
      if (!at_start) out["step"] = first - e.memory.begin();
      std::cerr << "remat: over budget by " << e.peak - *budget << " bytes, first "
                << (at_start ? "before the first step" : "at step " + std::to_string(first - e.memory.begin())) << "\n";
    }
  }
  const int status = report(out, text);
  draw(a, p, s, budget);
  return status;
}

int info(const arguments& a) {
  const auto p = remat::read_problem(a.problem);
  const auto store_all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto least = remat::bounds_without_search(p);
  std::size_t uses = 0, once = 0, held = 0;
  for (const auto& o : p.operations()) {
    uses += o.inputs.size();
    once += o.once;
  }
  for (const auto& v : p.values()) held += v.held;
  if (a.as_json) {
    std::cout << json{{"name", p.name()},
                      {"values", p.values().size()},
                      {"held", held},
                      {"operations", p.operations().size()},
                      {"once", once},
                      {"uses", uses},
                      {"targets", p.targets().size()},
                      {"copies", p.copies().has_value()},
                      {"held_bytes", p.held_bytes()},
                      {"source_bytes", p.source_bytes()},
                      {"store_all_peak", store_all.peak},
                      {"store_all_seconds", store_all.seconds},
                      {"budget_bound", least.budget},
                      {"bound", least.seconds}}
                     .dump(2)
              << "\n";
  } else {
    std::cout << p.name() << "\n"
              << "  values      " << p.values().size() << " (" << held << " held, " << p.targets().size() << " targets)\n"
              << "  operations  " << p.operations().size() << " (" << once << " once only, " << uses << " inputs)\n"
              << "  copies      " << (p.copies() ? "allowed" : "not allowed") << "\n"
              << "  held        " << remat::format_bytes(p.held_bytes()) << "\n"
              << "  store-all   " << remat::format_bytes(store_all.peak) << ", " << remat::format_seconds(store_all.seconds)
              << "\n"
              << "  every budget is at least " << remat::format_bytes(least.budget) << " (" << least.budget << " bytes)\n";
  }
  return success;
}

}  // namespace

int main(int argc, char** argv) {
  arguments a;
  CLI::App app("Rematerialization: which values to keep, recompute or move inside a memory budget.", "remat");
  app.require_subcommand(1);
  std::string solvers = "method:";
  for (const auto& m : cli::methods) solvers += "\n  " + std::string(m.name) + ": " + std::string(m.summary);

  auto* solving = app.add_subcommand("solve", "look for the fastest schedule within a budget");
  solving->add_option("problem", a.problem, "remat-problem file")->required();
  solving->add_option("-b,--budget", a.budget, "bytes such as 1.5GiB, or 60% of what store-all needs beyond held sources")
      ->required();
  solving->add_option("-s,--solver", a.solver, solvers)->capture_default_str();
  solving->add_option("--backend", a.backend, "MILP library")
      ->check(CLI::IsMember({"highs", "glpk", "auto"}))
      ->capture_default_str();
  solving->add_option("--time-limit", a.limits.seconds, "seconds")->capture_default_str();
  solving->add_option("--threads", a.limits.threads, "worker threads")->capture_default_str();
  solving->add_option("--seed", a.limits.seed, "of every random choice")->capture_default_str();
  solving->add_option("-o,--output", a.output, "where to write the remat-schedule");

  auto* checking = app.add_subcommand("check", "judge a schedule");
  checking->add_option("problem", a.problem, "remat-problem file")->required();
  checking->add_option("schedule", a.schedule, "remat-schedule file")->required();
  checking->add_option("-b,--budget", a.budget, "demand a peak within this budget");

  for (auto* command : {solving, checking}) {
    command->add_flag("--timeline", a.draw, "draw memory over time");
    command->add_option("--svg", a.svg, "draw memory over time into this SVG file");
  }

  auto* describing = app.add_subcommand("info", "describe a problem");
  describing->add_option("problem", a.problem, "remat-problem file")->required();

  for (auto* command : {solving, checking, describing}) command->add_flag("--json", a.as_json, "print JSON");
  app.footer(
      "Exit status: 0 found or valid; 1 schedule not valid or over the budget; 2 bad input;\n"
      "3 proven that nothing fits; 4 nothing found within the limits.");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& why) {
    return app.exit(why) == 0 ? success : bad_input;
  }
  try {
    if (*solving) return solve(a);
    return *checking ? check(a) : info(a);
  } catch (const std::exception& why) {
    std::cerr << "remat: " << why.what() << "\n";
    return bad_input;
  }
}
