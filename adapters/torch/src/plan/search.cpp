// SPDX-License-Identifier: Apache-2.0
#include "search.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <remat/copies/early_copies.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>

#include "../base/clock.hpp"
#include "solver.hpp"

namespace remat::pytorch {
namespace {

/// Solver name that marks results of `leanest` in the cache.
constexpr const char* smallest_budget_search = "search for the smallest budget";

/// Makes a `plan_solver` a solver. If it fails and `start` exceeds the budget by at most 10 %, lowers that peak.
struct as_solver {
  const search_options& options;
  std::vector<schedule>& found;  ///< gets each schedule found
  std::optional<schedule> start{};
  as_solver with_start(schedule s) const { return {options, found, std::move(s)}; }
  std::string name() const { return smallest_budget_search; }
  bool plans_tiers() const { return true; }  // solvers that cannot answer `not_applicable`
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    auto r = search(p, budget, m);
    if (r.found()) found.push_back(r.schedule);
    return r;
  }

 private:
  result search(const problem& p, bytes_t budget, monitor& m) const {
    auto l = m.limits();
    l.seconds = m.remaining();
    auto r = options.solver(p, budget, l, report_to(m));
    if (r.found() || r.status == status::infeasible || !start || has_copies(*start)) return r;
    if (static_cast<double>(as_result(p, *start).peak) > 1.1 * static_cast<double>(budget)) return r;
    if (auto lower = lower_peak_of(p, *start, budget, [&] { return m.stopped(); })) {
      r.status = status::feasible;
      r.schedule = std::move(*lower);
    }
    return r;
  }
};

/// Search options with an observer that remembers whether the user's observer stopped the search.
class watched_search {
 public:
  explicit watched_search(const search_options& o) : options_(o) {
    options_.watch = [this, watch = o.watch](const progress& p) {
      const auto answer = watch(p);
      if (answer == control::stop) stopped_ = true;
      return answer;
    };
  }
  watched_search(const watched_search&) = delete;
  watched_search& operator=(const watched_search&) = delete;
  const search_options& options() const { return options_; }
  bool stopped() const { return stopped_; }

 private:
  search_options options_;
  std::atomic<bool> stopped_ = false;
};

/// Cache key of a plan; nothing if the plan cannot be cached.
std::optional<std::string> key_of_plan(const captured_step& s, bytes_t available, const search_options& o, const limits& l) {
  using function = result (*)(const problem&, bytes_t, const limits&, const plan_observer&);
  const auto* known = o.solver.target<function>();
  auto solver = known && *known == &solve_by_default ? "automatic" : o.solver_name;
  if (s.far.memory && o.copies && !solver.empty())
    solver += " with " + s.far.memory->name() + " of " + std::to_string(s.far.memory->limit());
  for (index_t v = 0; v < s.problem.values().size() && !s.problem.plain() && !solver.empty(); ++v)
    if (s.problem.values()[v].starts != device_tier) solver += " fetched " + std::to_string(v);
  return o.cache.key(*s.step, available, solver, l);
}

/// A lower bound on the plan's bytes over all layouts; no layout may reach it.
bytes_t least_needed(const execution_plan& run) { return run.needed_bytes() - run.arena_bytes() + run.live_peak(); }

std::shared_ptr<const execution_plan> laid_out(const captured_step& s, const schedule& steps, bool zones, std::size_t tries) {
  auto o = s.layouts;
  o.tries = tries;
  if (has_copies(steps) && s.far.memory) o.alignment = std::max(o.alignment, s.far.memory->alignment());
  return std::make_shared<execution_plan>(s.step, steps, s.profiles, o, 0, zones ? placing::zones : s.places);
}

/// @param room target in bytes; 0: as few as possible
std::shared_ptr<const execution_plan> laid_out_within(const captured_step& s, const schedule& steps, bool zones, bytes_t room) {
  auto run = laid_out(s, steps, zones, s.layouts.tries);
  if (s.layouts.tries == 0 && run->needed_bytes() > room && (least_needed(*run) <= room || room == 0))
    run = laid_out(s, steps, zones, layout_options().tries);
  return run;
}

bool has_room(const captured_step& s, const execution_plan& run, bytes_t available) {
  return run.needed_bytes() <= available && (!s.far.memory || run.far_bytes() <= s.far.memory->limit());
}

/// The same problem with a slower link to far memory, so that plans send less. With `share` <= 0, plans send nothing.
problem with_slower_link(const problem& p, double share) {
  if (share <= 0) return p.plain() ? p.with_copies({}) : without_sends(p);
  auto copies = p.copies();
  if (copies) copies->to_host *= share;
  return p.with_copies(copies);
}

}  // namespace

