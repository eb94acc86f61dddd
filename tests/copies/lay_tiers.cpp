// SPDX-License-Identifier: Apache-2.0
// Copies for problems on several tiers: weights, gradients and optimizers on a device, a host and a disk.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <remat/copies/copy_search.hpp>
#include <remat/copies/early_copies.hpp>
#include <remat/copies/lay_copies.hpp>
#include <remat/copies/virtual_problem.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/result.hpp>

#include "../tiers.hpp"

using remat::bytes_t;
using remat::problem;
using remat::value_id;
using remat::testing::chance;
using remat::testing::disk;
using remat::testing::host;
using remat::testing::uniform;

namespace {

/// Some operations of the device run again some time later.
std::vector<remat::operation_id> repeated(std::mt19937_64& g, const problem& p) {
  auto order = remat::needed_operations(p);
  const auto first = order;
  for (auto o : first)
    if (!p.operations()[o].once && chance(g, 30)) {
      const auto made = std::find(order.begin(), order.end(), o) - order.begin();
      order.insert(order.begin() + uniform(g, made + 1, static_cast<std::int64_t>(order.size())), o);
    }
  return order;
}

}  // namespace

TEST_CASE("lay_copies on two and three tiers: every schedule is valid and within all budgets") {
  std::mt19937_64 g(21);
  int laid = 0, full = 0, refused = 0, drawn = 0, chained = 0, from_disk = 0;
  for (int round = 0; round < 4000; ++round) {
    auto p = round % 2 == 0 ? remat::testing::random_tiers_problem(g)
                            : remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 6)),
                                                              .cyclic = chance(g, 50),
                                                              .disk = 40 * (round % 4 / 2)});
    if (p.plain()) continue;
    ++drawn;
    if (!remat::copies::unplannable(p).empty()) {
      ++refused;
      continue;
    }
    p = remat::testing::with_some_budgets(g, p, 30, 0, 60);
    const bool again = chance(g, 50);
    const auto order = again ? repeated(g, p) : remat::needed_operations(p);
    const auto least = remat::bounds_without_search(p).budget;
    for (const auto budget : {least - 1, least, least + uniform(g, 0, 20), least + 1000})
      for (const char way : {'a', 'f', 'd'}) {
        INFO("round " << round << ", budget " << budget << ", way " << way);
        const auto found =
            remat::copies::lay_copies(p, order, budget, {.frugal = way == 'f', .small = 0, .on_demand = way == 'd'});
        if (!found) {
          REQUIRE((remat::testing::limited(p) || again || budget < least + 1000));
          ++full;
          continue;
        }
        ++laid;
        chained += remat::copies::tier_chain(p).size() > 2;
        from_disk += std::any_of(found->schedule.steps.begin(), found->schedule.steps.end(),
                                 [](const auto& s) { return s.what == remat::action::copy && s.from == disk; });
        const auto e = remat::evaluate(p, found->schedule);
        REQUIRE(e.peak <= budget);
        REQUIRE(e.peak >= least);
        if (p.next().empty()) REQUIRE(e.seconds <= found->seconds * (1 + 1e-12) + 1e-12);
        if (again) continue;
        auto computed = remat::compute_order(found->schedule);
        std::sort(computed.begin(), computed.end());
        REQUIRE(computed == order);
      }
  }
  CAPTURE(drawn, refused, laid, full, chained, from_disk);
  CHECK(laid > 10'000);
  CHECK(chained > 8000);
  CHECK(from_disk > 5000);
  CHECK(full > 1000);
  CHECK(3 * refused < 2 * drawn);
}

namespace {

/// A plan without foresight: what is on the host is copied when it is read and dropped afterwards, what goes to the host does so
/// when the device has no more use for it, all else stays.
class on_demand {
 public:
  explicit on_demand(const problem& p)
      : p_(p),
        where_(remat::copies::find_residence(p, std::vector<remat::tier_id>(p.values().size(), host))),
        on_(p.values().size()) {}

