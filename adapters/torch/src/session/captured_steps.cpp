// SPDX-License-Identifier: Apache-2.0
// Finds or captures the kinds of steps of a session.
#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <queue>
#include <set>

#include "../autograd/accumulation.hpp"
#include "../base/clock.hpp"
#include "../base/key.hpp"
#include "../capture/follower.hpp"
#include "../capture/step_run.hpp"
#include "../capture/summands.hpp"
#include "state.hpp"

namespace remat::pytorch {
namespace {

std::string text(const output_usage& outputs, const std::vector<output_use>& uses) {
  key k;
  k << outputs.number;
  for (const auto& u : uses) k << u.used << at::IntArrayRef(u.strides) << u.autocast.value_or(at::ScalarType::Undefined);
  return k.bytes();
}

/// A new step of the same module, for the same inputs and use of its outputs.
std::shared_ptr<captured_step> of_same_module(const captured_step& like) {
  auto s = std::make_shared<captured_step>();
  s->inputs = like.inputs;
  s->outputs = like.outputs;
  s->uses = like.uses;
  s->note = like.note;
  s->new_path = like.new_path;
  return s;
}

/// The engine of autograd takes ready leaves out of a heap in which all are equal, and so not in the order of insertion.
/// @return per place in the heap the leaf (of n) to put there, so that leaves are taken in their order
std::vector<std::size_t> places_in_queue(std::size_t n) {
  const auto equal = [](std::size_t, std::size_t) { return false; };
  std::priority_queue<std::size_t, std::vector<std::size_t>, decltype(equal)> queue(equal);
  for (std::size_t i = 0; i < n; ++i) queue.push(i);
  std::vector<std::size_t> which(n);
  for (std::size_t taken = 0; taken < n; ++taken, queue.pop()) which[queue.top()] = taken;
  return which;
}

std::shared_ptr<const bound_tensors> bound_to(const captured_step& s, const std::shared_ptr<const module_tensors>& of,
                                              bindings slots) {
  std::vector<at::Tensor> trained;
  for (auto k : s.trained) trained.push_back(of->parameters[k]);
  return std::make_shared<const bound_tensors>(bound_tensors{of, std::move(trained), std::move(slots)});
}

}  // namespace

std::string session::state::path_of(const std::string& base, const std::vector<at::Tensor>& inputs) const {
  constexpr int most = 8;
  auto path = base;
  for (int other = 1;; ++other) {
    const auto found = captured_steps.find(path);
    if (found == captured_steps.end()) return path;
    const auto& s = *found->second;
    if (!s.asked || s.asked->guards_hold(s.bound->slots, inputs)) return path;
    if (other == most)
      throw cannot_capture(s.asked->last() + " gives the forward a number that its inputs tell; it was another one in " +
                           std::to_string(most) + " captures. Compute it outside of the module and pass it as an argument");
    path = base + ";other answers " + std::to_string(other);
  }
}

std::shared_ptr<captured_step> session::state::known(const output_usage& outputs, const std::vector<output_use>& uses,
                                                     const std::vector<at::Tensor>& inputs) const {
  const auto found = captured_steps.find(path_of(text(outputs, uses), inputs));
  return found == captured_steps.end() || found->second->broken || found->second->bound->slots.out_of_date() ? nullptr
                                                                                                             : found->second;
}

bool session::state::can_run_again(const invocation& call, const std::vector<at::Tensor>& inputs,
                                   const std::shared_ptr<output_usage>& outputs, const std::vector<output_use>& uses) {
  if (known(*outputs, uses, inputs)) return true;
  look();
  return usage_of(key_of(call, inputs)) == outputs;
}

std::shared_ptr<captured_step> session::state::step_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                        const std::shared_ptr<output_usage>& outputs,
                                                        const std::vector<output_use>& uses) {
  if (outputs->without_gradient) throw no_gradient();
  if (const auto s = known(*outputs, uses, inputs)) {
    bind(*s, now_);
    replaced = 0;
    s->last_used = ++clock_;
    return s;
  }
  const auto k = path_of(text(*outputs, uses), inputs);
  if (const auto found = captured_steps.find(k); found != captured_steps.end()) {
    const auto s = found->second;
    forget(s);
    captured_steps.erase(found);
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
  std::shared_ptr<captured_step> s;
  try {
    s = make_captured_step(call, inputs, uses);
  } catch (const no_gradient&) {
    outputs->without_gradient = true;
    throw;
  }
  s->outputs = outputs;
  s->uses = uses;
  keep(k, s);
  return s;
}

void session::state::keep(const std::string& name, const std::shared_ptr<captured_step>& s) {
  s->last_used = ++clock_;
  if (!s->hook_places.empty()) s->outputs->hooks_inside = true;
  captured_steps.emplace(name, s);
  while (captured_steps.size() > options.max_shapes) {
    const auto oldest = std::min_element(captured_steps.begin(), captured_steps.end(),
                                         [](const auto& a, const auto& b) { return a.second->last_used < b.second->last_used; });
    forget(oldest->second);
    const auto outputs = oldest->second->outputs;
    captured_steps.erase(oldest);
    constexpr long here_and_in_the_list = 2;
    if (outputs.use_count() == here_and_in_the_list) std::erase_if(used, [&](const auto& x) { return x.second == outputs; });
  }
}

std::shared_ptr<captured_step> session::state::kind_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                        const std::shared_ptr<output_usage>& outputs,
                                                        const std::vector<output_use>& uses, std::size_t graphs) {
  return variant_of(step_for(call, inputs, outputs, uses), graphs);
}