schedule fetch_once_schedule(const problem& p) {
  std::vector<bool> away(p.values().size());
  for (value_id v = 0; v < away.size(); ++v) away[v] = p.values()[v].starts != device_tier;
  schedule made;
  for (const auto& x : store_all_schedule(p).steps) {
    if (x.what == action::drop && away[x.value()]) continue;  // no operation reads it
    if (x.what == action::compute)
      for (auto v : p.operations()[x.operation()].inputs)
        if (away[v]) {
          made.prefetch(v);
          away[v] = false;
        }
    made.steps.push_back(x);
  }
  for (auto v : p.targets())
    if (p.values()[v].ends != device_tier && !p.is_source(v)) {
      made.offload(v);
      made.drop(v);
    }
  const auto e = evaluate(p, made);
  copies::tighten(p, made, e, e.peak);
  return made;
}

problem without_sends(const problem& p) {
  auto x = p.members();
  for (value_id v = 0; v < x.values.size(); ++v)
    x.values[v].movable = x.values[v].movable && (p.is_source(v) || x.values[v].ends != device_tier);
  return problem(std::move(x));
}

std::shared_ptr<plan> lay_out_plan(const captured_step& s, const schedule& steps, bytes_t room, bool zones) {
  auto made = std::make_shared<plan>();
  made->schedule = steps;
  made->execution = laid_out_within(s, steps, zones, room);
  made->zones = zones;
  made->result = as_result(s.problem, steps);
  return made;
}

std::shared_ptr<const plan> take_over(const captured_step& s, bytes_t available, const captured_step& other) {
  const auto begin = clock::now();
  const auto homes = [](const value& a, const value& b) { return a.starts == b.starts; };
  const auto &mine = s.problem.values(), &theirs = other.problem.values();
  if (!std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end(), homes)) return nullptr;
  std::vector<std::shared_ptr<const plan>> known;  // fastest first
  for (const auto& [bytes, plan] : other.plans)
    if (s.problem.plain() || plan != other.store_all) known.push_back(plan);
  std::sort(known.begin(), known.end(), [](const auto& a, const auto& b) { return a->result.seconds < b->result.seconds; });
  for (const auto& k : known) {
    auto made = lay_out_plan(s, k->schedule, available);
    if (!has_room(s, *made->execution, available)) continue;
    made->result.solver = k->result.solver;
    made->fallback = k->fallback;
    made->taken_from = k->taken_from.empty() ? other.inputs : k->taken_from;
    made->unfinished = true;
    made->plan_seconds = since(begin);
    return made;
  }
  return nullptr;
}

std::shared_ptr<const plan> quick_search(const captured_step& s, bytes_t available, const search_options& o) {
  const auto begin = clock::now();
  auto l = o.limits;
  l.seconds = std::min(l.seconds, 0.05);
  const auto r = o.solver(s.problem, s.problem.held_bytes() + available, l, o.watch);
  if (!r.found()) return nullptr;
  const auto made = lay_out_plan(s, r.schedule, available);
  if (!has_room(s, *made->execution, available)) return nullptr;
  made->result.solver = r.solver;
  made->result.bound = bounds_without_search(s.problem).seconds;
  made->unfinished = true;
  made->plan_seconds = since(begin);
  return made;
}

