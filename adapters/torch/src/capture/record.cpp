// SPDX-License-Identifier: Apache-2.0
/// @file
/// Records a step through a boxed fallback below autograd.
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <atomic>

#include <remat/pytorch/device.hpp>

#include "../base/gradient_hooks.hpp"
#include "../base/hooks.hpp"
#include "../base/reason.hpp"
#include "../program/operators.hpp"
#include "backward.hpp"
#include "dispatch.hpp"
#include "origins.hpp"
#include "recorder.hpp"
#include "resumed_recording.hpp"
#include "step_run.hpp"

namespace remat::pytorch {

namespace {

std::atomic<void (*)()> forget_exception = nullptr, translate_exception = nullptr;
std::string (*effect_of)(::torch::autograd::Node&) = nullptr;
std::atomic<bool (*)()> has_handler = nullptr;

}  // namespace

void set_source_line_callback(std::string (*line)()) { detail::line_of_caller = line; }

void set_handler_query(bool (*has)()) { has_handler = has; }

void set_effect_inspector(std::string (*effect)(::torch::autograd::Node&)) { effect_of = effect; }

void on_exception_caught(void (*forget)()) { forget_exception = forget; }

void on_backward_exception(void (*translate)()) { translate_exception = translate; }

void detail::translate_raised() {
  if (auto* translate = translate_exception.load()) translate();
}

void detail::forget_caught() {
  if (auto* forget = forget_exception.load()) forget();
}

}  // namespace remat::pytorch

namespace remat::pytorch::detail {

std::string (*line_of_caller)() = nullptr;

bool may_be_caught(const c10::OperatorHandle& op) {
  auto* const ask = has_handler.load();
  return ask != nullptr && may_raise_by_values(op) && ask();
}

namespace {

/// Restores the `.grad` of tensors at its end, unless other threads may have written it. Tells whether tensors require gradients
/// as before.
class same_gradients {
 public:
  explicit same_gradients(const std::vector<at::Tensor>& tensors) {
    for (const auto& t : tensors)
      before_.push_back({t, gradient_of(t), gradient_of(t).defined() ? gradient_of(t)._version() : 0, t.requires_grad()});
  }
  ~same_gradients() {
    if (!hold())
      for (auto& x : before_) x.tensor.mutable_grad() = x.grad;
  }
  same_gradients(const same_gradients&) = delete;
  same_gradients& operator=(const same_gradients&) = delete;
  /// Leaves the gradients as they are.
  void release() { before_.clear(); }
  bool hold() const {
    const bool same = std::all_of(before_.begin(), before_.end(), [](const auto& x) {
      const auto& now = gradient_of(x.tensor);
      return now.unsafeGetTensorImpl() == x.grad.unsafeGetTensorImpl() && (!now.defined() || now._version() == x.version);
    });
    return same || others_.seen();
  }
  bool required_as_before() const {
    return std::all_of(before_.begin(), before_.end(), [](const auto& x) { return x.tensor.requires_grad() == x.required; });
  }

 private:
  struct entry {
    at::Tensor tensor, grad;
    int64_t version;
    bool required;
  };
  planned_backwards others_;
  std::vector<entry> before_;
};

/// The device of a step: the accelerator of its parameters and inputs, otherwise the host.
/// @throws cannot_capture if there are several devices, or steps cannot run on this one
c10::Device device_for(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
                       const std::vector<std::string>& names) {
  c10::Device device = c10::kCPU;
  std::string first;
  const auto look = [&](const at::Tensor& t, const std::string& name) {
    if (!t.defined() || t.is_cpu()) return;
    if (!first.empty() && t.device() != device)
      throw cannot_capture("the model is spread over two devices: " + first + " is on " + device.str() + " and " + name + " on " +
                           t.device().str() + "; a step is planned for one device");
    if (!at::accelerator::isAccelerator(t.device().type()))
      throw cannot_capture("steps run on the host or on an accelerator; " + name + " is on " + t.device().str());
    if (first.empty()) first = name;
    device = t.device();
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) look(parameters[i], i < names.size() ? names[i] : "a parameter");
  for (std::size_t i = 0; i < inputs.size(); ++i) look(inputs[i], "input " + std::to_string(i));
  return device;
}

/// Adds inputs to the outputs if the forward has written them and they need a gradient because of that.
/// @param arguments origins of the inputs
void add_written(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& arguments) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!arguments[i].defined() || !has_new_history(inputs[i], arguments[i])) continue;
    if (inputs[i].is_view())
      throw cannot_capture("the forward writes to input " + std::to_string(i) +
                           ", a view of another tensor, whose history would become that of calls without data");
    if (std::none_of(outputs.begin(), outputs.end(), [&](const auto& o) { return o.is_same(inputs[i]); }))
      outputs.push_back(inputs[i]);
  }
}

