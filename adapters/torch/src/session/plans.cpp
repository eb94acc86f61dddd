// SPDX-License-Identifier: Apache-2.0
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <sstream>

#include <remat/io/bytes.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/memory.hpp>

#include "state.hpp"

namespace remat::pytorch {
namespace {

/// A copy of a plan that is not refined again.
/// @param bound on the time, proven by a search beside the steps, s
std::shared_ptr<const plan> final_plan(const plan& p, double bound) {
  auto same = std::make_shared<plan>(p);
  same->result.bound = std::min(std::max(bound, p.result.bound), p.result.seconds);
  same->taken_from.clear();
  same->unfinished = same->superseded = false;
  return same;
}

/// The outputs with gradients from which no other such output is computed: for example the loss that a model returns beside its
/// logits, or the logits beside keys and values. An unknown loss probably uses these. Complexity: O(outputs x (V + E)) bits.
/// @return empty: all outputs with gradients
std::vector<output_use> last_outputs(const program& step) {
  const auto n = step.outputs.size();
  const auto brings = [&](std::size_t i) { return step.output_grads[i] != none; };
  std::vector<std::vector<bool>> from(step.values.size());  // per value: outputs that it is computed from
  std::vector<bool> inner(n);
  const auto add = [n](std::vector<bool>& to, const std::vector<bool>& what) {
    to.resize(n);
    for (std::size_t i = 0; i < what.size(); ++i) to[i] = to[i] || what[i];
  };
  const auto value_of = [&](std::size_t i) { return step.views[step.outputs[i]].value; };
  for (index_t k = 0; k < step.loss; ++k) {
    std::vector<bool> all(n);
    for (auto v : step.nodes[k].inputs) {
      add(all, from[v]);
      for (std::size_t i = 0; i < n; ++i) all[i] = all[i] || value_of(i) == v;
    }
    for (auto v : step.nodes[k].outputs) add(from[v], all);
  }
  for (std::size_t i = 0; i < n; ++i)
    if (brings(i)) add(inner, from[value_of(i)]);
  std::vector<output_use> uses;
  bool all = true;
  for (std::size_t i = 0; i < n; ++i) {
    uses.push_back({.used = brings(i) && !inner[i]});
    all = all && uses.back().used == brings(i);
  }
  return all ? std::vector<output_use>() : uses;
}

/// True if all used outputs are single numbers.
bool only_numbers(const program& step, const std::vector<output_use>& uses) {
  for (std::size_t i = 0; i < uses.size(); ++i)
    if (uses[i].used && c10::multiply_integers(step.views[step.outputs[i]].sizes) != 1) return false;
  return true;
}

}  // namespace

std::shared_ptr<const plan> session::state::plan_for(const std::shared_ptr<captured_step>& s, bytes_t available,
                                                     bytes_t held_bytes) {
  for (auto p = s->plans.lower_bound(available); p != s->plans.end(); ++p)  // made for as many bytes, and fits
    if (p->second->execution->needed_bytes() <= available) return p->second;
  std::shared_ptr<const plan> best;
  if (s->store_all->execution->needed_bytes() <= available)
    best = s->store_all;
  else if (s->refusal && s->refused == std::pair(available, held_bytes))
    std::rethrow_exception(s->refusal);
  else if (const auto relative = sibling(*s, true)) {
    best = take_over(*s, available, *relative);
    if (!best || best->execution->needed_bytes() < available / 10 * 9)  // there is room for better decisions
      if (const auto other = quick_search(*s, available, searching());
          other && (!best || other->result.seconds < best->result.seconds))
        best = other;
  }
  if (!best && s->new_path) best = quick_search(*s, available, searching());
  if (!best) try {
      best = search(*s, available, held_bytes, searching());
    } catch (const over_budget&) {
      s->refusal = std::current_exception();
      s->refused = {available, held_bytes};
      throw;
    }
  announce(*best, available);
  s->plans[available] = best;
  return best;
}

void session::state::announce(const plan& p, bytes_t available) const {
  std::ostringstream text;
  text << "planned for " << format_bytes(available) << " in " << format_seconds(p.plan_seconds) << ": " << p.result.recomputed
       << " recomputations, arena " << format_bytes(p.execution->arena_bytes()) << ", outputs "
       << format_bytes(p.execution->outside_bytes());
  log(text.str());
}

std::shared_ptr<captured_step> session::state::likely(const kind_of_uses& kind, const std::shared_ptr<output_usage>& outputs,
                                                      const std::vector<output_use>& uses, bool tight) {
  auto s = kind(uses);
  if (!uses.empty() || !outputs->unseen()) return s;
  const auto last = last_outputs(*s->step);
  if (last.empty() || !(tight || only_numbers(*s->step, last))) return s;
  try {
    auto other = kind(last);
    outputs->guess(last);
    return other;
  } catch (const not_supported&) {  // the code of the backward differs the second time
    return s;
  }
}

std::shared_ptr<runner> session::state::expected(const kind_of_uses& kind, const std::vector<at::Tensor>& inputs,
                                                 const std::shared_ptr<output_usage>& outputs,
                                                 const std::vector<output_use>& uses) {
  const auto s = likely(kind, outputs, uses);
  try {
    return acquire(s, inputs);
  } catch (const over_budget& e) {
    const auto beyond = [&](const std::string& what) {
      const auto restored = c10::make_scope_exit([&] { beyond_ = 0; });
      beyond_ = *e.smallest - e.asked;
      warn_once("the forward runs once more, for " + what + "; this takes " + format_bytes(beyond_) +
                " beyond the budget, in this step only");
      return acquire(s, inputs);
    };
    if (const auto other = likely(kind, outputs, uses, true); other != s) {
      try {
        return acquire(other, inputs);
      } catch (const over_budget&) {  // report the budget for all outputs, which always does
      }
      throw;
    }
    if (s->in_summands && memory.once_more && e.smallest) return beyond("gradients in summands");  // an unplanned need
    if (s->in_summands) {
      outputs->expect_summands(false);
      warn_once(
          "gradients do not fit into the budget as summands; where other graphs lead to the same parameter or input, their "
          "last bits may not be those of plain PyTorch");
      return expected(kind, inputs, outputs, uses);
    }
    // The outputs that this loss uses may take more than all outputs, whose gradients lie outside of the arena.
    if (uses.empty() || !same_autocast({}, uses)) throw;
    try {
      auto r = acquire(kind({}), inputs);
      outputs->expect_all();
      return r;
    } catch (const over_budget&) {
      if (memory.once_more && e.smallest && !options.strict) return beyond("another use of its outputs");
    }
    throw;
  }
}

void session::state::refine(const runner& r, bytes_t held_bytes) {
  if (!r.plan->unfinished || r.plan->superseded || r.steps < 2) return;
  worker.start([this, s = r.kind, old = r.plan, available = r.available, held_bytes] {
    auto o = searching();
    o.first_seconds = o.limits.seconds;
    o.watch = [this](const progress&) { return worker.ending() ? control::stop : control::go_on; };
    std::shared_ptr<const plan> found;
    try {
      found = search(*s, available, held_bytes, o);
    } catch (const std::exception& e) {
      log(std::string("no better plan beside the steps: ") + e.what());
    }
    std::lock_guard lock(mutex);
    if (!found || found->result.seconds >= old->result.seconds) found = final_plan(*old, found ? found->result.bound : 0);
    announce(*found, available);
    s->plans[available] = found;
    old->superseded = true;
  });
}

std::shared_ptr<runner> session::state::acquire(const std::shared_ptr<captured_step>& s, const std::vector<at::Tensor>& inputs) {
  auto r = ready(s, inputs);
  last_behind = memory.behind();
  rebind(*r);
  return r;
}

void session::state::rebind(runner& r) {
  if (r.bound == r.kind->bound) return;
  if (r.bound) r.executor->use(r.kind->bound->slots);
  r.bound = r.kind->bound;
}

std::shared_ptr<runner> session::state::ready(const std::shared_ptr<captured_step>& s, const std::vector<at::Tensor>& inputs) {
  for (const auto& r : memory.runners)  // their arenas may hold gradients of earlier tensors
    if (!r->executor->in_flight()) rebind(*r);
  memory.sweep();
  memory.note_kind(*s);
  last_held = memory.held(*s, inputs);
  if (memory.can_share() && memory.expected() > 1) return acquire_in_flight(s);
  const auto fixed = last_held.held();
  for (const auto& r : memory.runners) {  // an executor that is ready
    if (r->kind != s || r->executor->in_flight() || r->plan->superseded || r->plan->zones) continue;
    const auto& p = *r->plan->execution;  // its arena may be larger, made for another kind
    const auto need = p.needed_bytes() + std::max<bytes_t>(0, r->executor->arena()->bytes() - p.arena_bytes());
    const auto gradients = memory.gradients();
    if (fixed + gradients + need + memory.others(r.get()) > memory.budget(last_held, gradients, true) + beyond_) continue;
    if (!memory.vacate(*r->executor->memory())) continue;
    last_held.gradients = gradients;
    return r;
  }
  auto place = memory.idle_arena();
  if (place)  // others of this kind do not suit, and executors for earlier tensors would hold these tensors
    memory.let_go([&](const runner& r) {
      const bool stays = r.executor->arena() == place && r.kind != s && r.bound && r.bound->of == s->bound->of;
      return !r.executor->in_flight() && !stays;
    });
  else
    release();
  auto [available, held_bytes] = room(*s);
  auto r = std::make_shared<runner>();
  r->kind = s;
  r->available = available;
  r->plan = plan_for(s, available, held_bytes);
  if (place &&
      (place->bytes() < r->plan->execution->arena_bytes() || place->bytes() + r->plan->execution->outside_bytes() > available)) {
    place.reset();
    release();
    std::tie(available, held_bytes) = room(*s);
  }
  try {
    r->executor = reserve(*r, held_bytes, place);
  } catch (const out_of_memory& e) {
    const bool shared = std::any_of(memory.runners.begin(), memory.runners.end(),
                                    [](const auto& x) { return x->plan->execution->far_bytes() > 0; });
    if (!shared || r->plan->execution->far_bytes() == 0 || e.tier != s->far.memory->name()) throw;
    r->plan = without_copies(*s, available, held_bytes, e);
    r->executor = reserve(*r, held_bytes);
  }
  add(r);
  return r;
}

void session::state::add(const std::shared_ptr<runner>& r) {
  r->on_unplanned = [weak = weak_from_this()](const runner& of) {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard held(self->mutex);
    self->note_unplanned(of);
  };
  memory.runners.push_back(r);
}

std::unique_ptr<executor> session::state::reserve(runner& r, bytes_t held_bytes, const std::shared_ptr<region>& arena) {
  auto& on = device_for(*r.kind);
  const auto make = [&] {
    const executor_options o{.graphs = options.graph && !r.kind->uncaptured, .arena = arena};
    return std::make_unique<executor>(r.plan->execution, r.kind->bound->slots, on, r.kind->far, o);
  };
  if (on.which().is_cpu() || arena) return make();
  on.empty_cache();                       // frees what captures and measurements left: PyTorch should reserve only planned memory
  constexpr bytes_t rounding = 32 << 20;  // segments of a caching allocator are larger than requested
  auto available = on.free_bytes();
  if (r.plan->execution->needed_bytes() <= available) try {
      return make();
    } catch (const out_of_memory& e) {
      if (e.tier != on.memory().name()) throw;
      available = e.available;
    }
  available = std::max<bytes_t>(0, available - std::min(rounding, available / 8));
  TORCH_WARN("remat: the budget leaves ", format_bytes(r.available), " to this step, but ", on.memory().name(), " has only ",
             format_bytes(available), " free; another process may use it. Steps are planned for that");
  for (int left = 3;; available -= available / 8) {
    r.available = available;
    r.plan = plan_for(r.kind, available, held_bytes);
    try {
      return make();
    } catch (const out_of_memory& e) {
      if (--left == 0 || e.tier != on.memory().name()) throw;
    }
  }
}

std::shared_ptr<const plan> session::state::without_copies(const captured_step& s, bytes_t available, bytes_t held_bytes,
                                                           const out_of_memory& why) {
  auto& known = s.plans_without_copies[available];
  if (known) return known;
  log(why.what() + std::string(", as other steps are in flight; this one is planned without"));
  auto o = searching();
  o.first_seconds = o.limits.seconds;
  o.copies = false;
  try {
    known = search(s, available, held_bytes, o);
  } catch (const over_budget&) {
    throw why;
  }
  announce(*known, available);
  return known;
}

std::pair<bytes_t, bytes_t> session::state::room(const captured_step& s) {
  const auto fixed = last_held.held() - last_held.gradients;
  last_held.gradients = memory.gradients();
  const auto others = memory.others();
  const auto most = memory.budget(last_held, last_held.gradients, true) + beyond_;
  const auto available = most - fixed - last_held.gradients - others;
  const auto held_bytes = fixed + last_held.gradients + others;
  if (available < 0) fail_over_budget(s, *leanest(s, searching()), held_bytes + available, held_bytes);
  return {available, held_bytes};
}

}  // namespace remat::pytorch
