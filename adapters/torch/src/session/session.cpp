// SPDX-License-Identifier: Apache-2.0
// The public interface of sessions.
#include <ATen/ATen.h>

#include <algorithm>

#include <remat/core/bounds.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/memory.hpp>

#include "../capture/dispatch.hpp"
#include "../device/allocator.hpp"
#include "../plan/in_flight.hpp"
#include "../plan/solver.hpp"
#include "state.hpp"

namespace remat::pytorch {

plan_solver default_solver() { return solve_by_default; }

session::state::state(std::shared_ptr<model> m, wrap_options o) : trained(std::move(m)), options(std::move(o)) {
  if (options.max_budget < 0) throw bad_option("wrap_options.max_budget must be >= 0, got " + std::to_string(options.max_budget));
  if (options.optimizer < 0) throw bad_option("wrap_options.optimizer must be >= 0, got " + std::to_string(options.optimizer));
  if (!options.solver) throw bad_option("wrap_options.solver is empty");
  if (options.max_shapes < 1) throw bad_option("wrap_options.max_shapes must be >= 1, got 0");
  if (options.steps_on && !options.steps_on->is_cpu()) elsewhere_.emplace(*options.steps_on);
  if (!options.watch) options.watch = [](const progress&) { return control::go_on; };
  options.limits.validate();
  if (!(options.first_seconds >= 0))
    throw bad_option("wrap_options.first_seconds must be >= 0, got " + std::to_string(options.first_seconds));
  if (options.device) options.first_seconds = options.limits.seconds;  // no steps run beside which to search
  const auto& far = options.far;
  if (far.memory && (!far.out || !far.in)) throw bad_option("wrap_options.far has a memory without links");
  if (far.memory && options.device) throw bad_option("wrap_options.far: costs of an estimated device, and copies of this one");
  if (options.fetched && options.device)
    throw bad_option("wrap_options.fetched: costs of an estimated device, and copies of this one");
  if (options.device) options.cache = plan_cache("");  // cached plans are for measured costs
  placing_allocator::install();
}

namespace {

/// Gives idle arenas of all sessions back to the device, except for sessions that another thread works for.
/// @return true if this freed memory of that device
bool return_idle_arenas(c10::Device on) {
  auto& d = device_of(on);
  const auto before = d.use().live;
  session::release_all();
  return d.use().live < before;
}

}  // namespace

session::session(std::shared_ptr<model> trained, wrap_options options)
    : state_(std::make_shared<state>(std::move(trained), std::move(options))) {
  detail::set_idle_arenas(&return_idle_arenas);
  detail::set_unbind(&state::unbind_idle);
  state::all().add(state_);
}
session::~session() { state_->worker.end(); }  // steps that are alive keep the state

std::vector<at::Tensor> session::forward(const invocation& call, const std::vector<at::Tensor>& inputs,
                                         std::shared_ptr<void>* note) {
  return state_->or_device_lost(inputs, [&] { return state_->forward(call, inputs, note); });
}

void session::prepare(const invocation& call, const std::vector<at::Tensor>& inputs) {
  state_->or_device_lost(inputs, [&] { state_->prepare(call, inputs); });
}

void session::state::prepare(const invocation& call, const std::vector<at::Tensor>& inputs) {
  std::unique_lock lock(mutex);
  look();
  std::shared_ptr<captured_step> s;
  std::shared_ptr<const plan> made;
  if (!options.device) {
    put_back_weights();
    warm_up(inputs, lock);
  }
  const auto outputs = usage_of(key_of(call, inputs));
  const auto kind = [&](const auto& uses) { return kind_for(call, inputs, outputs, uses, 0); };
  if (options.device) {
    s = likely(kind, outputs, outputs->now());
    memory.note_kind(*s);
    last_held = memory.held(*s, inputs);
    const auto [available, held_bytes] = room(*s);
    made = plan_for(s, available, held_bytes);
  } else {
    const auto r = options.follow ? try_step(call, inputs) : expected(kind, inputs, outputs, outputs->now());
    s = r->kind;
    made = r->plan;
  }
  last_setup = std::move(s);
  last_plan = std::move(made);
}

void session::invalidate() {
  std::lock_guard lock(state_->mutex);
  state_->release();
  state_->captured_steps.clear();
  state_->memory.largest_plain = state_->memory.largest_held = state_->memory.largest_working = 0;
  state_->used.clear();
  state_->looked_ = false;
}

void session::set_budget(const budget& b) {
  std::lock_guard lock(state_->mutex);
  state_->options.budget = b;
  state_->release();
}

void session::release() {
  std::lock_guard lock(state_->mutex);
  state_->release();
}

void session::release_all() {
  for (const auto& s : state::all().alive())
    if (std::unique_lock lock(s->mutex, std::try_to_lock); lock) s->release();
}

void session::state::unbind_idle(const at::Tensor& t) {
  for (const auto& s : all().alive()) {
    std::unique_lock lock(s->mutex, std::defer_lock);
    if (!s->mutex.is_owned() && !lock.try_lock()) continue;
    for (const auto& r : s->memory.runners) r->executor->unbind(t);
  }
}

bool session::has_used_plan() const {
  std::lock_guard lock(state_->mutex);
  return state_->last_plan && !state_->kinds().empty();
}

pytorch::report session::report() const {
  std::lock_guard lock(state_->mutex);
  const auto& x = *state_;
  if (!x.last_plan) throw error("no step has been planned yet");
  return x.report(*x.last_setup, *x.last_plan);
}

std::vector<pytorch::report> session::reports() const {
  std::lock_guard lock(state_->mutex);
  const auto& x = *state_;
  auto kinds = x.kinds();
  std::sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) { return a->last_used > b->last_used; });
  std::vector<pytorch::report> list;
  for (const auto& s : kinds) {
    for (const auto& [available, plan] : s->plans) list.push_back(x.report(*s, *plan));
    for (const auto& [made_for, plan] : s->plans_in_flight) list.push_back(x.report(*s, *plan));
  }
  return list;
}

