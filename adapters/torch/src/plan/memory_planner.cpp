// SPDX-License-Identifier: Apache-2.0
// Walks through a schedule: buffers, moves, calls.
#include "memory_planner.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include <remat/core/evaluate.hpp>

#include "../base/gradient_hooks.hpp"
#include "../base/views.hpp"
#include "../program/effects.hpp"

namespace remat::pytorch {
namespace {

/// Why addresses cannot be fixed even with copies of the inputs; empty: they can.
std::string reason_to_move(const program& p) {
  if (std::any_of(p.nodes.begin(), p.nodes.end(), [](const auto& n) { return n.name == call_hooks_name; }))
    return "hooks inside of the forward run on the host";
  const auto on = device_of_step(p);
  const auto named = [&](index_t k) {
    const auto& s = p.slots[k];
    const auto what = s.from == role::input ? "input " : s.from == role::output_grad ? "the gradient of output " : "";
    return what + (s.name.empty() || s.from == role::output_grad ? std::to_string(s.position) : s.name);
  };
  for (index_t k = 0; k < p.slots.size(); ++k) {
    const auto& s = p.slots[k];
    if (s.from != role::constant && s.type.device != on)
      return named(k) + " is on " + s.type.device.str() + ", so its numbers would become part of the graph";
    if (s.from != role::input && s.from != role::output_grad) continue;
    if (p.values[s.value].slot != k) return named(k) + " shares memory with " + named(p.values[s.value].slot);
    if (!apart_or_expanded(s.type.sizes, s.type.strides) || (s.from == role::input && is_expanded(s.type.sizes, s.type.strides)))
      return named(k) + " has elements that share memory";
  }
  for (const auto& w : p.written)
    if (p.slots[w.slot].from == role::input) return "the forward writes to " + named(w.slot);
  for (auto v : p.outputs)
    if (p.from(p.views[v].value) == role::input) return "an output lies in " + named(p.values[p.views[v].value].slot);
  for (const auto* views : {&p.input_grads, &p.parameter_grads})
    for (auto v : *views)
      if (v != none && (p.from(p.views[v].value) == role::input || p.from(p.views[v].value) == role::output_grad))
        return "a gradient lies in " + named(p.values[p.views[v].value].slot);
  return "";
}

}  // namespace

memory_planner::memory_planner(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles)
    : schedule_(without_tiers(s)),
      profiles_(profiles),
      buffer_of_(step->values.size(), none),
      send_of_(buffer_of_),
      unfinished_sends_(buffer_of_),
      unfinished_arrivals_(buffer_of_) {
  plan_.step = std::move(step);
  TORCH_CHECK(profiles.nodes.size() == program_().nodes.size(), "profiles of another program");
}

std::unique_ptr<execution_plan::data> memory_planner::run(layout_options o, bytes_t in_place, placing how) {
  const bool fixed = how == placing::fixed;
  zones_ = how == placing::zones;
  by_allocator_ = how == placing::by_allocator;
  if (!device_of_step(program_()).is_cpu()) o.alignment = allocation_unit_ = std::max(o.alignment, accelerator_alignment);
  plan_.in_place = in_place;
  find_fetched();
  check();
  if (fixed) plan_.why_addresses_move = reason_to_move(program_());
  if (by_allocator_) {
    if (has_copies(schedule_))
      throw bad_schedule(0, "it moves values, and memory of the device has no addresses to move them from");
    plan_.why_addresses_move = "memory of " + device_of_step(program_()).str() + " has no fixed addresses";
  }
  if (fixed && plan_.why_addresses_move.empty()) plan_.slot_copies.assign(program_().slots.size(), none);
  reserve_slot_copies(role::input, 0);
  std::vector<bool> has_run(program_().nodes.size(), false);
  plan_.saves.resize(program_().nodes.size());
  plan_.given_early = has_early_gradient(program_());
  plan_.gradient_sends.resize(program_().parameters.size(), none);
  for (const auto k : leaving_gradients(program_()))
    gradient_to_host_[program_().views[program_().parameter_grads[k]].value] = static_cast<index_t>(k);
  if (std::find(plan_.given_early.begin(), plan_.given_early.end(), true) != plan_.given_early.end()) find_early_gradients();
  for (const auto& n : program_().nodes) note_origin(n.starts);
  note_origin(program_().after_forward);
  note_origin(program_().after_backward);
  for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
    const auto what = schedule_.steps[i].what;
    const auto which = schedule_.steps[i].which;
    if (what == action::drop) {
      wait_for(which, i);
      drop(which, time(i));
    } else if (what == action::offload) {
      send(which, i, o.alignment);
    } else if (what == action::prefetch) {
      bring_back(which, i, o.alignment);
    } else if (which == program_().loss) {
      loss_time_ = time(i);
      end_forward();
      reserve_slot_copies(role::output_grad, i);
    } else {
      const bool again = has_run[which];
      has_run[which] = true;
      if (again && program_().nodes[which].random) plan_.saves[which].before = true;
      plan_.recomputed += again;
      compute(i, which, again);
      give_early_gradients(i);
    }
  }
  finish();
  note_reads();
  by_allocator_ ? place_by_allocator() : place(o);
  return std::make_unique<execution_plan::data>(std::move(plan_));
}

