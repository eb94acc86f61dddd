// SPDX-License-Identifier: Apache-2.0
// Planning in parts: partitions, equal parts, condensed problems, and schedules of graphs that are no chains.
#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/structure/canonical.hpp>
#include <remat/structure/partition.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

using namespace remat;
using namespace remat::testing;

static_assert(solver<hierarchical<>> && solver<hierarchical<rotor>> && solver<hierarchical<rotor, hierarchical<>>>);

namespace {

/// A network of layers that read any earlier activations, and the backward of it: every layer's backward reads the gradient of
/// its output and its inputs and adds to their gradients.
class network {
 public:
  index_t input(bytes_t bytes) { return add(bytes, true); }
  index_t layer(std::vector<index_t> inputs, bytes_t bytes, double seconds) {
    const auto out = add(bytes, false);
    operations_.push_back({"forward", inputs, {out}, seconds});
    layers_.push_back({std::move(inputs), out, seconds});
    return out;
  }
  problem training() && {
    std::vector<index_t> gradient(values_.size(), none), targets;
    const auto last = layers_.back().output;
    gradient[last] = add(values_[last].bytes, false);
    operations_.push_back({"loss", {last}, {gradient[last]}, 1});
    for (auto i = layers_.size(); i-- > 0;) {
      const auto l = layers_[i];
      operation back{"backward", l.inputs, {}, 2 * l.seconds};
      back.inputs.push_back(gradient[l.output]);
      for (auto v : l.inputs) {
        if (v < values_.size() && values_[v].held) continue;
        const auto d = add(values_[v].bytes, false);
        back.outputs.push_back(d);
        if (gradient[v] == none) {
          gradient[v] = d;
        } else {
          const auto sum = add(values_[v].bytes, false);
          sums_.push_back({"add", {gradient[v], d}, {sum}, 0.1});
          gradient[v] = sum;
        }
      }
      targets.push_back(add(1, false));  // of the weights
      back.outputs.push_back(targets.back());
      operations_.push_back(std::move(back));
      operations_.insert(operations_.end(), sums_.begin(), sums_.end());
      sums_.clear();
    }
    return problem("network", std::move(values_), std::move(operations_), std::move(targets));
  }

 private:
  struct one {
    std::vector<index_t> inputs;
    index_t output;
    double seconds;
  };
  index_t add(bytes_t bytes, bool held) {
    values_.push_back({"", bytes, held});
    return static_cast<index_t>(values_.size() - 1);
  }
  std::vector<value> values_;
  std::vector<operation> operations_, sums_;
  std::vector<one> layers_;
};

/// Encoder and decoder with a skip connection on every level.
problem u_net(std::size_t depth, std::size_t layers) {
  network n;
  auto x = n.input(64);
  std::vector<index_t> skips;
  bytes_t bytes = bytes_t{64} << depth;
  for (std::size_t d = 0; d < depth; ++d, bytes /= 2) {
    for (std::size_t i = 0; i < layers; ++i) x = n.layer({x}, bytes, 4);
    skips.push_back(x);
    x = n.layer({x}, bytes / 2, 1);
  }
  for (std::size_t i = 0; i < layers; ++i) x = n.layer({x}, bytes, 4);
  for (std::size_t d = depth; d-- > 0;) {
    bytes *= 2;
    x = n.layer({x, skips[d]}, bytes, 5);
    for (std::size_t i = 0; i < layers; ++i) x = n.layer({x}, bytes, 4);
  }
  return std::move(n).training();
}

/// Blocks in which every layer reads all layers before it.
problem dense_net(std::size_t blocks, std::size_t layers) {
  network n;
  auto x = n.input(32);
  for (std::size_t b = 0; b < blocks; ++b) {
    std::vector<index_t> all = {x};
    for (std::size_t i = 0; i < layers; ++i)
      all.push_back(n.layer({n.layer(all, 8 * static_cast<bytes_t>(all.size()), 1)}, 8, 6));
    x = n.layer(all, 24, 2);
  }
  return std::move(n).training();
}

/// Towers beside one another that are joined at their ends, several times.
problem branches(std::size_t times, std::size_t towers, std::size_t layers) {
  network n;
  auto x = n.input(16);
  for (std::size_t t = 0; t < times; ++t) {
    std::vector<index_t> ends;
    for (std::size_t k = 0; k < towers; ++k) {
      auto y = x;
      for (std::size_t i = 0; i < layers; ++i) y = n.layer({y}, 16, 3);
      ends.push_back(y);
    }
    x = n.layer(ends, 16, 1);
  }
  return std::move(n).training();
}

bytes_t part_of_peak(const problem& p, double f) {
  return p.held_bytes() + static_cast<bytes_t>(f * static_cast<double>(evaluate(p, store_all_schedule(p)).peak - p.held_bytes()));
}

/// `min_cut` with little effort.
min_cut quick() { return min_cut({.moments = 1, .cuts = 4, .mixtures = 1, .bound = false, .repairs = 1000, .rounds = 0}); }

/// Counts the problems it is given.
struct counting {
  min_cut inner = quick();
  std::atomic<int>* calls = nullptr;
  std::string name() const { return "counting"; }
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    ++*calls;
    return inner.solve(p, budget, m);
  }
};

