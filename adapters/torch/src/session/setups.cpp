// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <sstream>
#include <unordered_set>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/pytorch/paged_memory.hpp>

#include "../autograd/accumulation.hpp"
#include "../base/clock.hpp"
#include "../base/key.hpp"
#include "../capture/follower.hpp"
#include "../capture/step_run.hpp"
#include "../device/home.hpp"
#include "state.hpp"

namespace remat::pytorch {
namespace {

/// Each tensor once, by its name.
std::vector<named_tensor> distinct(std::vector<named_tensor> named) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(named, [&](const auto& n) { return !n.tensor.defined() || !seen.insert(n.tensor.unsafeGetTensorImpl()).second; });
  return named;
}

std::string text(const usage& outputs, const std::vector<output_use>& uses) {
  key k;
  k << outputs.number;
  for (const auto& u : uses) k << u.used << at::IntArrayRef(u.strides);
  return k.bytes();
}

/// Another step of the same module, for the same use of its outputs.
std::shared_ptr<setup> of_same_module(const setup& like) {
  auto s = std::make_shared<setup>();
  s->outputs = like.outputs;
  s->uses = like.uses;
  s->note = like.note;
  return s;
}

/// The engine of autograd takes leaves that are ready together out of a heap in which all are equal. So they do not come in the
/// order in which they were put there.
/// @return for each place which of n leaves to put there, so that they are taken in their order
std::vector<std::size_t> places_in_queue(std::size_t n) {
  const auto equal = [](std::size_t, std::size_t) { return false; };
  std::priority_queue<std::size_t, std::vector<std::size_t>, decltype(equal)> queue(equal);
  for (std::size_t i = 0; i < n; ++i) queue.push(i);
  std::vector<std::size_t> which(n);
  for (std::size_t taken = 0; taken < n; ++taken, queue.pop()) which[queue.top()] = taken;
  return which;
}

/// Those that share no memory with `weights`.
std::vector<at::Tensor> other_than(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> list) {
  std::erase_if(list, [&](const auto& t) {
    return std::any_of(weights.begin(), weights.end(), [&](const auto& w) { return w.is_alias_of(t); });
  });
  return list;
}

std::shared_ptr<const bound_tensors> bound_to(const setup& s, const std::shared_ptr<const module_tensors>& of, bindings slots) {
  std::vector<at::Tensor> trained;
  for (auto k : s.trained) trained.push_back(of->parameters[k]);
  return std::make_shared<const bound_tensors>(bound_tensors{of, std::move(trained), std::move(slots)});
}

}  // namespace

std::string session::state::path_of(const std::string& base, const std::vector<at::Tensor>& inputs) const {
  constexpr int most = 8;
  auto path = base;
  for (int other = 1;; ++other) {
    const auto found = setups.find(path);
    if (found == setups.end()) return path;
    const auto& s = *found->second;
    if (!s.asked || s.asked->same_answers(s.bound->slots, inputs)) return path;
    if (other == most)
      throw cannot_capture(s.asked->last() + " gives the forward a number that its inputs tell; it was another one in " +
                           std::to_string(most) + " captures. Compute it outside of the module and pass it as an argument");
    path = base + ";other answers " + std::to_string(other);
  }
}

std::shared_ptr<setup> session::state::known(const usage& outputs, const std::vector<output_use>& uses,
                                             const std::vector<at::Tensor>& inputs) const {
  const auto found = setups.find(path_of(text(outputs, uses), inputs));
  return found == setups.end() || found->second->broken || found->second->bound->slots.out_of_date() ? nullptr : found->second;
}

bool session::state::can_run_again(const invocation& call, const std::vector<at::Tensor>& inputs,
                                   const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses) {
  if (known(*outputs, uses, inputs)) return true;
  look();
  return usage_of(key_of(call, inputs)) == outputs;
}

std::shared_ptr<setup> session::state::setup_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                 const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses) {
  if (outputs->without_gradient) throw no_gradient();
  if (const auto s = known(*outputs, uses, inputs)) {
    bind(*s, now_);
    replaced = 0;
    s->last_used = ++clock_;
    return s;
  }
  const auto k = path_of(text(*outputs, uses), inputs);
  if (const auto found = setups.find(k); found != setups.end()) {
    const auto s = found->second;
    forget(s);
    setups.erase(found);
    if (s->broken) {
      forget_profiles();
      options.profile.cache.clear();
    } else if (++replaced > 3) {
      throw cannot_capture(
          "the module puts a new tensor in the place of one of its members in every forward; register it as a "
          "buffer and write into it");
    }
    log(s->broken ? "an operator uses memory in another way than it did: measured again"
                  : "a tensor of the module that is no parameter and no buffer has been replaced: captured again");
  }
  std::shared_ptr<setup> s;
  try {
    s = make_setup(call, inputs, uses);
  } catch (const no_gradient&) {
    outputs->without_gradient = true;
    throw;
  }
  s->outputs = outputs;
  s->uses = uses;
  keep(k, s);
  return s;
}

