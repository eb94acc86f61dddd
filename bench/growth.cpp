// SPDX-License-Identifier: Apache-2.0
// Plans transformers of more and more layers in half of their activation memory and prints a table in Markdown: processor seconds
// of the planner, the parts found and the parts solved. Equal parts are solved once, so that twice the layers take at most twice
// the time.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/structure/canonical.hpp>
#include <remat/structure/partition.hpp>
#include <remat/testing/generators.hpp>

namespace {

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void print_row(std::size_t layers, double part) {
  const auto p = remat::testing::transformer_training_graph(layers);
  const auto all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto budget = p.held_bytes() + static_cast<remat::bytes_t>(part * static_cast<double>(all.peak - p.held_bytes()));

  const auto parts = remat::find_partition(p);
  const remat::part_index index(p, parts);
  std::vector<remat::canonical_form> distinct;
  for (const auto& piece : parts) {
    auto form = remat::canonical(remat::part_problem(p, index, piece).bare());
    if (std::find(distinct.begin(), distinct.end(), form) == distinct.end()) distinct.push_back(std::move(form));
  }

  const auto start = processor_seconds();
  const auto r = remat::solve(p, budget, remat::hierarchical<>(), {.seconds = 600});
  const auto seconds = processor_seconds() - start;
  const auto bound = remat::bound::min_cut_bound(p, budget).seconds;
  std::printf("| %zu | %zu | %zu | %zu | %.2f | %.2f | %.2f |\n", layers, p.operations().size(), parts.size(), distinct.size(),
              seconds, r.found() ? 100 * (r.seconds / all.seconds - 1) : -1.0, 100 * (bound / all.seconds - 1));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const double part = argc > 1 ? std::stod(argv[1]) : 0.5;
  std::printf(
      "| layers | operations | parts | distinct | processor s | extra time %% | bound %% |\n|---|---|---|---|---|---|---|\n");
  for (const std::size_t layers : {6, 12, 24, 48}) print_row(layers, part);
} catch (const std::exception& why) {
  std::cerr << why.what() << '\n';
  return 2;
}
