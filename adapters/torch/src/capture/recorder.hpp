// SPDX-License-Identifier: Apache-2.0
/// @file
/// Writes down the operators of a step while it runs without memory. Private to the adapter.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../program/views.hpp"
#include "call_log.hpp"
#include "draws.hpp"
#include "follower.hpp"
#include "hollow.hpp"
#include "known_results.hpp"
#include "lists.hpp"
#include "operators.hpp"
#include "questions.hpp"
#include "trace.hpp"
#include "weights_elsewhere.hpp"

namespace remat::pytorch::detail {

/// Constants (results of operators without any other input) keep their values up to this size, so that masks can be asked.
inline constexpr std::size_t constant_limit = std::size_t{1} << 20;

/// An argument with undefined tensors in place of its tensors.
inline c10::IValue without_tensors(const c10::IValue& v) {
  if (v.isTensor()) return c10::IValue(at::Tensor());
  if (!v.isList()) return v;
  auto list = v.toList().copy();
  for (std::size_t i = 0; i < list.size(); ++i)
    if (list.get(i).isTensor()) list.set(i, c10::IValue(at::Tensor()));
  return c10::IValue(list);
}

/// What is known of the contents of a storage while recording.
enum class contents {
  outside,   ///< parameters, buffers and other tensors that were there before
  constant,  ///< made during the capture, the same in every step
  kept,      ///< small integers that other operators may index with: valid values, but not constants
  hollow     ///< no memory
};

/// A call that was recorded before, as part of another step. Its results are there.
struct repeated_call {
  const std::vector<c10::IValue>* results = nullptr;
  const traced_call* before = nullptr;
  const std::vector<at::Tensor>* positions = nullptr;  ///< in the place of masks
};

/// Runs each operator of a step on tensors without memory, and writes it down: the calls, what they read and write, and what is
/// known of the contents. What it wrote outside of the step is put back when it goes.
class recorder {
 public:
  recorder(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
           const std::vector<std::string>& names, c10::Device device)
      : draws_(std::in_place, device), device_(device) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      add_outside(parameters[i], parameters[i].requires_grad() ? role::parameter : role::buffer, i,
                  i < names.size() ? names[i] : "parameter " + std::to_string(i));
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto at = parameters.size() + i;
      add_outside(buffers[i], role::buffer, at, at < names.size() ? names[at] : "buffer " + std::to_string(i));
    }
  }
  /// Goes on where the forward of `t` has ended.
  /// @param tensors by their numbers; undefined: nobody can use it
  recorder(const trace& t, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& parameters)
      : trace_(t), draws_(std::in_place, t.device), device_(t.device) {
    const auto& end = t.forward;
    trace_.calls.erase(trace_.calls.begin() + static_cast<std::ptrdiff_t>(t.backward), trace_.calls.end());
    trace_.slots.resize(end.slots);
    trace_.storages.resize(end.storages);
    trace_.tensors.resize(end.tensors);
    for (index_t k = 0; k < parameters.size(); ++k)  // whose slots come first
      if (parameters[k].requires_grad()) trace_.slots[k].from = role::parameter;
    std::vector<index_t> storage(end.tensors, none);
    for (std::size_t id = 0; id < end.tensors; ++id)
      if (const auto k = trace_.tensors[id]; k != none) storage[id] = trace_.slots[k].value;
    for (const auto& c : trace_.calls)
      for (const auto& x : c.results) storage[x.tensor] = x.view.value;
    for (std::size_t s = 0; s < end.storages; ++s) {
      contents_.push_back(trace_.storages[s].slot != none ? contents::outside
                          : end.constants[s]              ? contents::constant
                                                          : contents::hollow);
      alive_.push_back(c10::weak_intrusive_ptr<c10::StorageImpl>(c10::Storage().getWeakStorageImpl()));
      raw_.push_back(false);
      told_.push_back(false);
    }
    for (std::size_t id = 0; id < end.tensors; ++id) {
      const auto& x = tensors[id];
      met_.emplace_back(x.getIntrusivePtr());
      if (!x.defined() || storage[id] == none) continue;
      ids_.emplace(x.unsafeGetTensorImpl(), id);
      const bool first = index_.emplace(storage_of(x), storage[id]).second;
      if (first && trace_.tensors[id] != none) whole_.emplace(x.unsafeGetTensorImpl(), x);
    }
    for (const auto& c : trace_.calls) {
      auto next = c.positions.begin();
      for (const auto& o : c.operands) {
        if (next == c.positions.end() || o.at != takes_masks(c.op)) continue;
        const auto& mask = tensors[o.tensor];
        if (!mask.defined() || !is_mask(mask)) continue;
        const bool flat = o.element < 0;
        positions_.push_back({mask, flat ? c.operands[0].view.sizes : std::vector<int64_t>(), {}});
        for (auto j = flat ? 1 : mask.dim(); j > 0; --j) positions_.back().lists.push_back(tensors[tensor_in(trace_, *next++)]);
      }
    }
  }
  recorder(const recorder&) = delete;
  recorder& operator=(const recorder&) = delete;

  /// Puts back what the operators wrote.
  ~recorder() {
    if (!draws_) return;
    abandon();
    for (const auto& o : outside_) reset_version(o);
  }
  /// Puts back what the operators wrote, but for versions; nothing more is recorded.
  /// @return what they have made of the generator
  draw_origin abandon() {
    put_back_written();
    auto left = draws_->left_behind();
    draws_.reset();
    return left;
  }
  /// Somebody is about to look at the state of the generator. @return it is that of the step
  bool show_generator() { return draws_->show(); }
  /// Tensors from outside, with their versions now.
  std::vector<std::pair<at::Tensor, int64_t>> versions() const {
    std::vector<std::pair<at::Tensor, int64_t>> list;
    for (const auto& o : outside_)
      if (o.tensor.defined()) list.emplace_back(o.tensor, version(o.tensor));
    return list;
  }
  /// What was made by calls and is there still: its number, and the tensor.
  std::vector<std::pair<std::size_t, at::Tensor>> made() const {
    std::vector<std::pair<std::size_t, at::Tensor>> list;
    for (std::size_t id = 0; id < met_.size(); ++id)
      if (auto t = met_[id].lock(); t && trace_.tensors[id] == none)
        if (const auto s = index_.find(storage_of(at::Tensor(t)));
            s != index_.end() && trace_.storages[s->second].slot == none && contents_[s->second] != contents::constant)
          list.emplace_back(id, at::Tensor(std::move(t)));
    return list;
  }
  /// All tensors by their numbers, as far as they are there.
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> list;
    for (const auto& weak : met_) list.emplace_back(weak.lock());
    return list;
  }
  /// Somebody else's references to tensors, which do not make them the module's.
  void set_references(std::unordered_map<const c10::TensorImpl*, std::size_t> counts) { references_ = std::move(counts); }
  const std::string& maker_of(const at::Tensor& t) const { return trace_.storages[index_.at(storage_of(t))].name; }
  void set_held(std::vector<std::size_t> held) { trace_.held = std::move(held); }

  /// A tensor of the step that owns no memory: an input or the gradient of an output.
  at::Tensor stand_in(const at::Tensor& like, at::IntArrayRef strides, role from, std::size_t position) {
    const bool keep =
        from == role::input && at::isIntegralType(like.scalar_type(), true) && like.nbytes() <= value_limit() && has_memory(like);
    auto t = hollow_tensor(like.sizes(), strides, like.options());
    const auto s = add(t, keep ? contents::kept : contents::hollow);
    if (keep) {
      told_[s] = true;
      lent_memory memory;
      memory.fill(t);
      memory.give();
      t.copy_(like);
    }
    hide(storage_of(t));
    const auto slot =
        add_slot(t, s, from, position, (from == role::input ? "input " : "gradient of output ") + std::to_string(position));
    trace_.tensors[id_of(t)] = slot;
    if (from == role::input) {
      whole_.emplace(t.unsafeGetTensorImpl(), t);
      watch(t, slot);
    }
    return t;
  }

  /// The forward has ended.
  void end_forward() {
    trace_.forward = {trace_.slots.size(), trace_.storages.size(), trace_.tensors.size(), {}};
    for (const auto known : contents_) trace_.forward.constants.push_back(known == contents::constant);
  }
  /// Calls from here on are those of the backward.
  void start_backward() {
    trace_.backward = trace_.calls.size();
    trace_.after_forward = draws_->left_behind();
    for (auto& o : outside_) o.forward = version(o.tensor);
    draws_->begin_phase();
  }
  const std::vector<traced_call>& calls() const { return trace_.calls; }
  /// Values that the forward has asked for, and positions in masks: inputs of the plan, behind those of the forward.
  const std::vector<at::Tensor>& values() const { return values_; }
  /// Those of a call that takes masks.
  std::vector<at::Tensor> positions_of(const traced_call& c) const {
    std::vector<at::Tensor> list;
    for (auto k : c.positions) list.push_back(values_[trace_.slots[k].position - inputs_]);
    return list;
  }
  /// Runs the calls until now ahead of the plan, and shows data of tensors.
  /// @return false: they cannot
  bool run_ahead(const std::vector<at::Tensor>& wanted) {
    put_back_written();
    return log_->run_ahead(trace_.calls, wanted);
  }
  /// The module is about to look at memory. Is what lies there that of the step?
  bool shows(const at::Tensor& t) const {
    const auto s = index_.find(storage_of(t));
    return has_memory(t) && (s == index_.end() || contents_[s->second] == contents::constant || !saved_.count(storage_of(t)));
  }
  /// What has been recorded until now.
  const trace& until_now() const { return trace_; }
  c10::Device device() const { return device_; }
  /// It is a training step that is recorded, whose calls are in `log`.
  void of_step(call_log& log) { log_ = &log; }
  /// Are writes to this memory without an operator to be told from those by operators? Those to memory that nobody has read yet
  /// make a constant of it.
  bool watches_memory(const at::Tensor& t) const {
    const auto s = index_.find(storage_of(t));
    if (s == index_.end() || raw_[s->second] || saved_.count(storage_of(t))) return false;
    const auto known = contents_[s->second];
    return known == contents::constant || (known == contents::outside && storage_of(t)->nbytes() <= constant_limit);
  }
  /// Its first `most` calls are those of `t`.
  bool has_recorded(const trace& t, std::size_t most) const { return same_calls(trace_, t, most) == most; }
  /// The step began when tensors from outside had these versions.
  void began_with(const std::vector<std::pair<at::Tensor, int64_t>>& versions) {
    for (auto& o : outside_)
      for (const auto& [t, version] : versions)
        if (o.tensor.is_same(t)) o.start = version;
  }
  bool knows(const at::Tensor& t) const { return t.has_storage() && index_.count(storage_of(t)); }
  bool outside(const at::Tensor& t) const { return trace_.storages[index_.at(storage_of(t))].slot != none; }

  /// Which tensor of the step it is.
  std::size_t id_of(const at::Tensor& t) {
    auto* impl = t.unsafeGetTensorImpl();
    const auto [known, fresh] = ids_.emplace(impl, trace_.tensors.size());
    if (fresh) {
      trace_.tensors.push_back(none);
      met_.emplace_back(t.getIntrusivePtr());
    }
    return known->second;
  }
  /// The forward has so many inputs.
  void set_inputs(std::size_t n) { inputs_ = n; }
  /// An argument, itself.
  void add_input(const at::Tensor& t, std::size_t position) {
    add_outside(t, role::input, position, "input " + std::to_string(position));
  }

  byte_view view_of(const at::Tensor& t) const {
    return {index_.at(storage_of(t)), t.sizes().vec(), t.strides().vec(), byte_offset(t),
            t.scalar_type(),          t.is_conj(),     t.is_neg(),        whole_.count(t.unsafeGetTensorImpl()) > 0};
  }

  trace finish() {
    trace_.after_backward = draws_->left_behind();
    for (std::size_t s = 0; s < trace_.storages.size(); ++s) freeze_if_temporary(static_cast<index_t>(s));
    note_versions();
    if (!asked_.empty()) trace_.asked = std::make_shared<recorded_questions>(trace_, calculable_, asked_);
    return std::move(trace_);
  }

  [[noreturn]] void refuse(const std::string& op, const std::string& why) const {
    const auto& calls = trace_.calls;
    std::string where = "call " + std::to_string(calls.size()) + ", " + (trace_.backward ? "backward" : "forward");
    if (!calls.empty()) where += ", after " + calls.back().op.schema().name();
    refusal_ = op + " (" + where + ") " + why;
    throw cannot_capture(*refusal_);
  }

  /// Runs code of the module. A refusal reaches the caller whatever that code, or a language between, makes of the exception.
  template <class F>
  auto insist(F f) const {
    try {
      auto result = f();
      if (refusal_) throw cannot_capture(*refusal_);
      return result;
    } catch (const std::exception& e) {
      if (refusal_) throw cannot_capture(*refusal_);
      if (std::strstr(e.what(), reads_memory) != nullptr) throw cannot_capture(reads_memory);
      throw;
    }
  }

  /// Runs and records one call.
  /// @param again not null: it does not run
  void run(c10::OperatorHandle op, ::torch::jit::Stack& stack, repeated_call again = {}) {
    std::vector<at::Tensor> tensors;
    repeats_ = again.before != nullptr;
    auto c = read_call(op, stack, again, tensors);
    const auto& name = op.schema().name();
    std::optional<traced_call> masked;
    if (const auto other = with_positions(c, stack, tensors, again)) {
      masked = std::move(c);
      op = *other;
      c = read_call(op, stack, {}, tensors);
    }
    const auto n = c.arguments.size();
    const auto first = stack.size() - n;
    mark_hidden_writes(c);
    const bool ask = refuse_dynamic(c, tensors);
    if (c.ahead) {
      call_ahead(c, stack, first, tensors, again);
      trace_.calls.push_back(std::move(c));
      return;
    }
    freeze_raw_filled(c, tensors);
    const bool told = std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return told_[o.view.value]; });
    const bool constant = std::all_of(c.operands.begin(), c.operands.end(),
                                      [&](const auto& o) { return contents_[o.view.value] == contents::constant; });
    std::vector<std::size_t> bytes;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto s = c.operands[i].view.value;
      if (c.operands[i].written && contents_[s] == contents::outside) save(tensors[i]);
      if (c.operands[i].written && log_ != nullptr && trace_.backward == 0 && !constant && !again.before)
        keep_data(tensors[i], s);
      bytes.push_back(storage_of(tensors[i])->nbytes());
    }

    again.before != nullptr ? repeat(c, stack, first, again) : execute(c, stack, first, tensors, told, constant);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (storage_of(tensors[i])->nbytes() != bytes[i] || index_.at(storage_of(tensors[i])) != c.operands[i].view.value)
        refuse(name, "resizes or replaces the storage of a tensor");

    std::vector<c10::StorageImpl*> touched;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (c.operands[i].written || storage_of(tensors[i])->nbytes() > constant_limit) touched.push_back(storage_of(tensors[i]));
    const auto results = op.schema().returns().size();
    for (std::size_t i = 0; i < results; ++i)
      each_tensor(stack[stack.size() - results + i], [&](const at::Tensor& t, int element) {
        check(name, t);
        if (!index_.count(storage_of(t))) {
          const bool keep = !constant && kept(t.scalar_type(), storage_of(t)->nbytes(), told) && has_memory(t);
          const auto s = add(t, !c.draws && constant ? contents::constant : keep ? contents::kept : contents::hollow);
          trace_.storages[s].name = name;
          raw_[s] = makes_raw(op);
          if (contents_[s] == contents::hollow) let_go(storage_of(t));
          if (contents_[s] == contents::kept) hide(storage_of(t));
          told_[s] = told && !c.draws && contents_[s] != contents::hollow;
        }
        c.results.push_back({static_cast<int>(i), element, view_of(t), false, id_of(t)});
      });
    for (auto* s : touched) settle(s, constant && !c.draws, told && !c.draws);
    c.constant = constant && !c.draws && std::all_of(c.results.begin(), c.results.end(), [&](const auto& r) {
                   return contents_[r.view.value] == contents::constant;
                 });
    for (const auto& o : c.operands) {
      const auto s = o.view.value;
      if (o.written && (!told || c.draws || trace_.storages[s].slot != none)) told_[s] = false;
      if (contents_[s] == contents::hollow) told_[s] = false;
    }
    if (told && !c.draws) calculable_.push_back(trace_.calls.size());
    if (ask && log_ == nullptr)
      asked_.push_back({trace_.calls.size(), {stack.end() - static_cast<std::ptrdiff_t>(results), stack.end()}});
    if (!masked) return trace_.calls.push_back(std::move(c));
    masked->results = c.results;
    masked->planned = std::make_shared<const traced_call>(std::move(c));
    trace_.calls.push_back(std::move(*masked));
  }

  /// The step is recorded, and goes on: nobody asks for these values any more.
  void give_back_kept() const {
    for (std::size_t s = 0; s < alive_.size(); ++s)
      if (const auto there = alive_[s].lock();
          there && contents_[s] == contents::kept && trace_.storages[s].slot == none && !log_->is_pinned(there.get()))
        release(there.get());
  }

  /// A storage of the step that is still there once all results are gone: the module keeps it. @return what made it, or nothing
  std::optional<std::string> kept_by_module() const {
    for (std::size_t s = 0; s < alive_.size(); ++s)
      if (trace_.storages[s].slot == none && (contents_[s] == contents::hollow || contents_[s] == contents::kept) &&
          !alive_[s].expired())
        return trace_.storages[s].name;
    return std::nullopt;
  }

 private:
  /// What a call is about to do, without its results. @param tensors gets its operands
  traced_call read_call(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack, const repeated_call& again,
                        std::vector<at::Tensor>& tensors) {
    const auto& schema = op.schema();
    const auto n = schema.arguments().size();
    traced_call c{op, {}, {}, {}, at::GradMode::is_enabled(), {}, {}};
    tensors.clear();
    for (std::size_t i = 0; i < n; ++i) {
      const auto& argument = stack[stack.size() - n + i];
      if (argument.isGenerator() && argument.toGenerator().defined() && argument.toGenerator() != draws_->generator())
        refuse(schema.name(), "draws from a generator other than the default one of " + device_.str());
      const auto* alias = schema.arguments()[i].alias_info();
      each_tensor(argument, [&](const at::Tensor& t, int element) {
        check(schema.name(), t);
        if (!index_.count(storage_of(t))) add_unknown(schema.name(), t);
        const bool needs =
            again.before != nullptr ? again.before->operands.at(c.operands.size()).requires_grad : t.requires_grad();
        c.operands.push_back({static_cast<int>(i), element, view_of(t), alias && alias->isWrite(), id_of(t), needs});
        tensors.push_back(t);
      });
      c.arguments.push_back(without_tensors(argument));
    }
    if (again.before != nullptr)
      c.line = again.before->line;
    else if (line_of_caller != nullptr && trace_.backward == 0)
      c.line = line_of_caller();
    return c;
  }

  void put_back_written() {
    const plain_kernels kernels;
    for (auto& [storage, saved] : saved_) saved.first.copy_(saved.second);
  }

  /// Runs a call whose results depend on values of the step, after those before it. Its results are inputs of the plan.
  void call_ahead(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors,
                  const repeated_call& again) {
    const auto& name = c.op.schema().name();
    for (const auto& o : c.operands)
      if (o.written) refuse(name, "writes what depends on values of the step, even its size");
    if (again.before != nullptr) {
      stack.resize(first);
      stack.insert(stack.end(), again.results->begin(), again.results->end());
    } else {
      const bool there = std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return outside(t) && shows(t); });
      if (!there && !run_ahead(tensors)) refuse(name, "depends on values, and the module has written memory without an operator");
      const weights_there lent(stack);
      c.op.callBoxed(&stack);
      for (const auto& t : tensors)
        if (trace_.storages[index_.at(storage_of(t))].slot == none) hide(storage_of(t));
    }
    const bool trained =
        c.grad_mode && std::any_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.requires_grad; });
    const auto results = c.op.schema().returns().size();
    for (std::size_t i = 0; i < results; ++i)
      each_tensor(stack[stack.size() - results + i], [&](const at::Tensor& t, int element) {
        check(name, t);
        if (trained && (t.is_floating_point() || t.is_complex()))
          refuse(name, "gives a tensor whose size depends on values of the step, and which may need a gradient");
        add_value(t, name);
        c.results.push_back({static_cast<int>(i), element, view_of(t), false, id_of(t)});
      });
  }
  /// @return its slot
  index_t add_value(const at::Tensor& t, const std::string& maker) {
    const auto k = static_cast<index_t>(trace_.slots.size());
    add_outside(t, role::input, inputs_ + values_.size(), "value of " + maker);
    values_.push_back(t);
    return k;
  }

  /// Where a call has masks, puts positions in the place of these, as kernels do. What it gives has another size otherwise while
  /// it is recorded.
  /// @return the operator that takes them; nothing: the call stays as it is
  std::optional<c10::OperatorHandle> with_positions(traced_call& c, ::torch::jit::Stack& stack,
                                                    const std::vector<at::Tensor>& tensors, const repeated_call& again) {
    const auto argument = takes_masks(c.op);
    const bool forward = trace_.backward == 0;
    if (argument < 0 || (forward && (log_ == nullptr || !needs_positions(c, tensors)))) return std::nullopt;
    std::vector<at::Tensor> masks;
    c.told = true;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (c.operands[i].at != argument || !is_mask(tensors[i])) continue;
      masks.push_back(tensors[i]);
      c.told = c.told && told_[c.operands[i].view.value];
    }
    if (masks.empty()) return std::nullopt;
    const auto first = stack.end() - static_cast<std::ptrdiff_t>(c.arguments.size());
    std::vector<c10::IValue> arguments(first, stack.end());
    const bool flat = arguments[static_cast<std::size_t>(argument)].isTensor();
    const auto sizes = flat ? arguments[0].toTensor().sizes().vec() : std::vector<int64_t>();
    if (flat && at::infer_size(sizes, masks[0].sizes()) != sizes) return std::nullopt;
    const auto known = [&](const at::Tensor& m) {
      return std::find_if(positions_.begin(), positions_.end(), [&](const auto& p) { return p.of(m, sizes); });
    };
    if (!forward) {
      if (std::any_of(masks.begin(), masks.end(), [&](const auto& m) { return known(m) == positions_.end(); }))
        return std::nullopt;
    } else {
      std::size_t given = 0;
      if (again.before == nullptr && !c.told && !run_ahead(masks))
        refuse(c.op.schema().name(), "takes a mask, and the module has written memory without an operator");
      for (const auto& m : masks) {
        std::erase_if(positions_, [&](const auto& p) { return p.of(m, sizes); });
        positions_.push_back({m, sizes, {}});
        auto& lists = positions_.back().lists;
        if (again.before == nullptr) {
          lent_memory shown;
          shown.fill(m);
          lists = positions_in(m, c.op, arguments);
        }
        for (auto j = flat ? 1 : m.dim(); j > 0 && again.before != nullptr; --j) lists.push_back(again.positions->at(given++));
        for (const auto& list : lists) c.positions.push_back(add_value(list, c.op.schema().name()));
      }
    }
    const auto op = put_positions(c.op, arguments, [&](const at::Tensor& m) -> const std::vector<at::Tensor>* {
      const auto p = is_mask(m) ? known(m) : positions_.end();
      return p == positions_.end() ? nullptr : &p->lists;
    });
    if (!op) return std::nullopt;
    stack.erase(first, stack.end());
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    return op;
  }
  /// What it gives, or the gradient of what it takes, has a size that depends on its mask. Not where one number is written.
  static bool needs_positions(const traced_call& c, const std::vector<at::Tensor>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (c.operands[i].at != 2) continue;
      const bool one_mask = c.op.schema().arguments()[1].type()->kind() == c10::TypeKind::TensorType;
      return one_mask ? c.grad_mode && c.operands[i].requires_grad : tensors[i].numel() > 1;
    }
    return true;
  }

  static bytes_t byte_offset(const at::Tensor& t) { return t.storage_offset() * static_cast<bytes_t>(t.itemsize()); }

  /// A tensor from outside, whose writes are counted.
  void watch(const at::Tensor& t, index_t slot) {
    if (!t.is_inference()) outside_.push_back({t, slot, version(t), 0});
  }
  static int64_t version(const at::Tensor& t) { return t._version(); }

  /// How often the step wrote tensors from outside; those that share a version count once.
  void note_versions() {
    for (const auto& o : outside_) {
      const auto now = version(o.tensor);
      if (now == o.start) continue;
      trace_.written.push_back({o.slot, o.forward - o.start, now - o.forward});
      reset_version(o);
    }
  }

  index_t add(const at::Tensor& t, contents known) {
    const auto s = static_cast<index_t>(trace_.storages.size());
    index_.emplace(storage_of(t), s);
    alive_.push_back(t.storage().getWeakStorageImpl());
    storage_value origin;
    origin.bytes = static_cast<bytes_t>(storage_of(t)->nbytes());
    origin.device = t.device();
    trace_.storages.push_back(std::move(origin));
    contents_.push_back(known);
    raw_.push_back(false);
    told_.push_back(false);
    return s;
  }

  index_t add_slot(const at::Tensor& t, index_t storage, role from, std::size_t position, const std::string& name) {
    const auto k = static_cast<index_t>(trace_.slots.size());
    trace_.slots.push_back(
        {from, position, name, type_of(t), byte_offset(t), t.unsafeGetTensorImpl()->is_wrapped_number(), storage});
    auto& s = trace_.storages[storage];
    if (s.slot == none) s.slot = k, s.name = name;
    return k;
  }

  void add_outside(const at::Tensor& t, role from, std::size_t position, const std::string& name) {
    check(name, t);
    const auto known = index_.find(storage_of(t));
    // One that shares its memory with another is known by its geometry.
    if (known == index_.end()) whole_.emplace(t.unsafeGetTensorImpl(), t);
    const bool memory = known != index_.end() || has_memory(t);
    const auto s = known != index_.end() ? known->second : add(t, memory ? contents::outside : contents::hollow);
    const auto k = add_slot(t, s, from, position, name);
    if (const auto id = id_of(t); trace_.tensors[id] == none) trace_.tensors[id] = k;
    watch(t, k);
    if (known == index_.end()) told_.back() = from != role::parameter && memory;
    if (!memory) hide(storage_of(t));
  }

  /// A tensor that nobody announced: kept by the module in another place, or made outside the dispatcher during forward.
  void add_unknown(const std::string& op, const at::Tensor& t) {
    if (t.requires_grad()) refuse(op, "reads a tensor that requires a gradient and is not among the parameters");
    add_outside(t, role::found, 0, "tensor of " + op);
    std::optional<content> copy;
    if (!storage_of(t)->resizable()) copy = content_of(t.storage());  // memory of somebody who may free it
    unknown_.insert({index_.at(storage_of(t)), {t, std::move(copy)}});
  }

  /// How many hold `x`, but for a wrapper in Python that is there only because C++ holds `x` too.
  template <class T>
  static std::size_t holders(T& x, std::size_t count) {
    return count - (x.pyobj_slot()->has_unique_reference() ? 1 : 0);
  }

  /// After the step: an unknown tensor that only the recorder still holds was made for this step; its contents are a constant.
  /// Another one belongs to the module, which may put a new one in its place.
  void freeze_if_temporary(index_t s) {
    const auto found = unknown_.find(s);
    if (found == unknown_.end()) return;
    auto t = std::exchange(found->second.first, {});
    whole_.erase(t.unsafeGetTensorImpl());
    auto& slot = trace_.slots[trace_.storages[s].slot];
    auto watched = std::find_if(outside_.begin(), outside_.end(), [&](const auto& o) { return o.tensor.is_same(t); });
    if (watched != outside_.end()) watched->tensor.reset();
    const auto saved = saved_.find(storage_of(t));
    const auto logged = references_.find(t.unsafeGetTensorImpl());
    const auto count = t.use_count() - (logged != references_.end() ? logged->second : 0);
    // While a step goes on its graph holds what it saves, which is no sign of the module.
    const bool temporary = references_.empty()
                               ? holders(*t.unsafeGetTensorImpl(), count) == 1 &&
                                     holders(*storage_of(t), t.storage().use_count()) == (saved != saved_.end() ? 2U : 1U)
                               : !held_by_python(t);
    if (temporary) {
      const auto& as_found = saved != saved_.end() ? saved->second.second : t;
      freeze(slot, found->second.second ? std::move(*found->second.second) : content_of(as_found.storage()));
      if (watched != outside_.end()) outside_.erase(watched);
    } else {
      slot.position = trace_.found.size();
      if (watched != outside_.end()) watched->tensor = t;
      trace_.found.push_back(std::move(t));
    }
  }
  void freeze(slot& s, content bytes) {
    s.from = role::constant;
    s.position = trace_.constants.size();
    trace_.constants.push_back(std::move(bytes));
  }

  /// `empty` whose first use is a read was filled by hand (`torch::tensor`, `data_ptr`): its contents are a constant.
  void freeze_raw_filled(const traced_call& c, const std::vector<at::Tensor>& tensors) {
    const bool view = is_view(c.op);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto s = c.operands[i].view.value;
      if (!raw_[s] || view) continue;
      raw_[s] = false;
      if (c.operands[i].written && overwrites(c.op)) continue;
      const auto& t = tensors[i];
      if (storage_of(t)->nbytes() == 0) continue;
      trace_.storages[s].name = "constant";
      freeze(trace_.slots[add_slot(bytes_of(t), s, role::constant, 0, "constant")], content_of(t.storage()));
    }
  }

  void check(const std::string& op, const at::Tensor& t) const {
    if (t.layout() != c10::kStrided || !t.has_storage() || t.is_quantized() || t.is_nested() || t._is_zerotensor())
      refuse(op, std::string("takes or gives a tensor that is sparse, quantized, nested or otherwise without a plain storage") +
                     (t.is_sparse() ? "; of an embedding, sparse=False helps" : ""));
    if (t.device() != device_ && !(t.is_cpu() && (t.dim() == 0 || t.nbytes() <= constant_limit)))
      refuse(op, "meets a tensor on " + t.device().str() + ", the step runs on " + device_.str());
  }

  void mark_hidden_writes(traced_call& c) const {
    const auto& arguments = c.op.schema().arguments();
    auto position = [&](const std::string& name) {
      for (std::size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].name() == name) return static_cast<int>(i);
      return -1;
    };
    const auto& known = facts(c.op);
    if (!known.writes_if.empty() && !c.arguments[static_cast<std::size_t>(position(known.writes_if))].toBool()) return;
    for (const auto& name : known.writes)
      for (auto& o : c.operands)
        if (o.at == position(name)) {
          o.written = true;
          if (known.statistics) c.statistics.push_back(o.at);
        }
  }

  /// Of a call that gives the forward what depends on values: does it run ahead of the plan?
  /// @return it gives a number that is not the same in every step, but told before the step
  bool refuse_dynamic(traced_call& c, const std::vector<at::Tensor>& tensors) const {
    const auto& name = c.op.schema().name();
    if (facts(c.op).resizes) refuse(name, "resizes or replaces the storage of a tensor");
    const bool dynamic = is_dynamic(c.op, [&](int argument) {
      for (std::size_t i = 0; i < tensors.size(); ++i)
        if (c.operands[i].at == argument && is_mask(tensors[i])) return true;
      return false;
    });
    if (!dynamic) return false;
    const auto& returns = c.op.schema().returns();
    const bool numbers = std::none_of(returns.begin(), returns.end(), [](const auto& r) {
      return r.type()->kind() == c10::TypeKind::TensorType || r.type()->kind() == c10::TypeKind::ListType;
    });
    bool ask = false;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      ask = ask || contents_[c.operands[i].view.value] != contents::constant || !has_memory(tensors[i]);
    const bool forward = trace_.backward == 0;
    const bool asks_again = log_ == nullptr || forward;  // nobody asks in planned backwards of a training step
    const bool told = std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return told_[o.view.value]; });
    c.ahead = ask && log_ != nullptr && forward && (!numbers || !told);
    if (ask && !c.ahead && (!numbers || !told || !asks_again))
      refuse(name, "depends on the values of an activation, an input, a parameter or a buffer; a plan needs a fixed graph");
    return ask && !c.ahead;
  }

  /// The values of what a call makes may be needed during the capture.
  bool kept(at::ScalarType type, std::size_t bytes, bool told) const {
    return (told || at::isIntegralType(type, true)) && bytes <= value_limit();
  }
  /// Larger values go. A step that is only recorded has no others to answer questions with.
  std::size_t value_limit() const { return log_ == nullptr ? 16 * constant_limit : constant_limit; }

  /// Replaces the arguments of a call on the stack by its results. The call does not run if only the geometry of its results
  /// matters, and that is known.
  /// @param first position of the arguments on the stack
  void execute(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors, bool told,
               bool constant) {
    if (only_checks(c) && !constant) return stack.resize(first);  // the verdict on made-up numbers says nothing
    const bool no_values = !told && !constant && std::none_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
      const bool statistics = std::find(c.statistics.begin(), c.statistics.end(), o.at) != c.statistics.end();
      return o.written && !statistics && contents_[o.view.value] != contents::hollow;
    });
    const auto key = no_values ? geometry_key(c, tensors) : std::nullopt;
    const bool seeded = may_draw(c.op);
    if (seeded && !device_.is_cpu() && draws_on_host(c, tensors))
      refuse(c.op.schema().name(),
             "draws from the generator of the host in a step on " + device_.str() +
                 "; a planned step would repeat the same number for ever. Draw on the device, or pass the number as an argument");
    const auto before = seeded ? draws_->state() : at::Tensor();
    const auto drawn = [&] {
      c.draws = draws_->note(trace_.calls.size(), before, key ? draws_->pass(before, *key) : draws_->state());
    };
    const auto looked_at = [&](const known_results& r) {
      return r.any_made([&](auto type, auto bytes) { return kept(type, bytes, told); });
    };
    auto known = key ? find_known(*key) : nullptr;
    if (key && !known)
      if (auto results = deduced(c, tensors); results && !looked_at(*results)) known = remember(*key, std::move(*results));
    if (known) {
      stack.resize(first);
      for (auto& result : known->over(tensors)) stack.push_back(std::move(result));
      if (known->drew) drawn();
      return;
    }
    if (is_native(c.op) && (is_view(c.op) || c.op.schema().name() == "aten::_unsafe_view"))  // which only shares memory
      c.op.callBoxed(&stack);
    else
      run_hollow(c.op, stack, stack.size() - first, tensors);
    if (seeded && !same_bytes(before, draws_->state())) drawn();
    if (!key || geometry_key(c, tensors) != key) return;
    known_results results(tensors, {stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end()});
    results.drew = c.draws.has_value();
    if (results.complete() && !looked_at(results)) remember(*key, std::move(results));
  }

  /// Puts the known results of a call in the place of its arguments.
  void repeat(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const repeated_call& again) {
    stack.resize(first);
    stack.insert(stack.end(), again.results->begin(), again.results->end());
    if (!again.before->draws) return;
    const auto before = draws_->state();
    const auto call = trace_.calls.size();
    c.draws = draws_->note(call, before, draws_->pass(before, std::to_string(call)));
  }

  /// Of a small storage whose data the module may look at: kernels may run on them, and the step may still go on eagerly.
  void keep_data(const at::Tensor& t, index_t s) const {
    if (log_->set_aside(t)) return;
    const bool has_data = contents_[s] == contents::constant || contents_[s] == contents::kept;
    if (has_data && storage_of(t)->nbytes() <= constant_limit) log_->keep_data(t);
  }

  /// The kernel of a call is one of the host: its operands are there, or it makes a tensor there.
  static bool draws_on_host(const traced_call& c, const std::vector<at::Tensor>& tensors) {
    if (!tensors.empty()) return std::all_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.is_cpu(); });
    const auto device = std::find_if(c.arguments.begin(), c.arguments.end(), [](const auto& a) { return a.isDevice(); });
    return device == c.arguments.end() || device->toDevice().is_cpu();
  }

  void save(const at::Tensor& t) {
    if (saved_.count(storage_of(t))) return;
    const auto whole = bytes_of(t);
    saved_.insert({storage_of(t), {whole, whole.clone()}});
  }
  /// After a call touched a storage of the step: constants stay only if small and written from constants.
  void settle(c10::StorageImpl* s, bool constant, bool told) {
    auto& known = contents_[index_.at(s)];
    if (known == contents::outside || known == contents::hollow) return;
    if (known == contents::constant && constant && s->nbytes() <= constant_limit) return;
    if ((known == contents::kept || told) && s->nbytes() <= value_limit()) {
      known = contents::kept;
      return hide(s);
    }
    known = contents::hollow;
    let_go(s);
  }
  void let_go(c10::StorageImpl* s) const {
    if (log_ != nullptr && log_->is_pinned(s)) return;
    const bool by_hand = trace_.storages[index_.at(s)].slot != none;  // nobody could make the data again
    repeats_ || by_hand || (log_ != nullptr && log_->has_made(s)) ? hide(s) : release(s);
  }

  trace trace_;
  mutable std::optional<std::string> refusal_;
  std::unordered_map<c10::StorageImpl*, index_t> index_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;  ///< keeps addresses from being used again, not the memory
  std::vector<contents> contents_;
  std::vector<bool> told_;  ///< the values are those of the real step: inputs, buffers and what is computed from these alone
  std::vector<std::size_t> calculable_;  ///< calls whose operands are all told
  std::vector<question> asked_;
  std::vector<bool> raw_;                                                     ///< made by `empty`, not yet written by an operator
  std::unordered_map<c10::TensorImpl*, at::Tensor> whole_;                    ///< tensors from outside
  std::map<index_t, std::pair<at::Tensor, std::optional<content>>> unknown_;  ///< storages nobody announced, with their contents
  /// Storages from outside that were written, with their contents, as bytes.
  std::unordered_map<c10::StorageImpl*, std::pair<at::Tensor, at::Tensor>> saved_;
  struct written_outside {
    at::Tensor tensor;
    index_t slot;
    int64_t start, forward;  ///< versions
  };
  static void reset_version(const written_outside& o) {
    auto counter = o.tensor.unsafeGetTensorImpl()->version_counter();
    counter.set_version(o.start);
  }
  std::vector<written_outside> outside_;
  std::unordered_map<c10::TensorImpl*, std::size_t> ids_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> met_;  ///< keeps addresses, not the memory
  std::optional<draw_log> draws_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> references_;
  c10::Device device_;
  call_log* log_ = nullptr;  ///< of the training step; null: it runs for the recording only
  bool repeats_ = false;     ///< the call has been recorded before, and data of its operands may be there
  std::size_t inputs_ = 0;
  std::vector<at::Tensor> values_;
  struct mask_positions {
    at::Tensor mask;
    std::vector<int64_t> sizes;  ///< of a tensor that is taken as if it were flat; empty: there is a list per dimension
    std::vector<at::Tensor> lists;
    bool of(const at::Tensor& t, const std::vector<int64_t>& flat) const {
      if (flat != sizes) return false;
      return mask.is_same(t) || (storage_of(mask) == storage_of(t) && mask.storage_offset() == t.storage_offset() &&
                                 mask.sizes() == t.sizes() && mask.strides() == t.strides());
    }
  };
  std::vector<mask_positions> positions_;
};

}  // namespace remat::pytorch::detail
