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
#include "observe.hpp"
#include "recorder.hpp"

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
call_observer* observer_of_calls = nullptr;

void fallback(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(record_key);
  if (active)
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

}  // namespace

trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names, const std::vector<output_use>& uses) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set())
    throw cannot_capture("a dispatch mode is active in this thread; capture outside of it");
  std::lock_guard<std::mutex> lock(one_at_a_time);
  claim_key();

  const auto device = device_for(inputs, parameters, names);
  device_of(device).warm_up();
  const c10::DeviceGuard guard(device);
  const fresh_casts casts;
  const same_gradients before(parameters);
  const without_hooks hooks(parameters);
  recorder r(parameters, buffers, names, device);
  std::vector<at::Tensor> arguments, outputs, wanted, grads, output_grads;
  std::vector<std::size_t> results;
  std::vector<std::optional<byte_view>> grad_views;
  ::torch::autograd::edge_list roots;
  std::vector<std::vector<bool>> sources;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    arguments.emplace_back();
    if (!inputs[i].defined()) continue;
    arguments.back() = r.stand_in(inputs[i], inputs[i].strides(), role::input, i);
    arguments.back().requires_grad_(inputs[i].requires_grad());
  }
  std::vector<index_t> wanted_slots;
  for (index_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad()) {
      wanted.push_back(parameters[i]);
      wanted_slots.push_back(i);
    }
  const auto trained = wanted.size();
  for (const auto& a : arguments)
    if (a.defined() && a.requires_grad()) wanted.push_back(a);
  {
    recording on(r);
    at::AutoGradMode grad_mode(true);
    {
      c10::impl::IncludeDispatchKeyGuard key(record_key);
      const auto returned = r.insist([&] { return forward(arguments); });
      for (std::size_t i = 0; i < returned.size(); ++i) {
        if (!returned[i].defined() || !r.knows(returned[i]))
          throw cannot_capture("output " + std::to_string(i) +
                               " of the module was not made by a recorded operator of this thread");
        const auto same = std::find_if(outputs.begin(), outputs.end(), [&](const auto& o) { return o.is_same(returned[i]); });
        results.push_back(static_cast<std::size_t>(same - outputs.begin()));
        if (same == outputs.end()) outputs.push_back(returned[i]);
      }
    }
    if (!before.hold())
      throw cannot_capture(
          "the module writes `.grad` of a parameter in its forward (a backward of its own); call it in the loop");
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
    sources = sources_of(outputs, wanted);
    auto loss = at::zeros({});
    auto node = c10::make_intrusive<loss_node>(std::exchange(output_grads, {}));
    node->set_next_edges(std::exchange(roots, {}));
    ::torch::autograd::set_history(loss, node);
    r.start_backward();
    c10::impl::IncludeDispatchKeyGuard key(record_key);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    grads = r.insist([&] { return ::torch::autograd::grad({loss}, wanted, {at::ones({})}, std::nullopt, false, true); });
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

  std::vector<index_t> kept;  // slots: those of the parameters come first
  std::vector<byte_view> parameter_grads, output_views;
  std::vector<std::optional<byte_view>> input_grads;
  std::vector<std::vector<bool>> parameter_sources, input_sources;
  std::vector<int64_t> versions;
  std::vector<bool> differentiable;
  const auto leads_to = [&](std::size_t i) { return std::count(sources[i].begin(), sources[i].end(), true) > 0; };
  std::vector<std::size_t> reached;
  for (std::size_t i = 0; i < trained; ++i) {
    if (leads_to(i)) reached.push_back(wanted_slots[i]);
    if (grads[i].defined()) {
      kept.push_back(wanted_slots[i]);
      parameter_grads.push_back(r.view_of(grads[i]));
      parameter_sources.push_back(sources[i]);
    }
  }
  auto next = trained;
  for (const auto& a : arguments) {
    input_grads.emplace_back();
    input_sources.emplace_back();
    if (!a.defined() || !a.requires_grad()) continue;
    if (leads_to(next)) input_sources.back() = sources[next];
    if (grads[next].defined()) input_grads.back() = r.view_of(grads[next]);
    ++next;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    output_views.push_back(r.view_of(outputs[i]));
    differentiable.push_back(outputs[i].requires_grad());
    versions.push_back(outputs[i].is_inference() ? 0 : outputs[i]._version());
  }
  for (auto* list : {&arguments, &outputs, &wanted, &grads}) list->clear();
  at::autocast::clear_cache();
  if (!device.is_cpu()) wait_until([&] { return !r.kept_by_module(); });
  if (const auto what = r.kept_by_module())
    throw cannot_capture("the module keeps a tensor that " + *what +
                         " made in its forward; a planned step would not renew it. A cache that does not change can be filled by "
                         "calling the module once before it is wrapped");
  auto t = r.finish();
  t.device = device;
  for (index_t k = 0; k < t.slots.size(); ++k)
    if (t.slots[k].from == role::parameter && std::find(kept.begin(), kept.end(), k) == kept.end())
      t.slots[k].from = role::buffer;
  t.parameters = std::move(kept);
  t.parameter_grads = std::move(parameter_grads);
  t.outputs = std::move(output_views);
  t.output_grads = std::move(grad_views);
  t.input_grads = std::move(input_grads);
  t.results = std::move(results);
  t.output_versions = std::move(versions);
  t.differentiable = std::move(differentiable);
  t.parameter_sources = std::move(parameter_sources);
  t.input_sources = std::move(input_sources);
  t.reached = std::move(reached);
  return t;
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

bool capturing() { return detail::active != nullptr && c10::impl::tls_is_dispatch_key_included(detail::record_key); }

}  // namespace remat::pytorch
