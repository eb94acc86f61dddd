// SPDX-License-Identifier: Apache-2.0
// How planning time grows with the number of layers of a transformer. Prints a table in Markdown.
//
// bench_growth [SHARE]: `hierarchical` within this share of the activation memory (default: half). Columns: processor seconds,
// all parts, and distinct parts. Equal parts are solved once, so twice the layers should take at most twice the time.
// bench_growth SHARE METHOD SECONDS LAYERS..: `min_cut` or `automatic` (without a MILP library). Columns: the time of the first
// schedule, and of the first within 0.5 % of the final bound. Times are processor seconds, except the delay beyond the time
// limit.
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/solver/automatic.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/structure/canonical.hpp>
#include <remat/structure/partition.hpp>
#include <remat/testing/generators.hpp>

namespace {

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void print_row(std::size_t layers, double part) {
  const auto p = remat::testing::transformer_training_graph(layers);
  const auto all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto budget = p.held_bytes() + static_cast<remat::bytes_t>(part * static_cast<double>(all.peak - p.held_bytes()));

  const auto parts = remat::structure::find_partition(p);
  const remat::hierarchy::part_index index(p, parts);
  std::vector<remat::structure::canonical_form> distinct;
  for (const auto& piece : parts) {
    auto form = remat::structure::canonical(remat::hierarchy::part_problem(p, index, piece).bare());
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

template <remat::solver S>
void print_run(std::size_t layers, double part, const S& method, double limit) {
  const auto p = remat::testing::transformer_training_graph(layers);
  const auto all = remat::evaluate(p, remat::store_all_schedule(p));
  const auto budget = static_cast<remat::bytes_t>(part * static_cast<double>(all.peak));
  std::vector<std::pair<double, double>> found;  // (processor seconds, time of the schedule)
  const auto start = processor_seconds();
  const auto r = remat::solve(p, budget, method, {.seconds = limit}, [&](const remat::progress& now) {
    if (std::isfinite(now.best) && (found.empty() || now.best < found.back().second))
      found.emplace_back(processor_seconds() - start, now.best);
  });
  const auto seconds = processor_seconds() - start;
  const auto close = std::find_if(found.begin(), found.end(), [&](auto x) { return x.second * (1 - 0.005) <= r.bound; });
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  std::printf("| %zu | %.2f | %.2f | %.3f | %.2f | %ld | %.2f |\n", p.operations().size(),
              found.empty() ? -1.0 : found.front().first, close == found.end() ? -1.0 : close->first, 100 * r.gap(), seconds,
              used.ru_maxrss / 1024, std::max(0.0, r.elapsed - limit));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const double part = argc > 1 ? std::stod(argv[1]) : 0.5;
  if (argc > 3) {
    std::printf(
        "| operations | first | within 0.5 %% | gap %% | in all | MiB so far | late, s |\n|---|---|---|---|---|---|---|\n");
    for (int i = 4; i < argc; ++i) {
      if (std::string(argv[2]) == "min_cut")
        print_run(std::stoul(argv[i]), part, remat::min_cut(), std::stod(argv[3]));
      else
        print_run(std::stoul(argv[i]), part, remat::automatic<>(), std::stod(argv[3]));
    }
    return 0;
  }
  std::printf(
      "| layers | operations | parts | distinct | processor s | extra time %% | bound %% |\n|---|---|---|---|---|---|---|\n");
  for (const std::size_t layers : {6, 12, 24, 48}) print_row(layers, part);
} catch (const std::exception& why) {
  std::cerr << why.what() << '\n';
  return 2;
}