/// The same problem, values and operations listed in another order.
problem shuffled(const problem& p, std::mt19937_64& g) {
  std::vector<index_t> values(p.values().size()), place(values.size());
  for (index_t v = 0; v < values.size(); ++v) values[v] = v;
  std::shuffle(values.begin(), values.end(), g);
  for (index_t v = 0; v < values.size(); ++v) place[values[v]] = v;
  std::vector<value> named;
  for (auto v : values) named.push_back(p.values()[v]);
  std::vector<std::size_t> missing(p.operations().size(), 0);
  std::vector<index_t> ready, targets;
  for (index_t o = 0; o < missing.size(); ++o) {
    for (auto v : p.operations()[o].inputs) missing[o] += !p.is_source(v);
    if (missing[o] == 0) ready.push_back(o);
  }
  std::vector<operation> operations;
  while (!ready.empty()) {
    const auto at = static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(ready.size()) - 1));
    auto op = p.operations()[ready[at]];
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(at));
    for (auto v : op.outputs)
      for (auto o : p.consumers(v))
        if (--missing[o] == 0) ready.push_back(o);
    for (auto& v : op.inputs) v = place[v];
    for (auto& v : op.outputs) v = place[v];
    operations.push_back(std::move(op));
  }
  for (auto v : p.targets()) targets.push_back(place[v]);
  return problem("", std::move(named), std::move(operations), std::move(targets));
}

}  // namespace

TEST_CASE("partitions of any graph: disjoint, in an order, balanced") {
  std::mt19937_64 g(31);
  for (int round = 0; round < 300; ++round) {
    const auto p = round % 2 ? random_problem(g, {.operations = 40, .once = round % 3 ? 0 : 20})
                             : random_training_chain(g, static_cast<std::size_t>(3 + round % 17));
    const auto parts = find_partition(p, {.size = static_cast<std::size_t>(3 + round % 9), .most = 12});
    CHECK(parts.size() <= 12);
    const part_index index(p, parts);  // throws if an operation is listed twice
    std::vector<part_option> ways;
    for (const auto& x : parts) {
      CHECK(x.size() > 1);
      const part_problem b(p, index, x);
      ways.push_back(b.measure(needed_operations(b.bare())));
    }
    std::vector<const part_option*> chosen;
    for (const auto& w : ways) chosen.push_back(&w);
    const condensed_problem c(p, index, chosen);
    REQUIRE(c.possible());
    // Any schedule of the condensed problem is one of the whole, of no larger peak and no more time.
    for (const auto budget : {max_bytes, part_of_peak(c.condensed(), .7), part_of_peak(c.condensed(), .5)}) {
      const auto r = solve(c.condensed(), budget, quick());
      if (!r.found()) continue;
      const auto whole = evaluate(p, with_drops(p, c.expand(p, compute_order(r.schedule))));
      REQUIRE(whole.peak <= r.peak);
      REQUIRE(whole.seconds <= r.seconds + 1e-9);
    }
  }
}

