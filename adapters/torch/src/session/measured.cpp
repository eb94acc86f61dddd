// SPDX-License-Identifier: Apache-2.0
// Measures a captured step, its copies and its weights; makes the planning problem and the first plan.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <sstream>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/pytorch/paged_memory.hpp>

#include "../capture/follower.hpp"
#include "../device/accelerator.hpp"
#include "../device/home.hpp"
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

}  // namespace

far_memory& session::state::far_for(pytorch::device& on) {
  const bool pinned = options.host_budget || options.steps_on;
  if (options.far.memory || options.far.in) require_moves(on);
  if (options.far.memory || options.far.in || !pinned || on.which().is_cpu()) return options.far;
  const auto name = on.which().str();
  if (const auto known = pinned_.find(name); known != pinned_.end()) return known->second;
  return pinned_[name] = on_host(on.which(), options.host_budget.value_or(max_bytes));
}

void session::state::complete(captured_step& s) {
  auto& on = device_for(s);
  memory.on(on);
  for (const auto& n : s.step->nodes)
    for (auto v : n.outputs)
      if (const auto made = s.step->values[v].device; made != on.which())
        throw cannot_capture(n.name + " makes a tensor on " + made.str() + " in a step on " + on.which().str() +
                             "; make it outside of the module, or on the device");
  if (options.graph && on.which().is_cpu())
    throw cannot_capture("graphs are for accelerators, and the model is on the host: move it to one, or leave out graph=true");
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
  auto& far = far_for(on);
  s.far = far;
  auto& rates = far.rates;
  constexpr bytes_t worth_it = 1 << 20;
  if (s.far.memory && !rates && s.far.memory->limit() >= worth_it) {
    bytes_t all = 0;
    for (const auto& v : s.step->values) all += v.bytes;
    const auto sample = std::clamp<bytes_t>(all / 16, 64 << 10, 8 << 20) / 4096 * 4096;
    rates = measure_rates(on, s.far, sample);  // takes 2 samples of device memory, the next line 3
    if (options.steps_on) interference_ = measure_interference(on, s.far, *rates, sample);
  }
  s.store_all_problem =
      to_problem(*s.step, s.profiles.seconds(), s.profiles.workspace(), trained->name(), s.far.memory ? rates : std::nullopt);
  const auto [fetched, weights] = fetched_by(s);
  s.problem = weights.empty() ? s.store_all_problem : fetching_problem(s, fetched, weights);
  const auto twice = overwritten_bytes(*s.step);
  s.counted_twice = twice.empty() ? 0 : *std::max_element(twice.begin(), twice.end());
  s.least_budget = least_budget_of(s.problem, *s.step, twice);
  const bool away = std::any_of(s.step->slots.begin(), s.step->slots.end(), [](const auto& k) { return k.on_host; });
  if (away) s.store_all_problem = s.problem;  // no weight on the host can be read in place
  s.parameter_bytes = unpaged_bytes(other_than(weights, s.bound->of->parameters));
  s.buffer_bytes = unpaged_bytes(other_than(weights, s.bound->of->buffers));
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
  bytes_t in_place = 0;
  if (!away)
    for (const auto& t : weights) in_place += static_cast<bytes_t>(t.storage().nbytes());
  const auto all = std::make_shared<plan>();
  all->schedule = away ? fetch_once_schedule(s.store_all_problem) : store_all_schedule(s.store_all_problem);
  constexpr std::size_t large = 300;  // operations; improving the layout of more takes more than milliseconds
  if ((relative || s.new_path) && s.step->nodes.size() > large) s.layouts.tries = 0;
  s.layouts.work = 100'000'000;  // about 0.2 s; work, not time, so that a fitting schedule fits in later processes
  all->execution = std::make_shared<execution_plan>(s.step, all->schedule, s.profiles, s.layouts, in_place, s.places);
  all->result = as_result(s.store_all_problem, all->schedule);
  all->result.solver = "store_all";
  all->result.bound = away ? bounds_without_search(s.store_all_problem).seconds : all->result.seconds;
  s.store_all = all;
  std::ostringstream text;
  text << "captured " << s.described() << ": " << s.step->nodes.size() << " operations (" << s.profiles.distinct << " different, "
       << s.profiles.measured << " measured) in " << format_seconds(s.capture_seconds) << " + "
       << format_seconds(s.profiles.elapsed) << "; plain step needs " << format_bytes(s.store_all->execution->needed_bytes());
  log(text.str());
}

std::pair<std::vector<bool>, std::vector<at::Tensor>> session::state::fetched_by(const captured_step& s) const {
  std::pair<std::vector<bool>, std::vector<at::Tensor>> found;
  if (!options.fetched && !options.steps_on) return found;
  auto& [values, weights] = found;
  values = fetchable(*s.step);
  for (index_t v = 0; v < values.size(); ++v) {
    if (!values[v]) continue;
    const auto k = s.step->values[v].slot;
    const auto& t = s.bound->slots[k];
    values[v] = s.step->slots[k].on_host || (options.fetched && options.fetched(t));
    if (values[v]) weights.push_back(t);
  }
  return found;
}

problem session::state::fetching_problem(captured_step& s, const std::vector<bool>& fetched,
                                         const std::vector<at::Tensor>& weights) {
  auto& far = far_for(device_for(s));
  if (!far.in) far.in = host_link();
  s.far.in = far.in;
  if (!rates_of_weights_) rates_of_weights_ = measure_fetches(device_for(s), *s.far.in, weights);
  auto rates = *rates_of_weights_;
  const auto& others = s.store_all_problem.copies();
  if (others) rates = {others->to_host, std::min(others->to_device, rates.to_device), std::max(others->latency, rates.latency)};
  const auto seconds = beside_copies(*s.step, s.profiles.seconds(), rates, fetched);
  auto p = to_problem(*s.step, seconds, s.profiles.workspace(), trained->name(), rates, fetched);
  return others ? p : without_sends(p);
}

std::vector<double> session::state::beside_copies(const program& step, std::vector<double> seconds, const copy_rates& rates,
                                                  const std::vector<bool>& fetched) const {
  if (!interference_ || interference_->factor <= 1) return seconds;
  bytes_t in = 0, out = 0;
  for (index_t v = 0; v < fetched.size(); ++v) in += fetched[v] ? step.values[v].bytes : 0;
  for (auto k : leaving_gradients(step)) out += step.values[step.views[step.parameter_grads[k]].value].bytes;
  const auto copying = std::max(static_cast<double>(in) / rates.to_device, static_cast<double>(out) / rates.to_host);
  const auto busy = std::min(1.0, copying / std::accumulate(seconds.begin(), seconds.end(), 0.0));
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    bytes_t touched = 0;
    for (const auto* list : {&step.nodes[i].inputs, &step.nodes[i].outputs})
      for (auto v : *list) touched += step.values[v].bytes;
    const auto bound = std::min(seconds[i], static_cast<double>(touched) / interference_->rate);
    seconds[i] += (interference_->factor - 1) * busy * bound;
  }
  return seconds;
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