void memory_planner::note_origin(const generator_origin& o) {
  if (o.from == generator_origin::before) plan_.saves[o.node].before = true;
  if (o.from == generator_origin::after) plan_.saves[o.node].after = true;
  if (o.from == generator_origin::forward) plan_.saves_phase[0] = true;
  if (o.from == generator_origin::backward) plan_.saves_phase[1] = true;
}

schedule memory_planner::without_tiers(const schedule& s) {
  constexpr tier_id host = device_tier + 1;
  schedule made;
  made.starts = s.starts;
  for (const auto& x : s.steps) {
    if (x.what == action::copy && x.from == device_tier && x.to == host)
      made.offload(x.value());
    else if (x.what == action::copy && x.from == host && x.to == device_tier)
      made.prefetch(x.value());
    else if (x.what != action::drop || x.from == device_tier)
      made.steps.push_back(x);
  }
  if (!made.plain()) throw bad_schedule(0, "it names a tier beyond the device and the host");
  return made;
}

void memory_planner::check() const {
  const auto some_rate = has_copies(schedule_) ? std::optional(copy_rates{1, 1, 0}) : std::nullopt;
  const auto as_problem = [&](const std::vector<bool>& fetched) {
    return to_problem(program_(), profiles_.seconds(), profiles_.workspace(), "", some_rate, fetched);
  };
  if (fetched_.empty()) {
    evaluate_plain(as_problem({}), schedule_);
  } else {
    evaluate(as_problem(fetched_), schedule_);
  }
  const auto n = static_cast<index_t>(program_().nodes.size());
  std::vector<bool> has_run(n, false);
  for (const auto& x : schedule_.steps)
    if (x.what == action::compute) has_run[x.which] = true;
  for (index_t i = 0; i < n; ++i)
    if (!has_run[i] && has_effects(program_(), program_().nodes[i]))
      throw bad_schedule(schedule_.steps.size(), "node " + std::to_string(i) + " never runs");
}

void memory_planner::find_fetched() {
  if (!has_copies(schedule_)) return;
  const auto can = fetchable(program_());
  for (const auto& x : schedule_.steps) {
    if (x.what != action::prefetch || x.which >= can.size() || !can[x.which]) continue;
    fetched_.resize(can.size(), false);
    fetched_[x.which] = true;
  }
}

location memory_planner::where(index_t v) const {
  const bool in_place = from_outside(program_(), v) && (fetched_.empty() || !fetched_[v]);
  if (in_place && program_().values[v].slot != none && program_().slots[program_().values[v].slot].on_host)
    throw bad_schedule(schedule_.steps.size(), program_().values[v].name + " is on the host and never fetched");
  return {in_place ? none : buffer_of_[v], v};
}

void memory_planner::send(index_t v, std::size_t i, bytes_t alignment) {
  if (v >= buffer_of_.size() || send_of_[v] != none)
    return;  // a recomputed value has the same bytes, so the copy in far memory is valid
  if (const auto g = gradient_to_host_.find(v); g != gradient_to_host_.end()) {
    planned_move m{v, buffer_of_[v], program_().values[v].bytes};
    m.gradient = g->second;
    plan_.gradient_sends[g->second] = send_of_[v] = unfinished_sends_[v] = begin(std::move(m));
    return;
  }
  planned_move m{v, buffer_of_[v], aligned(program_().values[v].bytes, alignment)};
  if (unfinished_arrivals_[v] != none) m.after.push_back(unfinished_arrivals_[v]);
  send_of_[v] = unfinished_sends_[v] = begin(std::move(m));
  far_ranges_.push_back({time(i), time(i) + 1, plan_.moves.back().bytes});
  far_moves_.push_back(send_of_[v]);
}