TEST_CASE("parts are cut where little crosses") {
  const auto chain = find_partition(unit_training_chain(60), {.size = 10});
  CHECK(chain.size() >= 7);
  const auto u = u_net(4, 6);
  const auto parts = find_partition(u, {.size = 16});
  CHECK(parts.size() >= 5);
  const auto dense = dense_net(4, 6);
  CHECK(find_partition(dense, {.size = 24}).size() >= 4);
  CHECK(find_partition(branches(4, 3, 4), {.size = 24}).size() >= 4);
  CHECK(find_partition(problem{}).empty());
  const auto t = transformer_training_graph(12);
  CHECK(find_partition(t, {.turn = 150}).size() >= 6);
  CHECK(find_partition(t, {.most = 3}).size() <= 3);
  CHECK_THROWS_WITH(find_partition(t, {.turn = 5000}), Catch::Contains("turn"));
  CHECK_THROWS_WITH(find_partition(t, {.size = 0}), Catch::Contains("size"));
  CHECK_THROWS_WITH(find_partition(t, {.most = 0}), Catch::Contains("most"));
}

TEST_CASE("the canonical form does not depend on the numbering, and on everything else") {
  std::mt19937_64 g(32);
  int equal = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = random_problem(g, {.operations = 12, .once = 20});
    const auto form = canonical(p);
    const auto other = shuffled(p, g);
    const auto same = canonical(other);
    equal += form == same;
    if (form == same)
      for (std::size_t k = 0; k < form.operations.size(); ++k) {
        const auto &a = p.operations()[form.operations[k]], &b = other.operations()[same.operations[k]];
        REQUIRE(a.name == b.name);
      }
    auto values = p.values();
    auto operations = p.operations();
    const auto pick = [&](const auto& list) {
      return static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(list.size()) - 1));
    };
    switch (round % 4) {
      case 0:
        ++values[pick(values)].bytes;
        break;
      case 1:
        operations[pick(operations)].seconds += 0.5;
        break;
      case 2:
        ++operations[pick(operations)].workspace;
        break;
      default: {
        auto& op = operations[pick(operations)];
        op.once = !op.once;
      }
    }
    REQUIRE_FALSE(form == canonical(problem("", values, operations, p.targets())));
  }
  CHECK(equal == 500);
}

TEST_CASE("costs that differ by noise are made equal, others not") {
  std::mt19937_64 g(33);
  const auto p = transformer_training_graph(8);
  auto operations = p.operations();
  for (auto& op : operations) op.seconds *= 1 + 1e-4 * static_cast<double>(uniform(g, -200, 200));
  const problem noisy("noisy", p.values(), operations, p.targets());
  const auto alike = with_like_costs(noisy, 0.1);
  std::vector<double> before, after;
  for (std::size_t o = 0; o < operations.size(); ++o) {
    CHECK(std::abs(alike.operations()[o].seconds / operations[o].seconds - 1) < 0.1);
    before.push_back(operations[o].seconds);
    after.push_back(alike.operations()[o].seconds);
  }
  CHECK(alike.total_seconds() == Approx(noisy.total_seconds()));
  const auto distinct = [](std::vector<double> list) {
    std::sort(list.begin(), list.end());
    return std::unique(list.begin(), list.end()) - list.begin();
  };
  CHECK(distinct(before) > 120);
  CHECK(distinct(after) < 40);
  const auto same = with_like_costs(noisy, 0);
  for (std::size_t o = 0; o < operations.size(); ++o) CHECK(same.operations()[o].seconds == operations[o].seconds);
}

TEST_CASE("equal parts are solved once, however many there are") {
  std::vector<int> counts;
  std::mt19937_64 g(34);
  for (const std::size_t layers : {12u, 24u, 48u}) {
    const auto plain = transformer_training_graph(layers);
    auto operations = plain.operations();
    for (auto& op : operations) op.seconds *= 1 + 1e-4 * static_cast<double>(uniform(g, -200, 200));
    const problem p("noisy", plain.values(), operations, plain.targets());
    std::atomic<int> calls = 0;
    counting inner;
    inner.calls = &calls;
    hierarchical<counting, min_cut>::options o;
    o.cut.size = 30;
    o.bound = false;
    o.rounds = 0;
    o.slots = 300;
    const auto r = solve(p, part_of_peak(p, .6), hierarchical<counting, min_cut>(inner, quick(), o));
    CHECK(r.found());
    counts.push_back(calls);
  }
  CHECK(counts[0] > 0);
  CHECK(counts[1] <= counts[0] + 21);
  CHECK(counts[2] <= counts[1]);
}

