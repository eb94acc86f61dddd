// SPDX-License-Identifier: Apache-2.0
#include "follower.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "call_log.hpp"
#include "hollow.hpp"
#include "recorder.hpp"
#include "resumed_recording.hpp"
#include "weights_elsewhere.hpp"

namespace remat::pytorch::detail {
namespace {

bool same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor()) return b.isTensor();
  if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
  if (a.isNone()) return b.isNone();
  if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
  if (a.isDouble()) {
    if (!b.isDouble()) return false;
    const double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.isComplexDouble()) return b.isComplexDouble() && a.toComplexDouble() == b.toComplexDouble();
  if (a.isList()) {
    if (!b.isList()) return false;
    const auto x = a.toListRef(), y = b.toListRef();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), same);
  }
  if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
  if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
  return a.isGenerator() && b.isGenerator() && a.toGenerator() == b.toGenerator();
}

/// Where a storage from outside begins.
bytes_t start(const trace& t, index_t storage) {
  const auto k = t.storages[storage].slot;
  return k == none ? 0 : t.slots[k].offset;
}
bool same(const trace& x, const traced_tensor& a, const trace& y, const traced_tensor& b) {
  const auto &v = a.view, &w = b.view;
  return a.at == b.at && a.element == b.element && a.tensor == b.tensor && a.requires_grad == b.requires_grad &&
         v.value == w.value && v.sizes == w.sizes && v.strides == w.strides && v.dtype == w.dtype && v.conj == w.conj &&
         v.neg == w.neg && v.offset - start(x, v.value) == w.offset - start(y, w.value);
}

bool asks(const traced_call& c) { return c.results.empty() && !c.op.schema().returns().empty(); }

/// A tensor or a storage that may be gone by now. Its address is not used again meanwhile.
template <class Weak>
class identity {
 public:
  identity() : of_(nothing()) {}
  identity(Weak of) : of_(std::move(of)) {}
  explicit operator bool() const { return address() != nothing()._unsafe_get_target(); }
  auto* address() const { return of_._unsafe_get_target(); }
  auto lock() const { return of_.lock(); }

 private:
  static const Weak& nothing() {
    static const Weak none{decltype(std::declval<Weak>().lock())()};
    return none;
  }
  Weak of_;
};
using tensor_identity = identity<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>;
using storage_identity = identity<c10::weak_intrusive_ptr<c10::StorageImpl>>;

/// The backward makes other calls than planned.
struct left_plan : std::exception {
  const char* what() const noexcept override { return "remat: the backward of this step is not the planned one"; }
};

/// Follows one forward, or one backward.
class follower final : public c10::DebugInfoBase {
 public:
  follower(const std::vector<candidate>& candidates, const std::vector<at::Tensor>& inputs, const step_request& what)
      : candidates_(candidates),
        inputs_(inputs),
        what_(&what),
        log_(std::make_shared<call_log>(candidates.front().what->recorded->device)) {
    for (const auto& c : candidates_)
      for (const auto& w : c.what->recorded->written) {
        const auto& slot = c.what->recorded->slots[w.slot];
        if (slot.from == role::input && slot.position >= inputs_.size()) continue;
        const auto& t = slot.from == role::input ? inputs_[slot.position] : (*c.tensors)[w.slot];
        if (t.defined() && !t.is_inference()) versions_.emplace_back(t, t._version());
      }
    log_->before_ahead(what.make_room);
    bind();
  }

