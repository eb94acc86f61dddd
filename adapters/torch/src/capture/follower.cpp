// SPDX-License-Identifier: Apache-2.0
// Follows the calls of a module: along the current candidate, another one, a new recording, or eagerly.
#include "follower_state.hpp"

#include <algorithm>
#include <unordered_set>

#include "../program/operators.hpp"
#include "hollow.hpp"
#include "recorder.hpp"
#include "same_calls.hpp"
#include "weights_elsewhere.hpp"

namespace remat::pytorch::detail {

follower::follower(const std::vector<candidate>& candidates, const std::vector<at::Tensor>& inputs, const step_request& request)
    : candidates_(candidates),
      inputs_(inputs),
      request_(&request),
      log_(std::make_shared<call_log>(candidates.front().forward->recorded->device)) {
  for (const auto& c : candidates_)
    for (const auto& w : c.forward->recorded->written) {
      const auto& slot = c.forward->recorded->slots[w.slot];
      if (slot.from == role::input && slot.position >= inputs_.size()) continue;
      const auto& t = slot.from == role::input ? inputs_[slot.position] : (*c.tensors)[w.slot];
      if (t.defined() && !t.is_inference()) versions_.emplace_back(t, t._version());
    }
  log_->before_first_run_ahead(request.make_room);
  bind();
}

follower::follower(const candidate& step, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& output_grads)
    : candidates_{step}, inputs_(output_grads), backward_(true), next_call_(step.forward->recorded->backward) {
  generator_.emplace(step.forward->recorded->device);
  reserve();
  const auto& t = recorded();
  for (const auto& w : t.written)
    if (const auto& x = (*step.tensors)[w.slot]; x.defined() && !x.is_inference()) versions_.emplace_back(x, x._version());
  const auto meet = [&](const traced_tensor& o) {
    if (o.tensor >= tensors.size() || !tensors[o.tensor].defined()) return;
    const auto& x = tensors[o.tensor];
    set(o.tensor, x);
    locate(o.view.value, x, o.view.offset);
  };
  for (std::size_t i = 0; i < t.backward; ++i)
    for (const auto* list : {&t.calls[i].operands, &t.calls[i].results}) std::for_each(list->begin(), list->end(), meet);
  for (std::size_t id = 0; id < t.tensors.size(); ++id)
    if (const auto k = t.tensors[id]; k != none && t.slots[k].from == role::output_grad)
      bind(id, output_grads[t.slots[k].position]);
}

void follower::run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
  if (backward_) return run_backward(op, stack);
  refuse();
  if (log_->filled()) return op.callBoxed(&stack);
  if (log_->uses_touched(op, stack)) {
    fall_back(op.schema().name() + " uses a tensor whose memory the module has written without an operator");
    return op.callBoxed(&stack);
  }
  const auto leave = [&](const std::string& why) {
    if (record_from_here(why)) return recording_->call(op, stack);
    fall_back(why);
    op.callBoxed(&stack);
  };
  while (const char* why = differs(op, stack))
    if (!choose_another(op, stack)) return leave(op.schema().name() + ": " + why);
  std::vector<at::Tensor> positions;
  std::optional<::torch::jit::Stack> made;  // results of a call that runs ahead of the plan
  if (call().ahead || !call().positions.empty())
    if (const auto why = evaluate(op, stack, positions, made)) return leave(*why);
  if (call().catchable) {
    search_from_first_ = true;
    if (!log_->try_kernel(recorded().calls, op, stack))
      return leave(op.schema().name() + " may raise an error that the module handles" + not_ahead);
    search_from_first_ = false;
  }
  const auto& c = call();
  const auto n = c.arguments.size(), first = stack.size() - n;
  for (const auto& o : c.operands) take_operand(o, tensor_at(stack, o, first));
  for (const auto at : c.numbers) numbers_.push_back(stack[first + static_cast<std::size_t>(at)].toDouble());
  if (c.draws) generator().draw(next_call_);
  for (std::size_t j = 0; j < positions.size(); ++j) take_value(tensor_in(recorded(), c.positions[j]), positions[j]);
  if (made) {
    auto arguments = values_from(stack, first);
    replace_from(stack, first, *made);
    for (const auto& r : c.results) take_value(r.tensor, tensor_at(*made, r));
    log_->add(next_call_, op, std::move(arguments), std::move(*made), c.draws, true);
    ran_.push_back(true);
    ++next_call_;
    return;
  }
  if (candidates_[current_].forward->runs_at_once[next_call_]) {
    if (std::any_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.written && read_[o.view.value]; })) {
      fall_back(op.schema().name() + " writes a constant that a call before it reads");
      return op.callBoxed(&stack);
    }
    const auto arguments = values_from(stack, first);
    const lent_weights lent(arguments);
    op.callBoxed(&stack);
    note_results(c, stack);
    log_->add(next_call_, op, arguments, values_from(stack, first), c.draws, true, std::move(positions));
    ran_.push_back(true);
    ++next_call_;
    return;
  }
  ran_.push_back(false);
  for (const auto& o : c.operands) {
    read_[o.view.value] = true;
    if (c.constant) continue;
    if (o.written) written_[o.view.value] = true;
    if (o.written && recorded().storages[o.view.value].slot == none && has_memory(tensor_at(stack, o, first)))
      log_->hide(tensor_at(stack, o, first).storage());  // was a constant until now
  }
  auto arguments = values_from(stack, first);
  for (const auto& o : c.operands)
    for (auto k = o.version_increments; k > 0; --k) tensor_at(arguments, o).unsafeGetTensorImpl()->bump_version();
  const auto before = reshape(c, arguments);
  auto results = results_of(c, arguments);
  replace_from(stack, first, results);
  if (before.empty()) {
    log_->watch(recorded(), inputs_.size(), c, arguments);
    log_->add(next_call_, op, std::move(arguments), std::move(results), c.draws, false, std::move(positions));
  } else {
    log_->add_geometry_change(next_call_, op, std::move(arguments), std::move(results), before);
  }
  ++next_call_;
}