  remat::schedule plan() {
    const auto order = *remat::copies::overwrite_last(p_, remat::needed_operations(p_));
    for (value_id v = 0; v < on_.size(); ++v)
      if (p_.is_source(v)) {
        on_[v].insert(where_.homes[v]);
        if (p_.values()[v].starts == remat::any_tier) s_.starts.push_back({v, where_.homes[v]});
      }
    for (auto o : order)
      for (auto v : p_.operations()[o].inputs) ++reads_[{v, p_.operations()[o].on}];
    for (auto o : order) run(p_.operations()[o], o);
    for (value_id v = 0; v < on_.size(); ++v) end(v);
    return std::move(s_);
  }

 private:
  using place = remat::copies::residence::place;

  void run(const remat::operation& op, remat::operation_id o) {
    for (auto v : op.inputs) bring(v, op.on);
    s_.compute(o);
    for (const auto& x : op.overwrites) on_[x.input].erase(op.on);
    for (auto v : op.outputs) on_[v].insert(op.on);
    for (auto v : op.inputs) --reads_[{v, op.on}];
    if (op.on != remat::device_tier) return;
    for (const auto* list : {&op.inputs, &op.outputs})
      for (auto v : *list)
        if (on_[v].contains(remat::device_tier)) leave(v);
  }
  void leave(value_id v) {
    const bool here = reads_[{v, remat::device_tier}] > 0 || where_.ends[v] == place::device || where_.ends[v] == place::anywhere;
    if (!here && (reads_[{v, host}] > 0 || where_.ends[v] == place::host)) bring(v, host);
    if (!here || on_[v].contains(host)) drop(v, remat::device_tier);
  }
  void end(value_id v) {
    if (where_.ends[v] == place::device) bring(v, remat::device_tier);
    if (where_.ends[v] == place::host) bring(v, host);
    if (p_.next().empty() || where_.ends[v] == place::anywhere) return;
    if (where_.ends[v] != place::device) drop(v, remat::device_tier);
    if (where_.ends[v] != place::host) drop(v, host);
  }
  void bring(value_id v, remat::tier_id t) {
    if (!on_[v].insert(t).second) return;
    s_.copy(v, t == host ? remat::device_tier : host, t);
  }
  void drop(value_id v, remat::tier_id t) {
    if (!on_[v].contains(t) || (p_.values()[v].held && where_.homes[v] == t)) return;
    on_[v].erase(t);
    s_.drop(v, t);
  }

  const problem& p_;
  remat::copies::residence where_;
  std::vector<std::set<remat::tier_id>> on_;
  std::map<std::pair<value_id, remat::tier_id>, int> reads_;
  remat::schedule s_;
};

}  // namespace

TEST_CASE("lay_copies on two tiers: rarely slower than on demand, in the same memory") {
  std::mt19937_64 g(22);
  int compared = 0, missed = 0, no_room = 0, slower = 0, faster = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto p =
        remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 6)), .cyclic = chance(g, 50)});
    if (p.plain() || !remat::copies::unplannable(p).empty()) continue;
    INFO("round " << round);
    const auto e = remat::evaluate(p, on_demand(p).plan());
    double seconds = std::numeric_limits<double>::infinity();
    for (const bool frugal : {false, true})
      if (const auto laid = remat::copies::lay_copies(p, remat::needed_operations(p), e.peak, {.frugal = frugal, .small = 0}))
        seconds = std::min(seconds, remat::evaluate(p, laid->schedule).seconds);
    const auto tight = remat::testing::with_budgets(p, {std::nullopt, e.peaks[host]});
    bool fits = false;
    for (const bool frugal : {false, true})
      fits = fits || remat::copies::lay_copies(tight, remat::needed_operations(p), e.peak, {.frugal = frugal, .small = 0});
    ++compared;
    no_room += !fits;
    missed += std::isinf(seconds);
    slower += seconds > e.seconds + 1e-9;
    faster += seconds < e.seconds - 1e-9;
  }
  CAPTURE(compared, missed, no_room, slower, faster);
  CHECK(missed == 0);
  CHECK(500 * no_room < compared);  // in the memory of the host, too
  CHECK(200 * slower < compared);
  CHECK(10 * faster > 9 * compared);
}

