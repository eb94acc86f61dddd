// SPDX-License-Identifier: Apache-2.0
// Measures static memory layout and prints a table in Markdown.
//
// bench_layout SEEDS SECONDS CAPACITY CSV..   per file: the arena of the heuristics relative to the load (largest sum of live
//                                             bytes), and the time of the search to fit the capacity, over several seeds
// bench_layout PLANS PROBLEM..                per plan: the arena relative to the load, with and without the search
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/io/allocation_csv.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/problem_document.hpp>
#include <remat/layout/layout.hpp>
#include <remat/report/device_spans.hpp>
#include <remat/solver/min_cut.hpp>

namespace {

using namespace remat;

double ratio(const layout& l) { return static_cast<double>(l.arena) / static_cast<double>(std::max<bytes_t>(1, l.live_peak)); }

void print_instance(const std::string& path, unsigned seeds, double seconds, bytes_t capacity) {
  const auto list = read_allocations(path).list;
  const monitor start;
  const auto first = lay_out(list, {.alignment = 1, .tries = 0});
  const auto first_ms = start.elapsed() * 1e3;
  std::vector<double> times;
  for (unsigned seed = 0; seed < seeds; ++seed) {
    const monitor m({.seconds = seconds});
    constexpr auto unlimited = layout_options::unlimited;
    const auto r = fit_within(list, capacity, {.alignment = 1, .tries = unlimited, .work = unlimited, .seed = seed}, m);
    if (r.status == fit_status::fits) times.push_back(m.elapsed());
  }
  const auto fits = times.size();
  std::sort(times.begin(), times.end());
  if (times.empty()) times.push_back(seconds);
  std::printf("| %s | %zu | %.4f | %.3f | %.1f | %zu of %u | %.2f | %.2f |\n", std::filesystem::path(path).stem().c_str(),
              list.size(), static_cast<double>(first.live_peak) / static_cast<double>(capacity), ratio(first), first_ms, fits,
              seeds, times[times.size() / 2], times.back());
}

void print_plans(const std::string& path) {
  const auto p = read_problem(path);
  for (const char* budget : {"40%", "60%", "80%", "100%"}) {
    const auto r = solve(p, parse_budget(budget, p), min_cut(), {.seconds = 5});
    if (!r.found()) continue;
    std::vector<allocation> list;
    const auto end = 2 * static_cast<std::int64_t>(r.schedule.steps.size()) + 2;
    for (const auto& s : device_spans(p, r.schedule))
      list.push_back({s.birth, s.death == device_span::to_the_end ? end : s.death, s.bytes});
    for (bytes_t alignment : {bytes_t{64}, bytes_t{512}}) {
      const monitor start;
      const auto first = lay_out(list, {.alignment = alignment, .tries = 0});
      const auto first_seconds = start.elapsed();
      const auto best = lay_out(list, {.alignment = alignment});
      std::printf("| %s | %s | %zu | %lld | %.5f | %.1f | %.5f | %.1f |\n", std::filesystem::path(path).stem().c_str(), budget,
                  list.size(), static_cast<long long>(alignment), ratio(first), first_seconds * 1e3, ratio(best),
                  (start.elapsed() - first_seconds) * 1e3);
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> a(argv + 1, argv + argc);
  if (a.size() > 1 && a[0] == "PLANS") {
    std::puts(
        "| problem | budget | allocations | alignment | heuristics / load | ms | search / load | ms "
        "|\n|---|---|---|---|---|---|---|---|");
    for (std::size_t i = 1; i < a.size(); ++i) print_plans(a[i]);
    return 0;
  }
  if (a.size() < 4) throw std::runtime_error("arguments: SEEDS SECONDS CAPACITY CSV.., or PLANS PROBLEM..");
  std::puts(
      "| instance | allocations | load / capacity | heuristics / load | ms | fits | median s | longest s "
      "|\n|---|---|---|---|---|---|---|---|");
  for (std::size_t i = 3; i < a.size(); ++i)
    print_instance(a[i], static_cast<unsigned>(std::stoul(a[0])), std::stod(a[1]), parse_bytes(a[2]));
  return 0;
} catch (const std::exception& why) {
  std::cerr << "bench_layout: " << why.what() << "\n";
  return 2;
}
