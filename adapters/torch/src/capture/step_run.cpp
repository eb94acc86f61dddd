// SPDX-License-Identifier: Apache-2.0
#include "step_run.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>

#include "../base/reason.hpp"
#include "../base/views.hpp"
#include "../program/operators.hpp"
#include "follower.hpp"
#include "recorder.hpp"

namespace remat::pytorch::detail {
namespace {

std::atomic<std::vector<bool> (*)(const std::vector<::torch::autograd::Node*>&, const std::vector<at::Tensor>&)> who_holds =
    nullptr;

}  // namespace

std::vector<at::Tensor> step_run::forward(recorder& r, const forward_function& f, const std::vector<at::Tensor>& arguments) {
  r.attach_log(*log_);
  ran_ = true;
  try {
    note_returned(r, f(arguments));
  } catch (...) {
    note_exception(r);
    throw;
  }
  return returned_;
}

void step_run::note_returned(recorder& r, std::vector<at::Tensor> tensors) {
  if (!eager() && log_->is_any_touched()) fall_back(r, "the module has written memory without an operator that calls have read");
  returned_ = std::move(tensors);
  versions_ = r.versions();
}

void step_run::call(recorder& r, const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
  if (eager()) return op.callBoxed(&stack);
  const auto n = op.schema().arguments().size(), results = op.schema().returns().size();
  const auto first = stack.size() - n;
  auto arguments = values_from(stack, first);
  own_lists(arguments);
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // each with a tensor of its geometry before the call
  bool own_generator = false;
  for (std::size_t i = 0; i < n; ++i) {
    own_generator = own_generator || (arguments[i].isGenerator() && arguments[i].toGenerator().defined());
    if (!is_written(op.schema().arguments()[i])) continue;
    each_tensor(arguments[i], [&](const at::Tensor& t, int) {
      if (t.has_storage()) written.emplace_back(t, alias_of(t));
    });
  }
  const bool catchable = may_be_caught(op);
  if (catchable && !r.try_kernel(op, stack)) {
    fall_back(r, op.schema().name() + " may raise an error that the module handles" + not_ahead);
    return op.callBoxed(&stack);
  }
  try {
    if (log_->uses_touched(op, stack))
      r.refuse(op.schema().name(), "uses a tensor whose memory the module has written without an operator");
    if (own_generator && runs_again_)
      r.refuse(op.schema().name(), "draws from a generator of its own, and the step will run once more");
    r.run(op, stack);
  } catch (const std::exception& e) {
    if (strict_) throw;  // an error of the recorder, or of a kernel on made-up numbers
    replace_from(stack, first, arguments);
    fall_back(r, message_of(e));
    return op.callBoxed(&stack);
  }
  if (vary_numbers_) r.let_numbers_vary();
  if (catchable) r.note_catchable();
  const auto& c = r.calls().back();
  auto made = values_from(stack, stack.size() - results);
  if (c.results.empty() && results > 0) return;  // the result is a number
  std::erase_if(written, [](const auto& w) {
    const auto& [t, before] = w;
    return t.sizes() == before.sizes() && t.strides() == before.strides() && t.storage_offset() == before.storage_offset();
  });
  for (const auto& [t, before] : written) log_->replace({{t.unsafeGetTensorImpl(), before}});
  if (!written.empty()) return;  // the call only changes a geometry (`transpose_`)
  if (!c.constant && !c.ahead) log_->watch(r.trace_so_far(), r.inputs(), c, arguments);
  log_->add(r.calls().size() - 1, op, std::move(arguments), std::move(made), c.draws, c.constant || c.ahead, r.positions_of(c));
}

void step_run::read(recorder& r, const at::Tensor& t, bool may_write) {
  if (eager() || !t.has_storage()) return;
  if (!r.is_readable(t) || (may_write && log_->may_free(storage_of(t)))) {
    const bool there = r.knows(t) && !(may_write && r.is_outside(t)) && r.run_ahead({t});
    if (!there || !has_memory(t)) return fall_back(r, reads_memory);
    if (!may_write) return;
    log_->pin(t);
    return log_->expose(t);
  }
  if (may_write && r.watches_memory(t)) log_->expose(t);
}

void step_run::fall_back(recorder& r, const std::string& why) {
  if (eager()) return;
  if (strict_) r.refuse("the forward", "cannot be recorded: " + why);
  run_calls(r, why);
}

void step_run::note_exception(recorder& r) {
  thrown_ = std::current_exception();
  try {
    r.rethrow_refusal([]() -> int { throw; });
  } catch (const cannot_capture&) {
    if (strict_) return;
  } catch (...) {
  }
  if (!eager()) run_calls(r, "the forward throws");
}

void step_run::run_calls(recorder& r, const std::string& why) {
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::Fake);
  why_ = why;
  const auto left = r.abandon();
  log_->make_room();
  log_->fill();
  if (left.from == generator_origin::fixed) log_->generator().set(text_of(left.state));
  if (left.from == generator_origin::forward) log_->generator().set(log_->generator().start());
}