void session::state::keep(const std::string& name, const std::shared_ptr<setup>& s) {
  s->last_used = ++clock_;
  setups.emplace(name, s);
  while (setups.size() > options.most_shapes) {
    const auto oldest = std::min_element(setups.begin(), setups.end(),
                                         [](const auto& a, const auto& b) { return a.second->last_used < b.second->last_used; });
    forget(oldest->second);
    setups.erase(oldest);
  }
}

std::shared_ptr<setup> session::state::kind_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses,
                                                std::size_t graphs) {
  return variant_of(setup_for(call, inputs, outputs, uses), graphs);
}

std::shared_ptr<setup> session::state::variant_of(const std::shared_ptr<setup>& s, std::size_t graphs,
                                                  const detail::kept_graph* own) {
  const auto variant = [&](std::shared_ptr<setup>& v, program (*of)(const program&), const char* what) {
    if (!v || v->broken) v = make_variant(*s, of(*s->step), what);
    v->last_used = s->last_used;
    return v;
  };
  if (options.steps_on) return s;  // gradients go to the host
  if (s->outputs->alone() && all_only_add(s->bound->trained)) return variant(s->adding, accumulating, ", gradients accumulate");
  const auto leading = [&, edges = own != nullptr && s->outputs->gradients_leave()
                                       ? own->contents().edges
                                       : decltype(detail::graph_contents::edges)()](const auto* leaf) {
    const auto found = edges.find(leaf);
    return graphs + (found == edges.end() ? 0 : found->second);
  };
  if (s->outputs->gradients_leave() && may_be_given(s->bound->trained, leading)) {
    const auto v = variant(s->giving, pytorch::giving, ", gradients leave");
    v->given_early = true;
    return v;
  }
  return s;
}

std::shared_ptr<setup> session::state::make_variant(const setup& s, program step, const char* what) {
  release();
  auto a = of_same_module(s);
  a->trained = s.trained;
  a->place = s.place;
  a->forward = s.forward;
  a->new_path = s.new_path;
  a->inputs = s.inputs + what;
  a->step = std::make_shared<const program>(std::move(step));
  a->bound = bound_to(*a, s.bound->of, s.bound->slots.followed_by(a->step));
  complete(*a);
  return a;
}

namespace {

/// Says in the program which parameters are on the host.
/// @throws cannot_capture if one of them cannot be fetched from there
void mark_homes(setup& s, captured& c) {
  auto step = std::make_shared<program>(*c.step);
  const auto can = fetchable(*step);
  for (index_t k = 0; k < step->slots.size(); ++k) {
    auto& slot = step->slots[k];
    if (slot.type.device.is_cpu() || (slot.from != role::parameter && slot.from != role::buffer) || !c.tensors[k].is_cpu())
      continue;
    if (!can[slot.value])
      throw cannot_capture("parameter " + slot.name +
                           " cannot stay on the host: the step writes or returns it, or it shares memory");
    slot.on_host = true;
  }
  c.tensors = c.tensors.followed_by(step);
  s.step = step;
}

}  // namespace

std::unique_ptr<detail::weights_elsewhere::disguise> session::state::disguise(const module_tensors& of) {
  if (!elsewhere_) return nullptr;
  return std::make_unique<detail::weights_elsewhere::disguise>(*elsewhere_, of.parameters);
}

std::shared_ptr<setup> session::state::make_setup(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                  const std::vector<output_use>& uses, detail::step_run* run) {
  release();  // capture and measurements take memory of their own
  auto s = std::make_shared<setup>();
  const auto begin = clock::now();
  std::vector<std::string> names;
  for (const auto* list : {&parameters, &buffers})
    for (const auto& n : *list) names.push_back(n.name);
  s->inputs = describe(inputs);
  s->note = call.note;
  const auto of = now_;
  auto recorded = [&] {
    const auto there = disguise(*of);
    return std::make_shared<detail::trace>(detail::record(call.forward, inputs, of->parameters, of->buffers, names, uses, run));
  }();
  s->capture_seconds = since(begin);
  return run != nullptr ? setup_of_run(recorded, *s, of, *run) : setup_from(recorded, *s, of);
}