TEST_CASE("copies as early as they can be, and steps as they happen: valid, within all budgets, the same steps, never slower") {
  std::mt19937_64 g(29);
  int valid = 0, faster = 0, tight = 0, sooner = 0, later = 0;
  for (int round = 0; round < 6'000; ++round) {
    auto p = round % 2 == 0 ? remat::testing::random_tiers_problem(g)
                            : remat::testing::random_step(g, {.layers = 3, .cyclic = chance(g, 50), .disk = 40});
    if (p.plain()) continue;
    auto s = remat::testing::tiers_walk(g, p).run();
    if (chance(g, 50) && remat::copies::unplannable(p).empty())
      if (auto laid = remat::copies::lay_copies(p, remat::needed_operations(p), 30, {.on_demand = chance(g, 50)}))
        s = std::move(laid->schedule);
    const auto e = remat::testing::evaluated(p, s);
    if (!e) continue;
    INFO("round " << round);
    auto peaks = std::vector<std::optional<bytes_t>>(e->peaks.begin(), e->peaks.end());
    peaks.front().reset();
    const auto q = remat::testing::with_budgets(p, peaks);  // exactly what it needs
    const auto early = remat::copies::detail::with_early_copies(q, s, *e, e->peak);
    const auto then = remat::evaluate(q, early);
    REQUIRE(then.peak <= e->peak);
    REQUIRE(then.seconds <= e->seconds * (1 + 1e-9));
    const auto steps = [](const remat::schedule& of) {
      std::map<std::vector<std::size_t>, int> counts;
      for (const auto& x : of.steps) ++counts[{static_cast<std::size_t>(x.what), x.which, x.from, x.to}];
      return counts;
    };
    REQUIRE(steps(early) == steps(s));
    REQUIRE(remat::compute_order(early) == remat::compute_order(s));
    const auto sorted = remat::copies::detail::in_time(q, s, e->peak).list();
    const auto timed = remat::evaluate(q, sorted);
    REQUIRE(timed.peak <= e->peak);
    REQUIRE(steps(sorted) == steps(s));
    sooner += timed.seconds < e->seconds * (1 - 1e-9);
    later += timed.seconds > e->seconds * (1 + 1e-9);
    auto both = s;
    const auto seconds = remat::copies::tighten(q, both, *e, e->peak);
    const auto last = remat::evaluate(q, both);
    REQUIRE(last.peak <= e->peak);
    REQUIRE(last.seconds == seconds);
    REQUIRE(seconds <= e->seconds);
    ++valid;
    faster += then.seconds < e->seconds * (1 - 1e-9);
    tight += seconds < then.seconds * (1 - 1e-9);
  }
  CAPTURE(valid, faster, tight, sooner, later);
  CHECK(valid > 1000);
  CHECK(faster > 100);
  CHECK(tight > 100);
  CHECK(sooner > 100);
  CHECK(20 * later < sooner);
}

TEST_CASE("copies within less of the budget: never slower, sometimes faster, and kept for other orders") {
  std::mt19937_64 g(24);
  int tried = 0, faster = 0;
  for (int round = 0; round < 400; ++round) {
    const auto p =
        remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 6, 16)), .cyclic = true, .disk = 80});
    if (p.plain() || !remat::copies::unplannable(p).empty()) continue;
    const auto budget = remat::bounds_without_search(p).budget + uniform(g, 20, 80);
    remat::copies::copy_incumbent best(p, budget);
    best.try_less();  // of nothing
    best.offer({remat::needed_operations(p)});
    if (!std::isfinite(best.seconds())) continue;
    const auto before = best.seconds();
    best.try_less();
    INFO("round " << round);
    REQUIRE(best.seconds() <= before);
    ++tried;
    faster += best.seconds() < before * (1 - 1e-9);
    best.offer({remat::needed_operations(p)});
    REQUIRE(best.seconds() <= before);
    remat::result r;
    best.put_into(r);
    const auto e = remat::evaluate(p, r.schedule);
    REQUIRE(e.peak <= budget);
    REQUIRE(e.seconds == Approx(best.seconds()));
  }
  CAPTURE(tried, faster);
  CHECK(tried > 200);
  CHECK(faster > 4);
}

