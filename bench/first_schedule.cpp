// SPDX-License-Identifier: Apache-2.0
// Plans large graphs of several families within several budgets and prints a table in Markdown. Columns: the time of the first
// schedule of `automatic`, its delay beyond the time limit, and the extra time of its schedule and of its bound.
//
// bench_first_schedule OPERATIONS SECONDS [FAMILY|all [copies|tiers]]: a budget is a multiple of the smallest peak of all cheap
// orders, or a share of store-all's peak. With "copies" values may move to the host, and with "tiers" also to a disk.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include <remat/core/solve.hpp>
#include <remat/solver/automatic.hpp>
#include <remat/solver/cheap_orders.hpp>

#include "../tests/families.hpp"

namespace {

/// Adds links to a problem. In the time of store-all, the links to the host move an eighth of all bytes out and back. The links
/// to the disk have a third of their rate.
remat::problem with_memory(const remat::problem& p, const std::string& kind) {
  if (kind.empty()) return p;
  double bytes = 0;
  for (const auto& v : p.values()) bytes += static_cast<double>(v.bytes);
  const double rate = bytes / 4 / p.total_seconds();
  auto x = p.members();
  x.copies = remat::copy_rates{rate, rate};
  if (kind == "tiers") {
    x.system.tiers = {{"device"}, {"host", remat::measure_store_all(p).peak / 2}, {"disk"}};
    x.system.links = {{1, 2, rate / 3, 0, "write"}, {2, 1, rate / 3, 0, "read"}};
  } else if (kind != "copies") {
    throw std::invalid_argument("copies or tiers, got " + kind);
  }
  return remat::problem(std::move(x));
}

/// The smallest peak of the cheap orders, in bytes.
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
    if (argc > 3 && f.name != argv[3] && argv[3] != std::string("all")) continue;
    const auto plain = f.make(operations);
    const auto p = with_memory(plain, argc > 4 ? argv[4] : "");
    const auto all = remat::measure_store_all(plain).peak, least = smallest_known(plain);
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
