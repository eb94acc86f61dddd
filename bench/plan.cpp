// SPDX-License-Identifier: Apache-2.0
// Plans problems with several solvers. Prints tables in Markdown: the plans for several budgets, or the smallest budgets.
//
// A budget f stands for held + f (peak of store-all - held) bytes. Extra times are in % of store-all's time. Gaps are relative to
// the best bound of all solvers. Each search runs in a process of its own, so its peak memory can be measured.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/json.hpp>
#include <remat/registry/registry.hpp>

namespace {

/// Results of a search for the table. The search process sends this struct byte by byte through a pipe.
struct measurement {
  remat::status status = remat::status::not_found;
  double seconds = 0, bound = 0, elapsed = 0;
  double first = std::numeric_limits<double>::quiet_NaN();  ///< time until the first schedule was reported, s
  remat::bytes_t peak = 0, budget_bound = 0;
  double mebibytes = 0, cpu = 0;  ///< peak memory (MiB) and user time (s) of the process
};

using search = std::function<remat::result(const std::function<void(const remat::progress&)>&)>;

/// Runs a search in a process of its own.
measurement measure(const search& s) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe");
  std::cout << std::flush;
  const auto child = fork();
  if (child < 0) throw std::runtime_error("no process");
  if (child == 0) {
    int status = 1;
    try {
      measurement m;
      const auto r = s([&](const remat::progress& now) {
        if (std::isnan(m.first) && std::isfinite(now.best)) m.first = now.elapsed;
      });
      m.status = r.status, m.seconds = r.seconds, m.bound = r.bound, m.elapsed = r.elapsed;
      m.peak = r.peak, m.budget_bound = r.budget_bound;
      if (r.found() && std::isnan(m.first)) m.first = r.elapsed;
      status = write(ends[1], &m, sizeof m) == sizeof m ? 0 : 1;
    } catch (const std::exception& why) {
      std::cerr << "plan: " << why.what() << std::endl;
    }
    _exit(status);
  }
  close(ends[1]);
  measurement m;
  const bool sent = read(ends[0], &m, sizeof m) == sizeof m;
  close(ends[0]);
  rusage used = {};
  wait4(child, nullptr, 0, &used);
  if (!sent) throw std::runtime_error("a search ended without a result");
  m.mebibytes = static_cast<double>(used.ru_maxrss) / 1024;
  m.cpu = static_cast<double>(used.ru_utime.tv_sec) + 1e-6 * static_cast<double>(used.ru_utime.tv_usec);
  return m;
}

std::string printed(const char* format, double number) {
  char text[32];
  std::snprintf(text, sizeof text, format, number);
  return text;
}

struct plans {
  std::vector<std::string> instances, solvers = {"min_cut", "automatic"};
  std::vector<double> budgets = {.8, .6, .5, .4, .3, .2};
  std::string backend = "auto";
  bool smallest = false, beside = false;
  remat::limits limits;
};

void print_budgets(const plans& x, const std::string& name, const remat::problem& p) {
  const auto all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto percent = [&](double seconds) { return printed("%.2f", 100 * (seconds / all.seconds - 1)); };
  for (double f : x.budgets) {
    const auto budget = p.held_bytes() + static_cast<remat::bytes_t>(f * static_cast<double>(all.peak - p.held_bytes()));
    std::vector<measurement> found;
    double bound = 0;
    for (const auto& solver : x.solvers) {
      found.push_back(measure([&](const auto& observer) {
        return remat::solve(p, budget, remat::registry::find(solver).make(x.backend), x.limits, observer);
      }));
      bound = std::max(bound, found.back().bound);
    }
    if (x.beside) {
      std::cout << "| " << name << " | " << f << " | " << percent(bound) << " |";
      for (const auto& m : found) {
        const bool any = m.status == remat::status::optimal || m.status == remat::status::feasible;
        std::cout << " " << (any ? percent(m.seconds) : std::string(to_string(m.status))) << " |";
      }
      std::cout << std::endl;
      continue;
    }
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto& m = found[i];
      const bool any = m.status == remat::status::optimal || m.status == remat::status::feasible;
      std::cout << "| " << name << " | " << f << " | " << x.solvers[i] << " | "
                << (any ? percent(m.seconds) : std::string(to_string(m.status))) << " | " << percent(bound) << " | "
                << (any ? printed("%.2f", 100 * std::max(0.0, 1 - bound / m.seconds)) : "") << " | "
                << (any ? printed("%.2f", m.first) : "") << " | " << printed("%.1f", m.elapsed) << " | " << printed("%.1f", m.cpu)
                << " | " << printed("%.0f", m.mebibytes) << " |" << std::endl;
    }
  }
}

