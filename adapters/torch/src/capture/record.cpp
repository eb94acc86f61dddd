// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs a step through a boxed fallback below autograd, which gives its operators to the recorder, or to an observer.
#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <unordered_set>

#include <remat/pytorch/device.hpp>

#include "../digest.hpp"
#include "../hooks.hpp"
#include "follower.hpp"
#include "kept_graph.hpp"
#include "observe.hpp"
#include "recorder.hpp"
#include "step_run.hpp"

namespace remat::pytorch::detail {
namespace {

/// The one functionality key below autograd that PyTorch gives neither kernels nor a fallback.
constexpr auto record_key = c10::DispatchKey::Fake;

/// Puts back the `.grad` of tensors, unless other threads may have written it.
class same_gradients {
 public:
  explicit same_gradients(const std::vector<at::Tensor>& tensors) {
    for (const auto& t : tensors)
      before_.push_back({t, gradient_of(t), gradient_of(t).defined() ? gradient_of(t)._version() : 0});
  }
  ~same_gradients() {
    if (!hold())
      for (auto& x : before_) x.tensor.mutable_grad() = x.grad;
  }
  same_gradients(const same_gradients&) = delete;
  same_gradients& operator=(const same_gradients&) = delete;
  /// They stay as they are.
  void release() { before_.clear(); }
  bool hold() const {
    const bool same = std::all_of(before_.begin(), before_.end(), [](const auto& x) {
      const auto& now = gradient_of(x.tensor);
      return now.unsafeGetTensorImpl() == x.grad.unsafeGetTensorImpl() && (!now.defined() || now._version() == x.version);
    });
    return same || others_.seen();
  }

 private:
  struct entry {
    at::Tensor tensor, grad;
    int64_t version;
  };
  planned_backwards others_;
  std::vector<entry> before_;
};

/// Autocast keeps casts of parameters while it is on; those of a capture are hollow, and older ones are not among its calls.
struct fresh_casts {
  fresh_casts() { at::autocast::clear_cache(); }
  ~fresh_casts() { at::autocast::clear_cache(); }
  fresh_casts(const fresh_casts&) = delete;
  fresh_casts& operator=(const fresh_casts&) = delete;
};

/// Notes the calls of a run, which several threads may make.
class call_observer {
 public:
  void run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
    if (is_view(op) || makes_raw(op) || facts(op).makes == filled::with_nothing || facts(op).resizes) return op.callBoxed(&stack);
    const auto& arguments = op.schema().arguments();
    const auto first = stack.size() - arguments.size();
    digest operands, results;
    std::vector<at::Tensor> written;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = stack[first + i];
      const auto* alias = arguments[i].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      each_tensor(argument, [&](const at::Tensor& t, int) {
        writes&& overwrites(op) ? operands.add_shape(t) : operands << t;
        if (writes) written.push_back(t);
      });
      if (argument.isInt()) operands << static_cast<std::uint64_t>(argument.toInt());
      if (argument.isBool()) operands << std::uint64_t{argument.toBool()};
      if (argument.isDouble()) operands << std::bit_cast<std::uint64_t>(argument.toDouble());
      if (argument.isIntList())
        for (const auto n : argument.toIntVector()) operands << static_cast<std::uint64_t>(n);
    }
    op.callBoxed(&stack);
    for (const auto& t : written) results << t;
    for (auto i = first; i < stack.size(); ++i) each_tensor(stack[i], [&](const at::Tensor& t, int) { results << t; });
    const std::lock_guard lock(mutex_);
    calls_.push_back({op, operands.value(), results.value()});
  }
  std::vector<observed_call> take() {
    const std::lock_guard lock(mutex_);
    return std::move(calls_);
  }

 private:
  std::mutex mutex_;
  std::vector<observed_call> calls_;
};

/// One capture, or one observed run, at a time.
std::mutex one_at_a_time;
/// Those of the run; threads of the autograd engine inherit the dispatch key, not thread-local data.
recorder* active = nullptr;
/// Of the thread whose forward is recorded, if it is that of a training step.
thread_local step_run* active_step = nullptr;
call_observer* observer_of_calls = nullptr;

void fallback(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(record_key);
  if (follow_call(op, *stack)) return;
  if (active_step != nullptr)
    active_step->call(*active, op, *stack);
  else if (active)
    active->run(op, *stack);
  else if (observer_of_calls)
    observer_of_calls->run(op, *stack);
  else
    op.callBoxed(stack);
}