  /// Follows the backward of a step.
  follower(const candidate& step, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& output_grads)
      : candidates_{step}, inputs_(output_grads), backward_(true), at_(step.what->recorded->backward) {
    generator_.emplace(step.what->recorded->device);
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

  void run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
    if (backward_) return run_backward(op, stack);
    refuse();
    if (log_->filled()) return op.callBoxed(&stack);
    if (log_->exposes() && touched(op, stack)) {
      diverge(op.schema().name() + " uses a tensor whose memory the module has written without an operator");
      return op.callBoxed(&stack);
    }
    while (const char* why = differs(op, stack)) {
      if (choose_another(op, stack)) continue;
      const auto text = op.schema().name() + ": " + why;
      if (record_on(text)) return fresh_->call(op, stack);
      diverge(text);
      return op.callBoxed(&stack);
    }
    std::vector<at::Tensor> positions;
    std::optional<::torch::jit::Stack> made;  // by a call that runs ahead of the plan
    if (call().ahead || !call().positions.empty()) {
      if (const auto why = ask(op, stack, positions, made)) {
        if (record_on(*why)) return fresh_->call(op, stack);
        diverge(*why);
        return op.callBoxed(&stack);
      }
    }
    const auto& c = call();
    const auto n = c.arguments.size(), first = stack.size() - n;
    for (const auto& o : c.operands) take(o, tensor_at(stack, first, o));
    if (c.draws) generator().draw(at_);
    for (std::size_t j = 0; j < positions.size(); ++j) take_value(tensor_in(recorded(), c.positions[j]), positions[j]);
    if (made) {
      std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
      stack.resize(first);
      stack.insert(stack.end(), made->begin(), made->end());
      for (const auto& r : c.results) take_value(r.tensor, tensor_at(*made, 0, r));
      log_->add(at_, op, std::move(arguments), std::move(*made), c.draws, true);
      ran_.push_back(true);
      ++at_;
      return;
    }
    if (candidates_[current_].what->runs[at_]) {
      if (std::any_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.written && read_[o.view.value]; })) {
        diverge(op.schema().name() + " writes a constant that a call before it reads");
        return op.callBoxed(&stack);
      }
      const std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
      const weights_there lent(arguments);
      op.callBoxed(&stack);
      meet_results(c, stack);
      log_->add(at_, op, arguments, {stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end()}, c.draws, true,
                std::move(positions));
      ran_.push_back(true);
      ++at_;
      return;
    }
    ran_.push_back(false);
    for (const auto& o : c.operands) {
      read_[o.view.value] = true;
      if (c.constant) continue;
      if (o.written) written_[o.view.value] = true;
      if (o.written && recorded().storages[o.view.value].slot == none && has_memory(tensor_at(stack, first, o)))
        log_->hide(tensor_at(stack, first, o).storage());  // a constant until now
    }
    std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
    const bool moved = reshape(c, arguments);
    auto results = results_of(c, arguments);
    stack.resize(first);
    stack.insert(stack.end(), results.begin(), results.end());
    if (!moved) log_->add(at_, op, std::move(arguments), std::move(results), c.draws, false, std::move(positions));
    ++at_;
  }

  /// From here on eagerly.
  void diverge(std::string why) {
    if (eager()) return;
    why_ = std::move(why);
    where_ = at_;
    if (backward_) {
      left_ = true;
      throw left_plan();
    }
    if (!what_->elsewhere) return log_->fill();
    left_ = true;
    put_back();
    refuse();
  }
  /// Code of the module may have caught the refusal.
  void refuse() const {
    if (left_ && !backward_) throw cannot_capture("call " + std::to_string(where_) + " differs from the planned one: " + why_);
  }
  bool eager() const { return log_ && log_->filled(); }
  /// The forward is recorded from the call on where it has left the candidates.
  resumed_recording* fresh() const { return fresh_.get(); }
  /// In a handler: the forward has thrown.
  void stopped() {
    if (fresh_) return fresh_->stopped();
    refuse();
    if (!eager()) log_->fill();
  }
  /// The module is about to look at the memory of a tensor.
  /// @return it may
  bool show(const at::Tensor& t, bool may_write) {
    if (eager() || !t.has_storage()) return true;
    for (std::size_t s = 0; s < live_.size(); ++s) {
      if (live_[s].address() != storage_of(t)) continue;
      if (backward_ && written_[s]) return false;  // by a call that has not run
      if (!has_memory(t) && !backward_ && !written_[s]) run_now(candidates_[current_].what->constants);
      if (!backward_ && (written_[s] || !has_memory(t))) {
        if ((may_write && recorded().storages[s].slot != none) || !run_ahead({t}) || !has_memory(t)) return false;
        if (may_write) {
          log_->pin(t);
          log_->expose(t);
        }
        return true;
      }
      if (!has_memory(t)) return false;
      const auto k = recorded().storages[s].slot;
      const bool filled_by_hand = k != none && recorded().slots[k].from == role::constant;
      const bool watch = filled_by_hand ? looked_[k] : k == none || storage_of(t)->nbytes() <= constant_limit;
      if (may_write && log_ && watch) log_->expose(t);
    }
    return has_memory(t);
  }

  bool has_drawn() const {
    const auto& calls = recorded().calls;
    return !eager() && std::any_of(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(at_),
                                   [](const auto& c) { return c.draws.has_value(); });
  }

  std::size_t calls() const { return at_; }
  auto writes(std::size_t since, std::size_t until, bool all) const { return writes_since(*log_, recorded(), since, until, all); }

  bool left() const { return left_; }
  /// The backward has ended. @return how it differs
  std::string finish() {
    if (!left_ && at_ < recorded().accumulated)
      why_ = "the backward ends before " + call().op.schema().name() + ", which is planned";
    else if (!left_ && !generator().is_at(recorded().after_backward))
      why_ = "the backward leaves another state of the generator than planned";
    generator().rewind();
    reset_versions();
    return why_;
  }

  followed finish(std::vector<at::Tensor> returned) {
    refuse();
    followed f;
    f.returned = std::move(returned);
    const auto follows = [&] { return !fresh_ && !log_->filled(); };
    if (follows() && log_->is_any_touched()) diverge("the module has written memory without an operator that calls have read");
    if (follows() && gives_constants(f.returned) && !run_now(candidates_[current_].what->constants))
      diverge("the module keeps or returns a constant that it has written after reading it");
    if (follows()) {
      while (const auto why = unfinished(f.returned)) {
        if (choose_another_end(f.returned)) continue;
        if (!record_on(*why)) diverge(*why);
        break;
      }
    }
    if (follows() && std::any_of(f.returned.begin(), f.returned.end(),
                                 [&](const auto& t) { return t.defined() && t.has_storage() && log_->is_pinned(storage_of(t)); }))
      diverge("the module returns a tensor whose memory it has read directly");
    if (fresh_) f.fresh = finish_recording(f.returned);
    if (f.fresh || log_->filled()) {
      f.why = why_;
      f.at = where_;
      return f;
    }
    f.which = current_;
    for (std::size_t i = 0; i < f.returned.size(); ++i)
      if (const auto id = recorded().output_tensors[recorded().results[i]]; !tensors_[id]) set(id, f.returned[i]);
    for (auto id : recorded().output_tensors) f.outputs.push_back(at::Tensor(tensors_[id].lock()));
    for (const auto& t : tensors_) f.tensors.emplace_back(t.lock());
    f.late = std::move(late_);
    f.late.insert(f.late.end(), values_.begin(), values_.end());
    put_back();
    f.log = log_;
    return f;
  }

 private:
  /// Runs the calls until now ahead of the plan. @return false: they cannot
  bool run_ahead(const std::vector<at::Tensor>& wanted) { return log_->run_ahead(recorded().calls, wanted); }
  /// A call whose results depend on values: looks at these.
  /// @param positions gets those in its masks
  /// @param made      gets its results, if it does not take masks
  /// @return why no candidate goes on like this; nothing: the present one does
  std::optional<std::string> ask(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack,
                                 std::vector<at::Tensor>& positions, std::optional<::torch::jit::Stack>& made) {
    const auto& c = call();
    const auto first = stack.size() - c.arguments.size();
    const auto masks = takes_masks(op);
    std::vector<at::Tensor> wanted;
    for (const auto& o : c.operands) {
      const auto& t = tensor_at(stack, first, o);
      if (c.ahead || (o.at == masks && is_mask(t))) wanted.push_back(t);
    }
    const bool there = std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
      if (!c.ahead && o.at != masks) return true;
      const bool outside = recorded().storages[o.view.value].slot != none;
      return (outside || (!c.ahead && c.told)) && !written_[o.view.value] && has_memory(tensor_at(stack, first, o));
    });
    if (!there && !run_ahead(wanted))
      return op.schema().name() + " depends on values, and the module has written memory without an operator";
    if (c.ahead) {
      made.emplace(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
      const weights_there lent(*made);
      op.callBoxed(&*made);
    } else {
      const std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
      for (const auto& m : wanted)
        for (const auto& list : positions_in(m, op, arguments)) positions.push_back(list);
    }
    for (const auto& t : wanted)
      if (const auto of = std::find_if(c.operands.begin(), c.operands.end(),
                                       [&](const auto& o) { return tensor_at(stack, first, o).is_same(t); });
          !there && recorded().storages[of->view.value].slot == none)
        hide(storage_of(t));
    const auto fits = [&] {
      const auto& r = recorded();
      if (made)
        return std::all_of(call().results.begin(), call().results.end(), [&](const auto& x) {
          const auto& t = tensor_at(*made, 0, x);
          return t.sizes() == at::IntArrayRef(x.view.sizes) && t.strides() == at::IntArrayRef(x.view.strides);
        });
      return positions.size() == call().positions.size() &&
             std::equal(positions.begin(), positions.end(), call().positions.begin(),
                        [&](const auto& t, auto k) { return t.sizes() == at::IntArrayRef(r.slots[k].type.sizes); });
    };
    if (fits() || choose([&] { return differs(op, stack) == nullptr && fits(); })) return std::nullopt;
    return op.schema().name() + " gives a tensor of another size than planned";
  }
  /// A tensor that depends on values: an input of the plan.
  void take_value(std::size_t id, const at::Tensor& t) {
    const auto k = recorded().tensors[id];
    set(id, t);
    live_[recorded().slots[k].value] = t.storage().getWeakStorageImpl();
    values_.emplace_back(k, t);
  }
  /// Runs those of the calls until now, unless they write what another one reads, which has not run.
  /// @return it has
  bool run_now(const std::vector<bool>& chosen) {
    const auto& calls = recorded().calls;
    std::vector<bool> read(live_.size());
    bool any = false;
    for (std::size_t i = 0; i < at_; ++i) any = any || (chosen[i] && !ran_[i]);
    if (!any) return true;
    if (log_->has_pinned()) return false;
    for (std::size_t i = 0; i < at_; ++i)
      for (const auto& o : calls[i].operands) {
        if (!chosen[i] && !ran_[i]) read[o.view.value] = true;
        if (chosen[i] && !ran_[i] && o.written && read[o.view.value]) return false;
      }
    log_->fill(chosen);
    for (std::size_t i = 0; i < at_; ++i) ran_[i] = ran_[i] || chosen[i];
    for (std::size_t s = 0; s < live_.size(); ++s)
      if (const auto there = live_[s].lock(); there && written_[s] && recorded().storages[s].slot == none)
        log_->hide(c10::Storage(there));
    return true;
  }
  /// The module has a constant in its hands, or returns one.
  bool gives_constants(const std::vector<at::Tensor>& returned) const {
    const auto& t = recorded();
    for (std::size_t i = 0; i < at_; ++i) {
      if (!t.calls[i].constant) continue;
      for (const auto& r : t.calls[i].results)
        if (const at::Tensor x(tensors_[r.tensor].lock());
            x.defined() && !has_memory(x) &&
            (held_by_python(x) || std::any_of(returned.begin(), returned.end(), [&](const auto& y) { return y.is_same(x); })))
          return true;
    }
    return false;
  }
  bool touched(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) const {
    const auto& arguments = op.schema().arguments();
    bool found = false;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      each_tensor(stack[stack.size() - arguments.size() + i],
                  [&](const at::Tensor& t, int) { found = found || log_->is_touched(t, alias != nullptr && alias->isWrite()); });
    }
    return found;
  }
  /// No candidate makes the calls of this forward: tries to record it from here on.
  bool record_on(const std::string& why) {
    if (std::this_thread::get_id() != thread_) return false;
    for (const auto& [k, t] : late_)  // whose first version nobody has noted
      for (std::size_t i = 0; i < at_; ++i)
        for (const auto& o : recorded().calls[i].operands)
          if (o.written && o.view.value == recorded().slots[k].value) return false;
    if (!run_now(candidates_[current_].what->constants)) return false;
    why_ = why;
    where_ = at_;
    fresh_ = resumed_recording::begin(*what_, inputs_, candidates_[current_], log_, versions_);
    return fresh_ != nullptr;
  }
  std::unique_ptr<recorded_run> finish_recording(const std::vector<at::Tensor>& returned) {
    auto f = std::make_unique<recorded_run>();
    try {
      f->recorded = std::make_shared<trace>(fresh_->finish(returned));
    } catch (const cannot_capture&) {
      f->refusal = std::current_exception();
    }
    f->run = fresh_->take();
    fresh_.reset();
    return f;
  }
  still_generator& generator() { return backward_ ? *generator_ : log_->generator(); }
  const trace& recorded() const { return *candidates_[current_].what->recorded; }
  const traced_call& call() const { return recorded().calls[at_]; }

  void run_backward(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
    if (left_) throw left_plan();  // code has caught it
    if (const char* why = differs(op, stack)) diverge(op.schema().name() + ": " + why);
    const auto& c = call();
    const auto first = stack.size() - c.arguments.size();
    for (const auto& o : c.operands) take(o, tensor_at(stack, first, o));
    if (!late_.empty()) diverge(op.schema().name() + ": another constant than planned");
    if (c.draws) generator().draw(at_);
    for (const auto& o : c.operands) written_[o.view.value] = written_[o.view.value] || o.written;
    if (candidates_[current_].what->runs[at_]) {
      for (const auto& o : c.operands)
        if (!has_memory(tensor_at(stack, first, o))) diverge(op.schema().name() + " asks for a number that is not there");
      op.callBoxed(&stack);
      meet_results(c, stack);
    } else {
      const std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
      reshape(c, arguments);
      auto results = results_of(c, arguments);
      stack.resize(first);
      std::move(results.begin(), results.end(), std::back_inserter(stack));
    }
    ++at_;
  }

  void reserve() {
    const auto& t = recorded();
    tensors_.resize(t.tensors.size());
    live_.resize(t.storages.size());
    read_.resize(t.storages.size());
    looked_.resize(t.slots.size());
    written_.resize(t.storages.size());
    shift_.resize(t.storages.size());
  }
  /// Takes parameters, buffers and inputs for known.
  void bind() {
    reserve();
    const auto& t = recorded();
    for (std::size_t id = 0; id < t.tensors.size(); ++id) {
      if (t.tensors[id] == none || tensors_[id]) continue;
      const auto& slot = t.slots[t.tensors[id]];
      if (slot.from == role::input && slot.position < inputs_.size())
        bind(id, inputs_[slot.position]);
      else if (slot.from == role::parameter || slot.from == role::buffer)
        bind(id, (*candidates_[current_].tensors)[t.tensors[id]]);
    }
  }
  void bind(std::size_t id, const at::Tensor& t) {
    if (!t.defined()) return;
    const auto& slot = recorded().slots[recorded().tensors[id]];
    set(id, t);
    if (t.has_storage() && of_.emplace(storage_of(t), slot.value).first->second != slot.value) shared_ = true;
    locate(slot.value, t, slot.offset);
  }
  /// A storage is seen for the first time, or again.
  /// @param recorded_at where `t` began in it when it was recorded
  void locate(index_t storage, const at::Tensor& t, bytes_t recorded_at) {
    if (live_[storage]) return;
    live_[storage] = t.storage().getWeakStorageImpl();
    shift_[storage] = t.storage_offset() * static_cast<bytes_t>(t.itemsize()) - recorded_at;
  }
  /// What a call has made that has run.
  void meet_results(const traced_call& c, const ::torch::jit::Stack& stack) {
    for (const auto& r : c.results) {
      const auto& t = tensor_at(stack, stack.size() - c.op.schema().returns().size(), r);
      set(r.tensor, t);
      if (!live_[r.view.value]) live_[r.view.value] = t.storage().getWeakStorageImpl();
    }
  }
  void set(std::size_t id, const at::Tensor& t) {
    tensors_[id] = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(t.getIntrusivePtr());
  }

  static const at::Tensor& tensor_at(const ::torch::jit::Stack& stack, std::size_t first, const traced_tensor& o) {
    const auto& v = stack[first + static_cast<std::size_t>(o.at)];
    return o.element < 0 ? v.toTensor() : v.toListRef()[static_cast<std::size_t>(o.element)].toTensor();
  }

  /// @return how the call differs from the next one of the candidate, or null
  const char* differs(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
    if (at_ >= (backward_ ? recorded().accumulated : recorded().backward)) return "comes after the last call of the plan";
    const auto& c = call();
    if (!(c.op == op)) return "another operator than planned";
    if (c.grad_mode != at::GradMode::is_enabled()) return "another grad mode than planned";
    const auto n = c.arguments.size(), first = stack.size() - n;
    const char* why = nullptr;
    std::size_t k = 0;
    for (std::size_t i = 0; i < n && why == nullptr; ++i) {
      const auto& a = stack[first + i];
      if (!same(a, c.arguments[i])) {
        const bool tensors =
            a.isTensor() || (a.isList() && c.arguments[i].isList() && a.toListRef().size() == c.arguments[i].toListRef().size());
        if (!tensors || !same_but_tensors(a, c.arguments[i])) return "another argument than planned";
      }
      each_tensor(a, [&](const at::Tensor& t, int element) {
        if (why != nullptr) return;
        if (k == c.operands.size() || c.operands[k].at != static_cast<int>(i) || c.operands[k].element != element)
          why = "one tensor more than planned";
        else
          why = differs(c.operands[k++], t);
      });
    }
    if (why == nullptr && k < c.operands.size()) why = "one tensor less than planned";
    if (why == nullptr && c.draws && !generator().is_at(*c.draws)) why = "another state of the generator than planned";
    return why;
  }
  /// In the recorded arguments undefined tensors are in the place of operands.
  static bool same_but_tensors(const c10::IValue& a, const c10::IValue& b) {
    if (a.isTensor()) return b.isTensor();
    if (!a.isList() || !b.isList()) return false;
    const auto x = a.toListRef(), y = b.toListRef();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                      [](const auto& p, const auto& q) { return p.isTensor() ? q.isTensor() || q.isNone() : same(p, q); });
  }

  const char* differs(const traced_tensor& o, const at::Tensor& t) const {
    const auto& known = tensors_[o.tensor];
    if (!t.has_storage() || t.layout() != c10::kStrided) return "a tensor without a plain storage";
    // Autograd unpacks some as tensors of their own, and functions in Python copy what a factory gives them.
    const bool copied = static_cast<bool>(live_[o.view.value]);
    if (known ? known.address() != t.unsafeGetTensorImpl() : recorded().tensors[o.tensor] == none && !copied)
      return "another tensor than planned";
    const auto& s = live_[o.view.value];
    if (s ? s.address() != storage_of(t) : static_cast<bool>(known)) return "a tensor of other memory than planned";
    if (t.requires_grad() != o.requires_grad) return "a tensor with another requires_grad than planned";
    const auto& v = o.view;
    if (t.scalar_type() != v.dtype || t.sizes() != at::IntArrayRef(v.sizes) || t.strides() != at::IntArrayRef(v.strides) ||
        t.is_conj() != v.conj || t.is_neg() != v.neg)
      return "a tensor of another geometry than planned";
    if (s && t.storage_offset() * static_cast<bytes_t>(t.itemsize()) != v.offset + shift_[v.value])
      return "a tensor in another place than planned";
    if (o.written && shared_ && recorded().storages[v.value].slot != none)
      return "a write to memory that two arguments may share";
    if (!known && recorded().tensors[o.tensor] != none) {
      const auto& slot = recorded().slots[recorded().tensors[o.tensor]];
      if (t.device() != slot.type.device || t.unsafeGetTensorImpl()->is_wrapped_number() != slot.number || o.written)
        return "a tensor that was not there before";
    }
    return nullptr;
  }

  /// An operand, seen for the first time, or again.
  void take(const traced_tensor& o, const at::Tensor& t) {
    if (log_) log_->hold(t);
    if (tensors_[o.tensor]) {
      if (const auto k = recorded().storages[o.view.value].slot;
          k != none && recorded().slots[k].from == role::constant && recorded().tensors[o.tensor] == none && !looked_[k])
        look_at(k, t.storage(), bytes_of(t));  // filled by hand
      return;
    }
    const auto k = recorded().tensors[o.tensor];
    set(o.tensor, t);
    if (k == none) return;
    locate(o.view.value, t, o.view.offset);
    look_at(k, t.storage(), t);
  }
  /// Is what lies in a slot what the program has there?
  void look_at(index_t k, const c10::Storage& s, const at::Tensor& t) {
    const auto& slot = recorded().slots[k];
    looked_[k] = true;
    bool as_planned = slot.from != role::input;
    if (slot.from == role::constant) {
      as_planned = content_of(s) == recorded().constants[slot.position];
    } else if (slot.from == role::found) {
      const auto& bound = (*candidates_[current_].tensors)[k];
      as_planned = bound.defined() && bound.unsafeGetTensorImpl() == t.unsafeGetTensorImpl();
      if (!as_planned)
        as_planned = bound.defined() && bound.storage().is_alias_of(s) && bound.storage_offset() == t.storage_offset();
    }
    if (!as_planned) late_.emplace_back(k, t);
  }

  /// Gives operands the geometry that a call gives them (`transpose_`).
  /// @return there are some: the call does nothing else
  bool reshape(const traced_call& c, const std::vector<c10::IValue>& arguments) {
    bool any = false;
    for (const auto& r : c.results)
      for (const auto& o : c.operands) {
        if (o.tensor != r.tensor || same_place(o.view, r.view)) continue;
        const auto& t = tensor_at(arguments, 0, o);
        if (log_) log_->replace({{t.unsafeGetTensorImpl(), another(t)}});
        t.unsafeGetTensorImpl()->set_sizes_and_strides(
            r.view.sizes, r.view.strides, (r.view.offset + shift_[r.view.value]) / static_cast<bytes_t>(t.itemsize()));
        any = true;
      }
    return any;
  }
  static bool same_place(const byte_view& a, const byte_view& b) {
    return a.sizes == b.sizes && a.strides == b.strides && a.offset == b.offset;
  }

  std::vector<c10::IValue> results_of(const traced_call& c, const std::vector<c10::IValue>& arguments) {
    const auto& returns = c.op.schema().returns();
    std::vector<c10::IValue> results;
    std::size_t j = 0;
    const auto next = [&]() -> at::Tensor {
      const auto& r = c.results[j++];
      if (tensors_[r.tensor])  // an operand
        for (const auto& o : c.operands)
          if (o.tensor == r.tensor) return tensor_at(arguments, 0, o);
      const auto& value = recorded().storages[r.view.value];
      const auto there = live_[r.view.value].lock();
      const auto s = there ? c10::Storage(there) : hollow_storage(static_cast<std::size_t>(value.bytes), value.device);
      live_[r.view.value] = s.getWeakStorageImpl();
      auto v = r.view;
      v.offset += shift_[r.view.value];
      auto t = tensor_over(s, v);
      set(r.tensor, t);
      return t;
    };
    for (std::size_t i = 0; i < returns.size(); ++i) {
      const auto here = [&] { return j < c.results.size() && c.results[j].at == static_cast<int>(i); };
      if (returns[i].type()->kind() == c10::TypeKind::ListType) {
        c10::List<at::Tensor> list;
        while (here()) list.push_back(next());
        results.emplace_back(std::move(list));
      } else {
        results.emplace_back(here() ? next() : at::Tensor());
      }
    }
    return results;
  }

  /// A candidate that has made the same calls until now, and makes this one.
  bool choose_another(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
    return choose([&] { return differs(op, stack) == nullptr; });
  }
  bool choose_another_end(const std::vector<at::Tensor>& returned) {
    return choose([&] { return !unfinished(returned); });
  }
  template <class F>
  bool choose(F suits) {
    const auto before = current_;
    for (current_ = before + 1; current_ < candidates_.size(); ++current_) {
      if (common_calls(*candidates_[before].what->recorded, recorded()) < at_) continue;
      if (!late_.empty()) break;  // the programs may have other constants
      bind();
      if (suits() && run_now(candidates_[current_].what->runs)) return true;
    }
    current_ = before;
    return false;
  }

  /// @return what keeps the forward from being that of the candidate
  std::optional<std::string> unfinished(const std::vector<at::Tensor>& returned) {
    const auto& t = recorded();
    if (at_ < t.backward) return "the forward ends before " + t.calls[at_].op.schema().name() + ", which is planned";
    if (returned.size() != t.results.size()) return "the forward returns another number of tensors than planned";
    for (std::size_t i = 0; i < returned.size(); ++i)
      if (const auto& known = tensors_[t.output_tensors[t.results[i]]];
          known ? known.address() != returned[i].unsafeGetTensorImpl() : !is_copy(t.results[i], returned[i]))
        return "the forward returns another tensor than planned";
    for (std::size_t id = 0; id < tensors_.size(); ++id) {
      if (t.tensors[id] != none) continue;
      if (const at::Tensor x(tensors_[id].lock()); !x.defined() || !held_by_python(x) || has_memory(x)) continue;
      if (!std::binary_search(t.held.begin(), t.held.end(), id) &&
          std::find(t.output_tensors.begin(), t.output_tensors.end(), id) == t.output_tensors.end())
        return "the module keeps a tensor that it did not keep when it was planned";
    }
    if (!generator().is_at(t.after_forward)) return "the forward leaves another state of the generator than planned";
    return std::nullopt;
  }

  /// A tensor that was copied when it was recorded, too, over the memory of a call.
  bool is_copy(std::size_t output, const at::Tensor& t) const {
    const auto& v = recorded().outputs[output];
    return recorded().tensors[recorded().output_tensors[output]] == none && t.has_storage() &&
           live_[v.value].address() == storage_of(t) &&
           t.storage_offset() * static_cast<bytes_t>(t.itemsize()) == v.offset + shift_[v.value] &&
           t.sizes() == at::IntArrayRef(v.sizes) && t.strides() == at::IntArrayRef(v.strides) && t.scalar_type() == v.dtype;
  }

  /// Everything outside is as before the forward.
  void put_back() const {
    log_->give_back();
    reset_versions();
    log_->generator().rewind();
  }
  void reset_versions() const {
    for (const auto& [t, version] : versions_) {
      auto counter = t.unsafeGetTensorImpl()->version_counter();
      counter.set_version(version);
    }
  }

  std::vector<candidate> candidates_;
  const std::vector<at::Tensor>& inputs_;
  bool backward_ = false, left_ = false;
  std::size_t current_ = 0, at_ = 0, where_ = 0;
  const step_request* what_ = nullptr;  ///< of a forward
  std::unique_ptr<resumed_recording> fresh_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::shared_ptr<call_log> log_;                            ///< of a forward
  std::optional<still_generator> generator_;                 ///< of a backward
  std::vector<tensor_identity> tensors_;                     ///< per tensor of the trace, once it has been met
  std::vector<storage_identity> live_;                       ///< per storage of the trace
  std::vector<bool> read_, written_;                         ///< per storage: by a call that has not run
  std::unordered_map<const c10::StorageImpl*, index_t> of_;  ///< of tensors from outside
  bool shared_ = false;                                      ///< two that did not share memory when recorded do so now
  std::vector<bool> ran_;                                    ///< per call until now
  std::vector<bool> looked_;                                 ///< per slot: what lies there has been compared
  std::vector<bytes_t> shift_;  ///< per storage from outside: how much further on it begins than when recorded
  std::vector<std::pair<index_t, at::Tensor>> late_, values_;
  std::vector<std::pair<at::Tensor, int64_t>> versions_;  ///< of tensors from outside that the forward writes
  std::string why_;
};

