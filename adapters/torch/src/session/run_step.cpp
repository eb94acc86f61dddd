// SPDX-License-Identifier: Apache-2.0
// Runs a step by its plan: the forward, and what its backward will need.
#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <set>

#include <remat/io/bytes.hpp>
#include <remat/pytorch/executor.hpp>

#include "../autograd/hooked_step.hpp"
#include "../autograd/output_node.hpp"
#include "../autograd/second_run.hpp"
#include "../autograd/step_node.hpp"
#include "../autograd/verification.hpp"
#include "../capture/follower.hpp"
#include "../capture/origins.hpp"
#include "autocast_block.hpp"
#include "state.hpp"

namespace remat::pytorch {
namespace {

/// True if the loss can use the outputs in one way only: there is a single number.
bool has_one_use(const program& step) {
  std::size_t uses = 0;
  for (std::size_t i = 0; i < step.outputs.size(); ++i)
    if (step.differentiable[i]) uses += c10::multiply_integers(step.views[step.outputs[i]].sizes) == 1 ? 1 : 2;
  return uses == 1;
}

/// @param of_module parameters and buffers of the module
/// @param written   tensors that the step may change
verification::names verified_names(const captured_step& s, const std::vector<named_tensor>& of_module,
                                   const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& written) {
  const auto name_of = [&](const at::Tensor& t) {
    for (const auto& named : of_module)
      if (named.tensor.is_same(t)) return named.name;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i].is_same(t)) return "input " + std::to_string(i);
    return std::string("a tensor that the module keeps");
  };
  verification::names of;
  for (std::size_t i = 0; i < s.step->results.size(); ++i) of.forward.push_back("output " + std::to_string(i));
  for (const auto& t : written) of.forward.push_back(name_of(t));
  for (const auto& t : s.bound->trained) of.gradients.push_back(name_of(t));
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!s.step->input_sources[i].empty()) of.gradients.push_back(name_of(inputs[i]));
  return of;
}

constexpr const char* changed_since =
    "remat: the loss uses the outputs of a wrapped module in another way than the last one, for which the forward has to run "
    "once "
    "more, but the mode, a parameter or an attribute of the module is another one by now; change it after the backward";

/// Puts the data of planned outputs under the outputs of the module's own code, which replace the planned ones.
/// @param origins of the inputs
/// @return per output: true if it is a tensor from outside, which keeps its own history
std::vector<bool> give_data(const program& step, std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& hollow,
                            const std::vector<at::Tensor>& origins) {
  std::vector<bool> own(outputs.size());
  for (std::size_t i = 0; i < hollow.size(); ++i) {
    const auto &from = outputs[i], &to = hollow[i];
    own[i] = detail::keeps_history(to, origins);
    if (step.from(step.views[step.outputs[i]].value) == role::internal) {
      to.unsafeGetTensorImpl()->set_storage_keep_dtype(from.storage());
      to.unsafeGetTensorImpl()->set_storage_offset(from.storage_offset());
    }
    if (to.is_view() && !own[i]) to.unsafeGetTensorImpl()->set_autograd_meta(nullptr);  // that of hollow tensors
    outputs[i] = to;
  }
  return own;
}

}  // namespace

std::shared_ptr<captured_step> session::state::same_step(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                         const captured_step& first, const std::vector<output_use>& uses,
                                                         const detail::kept_graph* graph,
                                                         const std::shared_ptr<const module_tensors>& of,
                                                         const std::vector<at::Tensor>& leaves) {
  const auto inside = graph != nullptr ? graph->contents() : detail::graph_contents();
  const auto& hook_places = graph != nullptr ? inside.hook_places : first.hook_places;
  for (const auto& s : followable(*first.outputs, uses)) {
    if (s->uses != uses || s->hook_places != hook_places || !same_forward(*s, first)) continue;
    bind(*s, of);
    const auto differs = [&] {
      const auto there = disguise(*of);
      return !graph->differs({s->forward, {s->bound, &s->bound->slots}}, inside.hooked, leaves).empty();
    };
    if (leaves.empty() || !differs()) return s;
    drop(s);
  }
  std::shared_ptr<captured_step> s;
  try {
    if (graph != nullptr) {
      auto recorded = [&] {
        std::vector<at::Tensor> reached;
        for (auto k : first.trained) reached.push_back(of->parameters[k]);
        const auto there = disguise(*of);
        return std::make_shared<const detail::trace>(graph->record(uses, of->parameters, reached));
      }();
      s = step_from(std::move(recorded), first, of);
    } else {
      look();
      s = make_captured_step(call, inputs, uses);
    }
  } catch (const cannot_capture& why) {
    throw not_supported(changed_since + std::string(" (") + why.what() + ")");
  }
  if (!same_forward(*s, first)) throw not_supported(changed_since);
  s->outputs = first.outputs;
  s->uses = uses;
  keep("followed " + std::to_string(++recorded_), s);
  return s;
}