std::shared_ptr<setup> session::state::setup_of_run(const std::shared_ptr<detail::trace>& recorded, const setup& like,
                                                    const std::shared_ptr<const module_tensors>& of, detail::step_run& run) {
  auto made = setup_from(recorded, like, of);
  return run.add_kept(*recorded) ? setup_from(recorded, like, of) : made;
}

void session::state::bind(setup& s, const std::shared_ptr<const module_tensors>& of) {
  if (s.bound->of != of) {
    auto announced = of->parameters;
    announced.insert(announced.end(), of->buffers.begin(), of->buffers.end());
    s.bound = bound_to(s, of, s.bound->slots.with(announced));
  }
  for (const auto& other : {s.adding, s.giving})
    if (other) bind(*other, of);
}

std::shared_ptr<setup> session::state::setup_from(const std::shared_ptr<const detail::trace>& recorded, const setup& like,
                                                  const std::shared_ptr<const module_tensors>& of) {
  auto s = of_same_module(like);
  const auto begin = clock::now();
  s->inputs = like.inputs;
  auto captured = [&] {
    const auto there = disguise(*of);
    return detail::captured_from(*recorded, of->parameters, of->buffers);
  }();
  s->step = captured.step;
  s->plain_peak = detail::plain_peak(*recorded);
  if (options.steps_on) mark_homes(*s, captured);
  if (options.follow) s->forward = std::make_shared<const detail::recorded_forward>(recorded);
  const auto place = places_in_queue(s->step->parameters.size());
  for (std::size_t i = 0; i < captured.reached.size(); ++i)
    s->trained.push_back(captured.reached[i < place.size() ? place[i] : i]);
  s->bound = bound_to(*s, of, std::move(captured.tensors));
  s->asked = std::move(captured.asked);
  for (auto slot : s->step->parameters)
    s->place.push_back(static_cast<std::size_t>(std::find(s->trained.begin(), s->trained.end(), s->step->slots[slot].position) -
                                                s->trained.begin()));
  s->capture_seconds = (like.step ? 0 : like.capture_seconds) + since(begin);  // that of another step does not count
  complete(*s);
  return s;
}

far_memory& session::state::far_for(pytorch::device& on) {
  const bool pinned = options.host_budget || options.steps_on;
  if (options.far.memory || options.far.in || !pinned || on.which().is_cpu()) return options.far;
  const auto name = on.which().str();
  if (const auto known = pinned_.find(name); known != pinned_.end()) return known->second;
  return pinned_[name] = on_host(on.which(), options.host_budget.value_or(max_bytes));
}