std::shared_ptr<captured_step> session::state::variant_of(const std::shared_ptr<captured_step>& s, std::size_t graphs,
                                                          const detail::kept_graph* own) {
  const auto variant = [&](std::shared_ptr<captured_step>& v, program (*of)(const program&), const char* what) {
    if (!v || v->broken) v = make_variant(*s, of(*s->step), what);
    v->last_used = s->last_used;
    return v;
  };
  if (s->sums && s->outputs->in_summands()) {
    if (!s->summands || s->summands->broken) s->summands = in_summands(*s);
    s->summands->last_used = s->last_used;
    return s->summands;
  }
  if (options.steps_on) return s;         // gradients go to the host
  if (!s->hook_places.empty()) return s;  // it may leave the plan, so it writes no gradient before its end
  if (s->outputs->alone() && !memory.several_threads() && all_only_add(s->bound->trained))
    return variant(s->adding, accumulating, ", gradients accumulate");
  const auto leading = [&, edges = own != nullptr && s->outputs->gradients_leave()
                                       ? own->contents().edges
                                       : decltype(detail::graph_contents::edges)()](const auto* leaf) {
    const auto found = edges.find(leaf);
    return graphs + (found == edges.end() ? 0 : found->second);
  };
  if (s->outputs->gradients_leave() && may_be_given(s->bound->trained, leading)) {
    const auto v = variant(s->giving, pytorch::giving, ", gradients leave");
    v->has_early_gradient = true;
    return v;
  }
  return s;
}

std::shared_ptr<captured_step> session::state::make_variant(const captured_step& s, program step, const char* what) {
  release();
  auto a = of_same_module(s);
  a->trained = s.trained;
  a->place = s.place;
  a->edges = s.edges;
  a->sums = s.sums;
  a->forward = s.forward;
  a->variant = what;
  a->step = std::make_shared<const program>(std::move(step));
  a->bound = bound_to(*a, s.bound->of, s.bound->slots.followed_by(a->step));
  complete(*a);
  return a;
}

std::shared_ptr<captured_step> session::state::in_summands(const captured_step& s) {
  release();
  auto parts = detail::in_summands(*s.sums);
  auto a = step_from(std::make_shared<const detail::trace>(std::move(parts.recorded)), s, s.bound->of, s.forward);
  a->variant = ", gradients in summands";
  a->plain_peak = s.plain_peak;
  a->input_of_summand = std::move(parts.inputs);
  a->sums = nullptr;
  a->in_summands = true;
  return a;
}