TEST_CASE("an early end: the same computations, in a valid order, so that what is sent last has more time") {
  std::mt19937_64 g(12);
  int moved = 0, faster = 0;
  for (int round = 0; round < 400; ++round) {
    const auto p =
        remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 2, 8)), .cyclic = round % 2 == 0});
    if (p.plain() || !remat::copies::unplannable(p).empty()) continue;
    const auto budget = remat::bounds_without_search(p).budget + uniform(g, 20, 200);
    const auto order = remat::needed_operations(p);
    const auto laid = remat::copies::lay_copies(p, order, budget);
    if (!laid) continue;
    INFO("round " << round);
    const auto sooner = remat::copies::early_end(p, order, *laid);
    const bool late = !laid->waits.empty() && laid->waits.back().position == order.size() && !laid->waits.back().arrival;
    if (!late) REQUIRE(sooner.empty());
    if (sooner.empty()) continue;
    ++moved;
    REQUIRE(sooner != order);
    auto sorted = sooner;
    std::sort(sorted.begin(), sorted.end());
    REQUIRE(sorted == order);
    const auto again = remat::copies::lay_copies(p, sooner, budget);  // throws of an order that reads what is not there
    if (!again) continue;
    const auto e = remat::evaluate(p, again->schedule);
    REQUIRE(e.peak <= budget);
    faster += e.seconds < remat::evaluate(p, laid->schedule).seconds * (1 - 1e-9);
  }
  CAPTURE(moved, faster);
  CHECK(moved > 20);
  CHECK(faster > 5);
}

TEST_CASE("lay_copies: links said in full give the plan of their short form") {
  std::mt19937_64 g(23);
  int copied = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto made = remat::testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 1, 20)), .once = 10});
    const double up = static_cast<double>(uniform(g, 1, 8)) / 2, down = static_cast<double>(uniform(g, 1, 8)) / 2;
    const auto shortly = made.with_copies(remat::copy_rates{up, down, 0.5});
    const problem fully(made.name(), made.values(), made.operations(), made.targets(), std::nullopt, std::nullopt,
                        {{}, {{remat::device_tier, host, up, 0.5, "up"}, {host, remat::device_tier, down, 0.5, "down"}}});
    REQUIRE((shortly.plain() && !fully.plain()));
    const auto order = remat::needed_operations(made);
    const auto least = remat::bounds_without_search(made).budget;
    const auto budget = uniform(g, least, std::max(least, remat::measure_order(made, order).peak));
    for (const bool frugal : {false, true}) {
      const auto a = remat::copies::lay_copies(shortly, order, budget, {.frugal = frugal, .small = 0}),
                 b = remat::copies::lay_copies(fully, order, budget, {.frugal = frugal, .small = 0});
      INFO("round " << round);
      REQUIRE((a && b));
      REQUIRE(a->schedule == b->schedule);
      REQUIRE(a->seconds == b->seconds);
      copied += remat::has_copies(a->schedule);
    }
  }
  CHECK(copied > 500);
}

TEST_CASE("lay_copies on two tiers: a step worked out by hand") {
  remat::testing::step_parts x;
  const auto order = std::vector<remat::operation_id>{0, 1};
  const auto once = remat::copies::lay_copies(x.build(), order, 20);
  REQUIRE(once);
  CHECK(once->schedule == remat::schedule{{{remat::action::prefetch, 0},
                                           {remat::action::compute, 0},
                                           {remat::action::drop, 0},
                                           {remat::action::offload, 1},
                                           {remat::action::compute, 1},
                                           {remat::action::drop, 1},
                                           {remat::action::drop, 1, host}},
                                          {}});
  CHECK(remat::evaluate(x.build(), once->schedule).seconds == 9);
  CHECK_FALSE(remat::copies::lay_copies(x.build(), order, 19));
  x.system.tiers = {{"device"}, {"host", 19}};
  CHECK_FALSE(remat::copies::lay_copies(x.build(), order, 20));  // w and g
}

