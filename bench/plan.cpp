// SPDX-License-Identifier: Apache-2.0
// Plans captured networks with several solvers and budgets and prints a table in Markdown.
//
//   plan [--seconds S] [--budgets .8,.6] [--solvers min_cut,rockmate] instance.json ...
//
// A budget f stands for held + f (peak of store-all - held) bytes. Times are in % of store-all's, beyond it.
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <remat/bound/min_cut.hpp>
#include <remat/io/json.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/rockmate.hpp>
#include <remat/solver/rotor.hpp>

using namespace remat;

namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

using method = std::function<result(const problem&, bytes_t, const limits&)>;

template <solver S>
method with(S s) {
  return [s](const problem& p, bytes_t budget, const limits& l) { return solve(p, budget, s, l); };
}

}  // namespace

int main(int argc, char** argv) try {
  const std::map<std::string, method> methods = {
      {"chen", with(chen{})}, {"rotor", with(rotor{})}, {"min_cut", with(min_cut{})}, {"rockmate", with(rockmate<>{})}};
  std::string budgets = ".8,.6,.5,.4", solvers;
  for (const auto& [name, run] : methods) solvers += (solvers.empty() ? "" : ",") + name;
  limits l{.seconds = 120};
  std::vector<std::string> instances;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const bool last = i + 1 == argc;
    if (a == "--seconds" && !last)
      l.seconds = std::stod(argv[++i]);
    else if (a == "--budgets" && !last)
      budgets = argv[++i];
    else if (a == "--solvers" && !last)
      solvers = argv[++i];
    else
      instances.push_back(a);
  }
  std::cout << "| instance (operations) | budget | bound |";
  for (const auto& s : split(solvers)) std::cout << ' ' << s << " | s |";
  std::cout << "\n|---|---|---|";
  for (std::size_t i = 0; i < split(solvers).size(); ++i) std::cout << "---|---|";
  std::cout << std::endl;
  for (const auto& file : instances) {
    const auto p = read_problem(std::filesystem::path(file));
    const auto all = evaluate(p, store_all_schedule(p));
    for (const auto& f : split(budgets)) {
      const auto budget = p.held_bytes() + static_cast<bytes_t>(std::stod(f) * static_cast<double>(all.peak - p.held_bytes()));
      const auto percent = [&](double seconds) {
        char text[32];
        std::snprintf(text, sizeof text, "%.2f", 100 * (seconds / all.seconds - 1));
        return std::string(text);
      };
      const auto bound = min_cut_bound(p, budget);
      std::cout << "| " << std::filesystem::path(file).stem().string() << " (" << p.operations().size() << ") | " << f << " | "
                << (bound.budget > budget ? "infeasible" : percent(bound.seconds)) << " |";
      for (const auto& s : split(solvers)) {
        const auto r = methods.at(s)(p, budget, l);
        char elapsed[32];
        std::snprintf(elapsed, sizeof elapsed, "%.1f", r.elapsed);
        std::cout << ' ' << (r.found() ? percent(r.seconds) : std::string(to_string(r.status))) << " | " << elapsed << " |"
                  << std::flush;
      }
      std::cout << std::endl;
    }
  }
} catch (const std::exception& e) {
  std::cerr << "plan: " << e.what() << "\n";
  return 1;
}
