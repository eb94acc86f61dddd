// SPDX-License-Identifier: Apache-2.0
/// @file
/// Conformance suite for MILP backends: run it on your backend before you give it to `checkmate`. Needs Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <remat/milp/backend.hpp>

namespace remat::testing {

namespace detail {

/// A 0-1 knapsack: maximises the sum of values within a limit on the sum of weights. Small enough to enumerate.
struct knapsack {
  std::vector<int> value, weight;
  int limit = 0;

  knapsack(std::uint64_t seed, int things) {
    std::mt19937_64 g(seed);
    for (int i = 0; i < things; ++i) {
      value.push_back(1 + static_cast<int>(g() % 50));
      weight.push_back(1 + static_cast<int>(g() % 50));
      limit += weight.back();
    }
    limit /= 2;
  }
  milp::model model() const {
    milp::builder b;
    milp::expression load;
    for (std::size_t i = 0; i < value.size(); ++i) load.add(b.binary(-value[i]), weight[i]);
    b.at_most(load, limit);
    return b.build();
  }
  /// The same model, with the load as a chain of running sums.
  /// @param unit factor of all weights
  milp::model chained(double unit) const {
    milp::builder b;
    milp::expression load;
    for (std::size_t i = 0; i < value.size(); ++i) {
      const auto sum = b.column(0, 0, limit * unit);
      b.equal(load + weight[i] * unit * b.binary(-value[i]) - sum, 0);
      load = sum;
    }
    return b.build();
  }
  /// Optimum of the linear relaxation: things by falling value per weight, the last one in part.
  double best_of_parts() const {
    std::vector<std::size_t> order(value.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return value[a] * weight[b] > value[b] * weight[a]; });
    double sum = 0, room = limit;
    for (auto i : order) {
      const auto part = std::min(1.0, room / weight[i]);
      sum += part * value[i];
      room -= part * weight[i];
    }
    return sum;
  }
  int best() const {
    int highest = 0;
    for (unsigned set = 0; set < 1u << value.size(); ++set) {
      int v = 0, w = 0;
      for (std::size_t i = 0; i < value.size(); ++i)
        if (set >> i & 1) v += value[i], w += weight[i];
      if (w <= limit) highest = std::max(highest, v);
    }
    return highest;
  }
};

/// A model that no backend solves within milliseconds: choose things of a given total weight. Parity forbids an exact choice,
/// since all weights are even and the total is odd.
inline milp::model long_search(int things = 60) {
  std::mt19937_64 g(3);
  milp::builder b;
  milp::expression half;
  for (int i = 0; i < things; ++i) {
    const auto weight = static_cast<double>(2 * (1000000 + g() % 1000000));
    const auto cost = static_cast<double>(g() % 100);
    half.add(b.binary(cost), weight);
  }
  const auto slack = b.column(1000, 0, milp::infinity);
  const double target = 1500000.0 * things + 1;
  b.at_least(half + slack, target), b.at_most(half - slack, target);
  return b.build();
}

}  // namespace detail