/// Registers the fallback on first use.
void claim_key() {
  static const auto library = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(record_key))
      throw not_available("capture needs the dispatch key Fake, but a fallback is registered for it already");
    auto lib = std::make_unique<::torch::Library>(::torch::Library::IMPL, "_", record_key, __FILE__, __LINE__);
    lib->fallback(::torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return lib;
  }();
}

struct recording {
  explicit recording(recorder& r) { active = &r; }
  ~recording() { active = nullptr; }
  recording(const recording&) = delete;
  recording& operator=(const recording&) = delete;
};

struct recorded_step {
  explicit recorded_step(step_run& run) { active_step = &run; }
  ~recorded_step() { active_step = nullptr; }
  recorded_step(const recorded_step&) = delete;
  recorded_step& operator=(const recorded_step&) = delete;
};

struct observing {
  explicit observing(call_observer& o) { observer_of_calls = &o; }
  ~observing() { observer_of_calls = nullptr; }
  observing(const observing&) = delete;
  observing& operator=(const observing&) = delete;
};

/// What AccumulateGrad makes of a first gradient: laid out like the parameter, and a tensor of its own.
at::Tensor settled(const at::Tensor& grad, const at::Tensor& variable, bool shared) {
  at::NoGradGuard no_grad;
  if (!shared && ::torch::autograd::utils::obeys_layout_contract(grad, variable)) return grad;
  return ::torch::autograd::utils::clone_obey_contract(grad, variable);
}

/// Stands for the loss: gives the outputs gradients that nobody else holds, which autograd adds to in place, as in a real step.
class loss_node final : public ::torch::autograd::Node {
 public:
  explicit loss_node(std::vector<at::Tensor> gradients) : gradients_(std::move(gradients)) {}
  std::string name() const override { return "RematLoss"; }

 protected:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&&) override { return std::exchange(gradients_, {}); }

 private:
  std::vector<at::Tensor> gradients_;
};

/// For each of `leaves`, from which of `outputs` its gradient comes.
std::vector<std::vector<bool>> sources_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& leaves) {
  std::vector<std::vector<bool>> sources(leaves.size(), std::vector<bool>(outputs.size(), false));
  std::vector<::torch::autograd::Edge> ends;  // nodes of leaves live as long as somebody holds them
  for (const auto& t : leaves) ends.push_back(::torch::autograd::impl::gradient_edge(t));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    std::vector<::torch::autograd::Node*> stack = {::torch::autograd::impl::gradient_edge(outputs[i]).function.get()};
    std::unordered_set<::torch::autograd::Node*> seen(stack.begin(), stack.end());
    while (!stack.empty()) {
      const auto* node = stack.back();
      stack.pop_back();
      for (const auto& edge : node->next_edges())
        if (edge.is_valid() && seen.insert(edge.function.get()).second) stack.push_back(edge.function.get());
    }
    for (std::size_t k = 0; k < leaves.size(); ++k) sources[k][i] = seen.count(ends[k].function.get()) > 0;
  }
  return sources;
}

/// Nodes that are code of somebody else: functions in Python, or in C++ outside of PyTorch.
bool is_foreign(const ::torch::autograd::Node& node) {
  const std::string_view name = typeid(node).name();
  constexpr std::string_view own = "N5torch8autograd";
  return !name.starts_with(own) || name.starts_with("N5torch8autograd6PyNode") || name.starts_with("N5torch8autograd7CppNode");
}

/// What is in the graph of `outputs` that the forward has made.
/// @param inputs of the forward: what lies beyond them is not its own
graph_contents contents_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  graph_contents found;
  std::unordered_set<::torch::autograd::Node*> seen;
  for (const auto& t : inputs)
    if (t.defined() && t.requires_grad()) seen.insert(::torch::autograd::impl::gradient_edge(t).function.get());
  std::vector<::torch::autograd::Node*> stack;
  const auto visit = [&](const ::torch::autograd::Edge& e) {
    if (!e.is_valid()) return;
    if (dynamic_cast<::torch::autograd::AccumulateGrad*>(e.function.get()) != nullptr)
      ++found.edges[e.function.get()];  // whose hooks are told in any case
    else if (seen.insert(e.function.get()).second)
      stack.push_back(e.function.get());
  };
  for (const auto& o : outputs)
    if (o.requires_grad()) visit(::torch::autograd::impl::gradient_edge(o));
  while (!stack.empty()) {
    auto* node = stack.back();
    stack.pop_back();
    if (!node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty())
      found.observer = "a hook on a tensor inside of the module (" + node->name() + ")";
    if (!node->retains_grad_hooks().empty())
      found.observer = "a tensor inside of the module that retains its gradient (" + node->name() + ")";
    found.code = found.code || is_foreign(*node);
    for (const auto& edge : node->next_edges()) visit(edge);
  }
  return found;
}