follower* followed_by_thread() { return static_cast<follower*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2)); }

std::atomic<void (*)()> forget_exception = nullptr;

}  // namespace

recorded_forward::recorded_forward(std::shared_ptr<const trace> t) : recorded(std::move(t)) {
  const auto& r = *recorded;
  std::vector<bool> written(r.storages.size());
  for (const auto& c : r.calls)
    for (const auto& o : c.operands) written[o.view.value] = written[o.view.value] || o.written;
  for (index_t k = 0; k < r.slots.size(); ++k)
    if (written[r.slots[k].value] && r.slots[k].from != role::constant && r.slots[k].from != role::output_grad)
      writes.push_back(k);
  runs.resize(r.calls.size());
  for (const auto& c : r.calls) constants.push_back(c.constant);
  const auto by_hand = [&](const traced_tensor& x) {
    const auto k = r.storages[x.view.value].slot;
    return k != none && r.slots[k].from == role::constant;
  };
  std::vector<bool> needed(r.storages.size());
  for (std::size_t i = r.calls.size(); i-- > 0;) {
    const auto& c = r.calls[i];
    if (c.ahead) {
      runs[i] = true;
      continue;
    }
    if (!c.positions.empty() && c.told)
      for (const auto& o : c.operands)
        if (o.at == takes_masks(c.op) && r.storages[o.view.value].slot == none) needed[o.view.value] = true;
    runs[i] = asks(c);
    if (runs[i] && !is_dynamic(c.op, [](int) { return false; })) continue;  // about the geometry of tensors (`_fused_sdp_choice`)
    for (const auto& o : c.operands) runs[i] = runs[i] || (o.written && (needed[o.view.value] || (c.constant && by_hand(o))));
    for (const auto& x : c.results) runs[i] = runs[i] || needed[x.view.value] || (c.constant && by_hand(x));
    if (!runs[i]) continue;
    for (const auto& o : c.operands)
      if (r.storages[o.view.value].slot == none) needed[o.view.value] = true;
  }
}

