// SPDX-License-Identifier: Apache-2.0
/// @file
/// Steps that run the module's own code.
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include <remat/io/bytes.hpp>

#include "../capture/follower.hpp"
#include "../capture/origins.hpp"
#include "../capture/step_run.hpp"
#include "state.hpp"

namespace remat::pytorch {
namespace {

/// Limit on known paths through one forward.
constexpr std::size_t most_paths = 8;

/// True if a refused step is tried again now. The intervals grow exponentially.
bool try_again(const output_usage& outputs) { return std::has_single_bit(outputs.plain + 1); }

}  // namespace

bool session::state::same_forward(const captured_step& a, const captured_step& b) {
  const auto &x = *a.forward->recorded, &y = *b.forward->recorded;
  return x.backward == y.backward && x.output_tensors == y.output_tensors && x.results == y.results &&
         detail::common_calls(x, y) == x.backward && detail::same_outside(x, y);
}

std::vector<std::shared_ptr<captured_step>> session::state::followable(const output_usage& outputs,
                                                                       const std::vector<output_use>& uses) const {
  std::vector<std::shared_ptr<captured_step>> list;
  for (const auto& [name, s] : captured_steps)
    if (s->outputs.get() == &outputs && s->forward && !s->broken) list.push_back(s);
  std::sort(list.begin(), list.end(), [&](const auto& a, const auto& b) {
    const bool x = a->uses == uses, y = b->uses == uses;
    return x != y ? x : a->last_used > b->last_used;
  });
  return list;
}

session::state::begun_step session::state::follow(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                  std::unique_lock<owned_mutex>& lock) {
  const auto outputs = usage_of(key_of(call, inputs));
  const auto uses = outputs->now();
  const auto of = now_;
  auto known = followable(*outputs, uses);
  std::erase_if(known, [&](const auto& s) {
    try {
      bind(*s, of);
      return false;
    } catch (const bad_binding&) {  // found tensors share memory with earlier parameters
      drop(s);
      return true;
    }
  });
  begun_step b;
  b.inputs = detail::origins_of(inputs);
  const auto as_it_is = [&] {
    lock.unlock();
    b.returned = call.forward(inputs);
    return std::move(b);
  };
  if (outputs->without_gradient) return as_it_is();
  const bool begins = std::none_of(known.begin(), known.end(), [&](const auto& s) { return s->uses == uses; });
  if (!outputs->refused.empty() && (begins || outputs->for_good)) {
    ++outputs->plain;
    if (outputs->for_good || !try_again(*outputs)) {
      release();
      return as_it_is();
    }
  }
  if (begins)
    return record_step(call, inputs, std::move(b.inputs), outputs, uses,
                       [&](detail::step_run& run) { return make_captured_step(call, inputs, uses, &run); });

  std::vector<detail::candidate> candidates;
  for (const auto& s : known) candidates.push_back({s->forward, {s->bound, &s->bound->slots}});
  const auto like = known.front();
  if (!elsewhere_) lock.unlock();  // otherwise nothing else may use the weights meanwhile
  bytes_t before = 0;
  const auto make_room = [&, this] {
    std::unique_lock held(mutex, std::defer_lock);
    if (!elsewhere_) held.lock();
    release();
    before = device_for(*like).use().live;
  };
  auto f = [&] {
    const auto there = disguise(*of);
    try {
      return detail::follow(candidates, call.forward, inputs,
                            {of->parameters, of->buffers, uses, b.inputs, options.strict || there, options.verify > 0,
                             there != nullptr, !options.graph, make_room});
    } catch (const cannot_capture&) {
      throw;
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (before > 0)
        warn_beyond(device_for(*like).use().live - before,
                    "the forward raises an exception: its calls until then have run as they are, and took ",
                    " beyond the budget");
      throw;
    }
  }();
  if (!elsewhere_) lock.lock();
  if (!f.match) {
    looked_ = false;
    const auto text = "the forward leaves the planned path at call " + std::to_string(f.differs_at) + " (" + f.why + "); ";
    f.recording ? log(text + "it is recorded anew from there") : warn_once(text + "this step runs as it is");
  }
  if (f.recording)
    return record_step(call, inputs, std::move(b.inputs), outputs, uses, [&](detail::step_run& run) {
      run = std::move(f.recording->step);
      if (f.recording->refusal) std::rethrow_exception(f.recording->refusal);
      return step_of_path(f.recording->recorded, *like, of, run);
    });
  b.returned = std::move(f.returned);
  if (!f.match) return b;
  auto s = known[*f.match];
  bind(*s, of);  // another thread may have bound other tensors
  std::vector<std::pair<index_t, at::Tensor>> fresh;
  for (const auto& [k, t] : f.changed_slots)
    if (s->forward->recorded->slots[k].from != role::input) fresh.emplace_back(k, t);
  if (!fresh.empty()) s = with_late_inputs(s, inputs.size(), fresh);
  for (const auto& [k, t] : f.changed_slots) {
    const auto at = s->forward->recorded->slots[k].position;
    b.inputs.resize(std::max(b.inputs.size(), at + 1));
    b.inputs[at] = t;
  }
  s->last_used = ++clock_;
  b.hollow = std::move(f.outputs);
  b.numbers = std::move(f.numbers);
  const auto ahead = f.log->peak_ahead();
  b.graph =
      std::make_shared<detail::kept_graph>(s->forward->recorded, std::move(f.log), std::move(f.tensors), b.inputs, b.hollow);
  find_plan(b, call, s, outputs, ahead);
  return b;
}

void session::state::warn_beyond(bytes_t bytes, const char* before, const char* behind) {
  const auto beyond = last_held.held() + bytes - memory.budget(last_held, last_held.gradients, false);
  if (bytes > 0 && beyond > 0 && warned_.insert(before).second) warn(before + format_bytes(beyond) + behind);
}

void session::state::note_unplanned(const runner& r) {
  auto& s = *r.kind;
  const auto [at, bytes] = r.executor->largest_unplanned();
  if (bytes <= s.largest_unplanned.second) return;
  const auto& n = s.step->nodes[at];
  s.largest_unplanned = {n.name + (n.line.empty() ? "" : " (" + n.line + ")"), bytes};
  const auto now = report(s, *r.plan);
  const auto beyond = now.total() + bytes - now.budget;
  if (beyond > 0 && !std::exchange(s.warned, true))
    warn(s.largest_unplanned.first + " takes " + format_bytes(bytes) +
         " outside of the plan, because it allocates memory in another way " + "than when it was measured. Steps take up to " +
         format_bytes(beyond) + " beyond the budget; lower it by as much");
}

void session::state::find_plan(begun_step& b, const invocation& call, const std::shared_ptr<captured_step>& s,
                               const std::shared_ptr<output_usage>& outputs, std::size_t ahead) {
  const bool same_hooks = !outputs->hooks_inside || s->hook_places == b.graph->contents().hook_places;
  const auto kind = [&](const auto& u) {
    const bool same = u == s->uses && same_hooks;
    return variant_of(same ? s : same_step(call, b.inputs, *s, u, b.graph.get(), s->bound->of), 0, b.graph.get());
  };
  try {
    b.r = expected(kind, b.inputs, outputs, s->uses);
  } catch (const over_budget& e) {
    if (!s->new_path || !e.smallest || options.strict) throw;
    const auto restored = c10::make_scope_exit([&] { beyond_ = 0; });
    beyond_ = *e.smallest - e.asked;
    if (!std::exchange(s->warned, true))
      warn("the forward takes another path than before, whose step does not fit into the budget: it takes " +
           format_bytes(beyond_) + " beyond it; smallest budget known to do: " + std::to_string(*e.smallest) + " bytes");
    b.r = expected(kind, b.inputs, outputs, s->uses);
  }
  warn_beyond(static_cast<bytes_t>(ahead), "the forward looks at values, and the calls before take ",
              " beyond the budget when they run ahead of the plan");
}

session::state::begun_step session::state::record_step(
    const invocation& call, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> origins,
    const std::shared_ptr<output_usage>& outputs, const std::vector<output_use>& uses,
    const std::function<std::shared_ptr<captured_step>(detail::step_run&)>& make, bool trial) {
  begun_step b;
  b.inputs = std::move(origins);
  const bool strict = options.strict || elsewhere_ || trial;
  detail::step_run run(strict, options.verify > 0 || trial, !options.graph);
  std::shared_ptr<captured_step> s;
  try {
    s = make(run);
  } catch (const cannot_capture& why) {
    if (dynamic_cast<const no_gradient*>(&why) != nullptr) {
      outputs->without_gradient = true;
      if (trial) throw;
    } else if (strict) {
      throw;
    } else if (run.thrown()) {  // the module's error, not that of an earlier call that cannot be planned
      std::rethrow_exception(run.thrown());
    } else {
      warn_once(std::string("this call is not planned: ") + why.what());
      outputs->refused = why.what();
    }
    if (run.log()) {
      release();  // the calls take memory of their own
      run.finish_eagerly();
    }
    b.returned = run.ran() ? run.returned() : call.forward(inputs);
    return b;
  }
  outputs->refused.clear();
  outputs->plain = 0;
  s->outputs = outputs;
  s->uses = uses;
  auto paths = followable(*outputs, uses);
  std::erase_if(paths, [&](const auto& known) {
    const bool same = same_forward(*known, *s);
    if (known->uses == uses && known->hook_places == s->hook_places && same) drop(known);
    return known->uses != uses || same;
  });
  if (paths.size() >= most_paths) drop(paths.back());  // not met for the longest time
  keep("followed " + std::to_string(++recorded_), s);
  b.inputs.insert(b.inputs.end(), run.values().begin(), run.values().end());
  b.hollow = run.outputs();
  b.numbers = detail::numbers_in(*s->forward->recorded);
  b.returned = run.returned();
  b.graph = std::make_shared<detail::kept_graph>(s->forward->recorded, run.log(), run.tensors(), b.inputs, b.hollow);
  find_plan(b, call, s, outputs, run.log()->peak_ahead());
  return b;
}

std::shared_ptr<runner> session::state::try_step(const invocation& call, const std::vector<at::Tensor>& inputs) {
  const auto outputs = usage_of(key_of(call, inputs));
  const auto uses = outputs->now();
  const auto make = [&](detail::step_run& run) { return make_captured_step(call, inputs, uses, &run); };
  return record_step(call, inputs, detail::origins_of(inputs), outputs, uses, make, true).r;
}

std::shared_ptr<captured_step> session::state::with_late_inputs(const std::shared_ptr<captured_step>& s, std::size_t inputs,
                                                                const std::vector<std::pair<index_t, at::Tensor>>& late) {
  auto recorded = std::make_shared<detail::trace>(*s->forward->recorded);
  auto next = std::max(inputs, recorded->input_grads.size());
  for (const auto& [k, t] : late) {
    auto& slot = recorded->slots[k];
    slot.from = role::input;
    slot.position = next++;
    recorded->input_grads.emplace_back();
    recorded->input_sources.emplace_back();
    recorded->input_sums.emplace_back();
    recorded->input_edges.push_back(0);
  }
  auto made = step_from(recorded, *s, s->bound->of);
  forget(s);
  const auto at = std::find_if(captured_steps.begin(), captured_steps.end(), [&](const auto& x) { return x.second == s; });
  const auto name = at != captured_steps.end() ? at->first : "followed " + std::to_string(++recorded_);
  if (at != captured_steps.end()) captured_steps.erase(at);
  keep(name, made);
  log("tensors that the module makes anew in each step are inputs of the plan from now on: " + std::to_string(late.size()));
  return made;
}

}  // namespace remat::pytorch
