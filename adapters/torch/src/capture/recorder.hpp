// SPDX-License-Identifier: Apache-2.0
/// @file
/// Records the operators of a step while it runs without memory. Private to the adapter.
#pragma once

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <cstring>
#include <deque>
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

/// Constants (results of operators without other inputs) keep their values up to this size in bytes, so that masks can be read.
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

/// What the recorder knows of the contents of a storage.
enum class contents {
  outside,   ///< existed before the step: parameters, buffers and other tensors
  constant,  ///< made during the capture, equal in each step
  kept,      ///< valid values, but not constant: small integers that other operators may index with
  hollow     ///< no memory
};

/// A call that was recorded before, as part of another step, with its results.
struct repeated_call {
  const std::vector<c10::IValue>* results = nullptr;
  const traced_call* original = nullptr;
  const std::vector<at::Tensor>* positions = nullptr;  ///< lists in place of masks
};

/// Runs each operator of a step on tensors without memory, and records it: the call, what it reads and writes, and what is known
/// of the contents. The destructor restores what the step wrote outside.
class recorder {
 public:
  recorder(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
           const std::vector<std::string>& names, c10::Device device);
  /// Continues at the end of the forward of `t`.
  /// @param tensors by their numbers; undefined: no longer used
  recorder(const trace& t, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& parameters);
  recorder(const recorder&) = delete;
  recorder& operator=(const recorder&) = delete;

  /// Restores what the operators wrote.
  ~recorder() {
    if (!draws_) return;
    abandon();
    for (const auto& o : watched_) set_version(o.tensor, o.start);
  }
  /// Ends the recording, and restores what the operators wrote, except for versions.
  /// @return the origin of the state in which they left the generator
  draw_origin abandon();
  /// Call this before the module reads the state of the generator. @return true if that is the state of the step
  bool show_generator() { return draws_->show(); }
  /// Tensors from outside, and their present versions.
  std::vector<std::pair<at::Tensor, int64_t>> versions() const;
  /// Tensors that calls made and that still exist, with their numbers. Constants are included only if they collect a gradient.
  std::vector<std::pair<std::size_t, at::Tensor>> made_tensors() const;
  /// All tensors by their numbers; undefined: freed.
  std::vector<at::Tensor> all_tensors() const {
    std::vector<at::Tensor> list;
    for (const auto& weak : met_) list.emplace_back(weak.lock());
    return list;
  }
  /// Sets how many references to each tensor are not those of the module.
  void set_references(std::unordered_map<const c10::TensorImpl*, std::size_t> counts) { references_ = std::move(counts); }
  void set_python_held(std::vector<std::size_t> held) { trace_.python_held = std::move(held); }

  /// Makes a tensor of the step that owns no memory: an input or the gradient of an output.
  at::Tensor stand_in(const at::Tensor& like, at::IntArrayRef strides, role from, std::size_t position);