pytorch::report session::state::report(const captured_step& s, const plan& p) const {
  auto r = last_held;
  r.gradients += last_behind;
  const auto& run = *p.execution;
  r.budget = memory.budget(r, r.gradients, false);
  r.left = r.budget - r.held();
  if (p.zones) r.in_flight = memory.at_a_time();
  const auto steps = static_cast<bytes_t>(r.in_flight);
  r.arena = steps * run.arena_bytes() + run.working_bytes();
  r.placed = run.placed();
  r.live_peak = run.live_peak();
  r.outputs = run.outside_bytes() + (steps - 1) * (run.held_bytes() - run.arena_bytes());
  r.in_place = run.in_place_bytes();
  r.fetched = run.fetched_bytes();
  r.store_all = bytes_in_flight(p.zones ? *s.all_in_flight->execution : *s.store_all->execution, r.in_flight);
  r.plain_peak = s.plain_peak;
  const auto workspaces = s.profiles.workspace();
  r.workspace = workspaces.empty() ? 0 : *std::max_element(workspaces.begin(), workspaces.end());
  r.step_seconds = p.result.seconds;
  r.store_all_seconds = s.store_all->result.seconds;
  r.bound = p.result.bound;
  r.gap = p.result.gap();
  r.capture_seconds = s.capture_seconds;
  r.profile_seconds = s.profiles.elapsed;
  r.plan_seconds = p.plan_seconds;
  r.operations = run.operations();
  r.recomputed = run.recomputed();
  r.far = run.far_bytes();
  std::tie(r.moved_out, r.moved_in) = run.moved_bytes();
  r.unplanned_allocations = memory.unplanned;
  r.waited = memory.waited;
  for (const auto& a : memory.runners) {
    r.unplanned_allocations += a->executor->unplanned_allocations();
    r.waited += a->executor->waited_seconds();
  }
  std::tie(r.unplanned_operation, r.unplanned_bytes) = s.largest_unplanned;
  r.solver = p.result.solver + (p.taken_from.empty() ? "" : " (taken over from " + p.taken_from + ")");
  r.fallback = p.fallback;
  r.planned_for = s.described();
  r.status = p.result.status;
  auto least = run.needed_bytes();
  for (const auto& [available, other] : s.plans) least = std::min(least, other->execution->needed_bytes());
  if (p.zones) least = std::max(least, bytes_in_flight(run, r.in_flight));
  r.smallest = r.held() + least;
  r.smallest_bound = std::min(r.smallest, r.held() + s.least_budget - s.problem.held_bytes());
  return r;
}

step_plan session::planned() const {
  std::lock_guard lock(state_->mutex);
  const auto& x = *state_;
  if (!x.last_plan) throw error("no step has been planned yet");
  const auto& s = *x.last_setup;
  step_plan found{x.report(s, *x.last_plan),
                  x.last_plan == s.store_all ? s.store_all_problem : s.problem,
                  s.counted_twice,
                  x.last_plan->schedule,
                  {}};
  for (const auto& n : s.step->nodes) found.lines.push_back(n.line);
  return found;
}

}  // namespace remat::pytorch
