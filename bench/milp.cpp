// SPDX-License-Identifier: Apache-2.0
/// @file
/// Times `checkmate`, per MILP backend, until it proves optimality among staged schedules of transformer-like training graphs.
/// Compares the strong form, with and without restrictions, with the published form (up to 49 operations).
///
///     milp [seconds per solve] [largest number of operations]
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#ifdef REMAT_WITH_GLPK
#include <remat/glpk/backend.hpp>
#endif
#ifdef REMAT_WITH_HIGHS
#include <remat/highs/backend.hpp>
#endif
#include <remat/solver/checkmate.hpp>
#include <remat/staged/published_form.hpp>

using namespace remat;

namespace {

/// A training graph of `layers` blocks with residual connections, and a loss. A block has attention (projection, scores) and an
/// MLP (wide, narrow). The backward has an operation per forward operation, which computes its gradient from the gradients,
/// inputs and outputs of its users. There are 8 layers + 1 operations of one value each.
problem transformer(int layers) {
  std::mt19937 random(7);
  const auto uneven = [&](int x) { return x * 8 + static_cast<int>(random() % static_cast<unsigned>(3 * x + 2)); };
  struct node {
    int seconds, bytes;
    std::vector<value_id> inputs;
  };
  std::vector<node> forward;
  for (int l = 0; l < layers; ++l) {
    const auto b = static_cast<index_t>(forward.size());
    const auto from = [&](std::initializer_list<int> back) {
      std::vector<value_id> inputs;
      for (int k : back)
        if (k <= static_cast<int>(b)) inputs.push_back(b - static_cast<index_t>(k));
      return inputs;
    };
    forward.push_back({uneven(3), uneven(3), from({1})});
    forward.push_back({uneven(2), uneven(4), {b}});
    auto residual = from({1});
    residual.push_back(b + 1);
    forward.push_back({uneven(4), uneven(4), std::move(residual)});
    forward.push_back({uneven(4), uneven(1), {b + 2}});
  }
  const auto n = static_cast<index_t>(forward.size());
  std::vector<std::vector<value_id>> users(n);
  for (index_t i = 0; i < n; ++i)
    for (auto j : forward[i].inputs) users[j].push_back(i);
  std::vector<value> values;
  std::vector<operation> ops;
  const auto add = [&](int seconds, int bytes, std::vector<value_id> inputs) {
    const auto v = static_cast<index_t>(values.size());
    values.push_back({"", bytes, false});
    ops.push_back({"", std::move(inputs), {v}, 1.0 * seconds, 0, false});
  };
  for (const auto& f : forward) add(f.seconds, f.bytes, f.inputs);
  add(8, 1, {n - 1});
  for (index_t i = n; i-- > 0;) {
    std::vector<value_id> inputs;
    if (users[i].empty()) inputs = {n, i};
    for (auto j : users[i]) {
      inputs.push_back(n + n - j);  // gradient of user j
      inputs.push_back(j);
      inputs.insert(inputs.end(), forward[j].inputs.begin(), forward[j].inputs.end());
    }
    add(2 * forward[i].seconds, forward[i].bytes, std::move(inputs));
  }
  return {"transformer", std::move(values), std::move(ops), {static_cast<index_t>(2 * n)}};
}

template <class Method>
void row(const problem& p, double part, const char* what, const Method& method, double seconds) {
  const auto peak = evaluate(p, store_all_schedule(p)).peak;
  const auto budget = static_cast<bytes_t>(part * static_cast<double>(peak));
  const auto began = std::clock();
  const auto x = solve(p, budget, method, {.seconds = seconds, .gap = 1e-6});
  std::printf("| %zu | %.2f | %s | %s | %.2f | %.2f | %.0f | %.0f | %s |\n", p.operations().size(), part, x.solver.c_str(), what,
              x.elapsed, static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC, x.found() ? x.seconds : 0.0, x.scope_bound,
              !x.found()              ? "nothing found"
              : x.scope_gap() <= 1e-6 ? "proven"
                                      : "limit");
  std::fflush(stdout);
}

template <class B>
void rows(const problem& p, double part, double seconds, std::size_t largest) {
  using strong = checkmate<B>;
  if (p.operations().size() <= 49) row(p, part, "published", checkmate<B, staged::published_form>(), seconds);
  if (p.operations().size() <= largest) row(p, part, "strong", strong(), seconds);
  row(p, part, "strong, R1-R3", strong({.rules = {true, true, true}, .restricted_first = false}), seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 60;
  const int largest = argc > 2 ? std::atoi(argv[2]) : 161;
  std::printf(
      "| operations | budget / peak | solver | form | s | CPU s | schedule | bound | |\n|---|---|---|---|---|---|---|---|---|\n");
  for (int layers : {3, 4, 6, 10, 20}) {
    if (8 * layers + 1 > largest) break;
    const auto p = transformer(layers);
    for (double part : {0.9, 0.6}) {
#ifdef REMAT_WITH_HIGHS
      rows<highs::backend>(p, part, seconds, 161);
#endif
#ifdef REMAT_WITH_GLPK
      rows<glpk::backend>(p, part, seconds, 81);
#endif
    }
  }
}
