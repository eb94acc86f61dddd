// SPDX-License-Identifier: Apache-2.0
/// @file
/// The command-line program: searches, checks and describes problems in the exchange formats.
#include <charconv>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>

#include <remat/registry/registry.hpp>
#include <remat/version.hpp>

#include "commands.hpp"
#include "printable.hpp"

namespace {

/// Checks a seed, because CLI11 also accepts -1 and numbers above 2^64.
/// @return an error message; empty if `text` is a seed
std::string refuse_seed(const std::string& text) {
  std::uint64_t seed = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), seed);
  return failed == std::errc{} && rest == text.data() + text.size() ? "" : "must be an integer from 0 to 2^64 - 1, got " + text;
}

/// Checks the name of a file. An empty name usually comes from an unset variable of the shell; nothing would be written.
/// @return an error message; empty if `text` is a name
std::string refuse_file(const std::string& text) { return text.empty() ? "is no name of a file: \"\"" : ""; }

}  // namespace

int main(int argc, char** argv) {
  cli::arguments a;
  CLI::App app("Rematerialization: which values to keep, recompute or move inside a memory budget.", "remat");
  app.require_subcommand(1);
  app.failure_message([](const CLI::App* whole, const CLI::Error& why) {
    const auto chosen = whole->get_subcommands();
    const std::string command = chosen.empty() ? "remat" : "remat " + chosen.front()->get_name();
    return "remat: " + cli::printable(why.what()) + "; see " + command + " --help\n";
  });
  app.set_version_flag("--version", REMAT_VERSION);
  app.footer(
      "Exit status: 0 found or valid; 1 schedule not valid or over the budget; 2 bad input;\n"
      "3 proven that nothing fits; 4 nothing found: time was up, or the method has no schedule for it.");

  auto* solving = app.add_subcommand("solve", "look for the fastest schedule within a budget");
  auto* drawing = app.add_subcommand("curve", "time against budget, for one solver or several");
  auto* comparing = app.add_subcommand("compare", "all solvers on one problem and budget, as a table");
  auto* checking = app.add_subcommand("check", "judge a schedule");
  auto* reporting = app.add_subcommand("report", "write an HTML page about a plan");
  auto* placing = app.add_subcommand("layout", "give every allocation of a CSV file an offset within a capacity");
  auto* describing = app.add_subcommand("info", "describe a problem");
  auto* listing = app.add_subcommand("list", "solvers and MILP libraries");

  for (auto* command : {solving, drawing, comparing, checking, describing})
    command->add_option("problem", a.problem, "remat-problem file")->required();
  checking->add_option("schedule", a.schedule, "remat-schedule file")->required();
  reporting->add_option("plan", a.schedule, "remat-schedule file")->required();
  reporting->add_option("--problem", a.problem, "remat-problem file that the plan is for, unless the plan holds its problem");
  reporting->add_option("-o,--output", a.output, "the HTML file to write")->required();

  placing->add_option("allocations", a.allocations, "CSV file with the columns id,lower,upper,size")->required();
  placing->add_option("-c,--capacity", a.capacity, "bytes such as 1048576 or 1MiB")->required();
  placing->add_option("-o,--output", a.output, "where to write the allocations with a column offset");
  placing->add_option("--time-limit", a.limits.seconds, "seconds")->capture_default_str();
  placing->add_option("--seed", a.limits.seed, "of every random choice")->capture_default_str();

  const std::string budget = "bytes such as 1.5GiB, or 60% of what store-all needs beyond held sources";
  for (auto* command : {solving, comparing}) command->add_option("-b,--budget", a.budget, budget)->required();
  checking->add_option("-b,--budget", a.budget, "demand a peak within this budget");
  auto* budgets = drawing->add_option("-b,--budgets", a.budgets, "several, separated by commas: " + budget)->delimiter(',');
  drawing->add_option("-n,--points", a.points, "so many, from the smallest budget found to that of store-all")
      ->excludes(budgets)
      ->capture_default_str();
  reporting->add_option("-n,--points", a.points, "budgets of the curve in the report")->capture_default_str();

  std::string solvers;
  for (const auto& m : remat::registry::methods()) solvers += "\n  " + std::string(m.name) + ": " + std::string(m.summary);
  a.solver = remat::registry::methods()[0].name;
  for (auto* command : {solving, reporting})
    command->add_option("-s,--solver", a.solver, "method:" + solvers)->capture_default_str();
  solving->add_option("--option", a.options, "name=value, an option of the solver (see remat list --options); may be repeated");
  listing->add_flag("--options", a.with_options, "also the options of the solvers");
  drawing->add_option("-s,--solver,--solvers", a.solvers, "one or more, separated by commas:" + solvers)->delimiter(',');
  comparing->add_option("-s,--solver,--solvers", a.solvers, "only these, separated by commas")->delimiter(',');
  for (auto* command : {solving, drawing, comparing, reporting}) {
    command->add_option("--backend", a.backend, "MILP library")
        ->check(CLI::IsMember({"highs", "glpk", "auto"}))
        ->capture_default_str();
    command->add_option("--time-limit", a.limits.seconds, command == comparing ? "seconds for each solver" : "seconds")
        ->capture_default_str();
    command->add_option("--threads", a.limits.threads, "worker threads, at most 1024")->capture_default_str();
    command->add_option("--seed", a.limits.seed, "of every random choice")->capture_default_str();
    command->add_option("--gap", a.limits.gap, "relative gap that counts as optimal")->capture_default_str();
  }
  solving->add_option("-o,--output", a.output, "where to write the remat-schedule, the best so far while searching");
  drawing->add_option("-o,--output", a.output, "where to write the points: JSON for a name that ends in .json, otherwise CSV");
  solving->add_flag("--with-problem", a.with_problem,
                    "write the problem into that file as well, so that `remat report` needs no other");
  solving->add_option("--start", a.start, "a remat-schedule to begin with, of any memory need");
  for (auto* command : {solving, checking}) {
    command->add_option("--trace", a.trace, "write the schedule for chrome://tracing or Perfetto");
    command->add_option("--memory", a.memory, "write planned memory for pytorch.org/memory_viz");
    command->add_flag("--timeline", a.draw, "draw memory over time");
    command->add_option("--svg", a.svg, "draw memory over time into this SVG file");
  }
  drawing->add_flag("--plot", a.draw, "draw the curves");
  drawing->add_option("--svg", a.svg, "draw the curves into this SVG file");
  for (auto* command : {solving, drawing, comparing, checking, describing, listing})
    command->add_flag("--json", a.as_json, "print JSON");
  for (auto* command : {solving, drawing, comparing, checking, reporting, placing})
    for (auto* option : command->get_options()) {
      if (option->check_lname("seed")) option->check(refuse_seed);
      if (option->check_lname("output") || option->check_lname("svg") || option->check_lname("trace") ||
          option->check_lname("memory"))
        option->check(refuse_file);
    }

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& why) {
    return app.exit(why) == 0 ? cli::success : cli::bad_input;
  }
  if (*drawing && a.solvers.empty()) a.solvers = {std::string(remat::registry::methods()[0].name)};
  const cli::printable_stream names(std::cout);
  try {
    if (*solving) return cli::solve(a);
    if (*drawing) return cli::curve(a);
    if (*comparing) return cli::compare(a);
    if (*checking) return cli::check(a);
    if (*describing) return cli::info(a);
    if (*reporting) return cli::report(a);
    if (*placing) return cli::layout(a);
    return cli::list(a);
  } catch (const std::exception& why) {
    std::cerr << "remat: " << cli::printable(why.what()) << "\n";
    return cli::bad_input;
  }
}