namespace {

/// Marks parameters of the program that are on the host.
/// @throws cannot_capture if the step cannot fetch one of them
void mark_homes(captured_step& s, captured& c) {
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

std::shared_ptr<captured_step> session::state::make_captured_step(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                                  const std::vector<output_use>& uses, detail::step_run* run) {
  release();  // capture and measurements take memory of their own
  auto s = std::make_shared<captured_step>();
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
  return run != nullptr ? step_of_run(recorded, *s, of, *run) : step_from(recorded, *s, of);
}

std::shared_ptr<captured_step> session::state::step_of_path(const std::shared_ptr<detail::trace>& recorded,
                                                            const captured_step& known,
                                                            const std::shared_ptr<const module_tensors>& of,
                                                            detail::step_run& run) {
  const auto like = of_same_module(known);
  like->new_path = true;
  return step_of_run(recorded, *like, of, run);
}

std::shared_ptr<captured_step> session::state::step_of_run(const std::shared_ptr<detail::trace>& recorded,
                                                           const captured_step& like,
                                                           const std::shared_ptr<const module_tensors>& of,
                                                           detail::step_run& run) {
  auto made = step_from(recorded, like, of);
  return run.add_kept(*recorded) ? step_from(recorded, like, of) : made;
}

void session::state::bind(captured_step& s, const std::shared_ptr<const module_tensors>& of) {
  if (s.bound->of != of) {
    auto announced = of->parameters;
    announced.insert(announced.end(), of->buffers.begin(), of->buffers.end());
    s.bound = bound_to(s, of, s.bound->slots.with(announced));
  }
  for (const auto& other : s.variants())
    if (other) bind(*other, of);
}

std::shared_ptr<captured_step> session::state::step_from(const std::shared_ptr<const detail::trace>& recorded,
                                                         const captured_step& like,
                                                         const std::shared_ptr<const module_tensors>& of,
                                                         std::shared_ptr<const detail::recorded_forward> forward) {
  auto s = of_same_module(like);
  const auto begin = clock::now();
  auto captured = [&] {
    const auto there = disguise(*of);
    return detail::captured_from(*recorded, of->parameters, of->buffers);
  }();
  s->step = captured.step;
  s->plain_peak = detail::plain_peak(*recorded);
  if (options.steps_on) mark_homes(*s, captured);
  s->forward = std::move(forward);
  s->hook_places = recorded->hook_places;
  if (options.follow && !s->forward) s->forward = std::make_shared<const detail::recorded_forward>(recorded);
  const auto place = places_in_queue(std::set(s->step->parameters.begin(), s->step->parameters.end()).size());
  for (std::size_t i = 0; i < captured.reached.size(); ++i) {
    const auto k = i < place.size() ? place[i] : i;
    s->trained.push_back(captured.reached[k]);
    s->edges.push_back(recorded->reached_edges[k]);
  }
  s->edges.insert(s->edges.end(), recorded->input_edges.begin(), recorded->input_edges.end());
  if (std::any_of(s->edges.begin(), s->edges.end(), [](auto n) { return n > 1; })) s->sums = recorded;
  s->bound = bound_to(*s, of, std::move(captured.tensors));
  s->asked = std::move(captured.asked);
  for (auto slot : s->step->parameters)
    s->place.push_back(static_cast<std::size_t>(std::find(s->trained.begin(), s->trained.end(), s->step->slots[slot].position) -
                                                s->trained.begin()));
  s->capture_seconds = (like.step ? 0 : like.capture_seconds) + since(begin);  // time of another step does not count
  complete(*s);
  return s;
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

void session::state::put_back_weights() {
  if (!elsewhere_) return;
  const auto misplaced = [&]() -> const named_tensor* {
    for (const auto& p : parameters)
      if (at::accelerator::isAccelerator(p.tensor.device().type())) return &p;
    for (const auto& b : buffers)
      if (b.tensor.device() != *options.steps_on && !b.tensor.is_meta()) return &b;
    return nullptr;
  };
  const auto* moved = misplaced();
  if (moved == nullptr) return;
  warn(moved->name + " is on " + moved->tensor.device().str() +
       " now; it is moved back, since weights stay in memory of the host and buffers on " + options.steps_on->str());
  trained->put_back();
  looked_ = false;
  look();
  if (const auto* still = misplaced())
    throw error(still->name + " is on " + still->tensor.device().str() +
                ", but steps take weights from memory of the host and buffers from " + options.steps_on->str() +
                "; move the module back");
}

c10::Device session::state::accelerator_of(const std::vector<at::Tensor>& tensors) const {
  if (options.steps_on) return *options.steps_on;
  for (const auto& t : tensors)
    if (t.defined() && at::accelerator::isAccelerator(t.device().type())) return t.device();
  return c10::kCPU;
}

c10::Device session::state::device_of_call(const std::vector<at::Tensor>& inputs) const {
  auto on = accelerator_of(inputs);
  for (std::size_t k = 0; k < parameters.size() && on.is_cpu(); ++k)
    if (const auto there = parameters[k].tensor.device(); at::accelerator::isAccelerator(there.type())) on = there;
  return on;
}

void session::state::warm_up(const std::vector<at::Tensor>& inputs, std::unique_lock<owned_mutex>& lock) {
  auto& d = device_of(device_of_call(inputs));
  if (d.warm()) return;
  lock.unlock();
  d.warm_up();
  lock.lock();
  look();
}

void session::state::forget(const std::shared_ptr<captured_step>& s) {
  memory.let_go([&](const runner& r) {
    const auto variants = s->variants();
    return (r.kind == s || std::find(variants.begin(), variants.end(), r.kind) != variants.end()) && !r.executor->in_flight() &&
           !r.executor->arena_in_use();
  });
}

void session::state::drop(const std::shared_ptr<captured_step>& s) {
  forget(s);
  std::erase_if(captured_steps, [&](const auto& x) {
    const auto variants = x.second->variants();
    return x.second == s || std::find(variants.begin(), variants.end(), s) != variants.end();
  });
}

}  // namespace remat::pytorch
