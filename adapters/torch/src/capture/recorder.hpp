// SPDX-License-Identifier: Apache-2.0
/// @file
/// Writes down the operators of a step while it runs without memory. Private to the adapter.
#pragma once

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/views.hpp"
#include "call_log.hpp"
#include "draws.hpp"
#include "follower.hpp"
#include "hollow.hpp"
#include "known_results.hpp"
#include "lists.hpp"
#include "questions.hpp"
#include "trace.hpp"

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
           const std::vector<std::string>& names, c10::Device device);
  /// Goes on where the forward of `t` has ended.
  /// @param tensors by their numbers; undefined: nobody can use it
  recorder(const trace& t, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& parameters);
  recorder(const recorder&) = delete;
  recorder& operator=(const recorder&) = delete;

  /// Puts back what the operators wrote.
  ~recorder() {
    if (!draws_) return;
    abandon();
    for (const auto& o : outside_) set_version(o.tensor, o.start);
  }
  /// Puts back what the operators wrote, but for versions; nothing more is recorded.
  /// @return what they have made of the generator
  draw_origin abandon();
  /// Somebody is about to look at the state of the generator. @return it is that of the step
  bool show_generator() { return draws_->show(); }
  /// Tensors from outside, with their versions now.
  std::vector<std::pair<at::Tensor, int64_t>> versions() const;
  /// What was made by calls and is there still: its number, and the tensor. Constants only if they collect a gradient.
  std::vector<std::pair<std::size_t, at::Tensor>> made() const;
  /// All tensors by their numbers, as far as they are there.
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> list;
    for (const auto& weak : met_) list.emplace_back(weak.lock());
    return list;
  }
  /// Somebody else's references to tensors, which do not make them the module's.
  void set_references(std::unordered_map<const c10::TensorImpl*, std::size_t> counts) { references_ = std::move(counts); }
  void set_held(std::vector<std::size_t> held) { trace_.held = std::move(held); }

  /// A tensor of the step that owns no memory: an input or the gradient of an output.
  at::Tensor stand_in(const at::Tensor& like, at::IntArrayRef strides, role from, std::size_t position);

  /// The forward has ended.
  void end_forward() {
    trace_.forward = {trace_.slots.size(), trace_.storages.size(), trace_.tensors.size(), {}};
    for (const auto known : contents_) trace_.forward.constants.push_back(known == contents::constant);
  }
  /// Calls from here on are those of the backward.
  void start_backward();
  const std::vector<traced_call>& calls() const { return trace_.calls; }
  /// Values that the forward has asked for, and positions in masks: inputs of the plan, behind those of the forward.
  const std::vector<at::Tensor>& values() const { return values_; }
  /// Those that require a gradient, which goes on to where they come from; the others undefined.
  std::vector<at::Tensor> differentiable_values() const;
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
  void of_step(call_log& log) {
    log_ = &log;
    may_assume_ = true;
  }
  /// Are writes to this memory without an operator to be told from those by operators? Those to memory that nobody has read yet
  /// make a constant of it.
  bool watches_memory(const at::Tensor& t) const;
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
  std::size_t id_of(const at::Tensor& t);
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

  /// The forward has made a call, and later steps may make it with other numbers: those that only tensors from outside get to
  /// see, without a gradient.
  void let_numbers_vary();
  /// The backward runs code, which may use any number of the forward.
  void keep_numbers();

  trace finish();

  [[noreturn]] void refuse(const std::string& op, const std::string& why) const;

  /// Runs code of the module. A refusal reaches the caller whatever that code, or a language between, makes of the exception.
  template <class F>
  auto insist(F f) const {
    try {
      auto result = f();
      if (refusal_) throw cannot_capture(*refusal_);
      return result;
    } catch (const std::exception& e) {
      const bool reads = std::strstr(e.what(), reads_memory) != nullptr;
      if (!refusal_ && !reads) throw;
      forget_caught();
      throw cannot_capture(refusal_ ? *refusal_ : reads_memory);
    }
  }

  /// Runs and records one call.
  /// @param again not null: it does not run
  void run(c10::OperatorHandle op, ::torch::jit::Stack& stack, repeated_call again = {});

  /// The step is recorded, and goes on: nobody asks for these values any more.
  void give_back_kept() const;

  /// A storage of the step that is still there once all results are gone: the module keeps it. @return what made it, or nothing
  std::optional<std::string> kept_by_module() const;

 private:
  /// What a call is about to do, without its results. @param tensors gets its operands
  traced_call read_call(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack, const repeated_call& again,
                        std::vector<at::Tensor>& tensors);

  void put_back_written() {
    const plain_kernels kernels;
    for (auto& [storage, saved] : saved_) saved.first.copy_(saved.second);
  }

  /// Runs a call whose results depend on values of the step, after those before it. Its results are inputs of the plan.
  void call_ahead(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors,
                  const repeated_call& again);
  /// @return its slot
  index_t add_value(const at::Tensor& t, const std::string& maker);
  /// It requires a gradient, and was made by none of the calls until now.
  bool trained_elsewhere(const at::Tensor& t) const;

  /// Where a call has masks, puts positions in the place of these, as kernels do. What it gives has another size otherwise while
  /// it is recorded.
  /// @return the operator that takes them; nothing: the call stays as it is
  std::optional<c10::OperatorHandle> with_positions(traced_call& c, ::torch::jit::Stack& stack,
                                                    const std::vector<at::Tensor>& tensors, const repeated_call& again);
  /// What it gives, or the gradient of what it takes, has a size that depends on its mask. Not where one number is written
  /// to the places of one mask.
  static bool needs_positions(const traced_call& c, const std::vector<at::Tensor>& tensors);

  /// A tensor from outside, whose writes are counted.
  void watch(const at::Tensor& t, index_t slot) {
    if (!t.is_inference()) outside_.push_back({t, slot, version(t), 0});
  }
  static int64_t version(const at::Tensor& t) { return t._version(); }

  /// How often the step wrote tensors from outside; those that share a version count once.
  void note_versions();

  index_t add(const at::Tensor& t, contents known);

  index_t add_slot(const at::Tensor& t, index_t storage, role from, std::size_t position, const std::string& name);

  void add_outside(const at::Tensor& t, role from, std::size_t position, const std::string& name);

  /// A tensor that nobody announced: kept by the module in another place, or made outside the dispatcher during forward.
  void add_unknown(const std::string& op, const at::Tensor& t);

  /// After the step: an unknown tensor that only the recorder still holds was made for this step; its contents are a constant.
  /// Another one belongs to the module, which may put a new one in its place.
  void freeze_if_temporary(index_t s);
  void freeze(slot& s, content bytes) {
    s.from = role::constant;
    s.position = trace_.constants.size();
    trace_.constants.push_back(std::move(bytes));
  }

  /// `empty` whose first use is a read was filled by hand (`torch::tensor`, `data_ptr`): its contents are a constant.
  void freeze_raw_filled(const traced_call& c, const std::vector<at::Tensor>& tensors);

  void check(const std::string& op, const at::Tensor& t) const;

  void mark_hidden_writes(traced_call& c) const;

  /// Runs a call ahead of the plan, on the values of the step.
  void run_on_values(const traced_call& c, ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors) const;
  /// Runs a call where only the geometry of its results matters.
  /// @throws cannot_capture if an operator of somebody else draws and does not say so
  void run_on_made_up(const traced_call& c, ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors);
  /// An operator of somebody else that tells nothing of its results: do they lie elsewhere than with made-up numbers, if it runs
  /// on the values of the step? Asked once in a recording.
  void try_on_values(const traced_call& c, const ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors);
  /// Of a call that gives the forward what depends on values: does it run ahead of the plan?
  /// @return it gives a number that is not the same in every step, but told before the step
  bool refuse_dynamic(traced_call& c, const std::vector<at::Tensor>& tensors) const;

  /// Does the backward ask whether values of the forward are zero?
  bool asks_for_zeros(const traced_call& c) const;

  /// Its values are those of the real step, and there. Those that calls have made ahead may be gone.
  bool told(const at::Tensor& t) const { return told_[index_.at(storage_of(t))] && has_data(t); }

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
               bool constant);

  /// Puts the known results of a call in the place of its arguments.
  void repeat(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const repeated_call& again);

  /// Of a small storage whose data the module may look at: kernels may run on them, and the step may still go on eagerly.
  /// @param told the kernel writes what it will in the step
  void keep_data(const at::Tensor& t, index_t s, bool told) const {
    if (log_->set_aside(t, told)) return;
    const bool real = contents_[s] == contents::constant || contents_[s] == contents::kept;
    if (real && storage_of(t)->nbytes() <= constant_limit) log_->keep_data(t);
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
  void settle(c10::StorageImpl* s, bool constant, bool told);
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
  std::vector<bool> of_forward_;         ///< there, with these values, when the forward ends, or computed from such alone
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
  std::vector<written_outside> outside_;
  std::unordered_map<c10::TensorImpl*, std::size_t> ids_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> met_;  ///< keeps addresses, not the memory
  std::optional<draw_log> draws_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> references_;
  c10::Device device_;
  call_log* log_ = nullptr;  ///< of the training step; null: it runs for the recording only
  bool may_assume_ = false;  ///< should the backward ask for a number of the forward, zero will do: the step has its graph, too
  bool repeats_ = false;     ///< the call has been recorded before, and data of its operands may be there
  std::size_t inputs_ = 0;
  std::vector<at::Tensor> values_;
  std::unordered_set<const c10::StorageImpl*> trained_;  ///< of values that require a gradient and were made elsewhere
  uint64_t began_ = at::sequence_number::peek();         ///< number of the first node of the step
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
  std::unordered_set<c10::OperatorName> tried_;  ///< see `try_on_values`
};

}  // namespace remat::pytorch::detail
