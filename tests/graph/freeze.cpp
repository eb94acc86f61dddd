// SPDX-License-Identifier: Apache-2.0
// From graphs and cost models to problems: archetypes, order, errors that name their vertex, cost models.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <remat/graph/roofline.hpp>
#include <remat/graph/solve.hpp>
#include <remat/graph/table.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/archetypes.hpp>

namespace {

/// A graph given by the operands of each vertex. Tests may make it invalid.
struct network {
  std::vector<std::vector<int>> operands;
  std::vector<int> ids = {};
  explicit network(std::vector<std::vector<int>> o) : operands(std::move(o)) {
    for (std::size_t i = 0; i < operands.size(); ++i) ids.push_back(static_cast<int>(i));
  }
};

/// A graph given by the readers of each vertex.
struct by_readers {
  std::vector<std::vector<int>> readers;
  std::vector<int> ids;
};

}  // namespace

template <>
struct remat::dag_traits<network> {
  using vertex = int;
  static const auto& vertices(const network& n) { return n.ids; }
  static auto inputs(const network& n, int v) {
    return static_cast<std::size_t>(v) < n.operands.size() ? n.operands[static_cast<std::size_t>(v)] : std::vector<int>{};
  }
  static std::size_t index(const network&, int v) { return static_cast<std::size_t>(v); }
};

template <>
struct remat::dag_traits<by_readers> {
  using vertex = int;
  static const auto& vertices(const by_readers& n) { return n.ids; }
  static const auto& outputs(const by_readers& n, int v) { return n.readers[static_cast<std::size_t>(v)]; }
  static std::size_t index(const by_readers&, int v) { return static_cast<std::size_t>(v); }
};