/// Where a step runs: on the accelerator that its parameters and inputs are on, else on the host.
/// @throws cannot_capture if there are several, or steps cannot run there
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

/// The thread of a device lets go of the last backward a moment after its caller has the gradients.
template <class F>
void wait_until(F done) {
  for (int k = 0; k < 1000 && !done(); ++k) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// The gradients of `wanted` for a loss that gives tensors `grads`, which nobody else holds then.
/// @param to the tensors, as edges
std::vector<at::Tensor> gradients_from(::torch::autograd::edge_list to, std::vector<at::Tensor> grads,
                                       const std::vector<at::Tensor>& wanted, bool keep) {
  // On the device, whose thread then knows all gradients of the loss before it goes on with one of them.
  const auto there = at::TensorOptions(to.front().function->input_metadata(to.front().input_nr).device());
  auto loss = at::zeros({}, there);
  const auto one = at::ones({}, there);
  auto node = c10::make_intrusive<loss_node>(std::move(grads));
  node->set_next_edges(std::move(to));
  ::torch::autograd::set_history(loss, node);
  c10::impl::IncludeDispatchKeyGuard key(record_key);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return ::torch::autograd::grad({loss}, wanted, {one}, keep, false, true);
}

/// Records the backward of a step whose forward has been recorded.
/// @param outputs   of the forward, each tensor once
/// @param results   what it returned: positions among these
/// @param arguments its inputs
/// @param others    graphs of others lead to these arguments: their hooks are not called, and the graph stays whole
trace record_backward(recorder& r, std::vector<at::Tensor> outputs, std::vector<std::size_t> results,
                      const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> arguments,
                      const std::vector<output_use>& uses, bool others) {
  std::vector<at::Tensor> wanted, grads, output_grads;
  std::vector<std::optional<byte_view>> grad_views;
  ::torch::autograd::edge_list roots;
  std::vector<index_t> wanted_slots;
  for (index_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad()) {
      wanted.push_back(parameters[i]);
      wanted_slots.push_back(i);
    }
  const auto trained = wanted.size();
  for (const auto& a : arguments)
    if (a.defined() && a.requires_grad()) wanted.push_back(a);
  r.end_forward();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& o = outputs[i];
    grad_views.emplace_back();
    const auto use = i < uses.size() ? uses[i] : output_use{};
    if (!o.requires_grad() || !use.used) continue;
    at::NoGradGuard no_grad;
    const bool dense = o.is_non_overlapping_and_dense();
    const auto strides = !use.strides.empty() ? use.strides : dense ? o.strides().vec() : at::detail::defaultStrides(o.sizes());
    output_grads.push_back(r.stand_in(o.detach(), strides, role::output_grad, i));
    grad_views.back() = r.view_of(output_grads.back());
    roots.push_back(::torch::autograd::impl::gradient_edge(o));
  }
  if (roots.empty()) throw no_gradient();
  const auto sources = sources_of(outputs, wanted);
  std::size_t accumulated = 0;
  {
    std::optional<without_hooks> hooks;
    if (others) hooks.emplace(wanted);
    r.start_backward();
    grads = r.insist([&] { return gradients_from(std::exchange(roots, {}), std::exchange(output_grads, {}), wanted, others); });
    accumulated = r.calls().size();
    c10::impl::IncludeDispatchKeyGuard key(record_key);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::set<c10::StorageImpl*> taken;
    for (const auto& o : outputs) taken.insert(o.storage().unsafeGetStorageImpl());
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      if (!r.knows(grads[i])) throw cannot_capture("a gradient was not made by a recorded operator");
      const bool shared = r.outside(grads[i]) || taken.count(grads[i].storage().unsafeGetStorageImpl());
      grads[i] = settled(grads[i], wanted[i], shared);
      taken.insert(grads[i].storage().unsafeGetStorageImpl());
    }
  }

  trace t;  // but for the calls
  t.accumulated = accumulated;
  const auto leads_to = [&](std::size_t i) { return std::count(sources[i].begin(), sources[i].end(), true) > 0; };
  for (std::size_t i = 0; i < trained; ++i) {
    if (leads_to(i)) t.reached.push_back(wanted_slots[i]);
    if (grads[i].defined()) {
      t.parameters.push_back(wanted_slots[i]);  // slots: those of the parameters come first
      t.parameter_grads.push_back(r.view_of(grads[i]));
      t.parameter_sources.push_back(sources[i]);
    }
  }
  auto next = trained;
  for (const auto& a : arguments) {
    t.input_grads.emplace_back();
    t.input_sources.emplace_back();
    if (!a.defined() || !a.requires_grad()) continue;
    if (leads_to(next)) t.input_sources.back() = sources[next];
    if (grads[next].defined()) t.input_grads.back() = r.view_of(grads[next]);
    ++next;
  }
  for (const auto& o : outputs) {
    t.outputs.push_back(r.view_of(o));
    t.differentiable.push_back(o.requires_grad());
    t.output_versions.push_back(o.is_inference() ? 0 : o._version());
    t.output_tensors.push_back(r.id_of(o));
  }
  t.output_grads = std::move(grad_views);
  t.results = std::move(results);
  return t;
}