void print_smallest(const plans& x, const std::string& name, const remat::problem& p) {
  const auto all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto mebibytes = [](remat::bytes_t b) { return printed("%.2f", static_cast<double>(b) / (1 << 20)); };
  for (const auto& solver : x.solvers) {
    const auto m = measure([&](const auto& observer) {
      return remat::smallest_budget(p, remat::registry::find(solver).make(x.backend), x.limits, 0.002, observer);
    });
    const auto share = static_cast<double>(m.peak - p.held_bytes()) / static_cast<double>(all.peak - p.held_bytes());
    std::cout << "| " << name << " | " << solver << " | " << mebibytes(m.peak) << " | " << printed("%.3f", share) << " | "
              << mebibytes(m.budget_bound) << " | "
              << printed("%.2f", 100 * (static_cast<double>(m.peak) / static_cast<double>(m.budget_bound) - 1)) << " | "
              << printed("%.1f", m.elapsed) << " | " << printed("%.0f", m.mebibytes) << " |" << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  plans x;
  CLI::App app{"Plans problems with several solvers and budgets; prints tables in Markdown."};
  app.add_option("problems", x.instances, "remat-problem files")->required()->check(CLI::ExistingFile);
  app.add_option("-s,--solvers", x.solvers, "names, separated by commas")->delimiter(',')->capture_default_str();
  app.add_option("-b,--budgets", x.budgets, "shares of what store-all needs beyond the held sources")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--backend", x.backend, "highs, glpk or auto")->capture_default_str();
  app.add_option("-t,--seconds", x.limits.seconds, "time limit of each search")->capture_default_str();
  app.add_option("--threads", x.limits.threads, "worker threads")->capture_default_str();
  app.add_option("--gap", x.limits.gap, "relative gap at which a search ends")->capture_default_str();
  app.add_flag("--smallest", x.smallest, "the smallest budget found and the proven bound, instead");
  app.add_flag("--beside", x.beside, "extra time in %, a column for each solver, and why one has no schedule");
  CLI11_PARSE(app, argc, argv);
  try {
    std::string beside = "| instance (operations) | budget | bound % |", line = "|---|---|---|";
    for (const auto& solver : x.solvers) beside += " " + solver + " |", line += "---|";
    std::cout << (x.beside ? beside + "\n" + line + "\n"
                  : x.smallest
                      ? "| instance (operations) | solver | smallest found [MiB] | share | proven [MiB] | apart % | s | MiB |\n"
                        "|---|---|---|---|---|---|---|---|\n"
                      : "| instance (operations) | budget | solver | extra % | bound % | gap % | first s | s | CPU s | MiB |\n"
                        "|---|---|---|---|---|---|---|---|---|---|\n");
    for (const std::filesystem::path file : x.instances) {
      const auto p = remat::read_problem(file);
      const auto name = file.stem().string() + " (" + std::to_string(p.operations().size()) + ")";
      x.smallest ? print_smallest(x, name, p) : print_budgets(x, name, p);
    }
  } catch (const std::exception& why) {
    std::cerr << "plan: " << why.what() << "\n";
    return 1;
  }
}