std::size_t same_calls(const trace& a, const trace& b, std::size_t most) {
  for (std::size_t i = 0; i < most; ++i) {
    const auto &x = a.calls[i], &y = b.calls[i];
    const auto equal = [&](const auto& p, const auto& q) { return same(a, p, b, q); };
    if (!(x.op == y.op) || x.grad_mode != y.grad_mode || x.constant != y.constant ||
        !std::equal(x.arguments.begin(), x.arguments.end(), y.arguments.begin(), y.arguments.end(),
                    [](const auto& p, const auto& q) { return same(p, q); }) ||
        !std::equal(x.operands.begin(), x.operands.end(), y.operands.begin(), y.operands.end(), equal) ||
        !std::equal(x.results.begin(), x.results.end(), y.results.begin(), y.results.end(), equal) || x.ahead != y.ahead ||
        x.positions != y.positions || x.told != y.told)
      return i;
  }
  return most;
}

bool same_outside(const trace& a, const trace& b) {
  const auto same = [&](index_t k, index_t l) {
    if (k == none || l == none) return k == l;
    const auto &x = a.slots[k], &y = b.slots[l];
    const auto of_module = [](const slot& s) { return s.from == role::parameter || s.from == role::buffer; };
    if (of_module(x) && of_module(y)) return k == l;  // what is trained depends on the use of the outputs
    if (x.from != y.from) return false;
    if (x.from == role::constant) return a.constants[x.position] == b.constants[y.position];
    if (x.from == role::found) return a.found[x.position].is_same(b.found[y.position]);
    return x.position == y.position;
  };
  for (std::size_t i = 0; i < std::min(a.backward, b.backward); ++i)
    for (std::size_t k = 0; k < a.calls[i].operands.size(); ++k)
      if (!same(a.tensors[a.calls[i].operands[k].tensor], b.tensors[b.calls[i].operands[k].tensor])) return false;
  return true;
}

