// SPDX-License-Identifier: Apache-2.0
// The canonical form of a problem, which does not depend on numbering.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include <remat/structure/canonical.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;

namespace {

/// The problem with its values and operations in another order.
problem shuffled(const problem& p, std::mt19937_64& g) {
  std::vector<value_id> values(p.values().size()), place(values.size());
  for (value_id v = 0; v < values.size(); ++v) values[v] = v;
  std::shuffle(values.begin(), values.end(), g);
  for (value_id v = 0; v < values.size(); ++v) place[values[v]] = v;
  std::vector<value> named;
  for (auto v : values) named.push_back(p.values()[v]);
  std::vector<std::size_t> missing(p.operations().size(), 0);
  std::vector<operation_id> ready;
  std::vector<value_id> targets;
  for (operation_id o = 0; o < missing.size(); ++o) {
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

TEST_CASE("the canonical form depends on everything but the numbering") {
  std::mt19937_64 g(32);
  int equal = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = random_problem(g, {.operations = 12, .once = 20});
    const auto form = structure::canonical(p);
    const auto other = shuffled(p, g);
    const auto same = structure::canonical(other);
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
    REQUIRE_FALSE(form == structure::canonical(problem("", values, operations, p.targets())));
  }
  CHECK(equal == 500);
}