bool step_run::is_output(const at::Tensor& t) const {
  return std::any_of(outputs_.begin(), outputs_.end(), [&](const auto& o) { return o.is_same(t); });
}

void step_run::end_forward(recorder& r, std::vector<at::Tensor>& outputs,
                           const std::vector<::torch::autograd::Node*>& custom_nodes) {
  outputs_ = outputs;
  if (!custom_nodes.empty()) r.keep_numbers();
  values_ = r.values();
  for (const auto& o : outputs) {
    r.id_of(o);  // `o` may be a copy that no call has met
    if (log_->is_pinned(storage_of(o))) throw cannot_capture(keeps_read);
  }
  log_->give_back();
  std::vector<std::size_t> held;
  std::vector<at::Tensor> kept;
  for (auto& [id, t] : r.made_tensors()) {
    if (is_output(t) || !held_by_python(t)) continue;
    held.push_back(id);
    kept.push_back(t);
  }
  const auto ask = who_holds.load();
  const auto by_module = custom_nodes.empty() || ask == nullptr ? std::vector<bool>(kept.size(), true) : ask(custom_nodes, kept);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto& t = kept[i];
    if (!by_module[i]) continue;  // held by a function of the graph, until the backward
    if (log_->is_pinned(storage_of(t))) throw cannot_capture(keeps_read);
    if (collects_gradient(t))
      throw cannot_capture(
          "the module makes a tensor in its forward that it keeps and that collects a gradient, such as a parameter; a step that "
          "finds it there is planned");
    if (t.requires_grad())
      outputs.push_back(t);
    else
      kept_.push_back({held[i], t, r.view_of(t), t.is_inference() ? 0 : t._version()});
  }
  outputs_ = outputs;
  r.set_python_held(std::move(held));
  tensors_ = r.all_tensors();
}

std::unordered_map<const c10::TensorImpl*, std::size_t> step_run::references() const {
  auto counts = log_->references();
  for (const auto& [t, version] : versions_) ++counts[t.unsafeGetTensorImpl()];
  for (const auto& m : kept_) ++counts[m.tensor.unsafeGetTensorImpl()];
  for (const auto& t : tensors_) ++counts[t.unsafeGetTensorImpl()];
  return counts;
}

void step_run::finish_eagerly() {
  for (const auto& [t, version] : versions_) set_version(t, version);
  kept_.clear();
  tensors_.clear();
  log_->fill();
}

bool step_run::add_kept(trace& t) {
  if (kept_.empty()) return false;
  for (const auto& m : kept_) {
    t.outputs.push_back(m.view);
    t.output_versions.push_back(m.version);
    t.differentiable.push_back(false);
    t.output_grads.emplace_back();
    t.output_tensors.push_back(m.id);
    for (auto* list : {&t.parameter_sources, &t.input_sources})
      for (auto& sources : *list)
        if (!sources.empty()) sources.push_back(false);
    outputs_.push_back(m.tensor);
  }
  kept_.clear();
  return true;
}

}  // namespace remat::pytorch::detail

namespace remat::pytorch {

void set_holder_query(std::vector<bool> (*held)(const std::vector<::torch::autograd::Node*>&, const std::vector<at::Tensor>&)) {
  detail::who_holds = held;
}

}  // namespace remat::pytorch