  /// Notes the end of the forward.
  void end_forward() {
    trace_.forward = {trace_.slots.size(), trace_.storages.size(), trace_.tensors.size(), {}};
    for (const auto known : contents_) trace_.forward.constants.push_back(known == contents::constant);
  }
  /// Further calls are those of the backward.
  void start_backward();
  const std::vector<traced_call>& calls() const { return trace_.calls; }
  /// Values that the forward has read, and positions in masks. They are inputs of the plan, after those of the forward.
  const std::vector<at::Tensor>& values() const { return values_; }
  /// The values that require a gradient, which flows on to where they were made; the others are undefined.
  std::vector<at::Tensor> differentiable_values() const;
  /// Lists of positions of a call that takes masks.
  std::vector<at::Tensor> positions_of(const traced_call& c) const {
    std::vector<at::Tensor> list;
    for (auto k : c.positions) list.push_back(values_[trace_.slots[k].position - inputs_]);
    return list;
  }
  /// Runs the calls so far ahead of the plan, and makes the data of `wanted` readable.
  /// @return false if they cannot
  bool run_ahead(const std::vector<at::Tensor>& wanted) {
    put_back_written();
    return log_->run_ahead(trace_.calls, wanted);
  }
  /// Runs the kernel of a call ahead of the plan, for its error only. @return false if it cannot
  bool try_kernel(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
    put_back_written();
    return log_->try_kernel(trace_.calls, op, stack);
  }
  /// The module may catch an error of the last call.
  void note_catchable() { trace_.calls.back().catchable = true; }
  /// True if the memory of a tensor can be read, and has the data of the step.
  bool is_readable(const at::Tensor& t) const {
    const auto s = index_.find(storage_of(t));
    return has_memory(t) && (s == index_.end() || contents_[s->second] == contents::constant || !saved_.count(storage_of(t)));
  }
  /// The recording so far.
  const trace& trace_so_far() const { return trace_; }
  c10::Device device() const { return device_; }
  /// The recorded step is a training step, whose calls are in `log`.
  void attach_log(call_log& log) {
    log_ = &log;
    may_assume_zero_ = true;
  }
  /// True if writes by the module to this memory, without an operator, must be noticed. Writes to memory that nothing has read
  /// yet make it a constant instead.
  bool watches_memory(const at::Tensor& t) const;
  /// True if the first `count` calls are those of `t`.
  bool has_recorded(const trace& t, std::size_t count) const { return same_calls(trace_, t, count) == count; }
  /// Sets the versions that tensors from outside had when the step began.
  void set_start_versions(const std::vector<std::pair<at::Tensor, int64_t>>& versions) {
    for (auto& o : watched_)
      for (const auto& [t, start] : versions)
        if (o.tensor.is_same(t) || (o.tensor.defined() && have_one_version_counter(o.tensor, t))) o.start = start;
  }
  bool knows(const at::Tensor& t) const { return t.has_storage() && index_.count(storage_of(t)); }
  bool is_outside(const at::Tensor& t) const { return trace_.storages[index_.at(storage_of(t))].slot != none; }

  /// The number of a tensor of the step.
  std::size_t id_of(const at::Tensor& t);
  /// A call that is about to be repeated changes the geometry of a tensor.
  /// @param from with the old geometry
  void note_geometry_change(const at::Tensor& from, const at::Tensor& to);
  /// Sets the number of inputs of the forward.
  void set_inputs(std::size_t n) { inputs_ = n; }
  std::size_t inputs() const { return inputs_; }
  /// Adds an argument of the forward itself, not a stand-in.
  void add_input(const at::Tensor& t, std::size_t position) {
    add_outside(t, role::input, position, "input " + std::to_string(position));
  }

  byte_view view_of(const at::Tensor& t) const {
    return {index_.at(storage_of(t)), t.sizes().vec(), t.strides().vec(), byte_offset(t),
            t.scalar_type(),          t.is_conj(),     t.is_neg(),        outside_tensors_.count(t.unsafeGetTensorImpl()) > 0};
  }

  /// Lets later steps make the last call with other numbers, if only tensors from outside depend on these, and no gradient does.
  void let_numbers_vary();
  /// Keeps numbers fixed, because custom code of the backward may use any number of the forward.
  void keep_numbers();

  trace finish();

  [[noreturn]] void refuse(const std::string& op, const std::string& why) const;