namespace {

/// Lays out a cached schedule. Null if it does not fit or is not valid.
std::shared_ptr<plan> laid_out_from_cache(const captured_step& s, bytes_t available, const result& earlier) {
  try {
    auto made = lay_out_plan(s, earlier.schedule, available);
    if (!has_room(s, *made->execution, available)) return nullptr;
    made->result.status = earlier.status;
    made->result.solver = earlier.solver;
    made->fallback = earlier.solver == smallest_budget_search;
    made->result.bound = std::min(earlier.bound, made->result.seconds);
    return made;
  } catch (const bad_schedule&) {  // damaged, or a hash collision
    return nullptr;
  }
}

/// The problem counts overwritten memory twice, and does not know fragmentation. So several budgets are tried, each corrected by
/// the layout of the previous answer. The first one has room for the memory counted twice, so that its bound on the time holds
/// for all plans. Bounds of smaller budgets prove nothing. Null if no answer fits.
std::shared_ptr<plan> search_anew(const captured_step& s, bytes_t available, const search_options& o) {
  auto best = std::make_shared<plan>();
  const auto begin = clock::now();
  const auto as_counted = s.problem.held_bytes() + available, whole = as_counted + s.counted_twice;
  auto within = whole;
  auto proven = bounds_without_search(s.problem).seconds;
  const auto far = s.far.memory && o.copies ? s.far.memory->limit() : 0;
  bool restricted = !o.copies;
  auto p = restricted ? with_slower_link(s.problem, 0) : s.problem;         // slower link if far memory is too small
  const int rounds = s.counted_twice > 0 ? 5 : 4, max_rounds = rounds + 6;  // after `rounds`, only while nothing fits
  auto margin = available / 200;
  bool rough = false;  // `best` has a quick layout; the search for a better one comes at the end
  for (int round = 0; round < (best->execution ? rounds : max_rounds) && within >= 0; ++round) {
    auto l = o.limits;
    l.seconds = std::max(std::min(0.1, l.seconds), (l.seconds - since(begin)) / std::max(1, rounds - round));
    auto r = o.solver(p, within, l, o.watch);
    if (!r.found()) {
      o.log("no schedule within " + format_bytes(within) + " (" + std::string(to_string(r.status)) + ")");
      if (best->execution || within >= s.problem.held_bytes() + 2 * available) break;
      within += available / 4;  // the layout may need less than the model predicts
      continue;
    }
    if (within >= whole && !restricted) proven = std::max(proven, r.bound);
    auto run = laid_out(s, r.schedule, false, 0);
    const auto least = least_needed(*run);
    const bool close = run->far_bytes() > far || (run->needed_bytes() > available && least <= available);
    if (close) run = laid_out_within(s, r.schedule, false, available);
    if (run->far_bytes() > far) {
      const auto share = static_cast<double>(far) / static_cast<double>(run->far_bytes());
      p = with_slower_link(p, round + 2 < rounds ? share * share : 0);
      restricted = true;
      o.log("schedule with " + format_bytes(run->far_bytes()) + " beyond the device, of " + format_bytes(far));
      continue;
    }
    const auto need = run->needed_bytes();
    const auto excess = (need > available && least <= available ? need : least) - available;
    o.log("schedule of " + format_seconds(r.seconds) + " with " + std::to_string(r.recomputed) + " recomputations needs " +
          format_bytes(need) + " of " + format_bytes(available));
    if (excess <= 0 && (!best->execution || r.seconds < best->result.seconds)) {
      best->execution = run;
      rough = !close;
      best->schedule = r.schedule;
      best->result = as_result(s.problem, r.schedule);
      best->result.solver = r.solver;
    }
    if (excess <= 0 && (-excess < available / 50 || r.recomputed == 0)) break;
    within -= excess;
    if (excess > 0 && round == 0 && s.counted_twice > 0) {
      within = std::max(within, as_counted);
    } else if (excess > 0) {  // the gap between layout and model varies between schedules
      within -= margin;
      margin *= 2;
    }
  }
  if (!best->execution) return nullptr;
  if (rough) best->execution = laid_out_within(s, best->schedule, false, available);
  best->result.bound = std::min(proven, best->result.seconds);
  best->result.status = best->result.gap() <= o.limits.gap ? status::optimal : status::feasible;
  best->plan_seconds = since(begin);
  return best;
}

}  // namespace

std::shared_ptr<const plan> search(const captured_step& s, bytes_t available, bytes_t held_bytes, const search_options& o) {
  const auto begin = clock::now();
  const bool brief = o.first_seconds < o.limits.seconds;
  auto first_limits = o.limits;
  if (brief) first_limits.seconds = o.first_seconds;
  const auto known = [&](const std::optional<std::string>& key) -> std::shared_ptr<plan> {
    const auto earlier = key ? o.cache.find(*key) : std::nullopt;
    auto made = earlier ? laid_out_from_cache(s, available, *earlier) : nullptr;
    if (!made) return nullptr;
    made->plan_seconds = since(begin);
    o.log("plan of an earlier process");
    return made;
  };
  const auto key = key_of_plan(s, available, o, o.limits);
  if (const auto p = known(key)) return p;
  const auto first_key = brief ? key_of_plan(s, available, o, first_limits) : std::nullopt;
  if (const auto p = known(first_key)) {
    p->unfinished = true;
    return p;
  }
  const watched_search w(o);
  auto within = w.options();
  within.limits = first_limits;
  auto made = search_anew(s, available, within);
  if (brief && made && made->result.gap() > o.limits.gap) {
    made->unfinished = true;
    if (first_key && !w.stopped()) o.cache.store(*first_key, made->result);
    return made;
  }
  const auto fail = [&](const plan& least, bool early) { fail_over_budget(s, least, held_bytes + available, held_bytes, early); };
  if (brief && !made) {
    auto look = w.options();
    look.limits.seconds = std::min(look.limits.seconds, 2 * o.first_seconds + look.limits.seconds / 10);
    const auto least = leanest(s, look);
    if (least->execution->needed_bytes() > available + available / 10) fail(*least, true);
    within.limits.seconds = std::max(o.first_seconds, o.limits.seconds - since(begin));
    made = search_anew(s, available, within);
  }
  std::shared_ptr<const plan> found = made;
  if (!found) {
    found = leanest(s, w.options());
    if (found->execution->needed_bytes() > available) fail(*found, false);
  }
  if (key && !w.stopped()) o.cache.store(*key, found->result);
  return found;
}