/// Runs a backend on models with known answers: optimal, infeasible and unbounded models, limits, cutoff, good and bad starts,
/// linear relaxations, empty models, equality rows, free columns, integers beyond 0 and 1, coefficients of very different size, a
/// `poll` that stops or throws, several threads at once.
/// @tparam B the backend
/// @param b  the backend
/// @return one line per failure; empty if the backend conforms
/// Complexity: some hundred small models; seconds.
/// @code
/// for (const auto& failure : remat::testing::check_backend(my_backend{})) std::cerr << failure << '\n';
/// @endcode
template <milp::backend B>
std::vector<std::string> check_backend(const B& b) {
  std::vector<std::string> failures;
  const auto expect = [&](bool ok, const std::string& what) {
    if (!ok) failures.push_back(std::string(b.name()) + ": " + what);
  };
  const auto near = [](double a, double c) { return std::abs(a - c) <= 1e-6 * std::max(1.0, std::abs(c)); };
  const auto optimal = [&](const milp::solution& s, double objective, const std::string& what) {
    expect(s.status == milp::status::optimal, what + ": not optimal, status " + std::to_string(static_cast<int>(s.status)));
    expect(near(s.objective, objective),
           what + ": objective " + std::to_string(s.objective) + ", not " + std::to_string(objective));
    expect(near(s.bound, objective), what + ": bound " + std::to_string(s.bound) + ", not " + std::to_string(objective));
  };
  using milp::status;

  expect(!std::string(b.name()).empty(), "no name");
  {
    milp::builder m;
    auto x = m.binary(-3), y = m.column(-1, 0, 4);
    m.at_most(2.0 * x + y, 5);
    const auto s = milp::solve(b, m.build(7));
    optimal(s, 1, "mixed model with an offset");
    expect(s.found() && near(s.x[0], 1) && near(s.x[1], 3), "mixed model: wrong point");
  }
  {
    milp::builder m;
    auto x = m.column(1, -milp::infinity, milp::infinity), y = m.column(2, -milp::infinity, milp::infinity);
    m.equal(x + y, 3), m.row(-5, x - y, 5);
    optimal(milp::solve(b, m.build()), 2, "free columns, equality and range rows, no integers");
  }
  {
    milp::builder m;
    auto x = m.column(-1, -7.5, 9.5, true), y = m.column(-1, 0, milp::infinity, true);
    m.at_most(3.0 * x + 5.0 * y, 41.5), m.at_most(x - 2.0 * y, 0);
    optimal(milp::solve(b, m.build()), -11, "general integers with fractional bounds");
  }
  {
    milp::builder m;
    auto x = m.binary(1), y = m.binary(1);
    m.equal(2.0 * x + 2.0 * y, 3);
    const auto s = milp::solve(b, m.build());
    expect(s.status == status::infeasible && s.x.size() == 0 && s.bound == milp::infinity,
           "integer-infeasible model not recognised");
  }
  {
    milp::builder m;
    auto x = m.column(0, 0, 1);
    m.at_least(x, 2);
    expect(milp::solve(b, m.build()).status == status::infeasible, "infeasible linear model not recognised");
  }
  {
    milp::builder m;
    m.column(1, 0.25, 0.75, true);
    expect(milp::solve(b, m.build()).status == status::infeasible,
           "integer column without an integer in its bounds not recognised");
  }
  {
    milp::builder m;
    auto x = m.column(-1, 0, milp::infinity), y = m.column(0, 0, 5, true);
    m.at_least(x + y, 1);
    const auto s = milp::solve(b, m.build());
    expect(s.status == status::unbounded && s.x.size() == 0, "unbounded model not recognised");
  }
  {
    milp::builder m;
    m.column(2, 3, 8), m.column(-1, 0, 4, true);
    optimal(milp::solve(b, m.build()), 2, "model without rows");
    optimal(milp::solve(b, milp::builder{}.build(5)), 5, "model without columns");
    milp::builder impossible;
    impossible.at_least({}, 1);
    expect(milp::solve(b, impossible.build()).status == status::infeasible, "impossible row without columns not recognised");
  }
  {
    milp::builder m;
    auto x = m.binary(0), y = m.column(1, 0, 1e7), z = m.binary(1e-3);
    m.at_least(y - 1e6 * x, -1e6 + 1e2), m.at_least(x + z, 1), m.at_most(1e-4 * y + x, 1);
    optimal(milp::solve(b, m.build()), 1e-3, "coefficients far apart");
  }
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const detail::knapsack k(seed, 12);
    const auto m = k.model();
    optimal(milp::solve(b, m, {.gap = 0}), -k.best(), "knapsack " + std::to_string(seed));
    auto s = milp::solve(b, m, {.gap = 0.2});
    expect(s.status == status::optimal && -s.objective <= k.best() &&
               s.objective - s.bound <= 0.2 * std::abs(s.objective) + 1e-6 && s.bound <= -k.best() + 1e-6,
           "knapsack " + std::to_string(seed) + ": gap of 20 % not met");
    s = milp::solve(b, m, {.gap = 0, .cutoff = -k.best() - 0.5});
    expect(s.status == status::cutoff && s.x.size() == 0, "cutoff below the optimum not recognised");
    optimal(milp::solve(b, m, {.gap = 0, .cutoff = -k.best() + 0.5}), -k.best(), "cutoff above the optimum");
    Eigen::VectorXd start = Eigen::VectorXd::Zero(12);
    optimal(milp::solve(b, m, {.gap = 0, .start = start}), -k.best(), "start that is no optimum");
    auto relaxed = m;
    relaxed.integer.assign(relaxed.integer.size(), false);
    optimal(milp::solve(b, relaxed), -k.best_of_parts(), "linear relaxation");
    optimal(milp::solve(b, k.chained(1), {.gap = 0}), -k.best(), "equality rows");
    optimal(milp::solve(b, k.chained(4096), {.gap = 0}), -k.best(), "equality rows with large coefficients");
    start.setConstant(0.5);
    optimal(milp::solve(b, m, {.gap = 0, .start = start}), -k.best(), "start that is not integer");
    start.resize(3);
    optimal(milp::solve(b, m, {.gap = 0, .start = start}), -k.best(), "start of the wrong size");
  }
  {
    const auto m = detail::long_search();
    auto s = milp::solve(b, m, {.seconds = 0.2, .gap = 0});
    expect(s.status == status::limit || s.status == status::feasible, "time limit ignored");
    expect(s.bound > -milp::infinity || !s.found(), "no bound at the time limit");
    Eigen::VectorXd start = Eigen::VectorXd::Zero(m.columns());
    start[m.columns() - 1] = m.row_lower[0];
    s = milp::solve(b, m, {.seconds = 0.2, .gap = 0, .start = start});
    expect(s.found() && s.objective <= m.objective(start) * (1 + 1e-9), "a start is lost at the time limit");
    int calls = 0;
    s = milp::solve(b, m, {.seconds = 20, .gap = 0, .poll = [&](double best, double bound) {
                             expect(!(bound > best + 1e-6 * std::abs(best)), "poll sees a bound above the best objective");
                             return ++calls >= 2;
                           }});
    expect(calls == 2, "poll called " + std::to_string(calls) + " times, and not 2, although the second asked to stop");
    expect(s.status == status::limit || s.status == status::feasible, "stop asked for by poll ignored");
    bool thrown = false;
    try {
      milp::solve(b, m, {.seconds = 20, .gap = 0, .poll = [](double, double) -> bool { throw std::range_error("poll"); }});
    } catch (const std::range_error&) {
      thrown = true;
    }
    expect(thrown, "an exception of poll is lost");
    s = milp::solve(b, m, {.seconds = 0});
    expect(s.status == status::limit || s.status == status::feasible || s.status == status::optimal,
           "no time at all: no such status");
  }
  {
    const detail::knapsack k(77, 14);
    const auto m = k.model();
    std::vector<milp::solution> found(4);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < found.size(); ++i)
      threads.emplace_back([&, i] { found[i] = milp::solve(b, m, {.gap = 0, .threads = 1 + i % 2, .seed = i}); });
    for (auto& t : threads) t.join();
    for (const auto& s : found) optimal(s, -k.best(), "several threads at once");
  }
  return failures;
}

}  // namespace remat::testing