/// Both parts of a trace.
trace joined(trace calls, trace ends, c10::Device device) {
  ends.device = device;
  ends.slots = std::move(calls.slots);
  for (index_t k = 0; k < ends.slots.size(); ++k)
    if (ends.slots[k].from == role::parameter &&
        std::find(ends.parameters.begin(), ends.parameters.end(), k) == ends.parameters.end())
      ends.slots[k].from = role::buffer;
  ends.constants = std::move(calls.constants);
  ends.found = std::move(calls.found);
  ends.storages = std::move(calls.storages);
  ends.calls = std::move(calls.calls);
  ends.backward = calls.backward;
  ends.after_forward = std::move(calls.after_forward);
  ends.after_backward = std::move(calls.after_backward);
  ends.written = std::move(calls.written);
  ends.asked = std::move(calls.asked);
  ends.tensors = std::move(calls.tensors);
  ends.held = std::move(calls.held);
  ends.forward = std::move(calls.forward);
  return ends;
}

}  // namespace

trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names, const std::vector<output_use>& uses,
             step_run* run) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set())
    throw cannot_capture("a dispatch mode is active in this thread; capture outside of it");
  std::lock_guard<std::mutex> lock(one_at_a_time);
  claim_key();

  const auto device = device_for(inputs, parameters, names);
  device_of(device).warm_up();
  const c10::DeviceGuard guard(device);
  const fresh_casts casts;
  same_gradients before(parameters);
  std::optional<without_hooks> hooks;
  if (run == nullptr) hooks.emplace(parameters);
  if (run != nullptr) run->begin(device);  // before states of the generator are replaced
  recorder r(parameters, buffers, names, device);
  std::vector<at::Tensor> arguments, outputs;
  std::vector<std::size_t> results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    arguments.emplace_back();
    if (!inputs[i].defined()) continue;
    if (run != nullptr) {
      const bool again = std::any_of(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(i),
                                     [&](const auto& t) { return t.is_same(inputs[i]); });
      if (!again) r.add_input(arguments.back() = inputs[i], i);
      continue;
    }
    arguments.back() = r.stand_in(inputs[i], inputs[i].strides(), role::input, i);
    arguments.back().requires_grad_(inputs[i].requires_grad());
  }
  trace ends;
  {
    recording on(r);
    at::AutoGradMode grad_mode(true);
    {
      c10::impl::IncludeDispatchKeyGuard key(record_key);
      const auto returned = [&] {
        if (run == nullptr) return r.insist([&] { return forward(arguments); });
        const recorded_step here(*run);
        return r.insist([&] { return run->forward(r, forward, inputs); });
      }();
      if (run != nullptr && run->eager()) {
        before.release();
        throw cannot_capture(run->why());
      }
      for (std::size_t i = 0; i < returned.size(); ++i) {
        if (!returned[i].defined() || !r.knows(returned[i]))
          throw cannot_capture("output " + std::to_string(i) +
                               " of the module was not made by a recorded operator of this thread");
        const auto same = std::find_if(outputs.begin(), outputs.end(), [&](const auto& o) { return o.is_same(returned[i]); });
        results.push_back(static_cast<std::size_t>(same - outputs.begin()));
        if (same == outputs.end()) outputs.push_back(returned[i]);
      }
      if (run != nullptr) run->end_forward(r, outputs);
    }
    if (!before.hold()) {
      if (run != nullptr) before.release();
      throw cannot_capture(
          "the module writes `.grad` of a parameter in its forward (a backward of its own); call it in the loop");
    }
    if (run != nullptr)
      if (const auto told = contents_of(outputs, arguments).observer; !told.empty())
        throw cannot_capture(told + " is to be told of gradients");
    try {
      ends = record_backward(r, std::exchange(outputs, {}), std::move(results), parameters, std::exchange(arguments, {}), uses,
                             run != nullptr);
    } catch (const cannot_capture&) {
      throw;
    } catch (const std::exception& e) {
      if (run == nullptr) throw;
      throw cannot_capture(std::string("the backward cannot be recorded: ") + e.what());
    }
  }
  at::autocast::clear_cache();
  if (run != nullptr) {
    r.set_references(run->references());
  } else {
    if (!device.is_cpu()) wait_until([&] { return !r.kept_by_module(); });
    if (const auto what = r.kept_by_module())
      throw cannot_capture(
          "the module keeps a tensor that " + *what +
          " made in its forward; a planned step would not renew it. A cache that does not change can be filled by "
          "calling the module once before it is wrapped");
  }
  return joined(r.finish(), std::move(ends), device);
}