  /// Runs code of the module. A refusal reaches the caller even if that code, or another language in between, catches the
  /// exception.
  template <class F>
  auto rethrow_refusal(F f) const {
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
  /// @param repeated its call does not run; without a call: it runs
  void run(c10::OperatorHandle op, ::torch::jit::Stack& stack, repeated_call repeated = {});

  /// The step is recorded and continues: frees values that only the recording needed.
  void give_back_kept() const;

  /// Finds a storage of the step that still exists after all results are gone: the module keeps it. @return its maker, or nothing
  std::optional<std::string> kept_by_module() const;

 private:
  /// Reads a call that is about to run, without its results. @param tensors gets its operands
  traced_call read_call(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack, const repeated_call& repeated,
                        std::vector<at::Tensor>& tensors);

  /// True if code of a custom backward is about to write a tensor that the forward has made.
  bool writes_forward(const at::Tensor& t) const;

  void put_back_written() {
    const plain_kernels kernels;
    for (auto& [storage, saved] : saved_) saved.first.copy_(saved.second);
  }

  /// Runs a call whose results depend on values of the step, after all calls before it. Its results become inputs of the plan.
  void call_ahead(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors,
                  const repeated_call& repeated);
  /// @return the slot of the value
  index_t add_value(const at::Tensor& t, const std::string& maker);
  /// True if the tensor requires a gradient, and no call so far has made it.
  bool trained_elsewhere(const at::Tensor& t) const;

  /// Replaces the masks of a call by lists of positions, as kernels do. Otherwise its results would have other sizes while it is
  /// recorded.
  /// @return the operator that takes the lists; nothing: the call stays as it is
  std::optional<c10::OperatorHandle> with_positions(traced_call& c, ::torch::jit::Stack& stack,
                                                    const std::vector<at::Tensor>& tensors, const repeated_call& repeated);
  /// True if the size of a result, or of the gradient of an operand, depends on the mask. That is not so if one number is written
  /// to the places of one mask.
  static bool needs_positions(const traced_call& c, const std::vector<at::Tensor>& tensors);

  /// Counts the writes to a tensor from outside.
  void watch(const at::Tensor& t, index_t slot) {
    if (!t.is_inference()) watched_.push_back({t, slot, version(t), 0});
  }
  static int64_t version(const at::Tensor& t) { return t._version(); }

  /// Notes how often the step wrote tensors from outside. Tensors that share a version count once.
  void note_versions();

  index_t add(const at::Tensor& t, contents known);

  index_t add_slot(const at::Tensor& t, index_t storage, role from, std::size_t position, const std::string& name);

  void add_outside(const at::Tensor& t, role from, std::size_t position, const std::string& name);

  /// Adds a tensor that was not announced: the module keeps it in another place, or made it outside the dispatcher.
  void add_unannounced(const std::string& op, const at::Tensor& t);

  /// After the step: an unknown tensor that only the recorder still holds was made for this step, and its contents become a
  /// constant. Any other one belongs to the module, which may replace it.
  void freeze_if_temporary(index_t s);
  void freeze(slot& s, content bytes) {
    s.from = role::constant;
    s.position = trace_.constants.size();
    trace_.constants.push_back(std::move(bytes));
  }

  /// If the first use of an `empty` tensor is a read, it was filled by hand (`torch::tensor`, `data_ptr`): its contents are a
  /// constant.
  void freeze_filled_by_hand(const traced_call& c, const std::vector<at::Tensor>& tensors);

  void check(const std::string& op, const at::Tensor& t) const;

  void mark_hidden_writes(traced_call& c) const;

  /// Runs a call ahead of the plan, on the values of the step.
  void run_on_values(const traced_call& c, ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors) const;
  /// Runs a call for the geometry of its results only.
  /// @throws cannot_capture if a custom operator draws and does not declare it
  void run_on_made_up(const traced_call& c, ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors);
  /// Runs a custom operator that does not describe its results, on made-up numbers and on values of the step. Distrusts it if the
  /// geometries differ. Runs once per operator and recording.
  void try_on_values(const traced_call& c, const ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors);
  /// Decides about a call that makes the forward depend on values: it runs ahead of the plan, or is assumed to give zeros, or is
  /// refused.
  /// @return true if the call gives a number that may differ between steps and is known before each step
  /// @throws cannot_capture if no plan can contain the call
  bool classify_dynamic(traced_call& c, const std::vector<at::Tensor>& tensors) const;

  /// True if the backward asks whether values of the forward are zero.
  bool asks_for_zeros(const traced_call& c) const;

  /// True if the tensor has the values of the real step, in memory. Data that calls have made ahead may be gone.
  bool has_real_values(const at::Tensor& t) const { return real_values_[index_.at(storage_of(t))] && has_data(t); }

  /// True if values of a result may be needed during the capture.
  bool keeps_values(at::ScalarType type, std::size_t bytes, bool real_values) const {
    return (real_values || at::isIntegralType(type, true)) && bytes <= value_limit();
  }
  /// Values of more bytes are freed. A step that is only recorded keeps more, because no other values can answer its questions.
  std::size_t value_limit() const { return log_ == nullptr ? 16 * constant_limit : constant_limit; }

  /// Replaces the arguments of a call on the stack by its results. The call does not run if only the geometry of its results
  /// matters, and the geometry is known.
  /// @param first position of the arguments on the stack
  void execute(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors,
               bool real_values, bool constant);

  /// Replaces the arguments of a call by its known results.
  void repeat(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const repeated_call& repeated);

  /// Saves data before a kernel writes them: small constants, and results of calls that ran at once while the step was followed.
  /// The step may still continue eagerly, or run calls ahead of the plan. Other data are made again then.
  /// @param real_values the kernel writes the values of the step
  void keep_data(const at::Tensor& t, index_t s, bool real_values) const {
    if (log_->set_aside(t, real_values)) return;
    const bool constant = contents_[s] == contents::constant && storage_of(t)->nbytes() <= constant_limit;
    if (constant || (contents_[s] == contents::kept && log_->made_at_once(storage_of(t)))) log_->keep_data(t);
  }

  /// True if the kernel of a call runs on the host: its operands are there, or it makes a tensor there.
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
  /// Adds a storage that a call has made.
  /// @param name        of the operator that the module calls
  /// @param real_values all operands have the values of the step
  /// @param constant    all operands are constants
  void add_result_storage(const traced_call& c, const std::string& name, const at::Tensor& t, bool real_values, bool constant);
  /// After a call: storages that it has written, or whose data are gone, may no longer have the values of the step.
  void forget_changed_values(const traced_call& c, bool real_values);
  /// Releases the oldest kept values until the rest takes at most `value_limit()` bytes. A question about a released value is
  /// answered by calls that run ahead of the plan.
  void limit_kept();
  /// Updates the contents of a storage after a call: constants stay constants only if they are small and written from constants.
  void update_contents(c10::StorageImpl* s, bool constant, bool real_values);
  void release_or_hide(c10::StorageImpl* s) const {
    if (log_ != nullptr && (log_->is_pinned(s) || log_->is_exposed(s))) return;
    const bool by_hand = trace_.storages[index_.at(s)].slot != none;  // the data cannot be made again
    repeats_ || by_hand || (log_ != nullptr && log_->holds_ahead_data(s)) ? hide(s) : release(s);
  }

  trace trace_;
  mutable std::optional<std::string> refusal_;
  std::unordered_map<c10::StorageImpl*, index_t> index_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;  ///< keeps addresses from being reused, not the memory
  std::vector<contents> contents_;
  std::deque<index_t> kept_;       ///< storages of kept results, the oldest first
  bytes_t kept_bytes_ = 0;         ///< their sizes, in bytes
  std::vector<bool> real_values_;  ///< per storage: has the values of the real step, as inputs, buffers and their functions do
  std::vector<bool> of_forward_;   ///< per storage: there with these values when the forward ends, or derived from such storages
  std::vector<std::size_t> calculable_;  ///< calls whose operands all have real values
  std::vector<question> asked_;
  std::vector<bool> uninitialized_;                                   ///< per storage: made by `empty`, and not used yet
  std::unordered_map<c10::TensorImpl*, at::Tensor> outside_tensors_;  ///< tensors from outside
  std::map<index_t, std::pair<at::Tensor, std::optional<content>>> unannounced_;  ///< unannounced storages, and their contents
  /// Storages from outside that were written: their bytes, and the contents before.
  std::unordered_map<c10::StorageImpl*, std::pair<at::Tensor, at::Tensor>> saved_;
  struct watched_tensor {
    at::Tensor tensor;
    index_t slot;
    int64_t start, forward;  ///< versions
  };
  std::vector<watched_tensor> watched_;
  std::unordered_map<c10::TensorImpl*, std::size_t> ids_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> met_;  ///< keeps addresses, not the memory
  std::optional<draw_log> draws_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> references_;
  c10::Device device_;
  call_log* log_ = nullptr;       ///< of the training step; null: it runs for the recording only
  bool may_assume_zero_ = false;  ///< the backward may take values of the forward for zeros, as the step has a graph as fallback
  bool repeats_ = false;          ///< the call has been recorded before, and its operands may have data
  std::size_t inputs_ = 0;
  std::vector<at::Tensor> values_;
  std::unordered_set<const c10::StorageImpl*>
      trained_storages_;                               ///< storages of values that require a gradient and were made elsewhere
  uint64_t first_node_ = at::sequence_number::peek();  ///< number of the first autograd node of the step
  struct mask_positions {
    at::Tensor mask;
    std::vector<int64_t> sizes;  ///< of a tensor that is indexed as if flat; empty: one list per dimension
    std::vector<at::Tensor> lists;
    bool of(const at::Tensor& t, const std::vector<int64_t>& flat) const {
      if (flat != sizes) return false;
      return mask.is_same(t) || (storage_of(mask) == storage_of(t) && mask.storage_offset() == t.storage_offset() &&
                                 mask.sizes() == t.sizes() && mask.strides() == t.strides());
    }
  };
  std::vector<mask_positions> positions_;
  std::unordered_set<c10::OperatorName> tried_operators_;  ///< see `try_on_values`
};

}  // namespace remat::pytorch::detail
