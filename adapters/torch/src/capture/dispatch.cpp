// SPDX-License-Identifier: Apache-2.0
#include "dispatch.hpp"

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <string_view>
#include <unordered_set>

#include "../base/digest.hpp"
#include "../base/gradient_hooks.hpp"
#include "../program/operators.hpp"
#include "follower_state.hpp"
#include "observe.hpp"
#include "recorder.hpp"
#include "step_run.hpp"

namespace remat::pytorch::detail {
namespace {

/// Notes the calls of a run, from any number of threads.
class call_observer {
 public:
  void run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
    if (is_view(op) || makes_uninitialized(op) || facts(op).makes == filled::with_nothing || facts(op).resizes)
      return op.callBoxed(&stack);
    const auto& arguments = op.schema().arguments();
    const auto first = stack.size() - arguments.size();
    digest operands, results;
    std::vector<at::Tensor> written;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = stack[first + i];
      const bool writes = is_written(arguments[i]);
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

/// State of the process. It changes only while `one_at_a_time` is held.
recorder* active_recorder = nullptr;
step_run* active_step = nullptr;  ///< while its forward runs
call_observer* observer_of_calls = nullptr;
std::atomic<void (*)(const at::Tensor&)> unbind_idle = nullptr;

/// The step whose forward runs on this thread, if that is recorded; else null.
step_run* step_here() { return capturing() ? active_step : nullptr; }

/// True if the operator only tells a profiler where the forward is.
bool is_profiler_mark(const c10::OperatorHandle& op) { return op.operator_name().name.starts_with("profiler::"); }

/// True if the operator has no kernel for the device of these tensors, and only calls other operators. Autograd takes such
/// operators apart, but inference tensors do not pass through autograd. Operators on nested tensors have kernels of their own.
bool is_composite(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
    return false;
  bool kernel = false;
  for (auto i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i)
    each_tensor(stack[i], [&](const at::Tensor& t, int) {
      kernel =
          kernel || t.is_nested() || op.hasKernelForDispatchKey(c10::computeDispatchKey(std::nullopt, std::nullopt, t.device()));
    });
  return !kernel;
}

void fallback(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  if (is_composite(op, *stack)) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  c10::impl::ExcludeDispatchKeyGuard below(record_key);
  if (is_profiler_mark(op)) return op.callBoxed(stack);
  if (auto* f = follower::of_calls()) return f->run(op, *stack);
  if (active_step != nullptr)
    active_step->call(*active_recorder, op, *stack);
  else if (active_recorder)
    active_recorder->run(op, *stack);
  else if (observer_of_calls)
    observer_of_calls->run(op, *stack);
  else
    op.callBoxed(stack);
}

/// Runs a composite operator again, on data, if it turns out to read memory itself.
void guarded(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(guarded_key);
  auto* step = step_here();
  if (step == nullptr || step->eager()) return op.callBoxed(stack);
  const auto first = stack->size() - op.schema().arguments().size();
  const auto arguments = values_from(*stack, first);
  const auto since = active_recorder->calls().size(), storages = active_recorder->trace_so_far().storages.size();
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& e) {
    const auto& calls = active_recorder->calls();
    const bool left_traces = std::any_of(calls.begin() + static_cast<std::ptrdiff_t>(since), calls.end(), [&](const auto& c) {
      return c.draws || std::any_of(c.operands.begin(), c.operands.end(),
                                    [&](const auto& o) { return o.written && o.view.value < storages; });
    });
    if (left_traces || step->eager() || std::strstr(e.what(), reads_memory) == nullptr) throw;
    step->fall_back(*active_recorder, op.schema().name() + " reads the memory of a tensor directly");
    replace_from(*stack, first, arguments);
    op.callBoxed(stack);
  }
}

}  // namespace

std::mutex& one_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

void claim_key() {
  static const auto library = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(record_key))
      throw not_available("capture needs the dispatch key Fake, but a fallback is registered for it already");
    auto lib = std::make_unique<::torch::Library>(::torch::Library::IMPL, "_", record_key, __FILE__, __LINE__);
    lib->fallback(::torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return lib;
  }();
  static const auto above = [] {
    auto lib = std::make_unique<::torch::Library>(::torch::Library::IMPL, "_", guarded_key, __FILE__, __LINE__);
    lib->fallback(::torch::CppFunction::makeFromBoxedFunction<&guarded>());
    return lib;
  }();
  claim_reader_key();
}

