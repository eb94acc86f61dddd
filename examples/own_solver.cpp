// SPDX-License-Identifier: Apache-2.0
// Your own solver. It forgets the outputs of operations that are quick to compute again, one operation after the other, until the
// rest fits. The conformance suite of the library then checks its answers.
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/testing/check_solver.hpp>

class forgetful {
 public:
  std::string name() const { return "forgetful"; }

  remat::result solve(const remat::problem& p, remat::bytes_t budget, remat::monitor& m) const {
    const auto order = remat::needed_operations(p);
    auto again = order;  // operations that may run again, fewest seconds per byte first
    std::erase_if(again, [&](auto o) { return p.operations()[o].once; });
    const auto rate = [&](auto o) {
      double bytes = 1;
      for (auto v : p.operations()[o].outputs) bytes += static_cast<double>(p.values()[v].bytes);
      return p.operations()[o].seconds / bytes;
    };
    std::stable_sort(again.begin(), again.end(), [&](auto a, auto b) { return rate(a) < rate(b); });

    remat::result r;  // "not_found" until there is one
    std::vector<bool> forgotten(p.operations().size(), false);
    for (std::size_t n = 0; n <= again.size() && !m.stopped(); ++n) {
      if (n > 0) forgotten[again[n - 1]] = true;
      r.schedule = remat::with_drops(p, play(p, order, forgotten));
      const auto e = remat::evaluate(p, r.schedule);
      if (e.peak > budget) continue;
      r.status = remat::status::feasible;
      m.report({.stage = std::to_string(n) + " operations forgotten", .best = e.seconds});
      break;
    }
    return r;
  }

 private:
  /// Computes forgotten values anew before every operation that reads them.
  static std::vector<remat::operation_id> play(const remat::problem& p, const std::vector<remat::operation_id>& order,
                                               const std::vector<bool>& forgotten) {
    std::vector<remat::operation_id> played;
    for (auto o : order) {
      std::vector<remat::operation_id> now = {o};
      for (std::size_t i = 0; i < now.size(); ++i)
        for (auto v : p.operations()[now[i]].inputs)
          if (!p.is_source(v) && forgotten[p.producer(v)] && std::find(now.begin(), now.end(), p.producer(v)) == now.end())
            now.push_back(p.producer(v));
      std::sort(now.begin(), now.end());
      played.insert(played.end(), now.begin(), now.end());
    }
    return remat::prune_order(p, played);  // without computations whose outputs nothing reads
  }
};

int main() {
  const auto p = remat::testing::transformer_training_graph(2);
  for (const char* budget : {"100%", "70%", "50%"}) {
    const auto r = remat::solve(p, remat::parse_budget(budget, p), forgetful{});
    std::cout << budget << ": " << remat::to_string(r.status);
    if (r.found()) std::cout << ", " << r.recomputed << " recomputed, at most " << 100 * r.gap() << " % slower than the best";
    std::cout << "\n";
  }
  const auto failures = remat::testing::check_solver(forgetful{}, {.rounds = 100});
  for (const auto& failure : failures) std::cerr << failure << "\n";
  return failures.empty() ? 0 : 1;
}
