// SPDX-License-Identifier: Apache-2.0
// Copies for problems on several tiers: weights, gradients and optimizer states on a device, a host and a disk.
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
#include <remat/copies/schedule_copies.hpp>
#include <remat/copies/virtual_problem.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/result.hpp>
#include <remat/testing/generators.hpp>

#include "../rounds.hpp"
#include "../tiers_walk.hpp"

using remat::bytes_t;
using remat::problem;
using remat::value_id;
using remat::testing::chance;
using remat::testing::disk;
using remat::testing::host;
using remat::testing::shortened;
using remat::testing::uniform;

namespace {

/// Some operations of the device run a second time later.
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

TEST_CASE("schedule_copies on two and three tiers returns valid schedules within all budgets") {
  std::mt19937_64 g(21);
  int laid = 0, full = 0, refused = 0, drawn = 0, chained = 0, from_disk = 0;
  for (int round = 0; round < shortened(4000); ++round) {
    auto p = round % 2 == 0 ? remat::testing::random_tiers_problem(g)
                            : remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 6)),
                                                              .cyclic = chance(g, 50),
                                                              .disk = 40 * (round % 4 / 2)});
    if (p.plain()) continue;
    ++drawn;
    if (!remat::copies::why_unplannable(p).empty()) {
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
            remat::copies::schedule_copies(p, order, budget, {.frugal = way == 'f', .small = 0, .on_demand = way == 'd'});
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
  CHECK(laid > shortened(10'000));
  CHECK(chained > shortened(8000));
  CHECK(from_disk > shortened(5000));
  CHECK(full > shortened(1000));
  CHECK(3 * refused < 2 * drawn);
}

namespace {

/// A plan without foresight. It copies a value from the host when an operation reads it, and drops it afterwards. It sends a
/// value that must end on the host once the device has no more use for it. All other values stay.
class on_demand {
 public:
  explicit on_demand(const problem& p)
      : p_(p),
        where_(remat::copies::find_placement(p, std::vector<remat::tier_id>(p.values().size(), host))),
        on_(p.values().size()) {}

  remat::schedule plan() {
    const auto order = *remat::copies::readers_before_overwrites(p_, remat::needed_operations(p_));
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
  using place = remat::copies::placement::place;

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
  remat::copies::placement where_;
  std::vector<std::set<remat::tier_id>> on_;
  std::map<std::pair<value_id, remat::tier_id>, int> reads_;
  remat::schedule s_;
};

}  // namespace

TEST_CASE("schedule_copies on two tiers is rarely slower than copying on demand in the same memory") {
  std::mt19937_64 g(22);
  int compared = 0, missed = 0, no_room = 0, slower = 0, faster = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto p =
        remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 6)), .cyclic = chance(g, 50)});
    if (p.plain() || !remat::copies::why_unplannable(p).empty()) continue;
    INFO("round " << round);
    const auto e = remat::evaluate(p, on_demand(p).plan());
    double seconds = std::numeric_limits<double>::infinity();
    for (const bool frugal : {false, true})
      if (const auto laid =
              remat::copies::schedule_copies(p, remat::needed_operations(p), e.peak, {.frugal = frugal, .small = 0}))
        seconds = std::min(seconds, remat::evaluate(p, laid->schedule).seconds);
    const auto tight = remat::testing::with_budgets(p, {std::nullopt, e.peaks[host]});
    bool fits = false;
    for (const bool frugal : {false, true})
      fits = fits || remat::copies::schedule_copies(tight, remat::needed_operations(p), e.peak, {.frugal = frugal, .small = 0});
    ++compared;
    no_room += !fits;
    missed += std::isinf(seconds);
    slower += seconds > e.seconds + 1e-9;
    faster += seconds < e.seconds - 1e-9;
  }
  CAPTURE(compared, missed, no_room, slower, faster);
  CHECK(missed == 0);
  CHECK(500 * no_room < compared);  // also if the host has only the memory that on_demand uses
  CHECK(200 * slower < compared);
  CHECK(10 * faster > 9 * compared);
}

TEST_CASE("early_copies and tighten are never slower, and like in_time keep the steps and all budgets") {
  std::mt19937_64 g(29);
  int valid = 0, faster = 0, tight = 0, sooner = 0, later = 0;
  for (int round = 0; round < 6'000; ++round) {
    auto p = round % 2 == 0 ? remat::testing::random_tiers_problem(g)
                            : remat::testing::random_step(g, {.layers = 3, .cyclic = chance(g, 50), .disk = 40});
    if (p.plain()) continue;
    auto s = remat::testing::tiers_walk(g, p).run();
    if (chance(g, 50) && remat::copies::why_unplannable(p).empty())
      if (auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), 30, {.on_demand = chance(g, 50)}))
        s = std::move(laid->schedule);
    const auto e = remat::testing::evaluated(p, s);
    if (!e) continue;
    INFO("round " << round);
    auto peaks = std::vector<std::optional<bytes_t>>(e->peaks.begin(), e->peaks.end());
    peaks.front().reset();
    const auto q = remat::testing::with_budgets(p, peaks);  // budgets of exactly what the schedule needs
    const auto early = remat::copies::detail::early_copies(q, s, *e, e->peak).run();
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
    const auto sorted = remat::copies::detail::time_sorter(q, s, e->peak).sorted();
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