std::shared_ptr<const plan> leanest(const captured_step& s, const search_options& o) {
  std::lock_guard lock(s.least_mutex);
  if (s.least) return s.least;
  constexpr bytes_t smallest = -1;  // stands for `available` in the key
  const auto key = key_of_plan(s, smallest, o, {});
  const auto bound = s.least_budget;
  if (const auto earlier = key ? o.cache.find(*key) : std::nullopt)
    if (const auto made = laid_out_from_cache(s, max_bytes, *earlier)) {
      made->result.budget_bound = std::max(bound, earlier->budget_bound);
      return s.least = made;
    }
  const watched_search w(o);
  const auto least = std::make_shared<plan>();
  const auto find = [&](const problem& p) {
    std::vector<schedule> found;
    least->result = smallest_budget(p, as_solver{w.options(), found}, o.limits, 0.01, w.options().watch);
    if (least->result.status == status::not_applicable)
      throw bad_option("the solver cannot plan for weights that are fetched: " + least->result.reason);
    if (!least->result.found()) {  // the search had no time
      least->result = as_result(p, fetch_once_schedule(p));
      least->result.budget_bound = bounds_without_search(p).budget;
    }
    least->result.budget_bound = std::max(bound, least->result.budget_bound - s.counted_twice);
    // The plan with the least peak may have a larger layout than others: a gradient stays until the last read of its parameter.
    const auto bytes_of = [&](const schedule& x) { return least_needed(*laid_out(s, x, false, 0)); };
    auto needed = bytes_of(least->result.schedule);
    for (auto& other : found) {
      const auto bytes = bytes_of(other);
      if (bytes >= needed) continue;
      needed = bytes;
      auto leaner = as_result(p, other);
      leaner.bound = least->result.bound;
      leaner.budget_bound = least->result.budget_bound;
      least->result = std::move(leaner);
    }
    least->result.solver = smallest_budget_search;
    least->fallback = true;
    least->schedule = least->result.schedule;
    least->execution = laid_out_within(s, least->schedule, false, 0);
  };
  find(s.problem);
  if (!has_room(s, *least->execution, max_bytes)) find(with_slower_link(s.problem, 0));  // far memory is too small
  if (w.stopped()) return least;
  if (key) o.cache.store(*key, least->result);
  return s.least = least;
}

[[noreturn]] void fail_over_budget(const captured_step& s, const plan& least, bytes_t asked, bytes_t held_bytes, bool early) {
  const auto store_all = s.store_all->execution->needed_bytes();
  const auto smallest = held_bytes + std::min(store_all, least.execution->needed_bytes());
  const auto bound = std::min(smallest, held_bytes + least.result.budget_bound - s.problem.held_bytes());
  std::string largest;
  bytes_t most = -1;
  for (std::size_t i = 0; i < s.step->nodes.size(); ++i) {
    const auto& node = s.step->nodes[i];
    auto bytes = s.profiles.nodes[i]->workspace;
    for (const auto* list : {&node.inputs, &node.outputs})
      for (auto v : *list) bytes += s.step->values[v].bytes;
    if (bytes > most) most = bytes, largest = node.name + " with " + std::to_string(bytes) + " bytes";
  }
  std::ostringstream text;
  text << "budget of " << asked << " bytes (" << format_bytes(std::max<bytes_t>(0, asked))
       << "): no schedule fits. Smallest budget known to do: " << smallest << " bytes (" << format_bytes(smallest)
       << "); every budget is at least " << bound << " bytes; " << held_bytes
       << " bytes are held before the step begins; the plain step takes " << store_all
       << " bytes beyond that; the largest operator is " << largest;
  if (early) text << "; the search ended early, as nothing comes near";
  throw over_budget(text.str(), asked, smallest, bound, largest);
}

}  // namespace remat::pytorch
