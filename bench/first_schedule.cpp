// SPDX-License-Identifier: Apache-2.0
// Plans large graphs of several families within several budgets and prints a table in Markdown: when `automatic` has its first
// schedule, how late it is after its time limit, and what it finds and proves.
//
// bench_first_schedule OPERATIONS SECONDS [FAMILY]: a budget is a multiple of the smallest peak of all cheap orders, or a share
// of what store-all needs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <limits>
#include <string>

#include <remat/core/solve.hpp>
#include <remat/solver/automatic.hpp>
#include <remat/solver/cheap_orders.hpp>

#include "../tests/families.hpp"

namespace {

/// The smallest peak of the cheap orders.
remat::bytes_t smallest_known(const remat::problem& p) {
  remat::monitor unlimited({.seconds = 60});
  remat::incumbent nothing_fits(p, remat::bounds_without_search(p).budget - 1);
  return remat::measure_order(p, remat::offer_cheap_orders(p, nothing_fits, unlimited)).peak;
}

void print_row(const std::string& name, const remat::problem& p, const char* label, remat::bytes_t budget, double limit) {
  const auto all = remat::measure_store_all(p);
  double first = std::numeric_limits<double>::quiet_NaN();
  const auto r = remat::solve(p, budget, remat::automatic<>(), {.seconds = limit}, [&](const remat::progress& now) {
    if (std::isnan(first) && std::isfinite(now.best)) first = now.elapsed;
  });
  if (r.found() && std::isnan(first)) first = r.elapsed;
  std::printf("| %s (%zu) | %s | %.4f | %.2f | %.2f | %s | %.2f | %.2f |\n", name.c_str(), p.operations().size(), label,
              static_cast<double>(budget) / static_cast<double>(all.peak), first, std::max(0.0, r.elapsed - limit),
              std::string(to_string(r.status)).c_str(), r.found() ? 100 * (r.seconds / all.seconds - 1) : -1.0,
              100 * (r.bound / all.seconds - 1));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::size_t operations = argc > 1 ? std::stoul(argv[1]) : 100'000;
  const double limit = argc > 2 ? std::stod(argv[2]) : 5;
  std::printf(
      "| family (operations) | budget | of store-all | first, s | over the limit, s | status | extra %% | bound %% |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const auto& f : remat::testing::families()) {
    if (argc > 3 && f.name != argv[3]) continue;
    const auto p = f.make(operations);
    const auto all = remat::measure_store_all(p).peak, least = smallest_known(p);
    const auto times = [](double x, remat::bytes_t b) { return static_cast<remat::bytes_t>(x * static_cast<double>(b)); };
    print_row(f.name, p, "smallest known", least, limit);
    print_row(f.name, p, "1.5 times that", std::min(all, times(1.5, least)), limit);
    for (const auto& [share, label] : {std::pair(0.3, "30 %"), {0.7, "70 %"}})
      if (times(share, all) > least) print_row(f.name, p, label, times(share, all), limit);
  }
} catch (const std::exception& why) {
  std::cerr << why.what() << '\n';
  return 2;
}