/// Records the rest of the step after its forward.
/// @param inputs    of the forward
/// @param arguments origins of the inputs, each once
/// @param before    gradients of the parameters
trace record_rest(recorder& r, std::vector<at::Tensor> returned, const std::vector<at::Tensor>& inputs,
                  std::vector<at::Tensor> arguments, const std::vector<at::Tensor>& parameters,
                  const std::vector<output_use>& uses, same_gradients& before, step_run* run) {
  if (run != nullptr && run->eager()) {
    before.release();
    throw cannot_capture(run->why());
  }
  for (auto& t : r.differentiable_values()) arguments.push_back(std::move(t));
  std::vector<at::Tensor> outputs;
  std::vector<std::size_t> results;
  for (std::size_t i = 0; i < returned.size(); ++i) {
    if (!returned[i].defined() || !r.knows(returned[i]))
      throw cannot_capture("output " + std::to_string(i) + " of the module was not made by a recorded operator of this thread");
    const auto same = std::find_if(outputs.begin(), outputs.end(), [&](const auto& o) { return o.is_same(returned[i]); });
    results.push_back(static_cast<std::size_t>(same - outputs.begin()));
    if (same == outputs.end()) outputs.push_back(returned[i]);
  }
  returned.clear();
  graph_contents graph;
  auto expected = uses;
  if (run != nullptr) {
    const c10::impl::IncludeDispatchKeyGuard key(record_key);
    const auto of_result = outputs.size();
    add_written(outputs, inputs, arguments);
    graph = contents_of(outputs, arguments);
    run->end_forward(r, outputs, graph.custom_nodes);
    for (auto i = expected.size(); i < outputs.size(); ++i)  // tensors that the module keeps probably get no gradient
      expected.push_back({.used = i < of_result && !keeps_history(outputs[i], arguments)});
    bool any = false;
    for (std::size_t i = 0; i < outputs.size(); ++i) any = any || (outputs[i].requires_grad() && expected[i].used);
    if (!any) expected.clear();  // a forward that only returns its inputs now may do more in the next step
  }
  if (!before.hold()) {
    if (run != nullptr && !run->strict()) before.release();  // the step goes on
    throw cannot_capture("the module writes `.grad` of a parameter in its forward (a backward of its own); call it in the loop");
  }
  if (!before.required_as_before())
    throw cannot_capture("the module changes in its forward whether a parameter requires a gradient; do that in the loop");
  if (effect_of != nullptr)
    for (auto* node : graph.custom_nodes)
      if (const auto what = effect_of(*node); !what.empty()) throw cannot_capture(what);
  const replaced_hooks calls(graph.hooked);
  trace_ends ends;
  try {
    ends = record_backward(r, std::exchange(outputs, {}), std::move(results), parameters, std::move(arguments), expected,
                           run != nullptr);
    ends.hook_places = std::move(graph.hook_places);
  } catch (const cannot_capture&) {
    throw;
  } catch (const std::exception& e) {
    if (run == nullptr) throw;
    const auto why = "the backward cannot be recorded: " + message_of(e);
    forget_caught();
    throw cannot_capture(why);
  }
  at::autocast::clear_cache();
  if (run != nullptr) {
    run->log()->give_back_constants(r.calls());
    r.give_back_kept();
    r.set_references(run->references());
  } else {
    if (const auto what = r.kept_by_module())
      throw cannot_capture(
          "the module keeps a tensor that " + *what +
          " made in its forward; a planned step would not renew it. A cache that does not change can be filled by "
          "calling the module once before it is wrapped");
  }
  return joined(r.finish(), std::move(ends), r.device());
}

/// @return the origins of the inputs of a training step, each once
std::vector<at::Tensor> add_inputs(recorder& r, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& origins) {
  std::vector<at::Tensor> arguments;
  r.set_inputs(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    arguments.emplace_back();
    const bool again = std::any_of(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const auto& t) { return t.is_same(inputs[i]); });
    if (!inputs[i].defined() || again) continue;
    r.add_input(inputs[i], i);
    arguments.back() = origins[i];
  }
  return arguments;
}

}  // namespace

trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names, const std::vector<output_use>& uses,
             step_run* run) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set())
    throw cannot_capture("a dispatch mode is active in this thread; capture outside of it");
  const auto device = device_for(inputs, parameters, names);
  if (auto& d = device_of(device); !d.warm()) d.warm_up();
  const std::lock_guard lock(one_at_a_time());
  claim_key();
  const c10::DeviceGuard guard(device);
  const fresh_casts casts;
  same_gradients before(parameters);
  std::optional<without_hooks> hooks;
  if (run == nullptr) hooks.emplace(parameters);
  if (run != nullptr) run->begin(device);  // before the recorder replaces the state of the generator
  recorder r(parameters, buffers, names, device);
  std::vector<at::Tensor> arguments;
  if (run != nullptr) arguments = add_inputs(r, inputs, origins_of(inputs));
  for (std::size_t i = arguments.size(); i < inputs.size(); ++i) {
    arguments.emplace_back();
    if (!inputs[i].defined()) continue;
    arguments.back() = r.stand_in(inputs[i], inputs[i].strides(), role::input, i);
    arguments.back().requires_grad_(inputs[i].requires_grad());
  }
  recorded_dispatch on(r, run);
  const at::AutoGradMode grad_mode(true);
  std::vector<at::Tensor> returned;
  {
    const c10::impl::IncludeDispatchKeyGuard keys(c10::DispatchKeySet({record_key, reader_key, guarded_key}));
    returned = r.rethrow_refusal([&] { return run == nullptr ? forward(arguments) : run->forward(r, forward, inputs); });
    on.end_forward();
  }
  return record_rest(r, std::move(returned), inputs, std::exchange(arguments, {}), parameters, uses, before, run);
}