std::vector<at::Tensor> session::state::forward(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                std::shared_ptr<void>* note) {
  if (note != nullptr) *note = call.note;
  const bool recorded = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake);
  if (!at::GradMode::is_enabled() || recorded) return call.forward(inputs);

  if (options.device) throw not_supported("plans for a device that is estimated are not run");
  if (const auto on = accelerator_of(inputs); !on.is_cpu()) refuse_foreign_capture(on);
  abandoned_.end();
  std::unique_lock lock(mutex);
  memory.note_call();
  look();
  put_back_weights();
  if (std::none_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.tensor.requires_grad(); }) &&
      std::none_of(inputs.begin(), inputs.end(), [](const auto& t) { return t.defined() && t.requires_grad(); })) {
    lock.unlock();
    return call.forward(inputs);
  }
  warm_up(inputs, lock);
  const bool only_known = options.new_shapes == new_shape::plain || options.new_shapes == new_shape::error;
  if (only_known && !captured_steps.empty() && !used.count(key_of(call, inputs))) {
    if (options.new_shapes == new_shape::error)
      throw unexpected_inputs("wrapped for " + captured_steps.begin()->second->inputs + ", called with " + describe(inputs) +
                              " (or in another mode); wrap_options::new_shapes forbids a new plan");
    lock.unlock();
    return call.forward(inputs);
  }
  auto& block = autocast_block::of_thread();
  const auto on = device_of_call(inputs).type();
  if (block.has(number, on)) warn_of_casts();
  const auto ended = [&](std::vector<at::Tensor> outputs) {
    block.add(number, on);
    return outputs;
  };
  if (options.follow) {
    auto b = follow(call, inputs, lock);
    return ended(b.r ? run_step(call, std::move(b)) : std::move(b.returned));
  }
  begun_step b;
  b.inputs = inputs;
  try {
    const auto outputs = usage_of(key_of(call, inputs));
    b.r = expected([&](const auto& uses) { return kind_for(call, inputs, outputs, uses, 0); }, inputs, outputs, outputs->now());
  } catch (const no_gradient&) {
    lock.unlock();
    return call.forward(inputs);
  }
  if (note != nullptr) *note = b.r->kind->note;
  return ended(run_step(call, std::move(b)));
}

void session::state::warn_of_casts() {
  const auto cast = [](const auto& p) { return p.tensor.requires_grad() && p.tensor.scalar_type() == at::kFloat; };
  const auto waits = [](const auto& r) { return r->executor->in_flight(); };
  if (std::any_of(parameters.begin(), parameters.end(), cast) && std::any_of(memory.runners.begin(), memory.runners.end(), waits))
    warn_once(
        "two forwards in one autocast block wait for their backward. Plain PyTorch casts each weight once in a block, and adds "
        "the gradients of both in half precision. A plan adds them in float32, so last bits may differ. Use a block for each "
        "forward, or autocast(..., cache_enabled=False)");
}

