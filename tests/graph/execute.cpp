// SPDX-License-Identifier: Apache-2.0
// `execute` hands the vertices of the graph to a visitor, and runs nothing if the schedule cannot run to its end.
#include <catch2/catch.hpp>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/graph/execute.hpp>
#include <remat/graph/solve.hpp>
#include <remat/solver/chen.hpp>

namespace {

struct training_network {
  std::vector<std::vector<int>> operands;
  std::vector<int> ids;
};

}  // namespace

template <>
struct remat::dag_traits<training_network> {
  using vertex = int;
  static const auto& vertices(const training_network& n) { return n.ids; }
  static const auto& inputs(const training_network& n, int v) { return n.operands[static_cast<std::size_t>(v)]; }
  static std::size_t index(const training_network&, int v) { return static_cast<std::size_t>(v); }
};

namespace {

/// A chain of `layers` with its gradients and a held input, listed from the last vertex to the first. Even vertices have two
/// results.
training_network training_chain(int layers) {
  training_network n;
  n.operands.push_back({});
  for (int i = 1; i <= layers; ++i) n.operands.push_back({i - 1});
  for (int i = layers; i >= 1; --i) n.operands.push_back({i - 1, i, static_cast<int>(n.operands.size()) - 1});
  for (int v = static_cast<int>(n.operands.size()); v-- > 0;) n.ids.push_back(v);
  return n;
}

struct costs {
  double seconds(int) const { return 1; }
  std::vector<std::int64_t> bytes(int v) const {
    return v % 2 == 0 ? std::vector<std::int64_t>{6, 2} : std::vector<std::int64_t>{8};
  }
  bool held(int v) const { return v == 0; }
};

/// A device that tracks its memory, and refuses impossible steps.
struct device {
  const training_network& n;
  std::set<std::pair<int, std::size_t>> there = {{0, 0}, {0, 1}};
  std::int64_t bytes = 8, peak = 8;
  std::vector<int> order = {};

  void compute(int v) {
    for (int u : n.operands[static_cast<std::size_t>(v)])
      for (std::size_t k = 0; k < costs{}.bytes(u).size(); ++k) REQUIRE(there.count({u, k}) == 1);
    std::int64_t here = bytes;
    for (std::size_t k = 0; k < costs{}.bytes(v).size(); ++k) {
      here += costs{}.bytes(v)[k];
      if (there.insert({v, k}).second) bytes += costs{}.bytes(v)[k];
    }
    peak = std::max(peak, here);
    order.push_back(v);
  }
  void drop(int v, std::size_t k) {
    REQUIRE(there.erase({v, k}) == 1);
    bytes -= costs{}.bytes(v)[k];
  }
};

struct copying_device : device {
  std::vector<std::string> copies = {};
  void offload(int v, std::size_t k) { copies.push_back("offload " + std::to_string(v) + " " + std::to_string(k)); }
  void prefetch(int v, std::size_t k) {
    REQUIRE(there.insert({v, k}).second);
    copies.push_back("prefetch " + std::to_string(v) + " " + std::to_string(k));
  }
};

struct cannot_drop {
  void compute(int) {}
};

static_assert(remat::schedule_visitor<device, training_network> && !remat::copying_visitor<device, training_network>);
static_assert(remat::copying_visitor<copying_device, training_network>);
static_assert(!remat::schedule_visitor<cannot_drop, training_network> && !remat::schedule_visitor<int, training_network>);

}  // namespace

TEST_CASE("execute uses the memory that evaluate reports, and every target is there at the end") {
  const auto n = training_chain(9);
  for (auto budget : {1000, 80, 70, 60, 50}) {
    const auto r = remat::solve(n, costs{}, budget, remat::chen());
    if (!r.found()) continue;
    device d{n};
    remat::execute(r, r.schedule, d);
    CHECK(d.peak == r.peak);
    CHECK(d.order.size() == remat::compute_order(r.schedule).size());
    const int last = static_cast<int>(n.operands.size()) - 1;
    for (std::size_t k = 0; k < costs{}.bytes(last).size(); ++k) CHECK(d.there.count({last, k}) == 1);
  }
  const auto tight = remat::solve(n, costs{}, 70, remat::chen());
  REQUIRE(tight.found());
  CHECK(tight.recomputed > 0);  // the budgets above include tight ones
}

TEST_CASE("execute passes copies to the visitor, or refuses them before anything runs") {
  const auto n = training_chain(2);
  const auto f = remat::freeze(n, costs{}, {.copies = remat::copy_rates{1, 1, 0}});
  auto s = remat::store_all_schedule(f.problem);
  const auto v = f.value_of(n, 1);
  const auto produced = std::find(s.steps.begin(), s.steps.end(), remat::step{remat::action::compute, f.operation_of(n, 1)});
  s.steps.insert(produced + 1, {{remat::action::offload, v}, {remat::action::drop, v}, {remat::action::prefetch, v}});
  copying_device d{{n}};
  remat::execute(f, s, d);
  CHECK(d.copies == std::vector<std::string>{"offload 1 0", "prefetch 1 0"});
  device cannot{n};
  CHECK_THROWS_WITH(remat::execute(f, s, cannot), Catch::Contains("offload vertex 1") && Catch::Contains("the visitor"));
  CHECK(cannot.order.empty());
}

TEST_CASE("execute runs nothing of an invalid schedule") {
  const auto n = training_chain(2);
  const auto f = remat::freeze(n, costs{});
  auto s = remat::store_all_schedule(f.problem);
  s.steps.pop_back();
  s.compute(0);
  s.drop(f.value_of(n, 0));  // held
  device d{n};
  CHECK_THROWS_AS(remat::execute(f, s, d), remat::bad_schedule);
  CHECK(d.order.empty());
}
