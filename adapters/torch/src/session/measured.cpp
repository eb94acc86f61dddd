// SPDX-License-Identifier: Apache-2.0
// Measures a captured step, counts what it holds, and makes its first plan.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/pytorch/paged_memory.hpp>

#include "../capture/follower.hpp"
#include "../device/accelerator.hpp"
#include "state.hpp"

namespace remat::pytorch {
namespace {

/// The tensors of `list` that share no memory with `weights`.
std::vector<at::Tensor> other_than(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> list) {
  std::erase_if(list, [&](const auto& t) {
    return std::any_of(weights.begin(), weights.end(), [&](const auto& w) { return w.is_alias_of(t); });
  });
  return list;
}

/// A lower bound on every budget, found without search. Overwritten memory counts once.
/// @param twice per node: bytes that it overwrites
bytes_t least_budget_of(const problem& p, const program& step, const std::vector<bytes_t>& twice) {
  auto x = p.members();
  for (std::size_t i = 0; i < twice.size(); ++i) {
    auto& workspace = x.operations[i].workspace;
    if (workspace >= twice[i])
      workspace -= twice[i];
    else
      for (const auto& [old, fresh] : step.nodes[i].overwrites) x.values[fresh].bytes = 0;
  }
  return bounds_without_search(problem(std::move(x))).budget;
}

/// @throws cannot_capture if the device cannot run the step
void require_runnable(const captured_step& s, const device& on, bool graph) {
  for (const auto& n : s.step->nodes)
    for (auto v : n.outputs)
      if (const auto made = s.step->values[v].device; made != on.which())
        throw cannot_capture(n.name + " makes a tensor on " + made.str() + " in a step on " + on.which().str() +
                             "; make it outside of the module, or on the device");
  if (graph && on.which().is_cpu())
    throw cannot_capture("graphs are for accelerators, and the model is on the host: move it to one, or leave out graph=true");
}

void set_bounds(captured_step& s) {
  const auto twice = overwritten_bytes(*s.step);
  s.counted_twice = twice.empty() ? 0 : *std::max_element(twice.begin(), twice.end());
  s.least_budget = least_budget_of(s.problem, *s.step, twice);
}

/// Counts what a step holds beside its plan.
/// @param fetched weights that plans count
void count_held_bytes(captured_step& s, const device& on, const std::vector<at::Tensor>& fetched) {
  s.parameter_bytes = unpaged_bytes(other_than(fetched, s.bound->of->parameters));
  s.buffer_bytes = unpaged_bytes(other_than(fetched, s.bound->of->buffers));
  for (const auto& c : s.step->constants) s.constants += allocated_bytes(on.which(), static_cast<bytes_t>(c.size()));
  const auto copied = [&](c10::Device d, bytes_t bytes) { s.copy_bytes += allocated_bytes(d, bytes); };
  if (s.forward) {
    for (auto k : s.forward->written_slots) copied(s.step->slots[k].type.device, s.step->values[s.step->slots[k].value].bytes);
    const auto& t = *s.forward->recorded;
    std::set<index_t> made;
    for (std::size_t i = 0; i < t.calls.size(); ++i)
      if (s.forward->runs_at_once[i])
        for (const auto& r : t.calls[i].results) made.insert(r.view.value);
    for (auto v : made)
      if (t.storages[v].slot == none) copied(t.storages[v].device, t.storages[v].bytes);
  } else {
    for (const auto& b : s.bound->of->buffers) copied(b.device(), static_cast<bytes_t>(b.nbytes()));
    for (const auto& w : s.step->written)
      if (const auto& slot = s.step->slots[w.slot]; slot.from == role::input)
        copied(on.which(), s.step->values[slot.value].bytes);
  }
}

/// The plan that recomputes nothing.
/// @param fetched weights that other plans fetch; this one reads them in place, if they are on the device
std::shared_ptr<const plan> store_all_plan(const captured_step& s, const std::vector<at::Tensor>& fetched) {
  const bool away = has_weights_on_host(*s.step);
  bytes_t in_place = 0;
  if (!away)
    for (const auto& t : fetched) in_place += static_cast<bytes_t>(t.storage().nbytes());
  const auto all = std::make_shared<plan>();
  all->schedule = away ? fetch_once_schedule(s.store_all_problem) : store_all_schedule(s.store_all_problem);
  all->execution = std::make_shared<execution_plan>(s.step, all->schedule, s.profiles, s.layouts, in_place, s.places);
  all->result = as_result(s.store_all_problem, all->schedule);
  all->result.solver = "store_all";
  all->result.bound = away ? bounds_without_search(s.store_all_problem).seconds : all->result.seconds;
  return all;
}

}  // namespace

void session::state::complete(captured_step& s) {
  auto& on = device_for(s);
  memory.on(on);
  require_runnable(s, on, options.graph);
  if (!on.can_place())
    s.places = placing::by_allocator;
  else if (options.graph)
    s.places = placing::fixed;
  s.graph = graph_hash(*s.step);
  const auto relative = sibling(s, false);
  if (!options.device && !relative && !s.new_path) log("measuring the operators of a step for " + s.described());
  std::vector<profiled_program> like;
  if (relative) like.push_back({relative->step.get(), &relative->profiles});
  for (const auto& other : s.new_path && !relative ? kinds() : std::vector<std::shared_ptr<captured_step>>())
    like.push_back({other->step.get(), &other->profiles});
  s.profiles = options.device ? estimate(*s.step, options.device) : profile(*s.step, options.profile, like);
  const auto fetched = links.set_problems(s, on, trained->name());
  set_bounds(s);
  count_held_bytes(s, on, fetched);
  constexpr std::size_t large = 300;  // operations; improving the layout of more takes more than milliseconds
  if ((relative || s.new_path) && s.step->nodes.size() > large) s.layouts.tries = 0;
  s.layouts.work = 100'000'000;  // about 0.2 s; work, not time, so that a fitting schedule fits in later processes
  s.store_all = store_all_plan(s, fetched);
  std::ostringstream text;
  text << "captured " << s.described() << ": " << s.step->nodes.size() << " operations (" << s.profiles.distinct << " different, "
       << s.profiles.measured << " measured) in " << format_seconds(s.capture_seconds) << " + "
       << format_seconds(s.profiles.elapsed) << "; plain step needs " << format_bytes(s.store_all->execution->needed_bytes());
  log(text.str());
}

std::shared_ptr<const captured_step> session::state::sibling(const captured_step& s, bool planned) const {
  std::shared_ptr<const captured_step> nearest;
  if (options.new_shapes != new_shape::nearest) return nearest;
  auto size = [](const captured_step& x) {
    double sum = 0;
    for (const auto& v : x.step->values) sum += static_cast<double>(v.bytes);
    return sum;
  };
  const auto own = size(s);
  double best = 0;
  for (const auto& other : kinds()) {
    if (other->graph != s.graph || (planned && other->plans.empty()) || other->broken) continue;
    const auto theirs = size(*other);
    const auto distance =
        std::abs(std::log(theirs / own)) + (theirs < own ? 10 : 0);  // a plan for larger inputs fits smaller ones
    if (!nearest || distance < best) nearest = other, best = distance;
  }
  return nearest;
}

}  // namespace remat::pytorch
