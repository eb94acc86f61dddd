// SPDX-License-Identifier: Apache-2.0
// Orders with incremental memory, against a measurement from scratch.
#include <catch2/catch.hpp>

#include <random>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/order/sequence.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;
using order::sequence;

namespace {

bool agrees(const problem& p, const sequence& s) {
  const auto order = s.order();
  const auto needs = measure_order(p, order);
  std::size_t position = 0;
  bool same = s.size() == order.size() && s.peak() == needs.peak && s.seconds() == Approx(needs.seconds);
  for (sequence::slot k = 0; k < s.slots(); ++k) {
    const auto x = s.step_at(k);
    if (x == sequence::no_step || x <= sequence::end)
      same = same && s.memory().at(k) < 0;
    else
      same = same && s.memory().at(k) == needs.memory[position++];
  }
  CHECK_NOTHROW(evaluate(p, with_drops(p, order)));
  return same;
}

}  // namespace

TEST_CASE("a sequence updates its memory on insertion, removal, move, undo and reload") {
  std::mt19937_64 g(3);
  int inserted = 0, removed = 0, moved = 0, undone = 0;
  for (int round = 0; round < 600; ++round) {
    const auto size = static_cast<std::size_t>(round / 3);
    const auto p = round % 3 == 0   ? random_training_chain(g, 2 + size % 40)
                   : round % 3 == 1 ? random_problem(g, {.operations = 5 + size % 60})
                                    : transformer_training_graph(1 + size % 3);
    sequence s(p);
    s.load(needed_operations(p));
    REQUIRE(agrees(p, s));
    for (int i = 0; i < 20; ++i) {
      s.commit();
      const auto before = s.order();
      for (auto changes = uniform(g, 1, 6); changes > 0; --changes) {
        const auto x = s.step_at(static_cast<sequence::slot>(uniform(g, 1, static_cast<std::int64_t>(s.slots()) - 1)));
        if (x == sequence::no_step) continue;
        if (x != sequence::end && chance(g, 30) && !s.is_first(x)) {
          s.remove(x);
          ++removed;
        } else if (x != sequence::end && chance(g, 30) && s.slot_of(x) + 1 < s.slots()) {
          auto k = s.slot_of(x) + 1;
          while (s.step_at(k) == sequence::no_step) ++k;
          const auto y = s.step_at(k);  // swap the two operations, unless the second reads the first
          if (y == sequence::end || s.operation(y) == s.operation(x)) continue;
          const auto& reads = p.operations()[s.operation(y)].inputs;
          if (std::any_of(reads.begin(), reads.end(), [&](value_id v) { return p.producer(v) == s.operation(x); })) continue;
          s.move(y, x);
          ++moved;
        } else {
          const operation_id o = static_cast<index_t>(uniform(g, 0, static_cast<std::int64_t>(p.operations().size()) - 1));
          const auto& events = s.events(p.operations()[o].outputs[0]);
          if (events.empty() || s.slot_of(events.front()) >= s.slot_of(x)) continue;
          s.insert(o, x);
          ++inserted;
        }
        REQUIRE(agrees(p, s));
      }
      if (!chance(g, 40)) continue;
      if (++undone % 4 == 0) {
        s.load(before);
      } else {
        s.roll_back();
        REQUIRE(s.order() == before);
      }
      REQUIRE(agrees(p, s));
    }
  }
  CHECK(inserted > 4000);
  CHECK(removed > 100);
  CHECK(moved > 800);
  CHECK(undone > 2000);
}

TEST_CASE("a sequence updates its memory when slots are spread anew after many insertions at one place") {
  for (const bool at_end : {true, false}) {
    const auto p = transformer_training_graph(40);
    sequence s(p);
    s.load(needed_operations(p));
    REQUIRE(s.slots() > 2048);
    const auto slots = s.slots();
    std::vector<operation_id> made;  // made by earlier operations
    const auto next = at_end ? sequence::end : s.step_at(s.slots() / 2 / 2 * 2);
    REQUIRE(next != sequence::no_step);
    for (auto x : s.order()) {
      if (next != sequence::end && x == s.operation(next)) break;
      made.push_back(x);
    }
    for (std::size_t i = 0; i < 400; ++i) {
      auto before = next;  // the place stays the same, or moves back with each insertion
      if (i % 2 == 1)
        for (auto k = s.slot_of(next); (before = s.step_at(--k)) == sequence::no_step;) continue;
      s.insert(made[(i * 37) % made.size()], before);
      if (i % 20 == 0) REQUIRE(agrees(p, s));
    }
    CHECK(s.slots() == slots);
    REQUIRE(agrees(p, s));
    s.roll_back();
    CHECK(s.order() == needed_operations(p));
    REQUIRE(agrees(p, s));
  }
}

TEST_CASE("a sequence removes a hundred thousand useless computations in a row without recursion", "[long]") {
  constexpr index_t n = 100'000;
  std::vector<value> values;
  std::vector<operation> ops;
  for (index_t i = 0; i < n; ++i) {
    values.push_back({"", 1});
    ops.push_back({"", i > 0 ? std::vector{value_id(i - 1)} : std::vector<value_id>{}, {i}, 1});
  }
  for (index_t i = 0; i < 2; ++i) {  // both read the last value of the row
    values.push_back({"", 1});
    ops.push_back({"", {n - 1}, {n + i}, 1});
  }
  const problem p("row", std::move(values), std::move(ops), {n, n + 1});
  auto doubled = needed_operations(p);
  for (index_t i = 0; i < n; ++i) doubled.insert(doubled.end() - 1, i);
  sequence s(p);
  s.load(doubled);
  REQUIRE(s.size() == 2 * n + 2);
  auto k = s.slot_of(sequence::end);  // the second copy of the last operation of the row, before the last reader
  for (int steps = 0; steps < 2;) steps += s.step_at(--k) != sequence::no_step;
  s.remove(s.step_at(k));
  CHECK(s.order() == needed_operations(p));
  s.roll_back();
  CHECK(s.order() == doubled);
}
