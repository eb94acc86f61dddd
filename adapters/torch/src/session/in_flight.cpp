// SPDX-License-Identifier: Apache-2.0
/// @file
/// Several steps of a session in flight: calls of a cell before one backward, micro-batches, threads.
#include "../plan/in_flight.hpp"

#include <algorithm>
#include <bit>

#include <remat/core/bounds.hpp>
#include <remat/io/bytes.hpp>
#include <remat/pytorch/executor.hpp>

#include "state.hpp"

namespace remat::pytorch {
namespace {

/// The memory for steps in flight, in bytes.
struct room_in_flight {
  bytes_t all = 0;                  ///< for all expected steps
  bytes_t others = 0;               ///< held by steps in flight, and memory in which they compute now
  bytes_t working = 0;              ///< for steps in flight that will compute, but do not now
  bytes_t idle = 0;                 ///< idle working memory, for these and the next step
  std::size_t steps = 1, left = 1;  ///< expected steps: all, and those not begun

  bytes_t rest() const { return all - others; }
  /// Bytes that `n` further steps take, with at least `piece` bytes of working memory.
  static bytes_t need(const execution_plan& p, std::size_t n, bytes_t piece) {
    return bytes_in_flight(p, n) - p.working_bytes() + std::max(piece, p.working_bytes());
  }
  bytes_t need(const execution_plan& p, std::size_t n) const { return need(p, n, working); }
  bool fits(const execution_plan& p, std::size_t n) const { return need(p, n) <= rest(); }
  /// True if one more step fits only after idle working memory is freed.
  bool crowded(const execution_plan& p) const { return need(p, 1, std::max(idle, working)) > rest(); }
};

}  // namespace

/// Provides working memory, and a store-all plan in zones.
void session::state::share_memory(captured_step& s) {
  auto& tier = device_for(s).memory();
  if (!memory.working || &memory.working->of() != &tier) memory.working = std::make_shared<working_memory>(tier);
  if (s.all_in_flight) return;
  const auto all = lay_out_plan(s, s.store_all->schedule, max_bytes, true);
  all->result.solver = s.store_all->result.solver;
  all->result.bound = s.store_all->result.bound;
  s.all_in_flight = all;
  const auto held = all->execution->held_bytes();
  memory.largest_held = std::max(memory.largest_held, held);
  memory.largest_working = std::max(memory.largest_working, all->execution->needed_bytes() - held);
}

std::shared_ptr<runner> session::state::acquire_in_flight(const std::shared_ptr<captured_step>& s) {
  const auto idle = [](const runner& r) { return !r.executor->in_flight(); };
  if (std::any_of(memory.runners.begin(), memory.runners.end(), [&](const auto& r) { return idle(*r) && !r->plan->zones; }))
    release();
  share_memory(*s);
  last_held.gradients = memory.gradients();
  const auto most = memory.budget(last_held, last_held.gradients, true);
  room_in_flight room;
  room.all = most - last_held.held() - memory.behind() - memory.outputs_of_before;
  room.idle = memory.working->idle();
  room.others = memory.held_in_flight() + memory.working->bytes() - room.idle;
  for (const auto& r : memory.runners)
    if (!idle(*r)) room.working = std::max(room.working, r->plan->execution->working_bytes());
  room.steps = memory.expected();
  room.left = room.steps - memory.in_flight();
  const bool learned = memory.has_learned();
  const auto suits = [&](const runner& r) {
    return r.kind == s && !r.plan->superseded && room.fits(*r.plan->execution, room.left);
  };
  const auto make_room = [&](const execution_plan& p) {
    if (room.crowded(p)) memory.working->release();
  };
  for (const auto& r : memory.runners)
    if (idle(*r) && suits(*r)) {
      make_room(*r->plan->execution);
      return r;
    }
  memory.let_go([&](const runner& r) { return idle(r) && !suits(r); });

  auto& known = s->plans_in_flight;
  std::shared_ptr<const plan> what;
  const auto plan_for_steps = [&](bytes_t bytes, std::size_t n) {
    bytes = std::max<bytes_t>(0, bytes);
    bytes -= bytes % std::max<bytes_t>(1, static_cast<bytes_t>(std::bit_floor(static_cast<std::size_t>(bytes))) / 32);
    auto& made = known[{bytes, n}];
    if (!made) {
      made = plan_in_flight(*s, bytes, n, searching());
      announce(*made, bytes);
      if (bytes_in_flight(*made->execution, n) > bytes &&
          (!s->least_in_flight || made->execution->held_bytes() < s->least_in_flight->execution->held_bytes()))
        s->least_in_flight = made;
    }
    what = made;
  };
  if (const auto& all = *s->all_in_flight->execution; bytes_in_flight(all, room.steps) <= room.all && room.fits(all, room.left))
    what = s->all_in_flight;
  else if (learned)
    plan_for_steps(room.all, room.steps);
  else  // a plan for fewer steps may do for one more
    for (const auto& [made_for, p] : known)
      if (room.fits(*p->execution, 1) && (!what || p->result.seconds < what->result.seconds)) what = p;
  if (const auto least = memory.least_of_last_step(); learned && memory.in_flight() == 0 && least > room.all) {
    const auto needed = most + least - room.all;
    throw over_budget("budget of " + std::to_string(most) + " bytes (" + format_bytes(most) + "): no plan is known for " +
                          std::to_string(room.steps) + " calls in flight before a backward, as there were the last time. " +
                          "Smallest budget known to do: " + std::to_string(needed) + " bytes (" + format_bytes(needed) + "); " +
                          std::to_string(last_held.held()) + " bytes are held before the first",
                      most, needed, last_held.held() + s->least_budget - s->problem.held_bytes(), "");
  }
  if (!what || !room.fits(*what->execution, room.left)) {
    what = s->least_in_flight;
    // A share of the plain step grows with each further call. Other budgets must leave bytes for the next call.
    if (!what) plan_for_steps(room.rest(), learned ? room.left : options.budget.is_share() ? 1 : 2);
    if (!room.fits(*what->execution, 1) && !warned_in_flight_) plan_for_steps(room.rest(), 1);
  }
  if (!room.fits(*what->execution, 1) && !std::exchange(warned_in_flight_, true))
    warn("a call of the module begins while " + std::to_string(memory.in_flight()) +
         " others wait for their backward; it takes " + format_bytes(room.need(*what->execution, 1) - room.rest()) +
         " beyond the budget of " + format_bytes(most) + ". Steps like this one are planned for as many calls from now on");

  make_room(*what->execution);
  auto r = std::make_shared<runner>();
  r->kind = s;
  r->available = room.all;
  r->plan = what;
  const auto make = [&] {
    return std::make_unique<executor>(r->plan->execution, s->bound->slots, device_for(*s), s->far,
                                      executor_options{.working = memory.working});
  };
  try {
    r->executor = make();
  } catch (const out_of_memory& e) {
    if (what->execution->far_bytes() == 0 || e.tier != s->far.memory->name()) throw;
    auto o = searching();
    o.copies = false;
    r->plan = plan_in_flight(*s, room.rest(), room.left, o);
    r->executor = make();
  }
  add(r);
  return r;
}

}  // namespace remat::pytorch