TEST_CASE("lay_copies on two tiers: what is overwritten") {
  // A weight of the device that the host updates in place: it goes there, and comes back as another.
  const problem there("updated there", {{"w", 10}, {"w'", 10}},
                      {{.name = "update", .inputs = {0}, .outputs = {1}, .seconds = 1, .on = host, .overwrites = {{1, 0}}}}, {1},
                      remat::copy_rates{10, 10, 0}, std::nullopt, {}, {{1, 0}});
  const auto laid = remat::copies::lay_copies(there, std::vector<remat::operation_id>{0}, 10);
  REQUIRE(laid);
  CHECK(remat::evaluate(there, laid->schedule).peaks == std::vector<bytes_t>{10, 10});
  // One that the host reads before the device updates it: that waits for the copy.
  const problem here("updated here", {{"w", 10}, {.name = "norm", .bytes = 1, .ends = host}, {"w'", 10}},
                     {{.name = "norm", .inputs = {0}, .outputs = {1}, .seconds = 1, .on = host},
                      {.name = "update", .inputs = {0}, .outputs = {2}, .seconds = 4, .overwrites = {{2, 0}}}},
                     {1, 2}, remat::copy_rates{10, 10, 0});
  const auto waits = remat::copies::lay_copies(here, std::vector<remat::operation_id>{0, 1}, 20);
  REQUIRE(waits);
  CHECK(waits->seconds == 5);
  CHECK(remat::evaluate(here, waits->schedule).seconds == 5);
  // An update comes after all that reads the weight, and once.
  const problem late("late", {{"w", 10}, {"w'", 10}, {"y", 1}},
                     {{.name = "update", .inputs = {0}, .outputs = {1}, .overwrites = {{1, 0}}},
                      {.name = "reader", .inputs = {0}, .outputs = {2}}},
                     {1, 2}, remat::copy_rates{10, 10, 0});
  CHECK(remat::copies::overwrite_last(late, std::vector<remat::operation_id>{0, 1, 0}) == std::vector<remat::operation_id>{1, 0});
}

TEST_CASE("lay_copies on two tiers: weights that may start anywhere stay on the device as far as there is room") {
  // Two layers of 10 bytes whose updates run on the device in place: nothing has to move if there is room for both.
  std::vector<remat::value> values;
  std::vector<remat::operation> operations;
  std::vector<remat::carry> next;
  for (value_id l = 0; l < 4; ++l) values.push_back({.name = "w", .bytes = 10, .starts = remat::any_tier});
  for (value_id l = 0; l < 4; ++l) {
    values.push_back({.name = "w'", .bytes = 10, .ends = remat::any_tier});
    operations.push_back({.name = "update", .inputs = {l}, .outputs = {l + 4}, .seconds = 1, .overwrites = {{l + 4, l}}});
    next.push_back({l + 4, l});
  }
  const problem p("anywhere", values, operations, {4, 5, 6, 7}, remat::copy_rates{10, 10, 0}, std::nullopt, {}, next);
  const auto copies = [&](bytes_t budget) {
    const auto laid = remat::copies::lay_copies(p, remat::needed_operations(p), budget, {.small = 0});
    REQUIRE(laid);
    const auto e = remat::evaluate(p, laid->schedule);
    REQUIRE(e.peak <= budget);
    return e.copies.size();
  };
  CHECK(copies(40) == 0);
  CHECK(copies(30) > 0);
  CHECK(copies(30) < copies(20));
}