TEST_CASE("copy_incumbent::try_smaller_budgets never makes the best schedule slower, and sometimes makes it faster") {
  std::mt19937_64 g(24);
  int tried = 0, faster = 0;
  for (int round = 0; round < 400; ++round) {
    const auto p =
        remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 6, 16)), .cyclic = true, .disk = 80});
    if (p.plain() || !remat::copies::why_unplannable(p).empty()) continue;
    const auto budget = remat::bounds_without_search(p).budget + uniform(g, 20, 80);
    remat::copies::copy_incumbent best(p, budget);
    best.try_smaller_budgets();  // without any order so far
    best.offer({remat::needed_operations(p)});
    if (!std::isfinite(best.seconds())) continue;
    const auto before = best.seconds();
    best.try_smaller_budgets();
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

TEST_CASE("early_end keeps the computations in a valid order, and gives the last copy more time") {
  std::mt19937_64 g(12);
  int moved = 0, faster = 0;
  for (int round = 0; round < 400; ++round) {
    const auto p =
        remat::testing::random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 2, 8)), .cyclic = round % 2 == 0});
    if (p.plain() || !remat::copies::why_unplannable(p).empty()) continue;
    const auto budget = remat::bounds_without_search(p).budget + uniform(g, 20, 200);
    const auto order = remat::needed_operations(p);
    const auto laid = remat::copies::schedule_copies(p, order, budget);
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
    const auto again = remat::copies::schedule_copies(p, sooner, budget);  // throws if an operation reads an absent value
    if (!again) continue;
    const auto e = remat::evaluate(p, again->schedule);
    REQUIRE(e.peak <= budget);
    faster += e.seconds < remat::evaluate(p, laid->schedule).seconds * (1 - 1e-9);
  }
  CAPTURE(moved, faster);
  CHECK(moved > 20);
  CHECK(faster > 5);
}

// A search through all values for each eviction would take a quarter of an hour.
TEST_CASE("copies on demand make room quickly on tiers with many values") {
  const auto chain = remat::testing::unit_training_chain(shortened(200'000));
  const problem p(chain.name(), chain.values(), chain.operations(), chain.targets(), {}, {},
                  {{{"device"}, {"host", shortened(50'000)}, {"disk"}},
                   {{remat::device_tier, host, 10}, {host, remat::device_tier, 10}, {host, disk, 5}, {disk, host, 5}}});
  const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), shortened(100'000), {.on_demand = true});
  REQUIRE(laid);
  const auto e = remat::evaluate(p, laid->schedule);
  CHECK(e.peaks[remat::device_tier] == shortened(100'000));
  CHECK(e.peaks[host] == shortened(50'000));
}

TEST_CASE("on several tiers, schedule_copies and its improvements give up a long order when told to stop") {
  const auto chain = remat::testing::training_chain(std::vector<remat::testing::layer>(10'000));
  const auto all = remat::measure_store_all(chain).peak;
  remat::memory_system system{{{"device", std::nullopt}, {"host", all / 4}, {"disk", std::nullopt}},
                              {{0, 1, 2, 0, "out"}, {1, 0, 2, 0, "in"}, {1, 2, 1, 0, "write"}, {2, 1, 1, 0, "read"}}};
  const problem p("chain", chain.values(), chain.operations(), chain.targets(), std::nullopt, std::nullopt, system);
  const auto order = remat::needed_operations(p);
  const auto always = [] { return true; };
  for (const bool on_demand : {false, true})
    CHECK_FALSE(remat::copies::schedule_copies(p, order, all / 2, {.on_demand = on_demand, .stop = always}));
  const auto laid = remat::copies::schedule_copies(p, order, all / 2);
  REQUIRE(laid);
  const auto e = remat::evaluate(p, laid->schedule);
  CHECK(remat::copies::detail::early_copies(p, laid->schedule, e, all / 2, always).run() == laid->schedule);
  CHECK(remat::copies::detail::time_sorter(p, laid->schedule, all / 2, always).sorted() == laid->schedule);
  auto same = laid->schedule;
  CHECK(remat::copies::tighten(p, same, e, all / 2, always) == e.seconds);
  CHECK(same == laid->schedule);
}