void memory_planner::bring_back(index_t v, std::size_t i, bytes_t alignment) {
  if (v >= buffer_of_.size()) return;
  const auto& what = program_().values[v];
  planned_move m{v, new_buffer(what.bytes, time(i)), aligned(what.bytes, alignment)};
  if (!fetched_.empty() && fetched_[v]) {
    m.slot = what.slot;
    plan_.buffers[m.buffer].fetched = true;
    m.bytes = what.bytes;
  } else {
    m.brings_back = send_of_[v];
    m.after.push_back(send_of_[v]);
  }
  move_in(v, m.buffer, time(i));
  unfinished_arrivals_[v] = begin(std::move(m));
}

index_t memory_planner::begin(planned_move m) {
  const auto k = static_cast<index_t>(plan_.moves.size());
  plan_.moves.push_back(std::move(m));
  pending_moves_.push_back({k, false});
  return k;
}

void memory_planner::wait_for(index_t v, std::size_t i) {
  if (v >= buffer_of_.size()) return;
  for (auto* moves : {&unfinished_sends_, &unfinished_arrivals_}) {
    const auto k = std::exchange((*moves)[v], none);
    if (k == none) continue;
    pending_moves_.push_back({k, true});
    if (send_of_[v] == none) continue;
    const auto place = std::lower_bound(far_moves_.begin(), far_moves_.end(), send_of_[v]) - far_moves_.begin();
    if (plan_.moves[send_of_[v]].gradient == none) far_ranges_[static_cast<std::size_t>(place)].death = time(i) + 1;
  }
}

void memory_planner::compute(std::size_t i, index_t n, bool again) {
  const auto& node = program_().nodes[n];
  const auto& script = again ? profiles_.nodes[n]->again : profiles_.nodes[n]->first;
  for (auto v : node.inputs) {
    const bool overwritten =
        std::any_of(node.overwrites.begin(), node.overwrites.end(), [&](const auto& versions) { return versions.first == v; });
    if (overwritten || unfinished_arrivals_[v] != none) wait_for(v, i);
  }
  for (auto v : node.outputs)
    if (buffer_of_[v] != none) wait_for(v, i);
  node_run s{n, again, std::exchange(pending_moves_, {}), {}, {}, {}, {}};
  std::map<index_t, location> here;  // outputs, and versions that share their buffers

  for (const auto& [old, fresh] : node.overwrites) {
    const auto from = where(old);
    const bool in_place = from.buffer != none && plan_.buffers[from.buffer].values == 1 && dies_after(i, old);
    const auto b = in_place ? from.buffer : new_buffer(program_().values[fresh].bytes, time(i));
    if (!in_place) s.copies.push_back({from, {b, fresh}});
    here[fresh] = {b, fresh};
  }
  for (const auto& block : script.blocks) {
    const bool temporary = block.result == none && block.freed >= 0;
    if (block.result == none && !temporary) {
      s.blocks.push_back(none);  // the operator keeps this block
      continue;
    }
    const auto b = new_buffer(block.bytes, time(i, block.born + 1));
    s.blocks.push_back(b);
    if (temporary)
      plan_.buffers[b].dies = time(i, block.freed + 1);
    else
      here[node.outputs[block.result]] = {b, node.outputs[block.result]};
  }
  for (const auto& c : node.calls) {
    placed_call placed{&c, {}, {}};
    for (const auto& o : c.operands) {
      const auto v = program_().views[o.view].value;
      const auto found = here.find(v);
      placed.operands.push_back(found != here.end() ? found->second : where(v));
    }
    for (const auto& r : c.results) {
      const auto v = program_().views[r.view].value;
      if (!here.count(v))  // not in the script: an empty tensor, or the script could not attribute its block
        here[v] = {new_buffer(program_().values[v].bytes, time(i)), v};
      placed.results.push_back(here[v]);
    }
    s.calls.push_back(std::move(placed));
  }
  for (auto v : node.outputs)
    if (const auto found = here.find(v); found != here.end()) move_in(v, found->second.buffer, time(i + 1));
  for (const auto& [v, l] : here)
    if (plan_.buffers[l.buffer].values == 0) plan_.buffers[l.buffer].dies = time(i + 1);  // no later step reads it
  const auto workspace = profiles_.nodes[n]->workspace;
  if (by_allocator_ && script.blocks.empty() && workspace > 0) plan_.buffers[new_buffer(workspace, time(i))].dies = time(i + 1);
  step_times_.push_back(time(i));
  other_threads_peak_ = std::max(other_threads_peak_, profiles_.nodes[n]->other_threads_bytes);
  plan_.steps.push_back(std::move(s));
  plan_.scripts.push_back(script);
}

}  // namespace remat::pytorch