TEST_CASE("lay_copies: a source that only the device reads, in steps that repeat, stays there if there is room") {
  const std::vector<remat::value> values = {
      {.name = "frozen", .bytes = 4, .starts = remat::any_tier}, {"x", 1}, {"x'", 1}, {.name = "next", .bytes = 1}};
  const std::vector<remat::operation> operations = {{.name = "", .inputs = {0, 1}, .outputs = {2}, .seconds = 1},
                                                    {.name = "", .inputs = {2}, .outputs = {3}, .seconds = 1, .workspace = 2}};
  const problem p("frozen", values, operations, {3}, remat::copy_rates{1, 1, 0}, std::nullopt, {}, {{3, 1}});
  for (const bytes_t budget : {8, 6}) {  // the second operation needs 4, besides
    const auto laid = remat::copies::lay_copies(p, remat::needed_operations(p), budget);
    REQUIRE(laid);
    const auto e = remat::evaluate(p, laid->schedule);
    CHECK(e.peak <= budget);
    CHECK(laid->schedule.starts == std::vector<remat::start_place>{{0, budget == 8 ? remat::device_tier : host}});
    CHECK(e.seconds == Approx(budget == 8 ? 2 : 6));
  }
}

TEST_CASE("lay_copies: where steps repeat, what would be waited for at first starts on the device") {
  const remat::index_t layers = 4;
  std::vector<remat::value> values;
  for (remat::index_t l = 0; l < layers; ++l)
    values.push_back({.name = "w", .bytes = 10, .held = true, .starts = remat::any_tier});
  for (remat::index_t l = 0; l <= 2 * layers; ++l) values.push_back({.name = "x", .bytes = 1});
  std::vector<remat::operation> operations;
  for (remat::index_t i = 0; i < 2 * layers; ++i) {
    const value_id weight(i < layers ? i : 2 * layers - 1 - i), read(layers + i), made(layers + i + 1);
    operations.push_back({.name = "layer", .inputs = {weight, read}, .outputs = {made}, .seconds = 2});
  }
  const value_id first(layers), last(3 * layers);
  const problem p("step", values, operations, {last}, remat::copy_rates{10, 10, 0}, std::nullopt, {}, {{last, first}});
  const auto laid = remat::copies::lay_copies(p, remat::needed_operations(p), 34);  // three weights
  REQUIRE(laid);
  CHECK(remat::evaluate(p, laid->schedule).seconds == Approx(16));  // a second more if the first had to come
  for (const auto& [v, tier] : laid->schedule.starts) CHECK(tier == (v == 0 ? remat::device_tier : host));
}

TEST_CASE("what cannot be planned is named") {
  using remat::copies::unplannable;
  remat::testing::step_parts x;
  CHECK(unplannable(x.build()).empty());
  const auto refusal = [&](const auto& change) {
    auto y = x;
    change(y);
    return unplannable(y.build());
  };
  CHECK(refusal([](auto& y) { y.system.tiers = {{"device"}, {"host"}, {"disk"}}; }).empty());
  CHECK(refusal([](auto& y) {
          y.system = {{{"device"}, {"host"}, {"disk"}}, {{host, disk, 1}, {remat::device_tier, disk, 1}}};
          y.values[0].starts = y.values[2].ends = disk;
        }) == "values[0].starts: the disk is on no chain of tiers that are linked both ways (device, host)");
  CHECK(refusal([](auto& y) {
          y.copies.reset();
          y.system.links = {{host, remat::device_tier, 1}};
        }) == "links: none from the device to the host");
  CHECK(refusal([](auto& y) { y.values[1].movable = false; }) ==
        "values[1].movable: it may not be copied, and is read on another tier");
  CHECK(refusal([](auto& y) {
          y.next.clear();
          y.targets.push_back(0);
          y.values[0].ends = host;
        }) == "values[0]: an operation overwrites it, and it must be there at the end");
  CHECK(refusal([](auto& y) {
          y.values.push_back({.name = "late", .bytes = 1, .ends = host});
          y.operations.push_back({.name = "reader", .inputs = {0, 2}, .outputs = {3}, .on = host});
          y.targets.push_back(3);
        }) == "operations: one reads what another overwrites, and comes after it");
  x.system = {{{"device"}, {"host"}}, {{host, remat::device_tier, 1}}};
  x.copies.reset();
  CHECK_THROWS_WITH(remat::copies::lay_copies(x.build(), std::vector<remat::operation_id>{0, 1}, 20),
                    "lay_copies: links: none from the device to the host");
}