kept_graph::kept_graph(std::shared_ptr<const trace> forward, std::shared_ptr<call_log> log, std::vector<at::Tensor> tensors,
                       const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs)
    : forward_(std::move(forward)), log_(std::move(log)), tensors_(std::move(tensors)) {
  for (const auto& t : inputs) inputs_.push_back(t.defined() && t.requires_grad() ? t : at::Tensor());
  const at::NoGradGuard no_grad;
  for (const auto& o : outputs) {
    outputs_.push_back(o.detach());
    if (o.requires_grad()) ::torch::autograd::impl::set_gradient_edge(outputs_.back(), ::torch::autograd::impl::gradient_edge(o));
  }
  std::unordered_map<const c10::TensorImpl*, at::Tensor> instead;  // of outputs, whose memory will be that of the plan
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto id = forward_->output_tensors[i];
    given_.emplace_back(at::Tensor().getIntrusivePtr());
    if (forward_->tensors[id] != none) continue;
    tensors_[id] = outputs_[i];
    instead.emplace(outputs[i].unsafeGetTensorImpl(), outputs_[i]);
    given_.back() = decltype(given_)::value_type(outputs[i].getIntrusivePtr());
  }
  log_->replace(instead);
}

/// While it is there, the outputs that still exist have the memory of the graph again.
class kept_graph::as_recorded {
 public:
  explicit as_recorded(const kept_graph& g) : tensors(g.tensors_) {
    for (std::size_t i = 0; i < g.given_.size(); ++i) {
      const at::Tensor t(g.given_[i].lock());
      if (!t.defined()) continue;
      changed_.push_back({t, t.storage(), t.storage_offset()});
      put(t, g.outputs_[i].storage(), g.outputs_[i].storage_offset());
      tensors[g.forward_->output_tensors[i]] = t;
    }
  }
  ~as_recorded() {
    for (const auto& c : changed_) put(c.tensor, c.storage, c.offset);
  }
  as_recorded(const as_recorded&) = delete;
  as_recorded& operator=(const as_recorded&) = delete;

  std::vector<at::Tensor> tensors;  ///< by their numbers

 private:
  struct change {
    at::Tensor tensor;
    c10::Storage storage;
    int64_t offset;
  };
  static void put(const at::Tensor& t, const c10::Storage& s, int64_t offset) {
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
    t.unsafeGetTensorImpl()->set_storage_offset(offset);
  }
  std::vector<change> changed_;
};

graph_contents kept_graph::contents() const { return contents_of(outputs_, inputs_); }

std::string kept_graph::differs(const candidate& step, const std::vector<at::Tensor>& wanted) const {
  const auto& t = *step.what->recorded;
  const c10::DeviceGuard guard(t.device);
  const fresh_casts casts;
  std::vector<at::Tensor> grads(outputs_.size());
  ::torch::autograd::edge_list to;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (!t.output_grads[i]) continue;
    const auto& v = *t.output_grads[i];
    grads[i] = hollow_tensor(v.sizes, v.strides, at::TensorOptions().dtype(v.dtype).device(t.device));
    to.push_back(::torch::autograd::impl::gradient_edge(outputs_[i]));
  }
  const as_recorded hollow(*this);
  const without_hooks hooks(wanted);
  const at::AutoGradMode no_graph(false);
  return differing_backward(step, hollow.tensors, std::move(grads), [&](std::vector<at::Tensor> all) {
    std::erase_if(all, [](const auto& g) { return !g.defined(); });
    gradients_from(std::move(to), std::move(all), wanted, true);
  });
}