void follower::fall_back(std::string why) {
  if (eager()) return;
  divergence_ = std::move(why);
  diverged_at_ = next_call_;
  if (backward_) {
    left_plan_ = true;
    throw left_plan();
  }
  if (!request_->weights_on_host) return fill();
  left_plan_ = true;
  put_back();
  refuse();
}

bool follower::show(const at::Tensor& t, bool may_write) {
  if (eager() || !t.has_storage()) return true;
  for (std::size_t s = 0; s < storages_.size(); ++s) {
    if (storages_[s].address() != storage_of(t)) continue;
    if (backward_ && written_[s]) return false;  // the writing call has not run
    if (!has_memory(t) && !backward_ && !written_[s]) make_constants({storage_of(t)});
    if (!backward_ && (written_[s] || !has_memory(t) || (may_write && log_->may_free(storage_of(t))))) {
      if ((may_write && recorded().storages[s].slot != none) || !run_ahead({t}) || !has_memory(t)) return false;
      if (may_write) {
        log_->pin(t);
        log_->expose(t);
      }
      return true;
    }
    if (!has_memory(t)) return false;
    const auto k = recorded().storages[s].slot;
    const bool by_hand =
        k != none && (candidates_[current_].forward->filled_by_hand[k] || recorded().slots[k].from == role::constant);
    const bool watch = by_hand ? compared_[k] : k == none || storage_of(t)->nbytes() <= constant_limit;
    if (may_write && log_ && watch) log_->expose(t);
  }
  return has_memory(t);
}

std::string follower::finish() {
  if (!left_plan_ && next_call_ < recorded().accumulated)
    divergence_ = "the backward ends before " + call().op.schema().name() + ", which is planned";
  else if (!left_plan_ && !generator().is_at(recorded().after_backward))
    divergence_ = "the backward leaves another state of the generator than planned";
  generator().rewind();
  reset_versions();
  return divergence_;
}

followed follower::finish(std::vector<at::Tensor> returned) {
  refuse();
  followed f;
  f.returned = std::move(returned);
  const auto follows = [&] { return !recording_ && !log_->filled(); };
  if (follows() && log_->is_any_touched()) fall_back("the module has written memory without an operator that calls have read");
  if (const auto given = follows() ? given_constants(f.returned) : std::unordered_set<const c10::StorageImpl*>();
      !given.empty() && !make_constants(given))
    fall_back("the module keeps or returns a constant that it has written after reading it");
  if (follows()) {
    while (const auto why = unfinished(f.returned)) {
      if (choose_another_end(f.returned)) continue;
      if (!record_from_here(*why)) fall_back(*why);
      break;
    }
  }
  if (follows() && keeps_read_memory(f.returned)) fall_back(keeps_read);
  if (recording_) f.recording = finish_recording(f.returned);
  if (f.recording || log_->filled()) {
    f.why = divergence_;
    f.differs_at = diverged_at_;
    return f;
  }
  f.match = current_;
  for (std::size_t i = 0; i < f.returned.size(); ++i)
    if (const auto id = recorded().output_tensors[recorded().results[i]]; !tensors_[id]) set(id, f.returned[i]);
  for (auto id : recorded().output_tensors) f.outputs.push_back(at::Tensor(tensors_[id].lock()));
  for (const auto& t : tensors_) f.tensors.emplace_back(t.lock());
  f.numbers = std::move(numbers_);
  f.changed_slots = std::move(changed_slots_);
  f.changed_slots.insert(f.changed_slots.end(), ahead_values_.begin(), ahead_values_.end());
  log_->give_back_constants(recorded().calls);
  put_back();
  f.log = log_;
  return f;
}

