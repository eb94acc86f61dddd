// SPDX-License-Identifier: Apache-2.0
// Plans problems with several solvers and budgets and prints a table in Markdown.
//
// A budget f stands for held + f (peak of store-all - held) bytes. Times are in % of store-all's, beyond it.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <remat/bound/min_cut.hpp>
#include <remat/io/json.hpp>

#include "../tools/cli/methods.hpp"

namespace {

std::string printed(const char* format, double number) {
  char text[32];
  std::snprintf(text, sizeof text, format, number);
  return text;
}

void print_rows(const std::filesystem::path& file, const std::vector<double>& budgets, const std::vector<std::string>& solvers,
                const std::string& backend, const remat::limits& l) {
  const auto p = remat::read_problem(file);
  const auto all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto percent = [&](double seconds) { return printed("%.2f", 100 * (seconds / all.seconds - 1)); };
  for (double f : budgets) {
    const auto budget = p.held_bytes() + static_cast<remat::bytes_t>(f * static_cast<double>(all.peak - p.held_bytes()));
    const auto bound = remat::min_cut_bound(p, budget);
    std::cout << "| " << file.stem().string() << " (" << p.operations().size() << ") | " << f << " | "
              << (bound.budget > budget ? "infeasible" : percent(bound.seconds)) << " |";
    for (const auto& name : solvers) {
      const auto r =
          cli::find_method(name).run({p, budget, l, backend, [](const remat::progress&) { return remat::control::go_on; }});
      std::cout << ' ' << (r.found() ? percent(r.seconds) : std::string(to_string(r.status))) << " | "
                << printed("%.1f", r.elapsed) << " |" << std::flush;
    }
    std::cout << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> instances, solvers = {"chen", "rotor", "min_cut", "rockmate"};
  std::vector<double> budgets = {.8, .6, .5, .4};
  std::string backend = "auto";
  remat::limits l{.seconds = 60};
  CLI::App app{"Plans problems with several solvers and budgets; prints extra time in % of store-all's."};
  app.add_option("problems", instances, "remat-problem files")->required()->check(CLI::ExistingFile);
  app.add_option("--solvers", solvers, "names, separated by commas")->delimiter(',')->capture_default_str();
  app.add_option("--budgets", budgets, "shares of what store-all needs beyond the held sources")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--backend", backend, "highs, glpk or auto")->capture_default_str();
  app.add_option("--seconds", l.seconds, "time limit of each search")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    std::cout << "| instance (operations) | budget | bound |";
    for (const auto& name : solvers) std::cout << ' ' << name << " | s |";
    std::cout << "\n|---|---|---|";
    for (std::size_t i = 0; i < solvers.size(); ++i) std::cout << "---|---|";
    std::cout << std::endl;
    for (const auto& file : instances) print_rows(file, budgets, solvers, backend, l);
  } catch (const std::exception& why) {
    std::cerr << "plan: " << why.what() << "\n";
    return 1;
  }
}
