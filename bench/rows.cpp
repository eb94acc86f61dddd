// SPDX-License-Identifier: Apache-2.0
// What would plans gain if operators ran on parts of the rows, so that a value could be kept in part and recomputed in part (as
// in MEMO, SIGMOD 2025)? Prints the extra time, in % of store-all's time, of the bound and of the plan of `min_cut`: for whole
// values, and for values in 2 and 4 parts. Splitting is free here: each part takes its share of time and workspace. Operations
// that make targets, such as gradients of weights, stay whole and read all parts.
#include <cstddef>
#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/json.hpp>
#include <remat/solver/min_cut.hpp>

namespace {

using namespace remat;

/// Splits each operation and its outputs into `count` parts. An operation stays whole if it makes a target, runs only once, or
/// overwrites a value.
problem in_rows(const problem& p, std::size_t count) {
  std::vector<bool> target(p.values().size(), false);
  for (auto t : p.targets()) target[t] = true;
  const auto parts_of = [&](const operation& op) {
    for (auto v : op.outputs)
      if (target[v]) return std::size_t{1};
    return op.once || !op.overwrites.empty() ? std::size_t{1} : count;
  };
  std::vector<value> values;
  std::vector<std::vector<value_id>> parts(p.values().size());
  for (value_id v = 0; v < p.values().size(); ++v) {
    const auto n = p.is_source(v) ? 1 : parts_of(p.operations()[p.producer(v)]);
    for (std::size_t i = 0; i < n; ++i) {
      auto part = p.values()[v];
      part.bytes = part.bytes / static_cast<bytes_t>(n) + (i == 0 ? part.bytes % static_cast<bytes_t>(n) : 0);
      parts[v].push_back(static_cast<value_id>(values.size()));
      values.push_back(std::move(part));
    }
  }
  std::vector<operation> operations;
  std::optional<operation_id> turn;
  for (operation_id o = 0; o < p.operations().size(); ++o) {
    const auto& whole = p.operations()[o];
    const auto n = parts_of(whole);
    if (p.backward_start() == o) turn = static_cast<operation_id>(operations.size());
    for (std::size_t i = 0; i < n; ++i) {
      auto op = whole;
      op.seconds /= static_cast<double>(n);
      op.workspace /= static_cast<bytes_t>(n);
      op.inputs.clear(), op.outputs.clear();
      for (auto v : whole.inputs)
        if (n > 1 && parts[v].size() == n)
          op.inputs.push_back(parts[v][i]);
        else
          op.inputs.insert(op.inputs.end(), parts[v].begin(), parts[v].end());
      for (auto v : whole.outputs) op.outputs.push_back(parts[v][n > 1 ? i : 0]);
      operations.push_back(std::move(op));
    }
  }
  std::vector<value_id> targets;
  for (auto t : p.targets()) targets.insert(targets.end(), parts[t].begin(), parts[t].end());
  return {p.name(), std::move(values), std::move(operations), std::move(targets), std::nullopt, turn};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files, budgets = {"80%", "60%", "40%", "30%"};
  double seconds = 10;
  CLI::App app("What plans would gain from values in parts");
  app.add_option("FILE", files, "problems")->required();
  app.add_option("-b,--budgets", budgets, "sizes, or shares such as 80%")->delimiter(',');
  app.add_option("-t,--time", seconds, "seconds for each search");
  CLI11_PARSE(app, argc, argv);
  try {
    std::puts("| problem | budget | whole | 2 parts | 4 parts |\n|---|---|---|---|---|");
    for (const auto& file : files) {
      const auto p = read_problem(file);
      for (const auto& budget : budgets) {
        std::printf("| %s | %s |", p.name().c_str(), budget.c_str());
        for (const std::size_t count : {1, 2, 4}) {
          const auto q = count == 1 ? p : in_rows(p, count);
          const auto r = solve(q, parse_budget(budget, p), min_cut(), {.seconds = seconds});
          const auto extra = [&](double s) { return 100 * (s / q.total_seconds() - 1); };
          if (r.found())
            std::printf(" %.2f / %.2f |", extra(r.bound), extra(r.seconds));
          else
            std::printf(" %s |", std::string(to_string(r.status)).c_str());
        }
        std::puts("");
      }
    }
  } catch (const std::exception& why) {
    std::cerr << why.what() << '\n';
    return 2;
  }
}