TEST_CASE("hierarchical conforms") {
  hierarchical<>::options o;
  o.cut.size = 3;
  o.leaf_operations = 4;
  o.saved = 3;
  o.peaks = 2;
  o.rounds = 0;
  const hierarchical<> tiny_parts(quick(), quick(), o);
  CHECK(check_solver(tiny_parts, {.rounds = 80}) == std::vector<std::string>{});
}

TEST_CASE("parts of training graphs that are no chains are worth it") {
  struct sample {
    std::string name;
    problem p;
  };
  for (const auto& [name, p] :
       {sample{"u-net", u_net(4, 4)}, sample{"dense net", dense_net(3, 5)}, sample{"branches", branches(3, 3, 4)}}) {
    const auto all = p.total_seconds();
    for (const double f : {.8, .6, .5}) {
      const auto budget = part_of_peak(p, f);
      const auto r = solve(p, budget, hierarchical<>(quick(), quick())), cut = solve(p, budget, quick());
      INFO(name << " at " << f << ": " << 100 * (r.seconds / all - 1) << " %, min_cut " << 100 * (cut.seconds / all - 1) << " %");
      CHECK(r.found() >= cut.found());
      if (!r.found() || !cut.found()) continue;
      CHECK(r.seconds <= 1.03 * cut.seconds);
      CHECK(r.bound <= r.seconds);
    }
  }
}

TEST_CASE("parts of parts") {
  const auto p = transformer_training_graph(16);
  hierarchical<>::options flat, nested;
  nested.cut = {.size = 120, .most = 5};
  nested.leaf_operations = 60;
  flat.bound = nested.bound = false;
  flat.rounds = nested.rounds = 0;
  flat.saved = nested.saved = 3;
  flat.peaks = nested.peaks = 2;
  const auto light = quick();
  const auto budget = part_of_peak(p, .5);
  const auto a = solve(p, budget, hierarchical<>(light, light, flat)), b = solve(p, budget, hierarchical<>(light, light, nested));
  REQUIRE(a.found());
  REQUIRE(b.found());
  CHECK(b.seconds < 1.02 * a.seconds);
}

TEST_CASE("a user's partition is honoured, and refused where it is none") {
  std::mt19937_64 g(35);
  const auto p = random_training_chain(g, 8);
  // forward 0-7, loss 8, backward 9-16
  hierarchical<>::options o;
  o.parts = partition{{{0, 1, 2}, {14, 15, 16}}, {{3, 4, 5}, {11, 12, 13}}};
  CHECK(solve(p, part_of_peak(p, .7), hierarchical<>(min_cut{}, min_cut{}, o)).found());
  const auto refused = [&](partition parts) {
    o.parts = std::move(parts);
    solve(p, max_bytes, hierarchical<>(min_cut{}, min_cut{}, o));
  };
  CHECK_THROWS_WITH(refused({{{0, 1}, {}}, {{2, 1}, {}}}), Catch::Contains("part 1") && Catch::Contains("operation 1 "));
  CHECK_THROWS_WITH(refused({{{0, 1}, {99}}}), Catch::Contains("part 0") && Catch::Contains("99"));
  CHECK_THROWS_WITH(refused({{{0, 2}, {}}}), Catch::Contains("part 0") && Catch::Contains("depends on itself"));
  CHECK_THROWS_WITH(refused({{{16}, {0}}}), Catch::Contains("part 0") && Catch::Contains("operation 16"));
  CHECK_THROWS_WITH(refused({{{0}, {}}, {}}), Catch::Contains("part 1") && Catch::Contains("empty"));
  CHECK_THROWS_AS(refused({{{0, 2}, {}}, {{1, 3}, {}}}), bad_option);
  CHECK_THROWS_AS(hierarchical<>(min_cut{}, min_cut{}, {.saved = 0}), bad_option);
  CHECK_THROWS_AS(hierarchical<>(min_cut{}, min_cut{}, {.peaks = 0}), bad_option);
  CHECK_THROWS_AS(hierarchical<>(min_cut{}, min_cut{}, {.tolerance = -1}), bad_option);
}