/// State of a resumed recording.
struct resumed_recording::state {
  state(std::unique_lock<std::mutex> l, const step_request& request, const candidate& common, const std::vector<at::Tensor>& i)
      : lock(std::move(l)),
        parameters(request.parameters),
        uses(request.uses),
        before(parameters),
        r(parameters, request.buffers, names_in(*common.forward->recorded, parameters.size() + request.buffers.size()),
          common.forward->recorded->device),
        inputs(i),
        arguments(add_inputs(r, inputs, request.origins)),
        run(request.strict, request.runs_again, request.vary_numbers) {}
  static std::vector<std::string> names_in(const trace& t, std::size_t how_many) {
    std::vector<std::string> names;
    for (std::size_t k = 0; k < how_many; ++k) names.push_back(t.slots[k].name);  // their slots come first
    return names;
  }

  std::unique_lock<std::mutex> lock;
  std::vector<at::Tensor> parameters;
  std::vector<output_use> uses;
  same_gradients before;
  recorder r;
  std::vector<at::Tensor> inputs, arguments;
  step_run run;
  std::optional<recorded_dispatch> on;
};

resumed_recording::resumed_recording(std::unique_ptr<state> s) : state_(std::move(s)) {}
resumed_recording::~resumed_recording() = default;

std::unique_ptr<resumed_recording> resumed_recording::begin(const step_request& request, const std::vector<at::Tensor>& inputs,
                                                            const candidate& common, const std::shared_ptr<call_log>& log,
                                                            const std::vector<std::pair<at::Tensor, int64_t>>& versions) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return nullptr;
  std::unique_lock lock(one_at_a_time(), std::try_to_lock);  // the holder may wait for this thread
  if (!lock) return nullptr;
  const auto& recorded = *common.forward->recorded;
  const auto& calls = log->calls();
  auto& generator = log->generator();
  const auto state_before = generator.current_state();
  const bool moved = state_before != generator.expected();
  generator.rewind();  // the recorder treats it as the state before the step
  log->show_before();
  std::unique_ptr<state> s;
  try {
    s = std::make_unique<state>(std::move(lock), request, common, inputs);
    s->r.attach_log(*log);
    s->r.show_generator();  // the module may have read the state
    const auto repeat = [&](const call_log::entry& c) {
      if (!c.set_state.empty()) generator.set(c.set_state);
      const at::AutoGradMode mode(c.grad_mode);
      auto stack = c.arguments;
      s->r.run(c.op, stack, {&c.results, &recorded.calls[c.call], &c.positions});
    };
    auto change = log->geometry_changes().begin();
    const auto repeat_changes = [&](std::size_t until) {
      for (; change != log->geometry_changes().end() && change->call < until; ++change) {
        const auto& c = recorded.calls[change->call];
        for (const auto& r : c.results)
          for (const auto& o : c.operands)
            if (o.tensor == r.tensor) s->r.note_geometry_change(tensor_at(change->arguments, o), tensor_at(change->results, r));
        repeat(*change);
      }
    };
    for (const auto& c : calls) {
      repeat_changes(c.call);
      repeat(c);
    }
    repeat_changes(none);
    if (!s->r.has_recorded(recorded, calls.size() + log->geometry_changes().size()))
      throw cannot_capture("other calls than before");
    if (moved) generator.set(state_before);
  } catch (const std::exception&) {
    s.reset();
    generator.set(state_before);
    return nullptr;
  }
  s->r.set_start_versions(versions);
  s->run.resume(log);
  s->on.emplace(s->r, &s->run);
  return std::unique_ptr<resumed_recording>(new resumed_recording(std::move(s)));
}

void resumed_recording::call(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
  state_->run.call(state_->r, op, stack);
}

void resumed_recording::note_exception() {
  state_->r.rethrow_refusal([&]() -> int {
    try {
      throw;
    } catch (...) {
      state_->run.note_exception(state_->r);
      throw;
    }
  });
}

trace resumed_recording::finish(const std::vector<at::Tensor>& returned) {
  auto& s = *state_;
  s.on->end_forward();
  s.run.note_returned(s.r, returned);
  const c10::DeviceGuard guard(s.r.device());
  const at::AutoGradMode grad_mode(true);
  return record_rest(s.r, s.r.rethrow_refusal([&] { return returned; }), s.inputs, std::exchange(s.arguments, {}), s.parameters,
                     s.uses, s.before, &s.run);
}

step_run resumed_recording::take() { return std::move(state_->run); }

}  // namespace remat::pytorch::detail