second_plan session::state::second_plan_of(const invocation& call, const runner& r, const std::vector<at::Tensor>& outputs,
                                           const begun_step& b) {
  const auto s = r.kind;
  const auto& step = *s->step;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> given_out;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (step.from(step.views[step.outputs[i]].value) == role::internal)
      given_out.push_back(outputs[i].storage().getWeakStorageImpl());
  second_plan once_more;
  once_more.possible = [self = shared_from_this(), call, outputs = s->outputs](const auto& again, const auto& seen) {
    std::lock_guard held(self->mutex);
    return self->options.follow || self->can_run_again(call, again, outputs, seen);
  };
  once_more.make = [self = shared_from_this(), call, given_out, first = s, of = r.bound->of, graph = b.graph,
                    numbers = b.numbers](const auto& again, const auto& seen, bool possible, const auto& leaves) {
    std::lock_guard held(self->mutex);
    const auto& usage = first->outputs;
    const auto uses = possible ? seen : std::vector<output_use>();
    const auto kind = [&](const std::vector<output_use>& u) {
      return self->options.follow
                 ? self->variant_of(self->same_step(call, again, *first, u, graph.get(), of, leaves), 1, graph.get())
                 : self->kind_for(call, again, usage, u, 1);
    };
    if (!possible && !self->options.follow && !self->known(*usage, uses, again)) throw not_supported(changed_since);
    std::set<c10::StorageImpl*> alive;
    for (const auto& weak : given_out)
      if (const auto there = weak.lock(); there && alive.insert(there.get()).second)
        self->memory.outputs_of_before += static_cast<bytes_t>(there->nbytes());
    self->memory.once_more = true;
    const auto restored = c10::make_scope_exit([&] {
      self->memory.outputs_of_before = 0;
      self->memory.once_more = false;
    });
    std::shared_ptr<runner> begun;
    try {
      begun = self->acquire(kind(uses), again);
    } catch (const over_budget&) {  // the smallest budget must do; outputs of the caller exceed it once
      if (self->memory.outputs_of_before > 0)
        self->warn_once("the forward runs once more for its backward. The outputs of before take " +
                        format_bytes(self->memory.outputs_of_before) + " beyond the budget, in this step only");
      self->memory.outputs_of_before = 0;
      begun = self->expected(kind, again, usage, uses);
    }
    begun->executor->set_numbers(numbers);
    begun->executor->forward(again);  // before another thread takes the executor
    return begun;
  };
  once_more.graph = b.graph;
  if (elsewhere_) {  // weights change places meanwhile: other nodes must wait
    once_more.handed = std::make_shared<handed_over>();
    once_more.disguise = [self = shared_from_this(), of = r.bound->of](bool with_data) -> std::shared_ptr<void> {
      struct held {
        std::unique_lock<owned_mutex> lock;
        std::unique_ptr<detail::weights_elsewhere::disguise> on;
      };
      std::unique_lock lock(self->mutex);
      auto on = self->disguise(*of);
      if (with_data) on->lend();
      return std::make_shared<held>(held{std::move(lock), std::move(on)});
    };
  }
  once_more.as_it_is = [self = shared_from_this(), outputs = s->outputs](const std::string& why, bool always) {
    std::lock_guard held(self->mutex);
    self->warn_once("this backward runs as it is, with the memory of a plain step, for " + why +
                    (always ? "; steps of this kind are not planned from now on" : ""));
    outputs->refused = why;
    outputs->plain = 0;
    outputs->for_good = outputs->for_good || always;
  };
  once_more.other_code = [self = shared_from_this(), first = s] {
    std::lock_guard held(self->mutex);
    if (std::has_single_bit(++first->outputs->other_code)) self->drop(first);  // the next step is recorded anew
  };
  return once_more;
}

