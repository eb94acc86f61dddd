// SPDX-License-Identifier: Apache-2.0
/// @file
/// The commands of the program, their arguments and exit statuses.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <remat/core/monitor.hpp>

namespace cli {

/// Exit statuses.
enum exit_status { success = 0, not_valid = 1, bad_input = 2, infeasible = 3, none_found = 4 };

/// The options of the command line. Each command reads its own options.
struct arguments {
  std::string problem, schedule, budget, start, output, svg, trace, memory;
  std::string allocations, capacity;  ///< of `layout`
  std::string solver, backend = "auto";
  std::vector<std::string> solvers;  ///< of `curve` and `compare`
  std::vector<std::string> budgets;  ///< of `curve`
  std::vector<std::string> options;  ///< of the solver, each `name=value`
  std::size_t points = 20;           ///< of `curve`, without `budgets`, and of the curve in a report
  remat::limits limits;
  bool as_json = false, draw = false, with_problem = false, with_options = false;
};

// Searches: search.cpp.
int solve(const arguments&);
int curve(const arguments&);
int compare(const arguments&);

// Descriptions: describe.cpp.
int check(const arguments&);
int info(const arguments&);
int list(const arguments&);

// A page about a plan: report.cpp.
int report(const arguments&);

// Offsets: layout.cpp.
int layout(const arguments&);

}  // namespace cli