std::optional<std::string> follower::evaluate(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack,
                                              std::vector<at::Tensor>& positions, std::optional<::torch::jit::Stack>& made) {
  const auto& c = call();
  const auto first = stack.size() - c.arguments.size();
  const auto masks = takes_masks(op);
  std::vector<at::Tensor> wanted;
  for (const auto& o : c.operands) {
    const auto& t = tensor_at(stack, o, first);
    if (c.ahead || (o.at == masks && is_mask(t))) wanted.push_back(t);
  }
  const bool there = std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
    if (!c.ahead && o.at != masks) return true;
    const bool outside = recorded().storages[o.view.value].slot != none;
    return (outside || (!c.ahead && c.masks_known)) && !written_[o.view.value] && has_memory(tensor_at(stack, o, first));
  });
  if (!there && !run_ahead(wanted)) return op.schema().name() + " depends on values" + not_ahead;
  if (c.ahead) {
    made = values_from(stack, first);
    const lent_weights lent(*made);
    op.callBoxed(&*made);
  } else {
    const auto arguments = values_from(stack, first);
    for (const auto& m : wanted)
      for (const auto& list : positions_in(m, op, arguments)) positions.push_back(list);
  }
  if (!there) log_->hide_made(wanted);
  const auto fits = [&] {
    const auto& r = recorded();
    if (made)
      return std::all_of(call().results.begin(), call().results.end(), [&](const auto& x) {
        const auto& t = tensor_at(*made, x);
        return t.sizes() == at::IntArrayRef(x.view.sizes) && t.strides() == at::IntArrayRef(x.view.strides);
      });
    return positions.size() == call().positions.size() &&
           std::equal(positions.begin(), positions.end(), call().positions.begin(),
                      [&](const auto& t, auto k) { return t.sizes() == at::IntArrayRef(r.slots[k].type.sizes); });
  };
  if (fits() || choose([&] { return differs(op, stack) == nullptr && fits(); })) return std::nullopt;
  return op.schema().name() + " gives a tensor of another size than planned";
}

void follower::take_value(std::size_t id, const at::Tensor& t) {
  const auto k = recorded().tensors[id];
  set(id, t);
  storages_[recorded().slots[k].value] = t.storage().getWeakStorageImpl();
  ahead_values_.emplace_back(k, t);
}

std::unordered_set<const c10::StorageImpl*> follower::given_constants(const std::vector<at::Tensor>& returned) const {
  const auto& t = recorded();
  std::unordered_set<const c10::StorageImpl*> pending, found;  // storages of constants whose kernels have not run
  for (std::size_t i = 0; i < next_call_; ++i) {
    if (!t.calls[i].constant) continue;
    for (const auto& r : t.calls[i].results)
      if (const auto s = storages_[r.view.value].lock(); s && s->_mutable_data_ptr_no_checks().get() == nullptr)
        pending.insert(s.get());
  }
  if (pending.empty()) return found;
  const auto look = [&](const at::Tensor& x) {
    if (x.defined() && x.has_storage() && pending.count(storage_of(x)) > 0 && !has_memory(x)) found.insert(storage_of(x));
  };
  for (const auto* s : log_->copied())
    if (pending.count(s)) found.insert(s);
  for (const auto& x : returned) look(x);
  for (const auto& known : tensors_)
    if (const at::Tensor x(known.lock()); x.defined() && held_by_python(x)) look(x);
  return found;
}

bool follower::make_constants(const std::unordered_set<const c10::StorageImpl*>& wanted) {
  const auto& all = candidates_[current_].forward->makes_constant;
  std::vector<bool> chosen(all.size()), needed(storages_.size());
  for (std::size_t s = 0; s < storages_.size(); ++s) needed[s] = wanted.count(storages_[s].address()) > 0;
  const auto is_needed = [&](const traced_tensor& x) { return needed[x.view.value]; };
  for (auto i = next_call_; i-- > 0;) {
    const auto& c = recorded().calls[i];
    chosen[i] =
        all[i] && (std::any_of(c.results.begin(), c.results.end(), is_needed) ||
                   std::any_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.written && is_needed(o); }));
    for (const auto& o : c.operands) needed[o.view.value] = needed[o.view.value] || chosen[i];
  }
  return run_at_once(chosen) || run_at_once(all);
}

