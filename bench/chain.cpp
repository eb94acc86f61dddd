// SPDX-License-Identifier: Apache-2.0
/// @file
/// Times the two dynamic programs over heterogeneous chains: the table with slots, and the search that is exact in bytes.
///
///     chain [links of the longest chain]
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>

#include <remat/chain/fastest_persistent.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using testing::uniform;

namespace {

/// A chain whose links have random sizes and costs. Each option of a link saves fewer bytes and takes more time than the next.
chain::heterogeneous_chain random_chain(std::size_t links, int options) {
  std::mt19937_64 g(7);
  chain::heterogeneous_chain c;
  c.links.resize(links);
  for (auto& l : c.links) {
    l.input = l.gradient = uniform(g, 1 << 20, 16 << 20);
    l.checkpoint_seconds = 1e-6 * static_cast<double>(uniform(g, 100, 2000));
    l.checkpoint_transient = uniform(g, 0, 8 << 20);
  }
  for (std::size_t i = 0; i < links; ++i) {
    auto& l = c.links[i];
    const auto next = i + 1 < links ? c.links[i + 1].input : 0;
    const auto full = static_cast<double>(uniform(g, 20 << 20, 120 << 20));
    for (int k = 0; k < options; ++k) {
      const double part = static_cast<double>(k) / (options - 1), less = 1 - part;
      const auto inside = full * (0.15 + 0.85 * part) * static_cast<double>(uniform(g, 900, 1100)) / 1000;
      const auto forward_transient = uniform(g, 0, 8 << 20), backward_transient = uniform(g, 0, 16 << 20);
      l.options.push_back({next + static_cast<bytes_t>(inside), l.checkpoint_seconds,
                           l.checkpoint_seconds * (2 + 0.9 * less * less), forward_transient,
                           backward_transient + static_cast<bytes_t>(less * full)});
    }
  }
  return c;
}

bytes_t store_all(const chain::heterogeneous_chain& c) {
  bytes_t sum = c.links[0].input;
  for (const auto& l : c.links) sum += l.options.back().saved;
  return sum;
}

/// Processor time of this program so far, s.
double seconds() {
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec) + 1e-6 * static_cast<double>(u.ru_utime.tv_usec);
}

void table(std::size_t links, int options, std::size_t slots, double part) {
  const auto c = random_chain(links, options);
  const auto budget = static_cast<bytes_t>(part * static_cast<double>(store_all(c)));
  const auto start = seconds();
  const chain::persistent_table t(c, budget, {.slots = slots});
  std::printf("| table | %zu | %d | %zu slots | %.0f %% | %.2f | | |\n", links, options, slots, 100 * part, seconds() - start);
}

void search(std::size_t links, int options, double part, double limit) {
  const auto c = random_chain(links, options);
  const auto budget = static_cast<bytes_t>(part * static_cast<double>(store_all(c)));
  const auto start = seconds();
  const auto a = chain::fastest_persistent(c, budget, {.stop = [&] { return seconds() - start > limit; }});
  const auto gap = a.found() ? (a.seconds - a.bound) / a.seconds : 1;
  std::printf("| search | %zu | %d | bytes | %.0f %% | %.2f | %.6f | %.1e |\n", links, options, 100 * part, seconds() - start,
              a.seconds, gap);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const auto longest = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 10'000;
  std::printf(
      "| method | links | options | memory in | budget, of store-all | processor s | schedule | "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (const double part : {1.0, 0.5, 0.2}) table(100, 10, 4000, part);
  for (const double part : {0.8, 0.5, 0.3, 0.2}) search(1000, 3, part, 60);
  search(longest, 3, 0.5, 60);
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  std::printf("\npeak memory of the program: %.0f MiB\n", static_cast<double>(u.ru_maxrss) / 1024);
}