void kept_graph::fill() {
  filled_ = true;
  tensors_.clear();
  log_->fill();
}

std::vector<at::Tensor> kept_graph::gradients(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& wanted) const {
  std::vector<at::Tensor> used, grads;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    used.push_back(outputs_[i]);
    grads.push_back(given[i]);
  }
  const without_hooks hooks(wanted);
  return ::torch::autograd::grad(used, wanted, grads, true, at::GradMode::is_enabled(), true);
}

trace kept_graph::record(const std::vector<output_use>& uses, const std::vector<at::Tensor>& parameters) const {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  claim_key();
  const auto& f = *forward_;
  const c10::DeviceGuard guard(f.device);
  const fresh_casts casts;
  const as_recorded hollow(*this);
  recorder r(f, hollow.tensors, parameters);
  trace ends;
  {
    recording on(r);
    at::AutoGradMode grad_mode(true);
    ends = record_backward(r, outputs_, f.results, parameters, inputs_, uses, true);
  }
  at::autocast::clear_cache();
  ends.output_versions = f.output_versions;
  ends.output_tensors = f.output_tensors;
  auto calls = r.finish();
  calls.after_forward = f.after_forward;
  for (std::size_t i = calls.backward; i < calls.calls.size(); ++i)
    if (const auto& d = calls.calls[i].draws; d && d->from == generator_origin::fixed)
      throw cannot_capture("the backward draws numbers again that the forward has drawn");
  return joined(std::move(calls), std::move(ends), f.device);
}

std::vector<observed_call> observe(const std::function<void()>& f) {
  // A capture may need the thread that this one runs on: waiting for its end could last for ever.
  const std::unique_lock lock(one_at_a_time, std::try_to_lock);
  if (!lock) {
    f();
    return {};
  }
  claim_key();
  call_observer notes;
  {
    const observing on(notes);
    const c10::impl::IncludeDispatchKeyGuard key(record_key);
    f();
  }
  return notes.take();
}

std::vector<std::pair<std::string, std::size_t>> differing(const std::vector<observed_call>& first,
                                                           const std::vector<observed_call>& second) {
  const auto question = [](const observed_call& c) { return std::pair(std::string_view(c.op.schema().name()), c.operands); };
  std::map<std::pair<std::string_view, std::uint64_t>, std::unordered_multiset<std::uint64_t>> answers;
  for (const auto& c : second) answers[question(c)].insert(c.results);
  std::vector<std::pair<std::string, std::size_t>> found;
  for (const auto& c : first) {
    const auto known = answers.find(question(c));
    if (known == answers.end()) continue;  // its operands differ
    if (const auto same = known->second.find(c.results); same != known->second.end()) {
      known->second.erase(same);
      continue;
    }
    const auto& name = c.op.schema().name();
    const auto named = std::find_if(found.begin(), found.end(), [&](const auto& x) { return x.first == name; });
    named == found.end() ? void(found.emplace_back(name, 1)) : void(++named->second);
  }
  return found;
}

}  // namespace remat::pytorch::detail

namespace remat::pytorch {

void about_to_read(const at::Tensor& t) {
  if (detail::active_step != nullptr) {
    if (t.has_storage() && !detail::has_memory(t)) detail::active_step->diverge(*detail::active, detail::reads_memory);
  } else {
    detail::read_by_follower(t);
  }
}

void about_to_read_generator() {
  constexpr const char* why = "the module reads the state of the generator";
  if (detail::active_step != nullptr) {
    if (!detail::active_step->eager() && !detail::active->show_generator()) detail::active_step->diverge(*detail::active, why);
  } else if (detail::has_followed_draws()) {
    detail::leave_followed(why);
  }
}

bool without_data() {
  return capturing() ? detail::active_step == nullptr || !detail::active_step->eager() : detail::is_followed();
}

bool capturing() { return detail::active != nullptr && c10::impl::tls_is_dispatch_key_included(detail::record_key); }

}  // namespace remat::pytorch