recorded_dispatch::recorded_dispatch(recorder& r, step_run* forward)
    : several_threads_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  active_recorder = &r;
  active_step = forward;
}
recorded_dispatch::~recorded_dispatch() {
  end_forward();
  active_recorder = nullptr;
  c10::AutogradState::get_tls_state().set_multithreading_enabled(several_threads_);
}

void recorded_dispatch::end_forward() { active_step = nullptr; }

void set_unbind(void (*f)(const at::Tensor&)) { unbind_idle = f; }

std::vector<observed_call> observe(const std::function<void()>& f) {
  // Do not wait: the capture that holds the lock may need this thread.
  const std::unique_lock lock(one_at_a_time(), std::try_to_lock);
  if (!lock) {
    f();
    return {};
  }
  claim_key();
  call_observer notes;
  {
    observer_of_calls = &notes;
    const auto ended = c10::make_scope_exit([] { observer_of_calls = nullptr; });
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
    if (known == answers.end()) continue;  // the operands differ
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

void about_to_read(const at::Tensor& t, bool may_write) {
  gradient_hooks::about_to_read(t);
  if (auto* f = detail::follower::at_work()) return f->read(t, may_write);
  if (auto* step = detail::step_here(); step != nullptr) step->read(*detail::active_recorder, t, may_write);
}

void about_to_read_generator() {
  constexpr const char* why = "the module reads the state of the generator";
  if (auto* f = detail::follower::at_work()) {
    if (f->has_drawn()) f->fall_back(why);
  } else if (auto* step = detail::step_here(); step != nullptr && !step->eager() && !detail::active_recorder->show_generator()) {
    step->fall_back(*detail::active_recorder, why);
  }
}

void fall_back_to_eager(const std::string& why) {
  if (c10::impl::tls_is_dispatch_key_excluded(detail::record_key)) return;  // inside of a kernel
  if (auto* f = detail::follower::at_work()) return f->fall_back(why);
  if (!without_data()) return;
  if (auto* step = detail::step_here(); step != nullptr) return step->fall_back(*detail::active_recorder, why);
  detail::active_recorder->refuse("the forward", "cannot be recorded: " + why);
}

bool may_copy(const at::Tensor& t, const at::Tensor& other) {
  const auto* step = detail::step_here();
  const auto* f = detail::follower::at_work();
  const auto* log = f != nullptr ? f->log() : step != nullptr && !step->eager() ? step->log().get() : nullptr;
  if (log == nullptr || !log->is_alone(other)) return false;
  if (log->is_alone(t)) return true;
  if (const auto unbind = detail::unbind_idle.load()) unbind(t);
  return log->is_alone(t);
}

without_recording_keys::without_recording_keys(bool recorded)
    : keys_(recorded ? c10::DispatchKeySet(detail::guarded_key)
                     : c10::DispatchKeySet({detail::record_key, detail::reader_key, detail::guarded_key})) {}

std::optional<std::size_t> calls_until_now() {
  if (const auto* f = detail::follower::at_work()) return f->calls();
  const auto* step = detail::step_here();
  return step != nullptr && !step->eager() ? std::optional(detail::active_recorder->calls().size()) : std::nullopt;
}

void repeat_writes(std::size_t since, std::size_t until, bool all) {
  if (!calls_until_now()) return;
  const auto* f = detail::follower::at_work();
  auto again = f != nullptr ? f->writes(since, until, all)
                            : detail::writes_since(*detail::step_here()->log(), detail::active_recorder->trace_so_far(), since,
                                                   until, all);
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (auto& [op, stack] : again) op.callBoxed(stack);
}

bool without_data() {
  return detail::follower::at_work() != nullptr ||
         (capturing() && (detail::active_step == nullptr || !detail::active_step->eager()));
}

bool capturing() {  // while this thread follows, the recording is that of another thread
  return c10::impl::tls_is_dispatch_key_included(detail::record_key) && detail::active_recorder != nullptr &&
         detail::follower::of_calls() == nullptr;
}

}  // namespace remat::pytorch