bool follower::record_from_here(const std::string& why) {
  if (std::this_thread::get_id() != thread_) return false;
  for (const auto& [k, t] : changed_slots_)  // their versions before the forward are unknown
    for (std::size_t i = 0; i < next_call_; ++i)
      for (const auto& o : recorded().calls[i].operands)
        if (o.written && o.view.value == recorded().slots[k].value) return false;
  if (!run_at_once(candidates_[current_].forward->makes_constant)) return false;
  divergence_ = why;
  diverged_at_ = next_call_;
  recording_ = resumed_recording::begin(*request_, inputs_, candidates_[current_], log_, versions_);
  return recording_ != nullptr;
}

std::unique_ptr<recorded_run> follower::finish_recording(const std::vector<at::Tensor>& returned) {
  auto f = std::make_unique<recorded_run>();
  try {
    f->recorded = std::make_shared<trace>(recording_->finish(returned));
  } catch (const cannot_capture&) {
    f->refusal = std::current_exception();
  }
  f->step = recording_->take();
  recording_.reset();
  return f;
}

void follower::run_backward(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
  if (left_plan_) throw left_plan();  // the backward's code has caught the exception
  if (const char* why = differs(op, stack)) fall_back(op.schema().name() + ": " + why);
  const auto& c = call();
  const auto first = stack.size() - c.arguments.size();
  for (const auto& o : c.operands) take_operand(o, tensor_at(stack, o, first));
  if (!changed_slots_.empty()) fall_back(op.schema().name() + ": another constant than planned");
  if (c.draws) generator().draw(next_call_);
  for (const auto& o : c.operands) written_[o.view.value] = written_[o.view.value] || o.written;
  if (c.assumes_zero) {
    run_on_zeros(op, stack);
    note_results(c, stack);
  } else if (candidates_[current_].forward->runs_at_once[next_call_]) {
    for (const auto& o : c.operands)
      if (!has_memory(tensor_at(stack, o, first))) fall_back(op.schema().name() + " asks for a number that is not there");
    op.callBoxed(&stack);
    note_results(c, stack);
  } else {
    const auto arguments = values_from(stack, first);
    reshape(c, arguments);
    replace_from(stack, first, results_of(c, arguments));
  }
  ++next_call_;
}

std::optional<std::string> follower::unfinished(const std::vector<at::Tensor>& returned) {
  const auto& t = recorded();
  if (next_call_ < t.backward) return "the forward ends before " + t.calls[next_call_].op.schema().name() + ", which is planned";
  if (returned.size() != t.results.size()) return "the forward returns another number of tensors than planned";
  for (std::size_t i = 0; i < returned.size(); ++i)
    if (const auto& known = tensors_[t.output_tensors[t.results[i]]];
        known ? known.address() != returned[i].unsafeGetTensorImpl() : !is_copy(t.results[i], returned[i]))
      return "the forward returns another tensor than planned";
  for (std::size_t id = 0; id < tensors_.size(); ++id) {
    if (t.tensors[id] != none) continue;
    if (const at::Tensor x(tensors_[id].lock()); !x.defined() || !held_by_python(x) || (has_memory(x) && !collects_gradient(x)))
      continue;
    if (!std::binary_search(t.python_held.begin(), t.python_held.end(), id) &&
        std::find(t.output_tensors.begin(), t.output_tensors.end(), id) == t.output_tensors.end())
      return "the module keeps a tensor that it did not keep when it was planned";
  }
  if (!generator().is_at(t.after_forward)) return "the forward leaves another state of the generator than planned";
  return std::nullopt;
}

bool follower::is_copy(std::size_t output, const at::Tensor& t) const {
  const auto& v = recorded().outputs[output];
  return recorded().tensors[recorded().output_tensors[output]] == none && t.has_storage() &&
         storages_[v.value].address() == storage_of(t) && byte_offset(t) == v.offset + shift_[v.value] &&
         t.sizes() == at::IntArrayRef(v.sizes) && t.strides() == at::IntArrayRef(v.strides) && t.scalar_type() == v.dtype;
}

void follower::reset_versions() const {
  for (const auto& [t, version] : versions_) set_version(t, version);
}

}  // namespace remat::pytorch::detail