namespace {

struct unit_costs {
  double seconds(int) const { return 1; }
  std::int64_t bytes(int) const { return 8; }
};

/// A cost model with all members; vertex 1 has two results.
struct full_costs : unit_costs {
  std::vector<std::int64_t> bytes(int v) const {
    return v == 1 ? std::vector<std::int64_t>{3, 4} : std::vector<std::int64_t>{v + 10};
  }
  std::int64_t workspace(int v) const { return v == 2 ? 5 : 0; }
  bool once(int v) const { return v == 3; }
  bool held(int v) const { return v == 0; }
  bool target(int v) const { return v == 2; }
  std::string name(int v) const { return std::string(1, static_cast<char>('p' + v)); }
  const char* kind(int v) const { return v == 1 ? "aten.split" : ""; }
  std::vector<int> reads(int u, int v) const {
    return u == 1 && v == 2 ? std::vector<int>{1} : u == 1 ? std::vector<int>{0, 1} : std::vector<int>{0};
  }
};

/// `full_costs` for the same vertices with other numbers.
struct full_costs_of_reordered : unit_costs {
  std::vector<std::int64_t> bytes(int v) const {
    return v == 2 ? std::vector<std::int64_t>{3, 4} : std::vector<std::int64_t>{v + 10};
  }
  bool held(int v) const { return v == 1; }
};

struct misspelt : unit_costs {
  std::int64_t worksapce(int) const { return 5; }
  bool once(int) const { return true; }
};

struct no_bytes {
  double seconds(int) const { return 1; }
};

static_assert(remat::dag<network> && remat::dag<by_readers>);
static_assert(!remat::dag<std::vector<int>> && !remat::dag<int>);
static_assert(remat::cost_model<unit_costs, network> && remat::cost_model<full_costs, network>);
using remat::cost_member;
static_assert(remat::cost_model_with<full_costs, network, cost_member::workspace, cost_member::once, cost_member::held,
                                     cost_member::target, cost_member::reads, cost_member::name, cost_member::kind>);
static_assert(!remat::cost_model_with<full_costs, network, cost_member::source> &&
              !remat::cost_model_with<full_costs, network, cost_member::backward>);
static_assert(remat::cost_model_with<misspelt, network, cost_member::once> &&
              !remat::cost_model_with<misspelt, network, cost_member::workspace>);
static_assert(!remat::cost_model_with<no_bytes, network>);
static_assert(!remat::cost_model<no_bytes, network> && !remat::cost_model<unit_costs, int>);
static_assert(!remat::cost_model<remat::table<remat::seconds_of<std::vector<double>>>, network>);

struct keep_all {
  std::string name() const { return "keep all"; }
  remat::result solve(const remat::problem& p, remat::bytes_t, remat::monitor& m) const {
    m.report({.stage = "only"});
    remat::result r;
    r.status = remat::status::feasible;
    r.schedule = remat::store_all_schedule(p);
    return r;
  }
};

template <class G, class C>
std::string refusal(const G& g, const C& c) {
  try {
    remat::freeze(g, c);
  } catch (const remat::bad_problem& why) {
    return why.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("freeze and solve ask for no more than the concepts require") {
  const remat::testing::dag_archetype g;
  const remat::testing::cost_model_archetype c;
  const auto f = remat::freeze(g, c);
  CHECK(f.problem.operations().size() == 3);
  CHECK(f.problem.operations()[2].inputs == std::vector<remat::value_id>{1});
  CHECK(f.operations.size() == 3);
  const auto r = remat::solve(g, c, 100, remat::testing::solver_archetype{}, {}, remat::testing::observer_archetype{});
  CHECK(r.status == remat::status::not_found);
}

TEST_CASE("freeze makes an operation with one result of each vertex, and targets of sinks") {
  const auto f =
      remat::freeze(network({{}, {0}, {0, 0}, {}}), unit_costs{}, {.name = "net", .copies = remat::copy_rates{1, 2, 3}});
  const remat::problem& p = f;
  CHECK(p.name() == "net");
  CHECK(p.copies()->to_device == 2);
  CHECK(p.operations().size() == 4);
  CHECK(p.operations()[2].inputs == std::vector<remat::value_id>{0});
  CHECK(p.operations()[2].name == "vertex 2");
  CHECK(p.values()[2].name == "vertex 2");
  CHECK(p.targets() == std::vector<remat::value_id>{1, 2, 3});
  CHECK(f.operations == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("freeze keeps a topological order, and changes another order as little as possible") {
  CHECK(remat::freeze(network({{}, {}, {0}, {1}, {2}}), unit_costs{}).operations == std::vector<int>{0, 1, 2, 3, 4});
  CHECK(remat::freeze(network({{3}, {}, {}, {2}}), unit_costs{}).operations == std::vector<int>{1, 2, 3, 0});
  CHECK(remat::freeze(by_readers{{{}, {0}, {1}}, {0, 1, 2}}, unit_costs{}).operations == std::vector<int>{2, 1, 0});
}

TEST_CASE("freeze takes the optional members of a cost model, and several results per vertex") {
  const auto f = remat::freeze(network({{}, {0}, {1}, {1, 0}}), full_costs{});
  const auto& p = f.problem;
  REQUIRE(p.values().size() == 5);
  CHECK(p.values()[0].held);
  CHECK(p.values()[0].name == "p[0]");
  CHECK(p.values()[2].name == "q[1]");
  CHECK(p.values()[2].bytes == 4);
  REQUIRE(p.operations().size() == 3);
  CHECK(p.operations()[0].outputs == std::vector<remat::value_id>{1, 2});
  CHECK(p.operations()[0].kind == "aten.split");
  CHECK(p.operations()[1].inputs == std::vector<remat::value_id>{2});
  CHECK(p.operations()[1].workspace == 5);
  CHECK(p.operations()[2].inputs == std::vector<remat::value_id>{0, 1, 2});
  CHECK(p.operations()[2].once);
  CHECK(p.targets() == std::vector<remat::value_id>{3});
  CHECK(f.operations == std::vector<int>{1, 2, 3});
}

TEST_CASE("a frozen graph maps vertices to operations and values, and back") {
  const network n({{2}, {}, {1}, {1, 0}});  // not in topological order
  const auto f = remat::freeze(n, full_costs_of_reordered{});
  REQUIRE(f.values.size() == f.problem.values().size());
  REQUIRE(f.operations.size() == f.problem.operations().size());
  for (remat::value_id v = 0; v < f.values.size(); ++v) CHECK(f.value_of(n, f.values[v].vertex, f.values[v].result) == v);
  for (remat::operation_id o = 0; o < f.operations.size(); ++o) {
    CHECK(f.operation_of(n, f.operations[o]) == o);
    for (std::size_t k = 0; k < f.problem.operations()[o].outputs.size(); ++k)
      CHECK(f.value_of(n, f.operations[o], k) == f.problem.operations()[o].outputs[k]);
  }
  CHECK(f.operation_of(n, 1) == remat::none);
  CHECK(f.problem.values()[f.value_of(n, 2, 1)].bytes == 4);
  CHECK_THROWS_WITH(f.value_of(n, 0, 1), Catch::Contains("result 1") && Catch::Contains("has 1"));
}

TEST_CASE("freeze makes droppable sources of vertices marked as source") {
  const network n({{}, {0}, {1}});
  const remat::table costs{remat::seconds_of([](int) { return 1; }), remat::bytes_of([](int) { return 8; }),
                           remat::source_of([](int v) { return v == 0; })};
  const auto f = remat::freeze(n, costs);
  CHECK((f.problem.is_source(0) && !f.problem.values()[0].held && !f.problem.is_target(0)));
  CHECK(f.operations == std::vector<int>{1, 2});
  CHECK(remat::evaluate(f.problem, remat::store_all_schedule(f.problem)).memory.back() == 8);  // only the target remains
  CHECK_THAT(
      refusal(network({{}, {0}}), remat::table{remat::seconds_of([](int) { return 1; }), remat::bytes_of([](int) { return 8; }),
                                               remat::source_of([](int v) { return v == 1; })}),
      Catch::Contains("vertex 1: a source, but it has inputs"));
}

TEST_CASE("freeze finds the beginning of the backward") {
  const auto costs = [](std::vector<bool> backward) {
    return remat::table{remat::seconds_of([](int) { return 1; }), remat::bytes_of([](int) { return 8; }),
                        remat::backward_of(std::move(backward))};
  };
  const network n({{}, {0}, {1}, {0}});  // vertex 3 belongs to the forward, and is listed last
  const auto f = remat::freeze(n, costs({false, false, true, false}));
  CHECK(f.operations == std::vector<int>{0, 1, 3, 2});
  CHECK(f.problem.backward_start() == std::optional<remat::operation_id>(3));
  CHECK_FALSE(remat::freeze(n, costs({false, false, false, false})).problem.backward_start());
  CHECK_FALSE(remat::freeze(n, unit_costs{}).problem.backward_start());
  CHECK_THAT(refusal(n, costs({false, true, false, false})), Catch::Contains("vertex 2") && Catch::Contains("backward"));
}

TEST_CASE("freeze takes a graph without vertices, and a graph without operations") {
  const auto nothing = remat::freeze(network(std::vector<std::vector<int>>{}), unit_costs{});
  CHECK(nothing.problem.values().empty());
  CHECK(nothing.operations.empty());
  CHECK(remat::solve(network(std::vector<std::vector<int>>{}), unit_costs{}, 0, remat::store_all{}).status ==
        remat::status::optimal);
  const remat::table held{remat::seconds_of([](int) { return 1; }), remat::bytes_of([](int) { return 8; }),
                          remat::held_of([](int) { return true; })};
  const auto still = remat::freeze(network({{}, {}}), held);
  CHECK(still.problem.operations().empty());
  CHECK(still.problem.held_bytes() == 16);
}

TEST_CASE("the error for a cycle names its vertices in order") {
  const network g({{}, {0, 3}, {1}, {2}, {3}});
  CHECK_THROWS_AS(remat::freeze(g, unit_costs{}), remat::not_a_dag);
  CHECK(refusal(g, unit_costs{}) == "the graph has a cycle: vertex 1 -> vertex 2 -> vertex 3 -> vertex 1");
  remat::table named{remat::seconds_of([](int) { return 1; }), remat::bytes_of([](int) { return 1; }),
                     remat::name_of(std::vector<std::string>{"in", "conv", "norm", "add", "out"})};
  CHECK(refusal(g, named) == "the graph has a cycle: conv -> norm -> add -> conv");
  CHECK(refusal(network(std::vector<std::vector<int>>{{0}}), unit_costs{}) == "the graph has a cycle: vertex 0 -> vertex 0");
  CHECK(refusal(by_readers{{{1}, {0}}, {0, 1}}, unit_costs{}) == "the graph has a cycle: vertex 0 -> vertex 1 -> vertex 0");
}

TEST_CASE("the error for a vertex outside the graph names the vertex that refers to it") {
  CHECK(refusal(network({{}, {7}}), unit_costs{}) == "vertex 1: an input with index 7 is not a vertex of the graph");
  CHECK_THAT(refusal(network({{}, {-1}}), unit_costs{}), Catch::Contains("vertex 1: an input with index"));
  CHECK(refusal(by_readers{{{2}, {}}, {0, 1}}, unit_costs{}) == "vertex 0: a reader with index 2 is not a vertex of the graph");
  network twice({{}, {}});
  twice.ids = {1, 1};
  CHECK(refusal(twice, unit_costs{}) == "vertex 1: index 1 is that of vertex 1 too");
  twice.ids = {0, 5};
  CHECK(refusal(twice, unit_costs{}) == "vertex 5: index 5 is not below the number of vertices, 2");
}

TEST_CASE("the error for a cost out of range names the vertex") {
  const network g({{}, {0}});
  const double infinity = std::numeric_limits<double>::infinity();
  for (double bad : {-1.0, std::nan(""), infinity}) {
    CHECK_THAT(refusal(g, remat::table{remat::seconds_of(std::vector<double>{1, bad}), remat::bytes_of(std::vector<int>{1, 1})}),
               Catch::StartsWith("vertex 1: seconds"));
    CHECK_THAT(
        refusal(g, remat::table{remat::seconds_of(std::vector<double>{1, 1}), remat::bytes_of(std::vector<double>{bad, 1})}),
        Catch::StartsWith("vertex 0: bytes"));
    CHECK_THAT(refusal(g, remat::table{remat::seconds_of([](int) { return 0; }), remat::bytes_of([](int) { return 0; }),
                                       remat::workspace_of(std::vector<double>{1, bad})}),
               Catch::StartsWith("vertex 1: workspace"));
  }
  const auto sized = [](auto bytes) { return remat::table{remat::seconds_of([](int) { return 1; }), remat::bytes_of(bytes)}; };
  CHECK(refusal(g, sized(std::vector<std::uint64_t>{1, ~std::uint64_t{0}})) ==
        "vertex 1: bytes is beyond 2^53: 18446744073709551615");
  CHECK(refusal(g, sized(std::vector<std::int64_t>{-4, 0})) == "vertex 0: bytes is negative: -4");
  CHECK_THAT(refusal(g, sized([](int) { return remat::max_bytes; })), Catch::Contains("2^53"));
  CHECK(refusal(g, sized(std::vector<int>{1})) == "bytes: no entry for vertex 1");
}

TEST_CASE("freeze refuses held vertices with inputs, and reads of absent results") {
  const network g({{}, {0}});
  const auto held = [](bool first, bool second) {
    return remat::table{remat::seconds_of([](int) { return 1; }), remat::bytes_of([](int) { return 1; }),
                        remat::held_of(std::map<int, bool>{{0, first}, {1, second}})};
  };
  CHECK(refusal(g, held(true, false)) == "accepted");
  CHECK(refusal(g, held(true, true)) == "vertex 1: a held vertex is a source, but it has inputs");
  struct reads_third : unit_costs {
    std::vector<int> reads(int, int) const { return {2}; }
  };
  CHECK(refusal(g, reads_third{}) == "vertex 1: reads result 2 of vertex 0, which has 1");
}

TEST_CASE("solve for graphs returns the vertices of its steps, and passes observers on") {
  int events = 0;
  const auto r = remat::solve(network({{1}, {}}), unit_costs{}, 16, keep_all{}, {}, [&](const remat::progress&) { ++events; });
  CHECK(events == 1);
  CHECK(r.status == remat::status::optimal);
  CHECK(r.peak == 16);
  CHECK(r.operations == std::vector<int>{1, 0});
}

TEST_CASE("roofline takes the longer of the times for arithmetic and for bytes") {
  const remat::roofline device{.flops_per_second = 100, .bytes_per_second = 10, .overhead = 0.5};
  CHECK(device.seconds(200, 10) == 2.5);  // bound by arithmetic
  CHECK(device.seconds(100, 30) == 3.5);  // bound by memory
  remat::table c{remat::roofline_of(device, std::vector<int>{0, 400}, [](int v) { return 10 * v; }),
                 remat::bytes_of([](int) { return 1; })};
  static_assert(remat::cost_model<decltype(c), network>);
  const auto f = remat::freeze(network({{}, {0}}), c);
  CHECK(f.problem.operations()[0].seconds == 0.5);
  CHECK(f.problem.operations()[1].seconds == 4.5);
  const auto column = [](int) { return 1; };
  CHECK_THROWS_WITH((remat::roofline_of{remat::roofline{0, 1}, column, column}), Catch::Contains("flops_per_second"));
  CHECK_THROWS_WITH((remat::roofline_of{remat::roofline{1, std::nan("")}, column, column}), Catch::Contains("bytes_per_second"));
  CHECK_THROWS_WITH((remat::roofline_of{remat::roofline{1, 1, -1}, column, column}), Catch::Contains("overhead"));
}