void session::state::complete(setup& s) {
  auto& on = device_for(s);
  memory.on(on);
  for (const auto& n : s.step->nodes)
    for (auto v : n.outputs)
      if (const auto made = s.step->values[v].device; made != on.which())
        throw cannot_capture(n.name + " makes a tensor on " + made.str() + " in a step on " + on.which().str() +
                             "; make it outside of the module, or on the device");
  if (options.graph && on.which().is_cpu())
    throw cannot_capture("graphs are for accelerators, and the model is on the host: move it to one, or leave out graph=true");
  s.fixed = options.graph;
  s.graph = graph_hash(*s.step);
  const auto relative = sibling(s);
  if (!options.device && !relative) log("measuring the operators of a step for " + s.inputs);
  s.profiles = options.device ? estimate(*s.step, options.device)
               : relative     ? profile_like(*s.step, *relative->step, relative->profiles)
                              : profile(*s.step, options.profile);
  auto& far = far_for(on);
  s.far = far;
  auto& rates = far.rates;
  constexpr bytes_t worth_it = 1 << 20;
  if (s.far.memory && !rates && s.far.memory->limit() >= worth_it) {
    bytes_t all = 0;
    for (const auto& v : s.step->values) all += v.bytes;
    const auto sample = std::clamp<bytes_t>(all / 16, 64 << 10, 8 << 20) / 4096 * 4096;
    rates = measure_rates(on, s.far, sample);  // this takes twice as much of the device, the next three times
    if (options.steps_on) interference_ = measure_interference(on, s.far, *rates, sample);
  }
  s.in_place =
      to_problem(*s.step, s.profiles.seconds(), s.profiles.workspace(), trained->name(), s.far.memory ? rates : std::nullopt);
  const auto [fetched, weights] = fetched_by(s);
  s.p = weights.empty() ? s.in_place : fetching_problem(s, fetched, weights);
  const bool away = std::any_of(s.step->slots.begin(), s.step->slots.end(), [](const auto& k) { return k.on_host; });
  if (away) s.in_place = s.p;  // nothing can be read where it is
  s.parameter_bytes = unpaged_bytes(other_than(weights, s.bound->of->parameters));
  s.buffer_bytes = unpaged_bytes(other_than(weights, s.bound->of->buffers));
  for (const auto& c : s.step->constants) s.constants += allocated_bytes(on.which(), static_cast<bytes_t>(c.size()));
  const auto copied = [&](c10::Device d, bytes_t bytes) { s.copy_bytes += allocated_bytes(d, bytes); };
  if (s.forward) {
    for (auto k : s.forward->writes) copied(s.step->slots[k].type.device, s.step->values[s.step->slots[k].value].bytes);
    const auto& t = *s.forward->recorded;
    std::set<index_t> made;
    for (std::size_t i = 0; i < t.calls.size(); ++i)
      if (s.forward->runs[i])
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
  all->steps = away ? fetch_once_schedule(s.in_place) : store_all_schedule(s.in_place);
  constexpr std::size_t large = 300;  // operations whose layout takes more than milliseconds to improve
  if (relative && s.step->nodes.size() > large) s.layouts.tries = 0;
  s.layouts.work = 100'000'000;  // a fifth of a second. Not a time: a schedule that fits has to fit in later processes, too
  all->run = std::make_shared<execution_plan>(s.step, all->steps, s.profiles, s.layouts, in_place,
                                              s.fixed ? placing::fixed : placing::one);
  all->found = as_result(s.in_place, all->steps);
  all->found.solver = "store_all";
  all->found.bound = away ? bounds_without_search(s.in_place).seconds : all->found.seconds;
  s.store_all = all;
  std::ostringstream text;
  text << "captured " << s.inputs << ": " << s.step->nodes.size() << " operations (" << s.profiles.distinct << " different, "
       << s.profiles.measured << " measured) in " << format_seconds(s.capture_seconds) << " + "
       << format_seconds(s.profiles.elapsed) << "; plain step needs " << format_bytes(s.store_all->run->needed_bytes());
  log(text.str());
  memory.largest_plain = std::max(memory.largest_plain, s.store_all->run->needed_bytes());
}

std::pair<std::vector<bool>, std::vector<at::Tensor>> session::state::fetched_by(const setup& s) const {
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

problem session::state::fetching_problem(setup& s, const std::vector<bool>& fetched, const std::vector<at::Tensor>& weights) {
  auto& far = far_for(device_for(s));
  if (!far.in) far.in = host_link();
  s.far.in = far.in;
  if (!rates_of_weights_) rates_of_weights_ = measure_fetches(device_for(s), *s.far.in, weights);
  auto rates = *rates_of_weights_;
  const auto& others = s.in_place.copies();
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

std::shared_ptr<const setup> session::state::sibling(const setup& s) const {
  std::shared_ptr<const setup> nearest;
  if (options.new_shapes != new_shape::nearest) return nearest;
  auto size = [](const setup& x) {
    double sum = 0;
    for (const auto& v : x.step->values) sum += static_cast<double>(v.bytes);
    return sum;
  };
  const auto own = size(s);
  double best = 0;
  for (const auto& other : kinds()) {
    if (other->graph != s.graph || other->plans.empty() || other->broken) continue;
    const auto theirs = size(*other);
    const auto distance =
        std::abs(std::log(theirs / own)) + (theirs < own ? 10 : 0);  // a plan for larger inputs fits smaller ones
    if (!nearest || distance < best) nearest = other, best = distance;
  }
  return nearest;
}

void session::state::look() {
  if (looked_ && !trained->changed()) return;
  looked_ = false;
  signature = trained->signature();
  parameters = distinct(trained->parameters());
  buffers = distinct(trained->buffers());
  auto now = std::make_shared<const module_tensors>(module_tensors{tensors_of(parameters), tensors_of(buffers)});
  const auto same = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.is_same(y); });
  };
  if (!now_ || !same(now->parameters, now_->parameters) || !same(now->buffers, now_->buffers)) now_ = std::move(now);
  looked_ = true;
}

void session::state::forget(const std::shared_ptr<setup>& s) {
  memory.let_go([&](const runner& r) {
    return (r.kind == s || r.kind == s->adding || r.kind == s->giving) && !r.run->in_flight() && !r.run->arena_in_use();
  });
}

void session::state::drop(const std::shared_ptr<setup>& s) {
  forget(s);
  std::erase_if(setups, [&](const auto& x) { return x.second == s; });
}

}  // namespace remat::pytorch