std::vector<at::Tensor> session::state::run_step(const invocation& call, begun_step b) {
  const auto& inputs = b.inputs;
  const auto r = std::exchange(b.r, nullptr);
  const auto s = r->kind;
  ++r->steps;
  memory.note_step(s);
  if (!r->executor->not_captured().empty()) s->uncaptured = true;
  refine(*r, last_held.held());
  last_setup = s;
  last_plan = r->plan;
  const auto& step = *s->step;
  const bool verify = verified < options.verify;
  std::shared_ptr<second_run> beside;
  std::unique_ptr<verification> checks;
  if (verify || s->forward || s->sums || !has_one_use(step)) {
    auto written = s->forward && !verify ? std::vector<at::Tensor>() : r->bound->of->buffers;
    const auto add = [&](index_t k) {
      const auto& slot = step.slots[k];
      if (slot.from == role::input && slot.position >= inputs.size()) return;  // made by this forward
      const auto& t = slot.from == role::input ? inputs[slot.position] : r->bound->slots[k];
      if (std::none_of(written.begin(), written.end(), [&](const auto& x) { return x.is_same(t); })) written.push_back(t);
    };
    for (const auto& w : step.written) add(w.slot);
    if (s->forward)
      for (auto k : s->forward->written_slots) add(k);
    auto read = r->bound->of->parameters;
    for (index_t k = 0; k < step.slots.size(); ++k)
      if (const auto from = step.slots[k].from; from == role::buffer || from == role::found) read.push_back(r->bound->slots[k]);
    beside = std::make_shared<second_run>(device_for(*s).which(), inputs, read, written);
    if (verify) {
      auto known = parameters;
      known.insert(known.end(), buffers.begin(), buffers.end());
      checks = std::make_unique<verification>(*beside, call.forward, verified_names(*s, known, inputs, written),
                                              [self = shared_from_this()](const auto& text) { self->warn(text); });
    }
  }
  if (checks) {
    ++verified;
    checks->run_forward();
  }
  r->executor->set_numbers(b.numbers);
  std::vector<at::Tensor> outputs;
  try {
    outputs = r->executor->forward(inputs);
    if (checks) checks->compare_forward(step, outputs);
  } catch (const plan_broken&) {
    s->broken = true;
    throw;
  } catch (const not_equal&) {
    r->executor->reset();
    throw;
  }
  note_unplanned(*r);
  const auto own = give_data(step, outputs, b.hollow, inputs);
  const auto& read = r->plan->execution->read_in_backward();
  auto watch = r->bound->slots.watch(read.outside, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& view = step.views[step.outputs[i]];
    const auto from = step.from(view.value);
    // An input that is returned is the input itself.
    if (b.hollow.empty() && view.whole && from == role::input && !step.differentiable[i])
      outputs[i] = inputs[step.slots[step.values[view.value].slot].position];
    // A write to shared memory would change the history of all tensors over it.
    const bool shared = from != role::internal || std::any_of(outputs.begin(), outputs.end(), [&](const auto& o) {
                          return !o.is_same(outputs[i]) && o.is_alias_of(outputs[i]);
                        });
    if (read.outputs[i] || (shared && step.differentiable[i]))
      watch.push_back({::torch::autograd::impl::version_counter(outputs[i]), outputs[i]._version(), none, i});
  }
  auto once_more = second_plan_of(call, *r, outputs, b);
  const auto handed = once_more.handed;
  auto connected = step.differentiable;
  for (std::size_t i = 0; i < own.size(); ++i) connected[i] = connected[i] && !own[i];
  const bool several = std::count(connected.begin(), connected.end(), true) > 1;
  const auto node = c10::make_intrusive<step_node>(r, std::move(watch), inputs, connected, std::move(beside), std::move(checks),
                                                   std::move(once_more));
  std::vector<at::Tensor> differentiable;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!connected[i]) continue;
    several || handed ? add_history(outputs[i], node, handed) : ::torch::autograd::set_history(outputs[i], node);
    differentiable.push_back(outputs[i]);
  }
  if (several) abandoned_.watch(node, differentiable);
  if (!b.hollow.empty()) return std::move(b.returned);
  std::vector<at::Tensor> returned;
  for (auto i : step.results) returned.push_back(outputs[i]);
  return returned;
}

observing_gradient::observing_gradient(const at::Tensor& t) {
  if (!t.defined() || !t.requires_grad() || t.is_leaf()) return;
  auto edge = ::torch::autograd::impl::gradient_edge(t);
  auto to = edge;
  if (const auto* output = dynamic_cast<const output_node*>(edge.function.get())) to = output->next_edge(0);
  auto* step = dynamic_cast<step_node*>(to.function.get());
  if (step == nullptr || !step->observe(t, to.input_nr)) return;
  tensor_ = t;
  edge_ = std::move(edge);
}
observing_gradient::~observing_gradient() {
  if (tensor_.defined()) ::torch::autograd::impl::set_gradient_edge(tensor_, std::move(edge_));
}

}  // namespace remat::pytorch