followed follow(const std::vector<candidate>& candidates, const forward_function& forward, const std::vector<at::Tensor>& inputs,
                const step_request& what) {
  const auto f = std::make_shared<follower>(candidates, inputs, what);
  at::autocast::clear_cache();  // what it holds is not among the calls, and what it will hold is hollow
  std::vector<at::Tensor> returned;
  {
    const c10::DebugInfoGuard here(c10::DebugInfoKind::TEST_INFO_2, f);
    const c10::impl::IncludeDispatchKeyGuard key(c10::DispatchKey::Fake);
    try {
      returned = forward(inputs);
    } catch (...) {
      f->stopped();
      throw;
    }
  }
  auto result = f->finish(std::move(returned));
  if (result.which || result.fresh) at::autocast::clear_cache();
  return result;
}

std::string differing_backward(const candidate& step, const std::vector<at::Tensor>& tensors,
                               std::vector<at::Tensor> output_grads,
                               const std::function<void(std::vector<at::Tensor>)>& backward) {
  const auto f = std::make_shared<follower>(step, tensors, output_grads);
  const c10::DebugInfoGuard here(c10::DebugInfoKind::TEST_INFO_2, f);
  try {
    backward(std::move(output_grads));
  } catch (const std::exception&) {
    if (!f->left()) {
      f->finish();
      throw;
    }
    if (auto* forget = forget_exception.load()) forget();
  }
  return f->finish();
}

bool follow_call(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
  auto* f = followed_by_thread();
  if (f == nullptr || f->fresh() != nullptr) return false;
  f->run(op, stack);
  return true;
}

void leave_followed(const char* why) {
  if (auto* f = followed_by_thread()) f->diverge(why);
}

std::size_t followed_calls() { return followed_by_thread()->calls(); }

std::vector<std::pair<c10::OperatorHandle, std::vector<c10::IValue>>> followed_writes(std::size_t since, std::size_t until,
                                                                                      bool all) {
  return followed_by_thread()->writes(since, until, all);
}

bool has_followed_draws() {
  const auto* f = followed_by_thread();
  return f != nullptr && f->has_drawn();
}

bool is_followed() {
  const auto* f = followed_by_thread();
  return f != nullptr && f->fresh() == nullptr && !f->eager();
}

void read_by_follower(const at::Tensor& t, bool may_write) {
  if (auto* f = followed_by_thread(); f != nullptr && !f->show(t, may_write))
    f->diverge("the module reads the memory of a tensor directly");
}

}  // namespace remat::pytorch::detail

namespace remat::pytorch {

void when_caught(void (*forget)()) { detail::forget_exception = forget; }

}  // namespace remat::pytorch
