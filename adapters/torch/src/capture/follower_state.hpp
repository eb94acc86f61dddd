// SPDX-License-Identifier: Apache-2.0
// State of following a forward or backward: position in the recorded calls, tensors met so far.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/views.hpp"
#include "call_log.hpp"
#include "follower.hpp"
#include "resumed_recording.hpp"

namespace remat::pytorch::detail {

/// Identifies a tensor or storage that may have been freed. Its address is not used again as long as this lives.
template <class Weak>
class identity {
 public:
  identity() : weak_(nothing()) {}
  identity(Weak weak) : weak_(std::move(weak)) {}
  explicit operator bool() const { return address() != nothing()._unsafe_get_target(); }
  auto* address() const { return weak_._unsafe_get_target(); }
  auto lock() const { return weak_.lock(); }

 private:
  static const Weak& nothing() {
    static const Weak none{decltype(std::declval<Weak>().lock())()};
    return none;
  }
  Weak weak_;
};
using tensor_identity = identity<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>;
using storage_identity = identity<c10::weak_intrusive_ptr<c10::StorageImpl>>;

/// The calls of the backward differ from the plan.
struct left_plan : std::exception {
  const char* what() const noexcept override { return "remat: the backward of this step is not the planned one"; }
};

/// Follows one forward, or one backward.
class follower final : public c10::DebugInfoBase {
 public:
  follower(const std::vector<candidate>& candidates, const std::vector<at::Tensor>& inputs, const step_request& request);

  /// Follows the backward of a step.
  follower(const candidate& step, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& output_grads);

  /// The follower of this thread; null: the thread follows no forward or backward.
  static follower* of_thread();
  /// The follower that gets the calls of this thread; null: there is none, or they are recorded anew.
  static follower* of_calls() {
    auto* f = of_thread();
    return f != nullptr && f->recording() == nullptr ? f : nullptr;
  }
  /// The same, if the kernels of its forward or backward have not run; else null.
  static follower* at_work() {
    auto* f = of_calls();
    return f != nullptr && !f->eager() ? f : nullptr;
  }

  void run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);

  /// Runs the rest eagerly.
  void fall_back(std::string why);
  /// Throws the refusal again, because code of the module may have caught it.
  void refuse() const {
    if (left_plan_ && !backward_)
      throw cannot_capture("call " + std::to_string(diverged_at_) + " differs from the planned one: " + divergence_);
  }
  bool eager() const { return log_ && log_->filled(); }
  /// The recording from the first different call on; null: none.
  resumed_recording* recording() const { return recording_.get(); }
  /// Call this in a handler: the forward has thrown.
  void note_exception() {
    if (recording_) return recording_->note_exception();
    refuse();
    if (!eager()) fill();
  }
  /// Call this before the module reads the memory of a tensor directly. The forward runs eagerly from here on if the data cannot
  /// be shown otherwise.
  /// @param may_write the module may write the memory, too, now or later
  void read(const at::Tensor& t, bool may_write) {
    if (!show(t, may_write)) fall_back("the module reads the memory of a tensor directly");
  }

  bool has_drawn() const {
    const auto& calls = recorded().calls;
    return std::any_of(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(next_call_),
                       [](const auto& c) { return c.draws.has_value(); });
  }

  std::size_t calls() const { return next_call_; }
  const call_log* log() const { return log_.get(); }
  auto writes(std::size_t since, std::size_t until, bool all) const { return writes_since(*log_, recorded(), since, until, all); }

  bool has_left_plan() const { return left_plan_; }
  /// The backward has ended. @return how it differs; empty: not at all
  std::string finish();

  followed finish(std::vector<at::Tensor> returned);

 private:
  /// Makes the data of a tensor available to the module, see `read`.
  /// @return true if the module may read the memory
  bool show(const at::Tensor& t, bool may_write);
  /// Runs the calls so far, instead of the plan.
  void fill() {
    log_->make_room();
    log_->fill();
  }
  /// Runs the calls so far ahead of the plan. @return false if they cannot
  bool run_ahead(const std::vector<at::Tensor>& wanted) { return log_->run_ahead(recorded().calls, wanted); }
  /// Evaluates what the results of a call depend on.
  /// @param positions gets the positions in its masks
  /// @param made      gets its results, if the call takes no masks
  /// @return why no candidate has such results; nothing: the present candidate has
  std::optional<std::string> evaluate(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack,
                                      std::vector<at::Tensor>& positions, std::optional<::torch::jit::Stack>& made);
  /// Takes a tensor that depends on values as an input of the plan.
  void take_value(std::size_t id, const at::Tensor& t);
  /// Runs the chosen calls among the calls so far, unless one of them writes what a call that has not run reads.
  /// @return true if they have run
  bool run_at_once(const std::vector<bool>& chosen);
  /// True if the module returns or keeps memory of calls ahead of the plan that it has read directly. The plan would use that
  /// memory for something else.
  bool keeps_read_memory(const std::vector<at::Tensor>& returned) const;
  /// Constants without data that the module holds or returns.
  std::unordered_set<const c10::StorageImpl*> given_constants(const std::vector<at::Tensor>& returned) const;
  /// Runs the calls so far that make some constants, see `run_at_once`. @return true if they have run
  bool make_constants(const std::unordered_set<const c10::StorageImpl*>& wanted);
  /// No candidate makes the calls of this forward: tries to record it from here on. @return true if that works
  bool record_from_here(const std::string& why);
  std::unique_ptr<recorded_run> finish_recording(const std::vector<at::Tensor>& returned);
  still_generator& generator() { return backward_ ? *generator_ : log_->generator(); }
  const trace& recorded() const { return *candidates_[current_].forward->recorded; }
  const traced_call& call() const { return recorded().calls[next_call_]; }

  void run_backward(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);

  void reserve();
  /// Makes parameters, buffers and inputs known.
  void bind();
  void bind(std::size_t id, const at::Tensor& t);
  /// Notes where a storage is, if it is met for the first time.
  /// @param recorded_at offset of `t` in its storage when it was recorded, in bytes
  void locate(index_t storage, const at::Tensor& t, bytes_t recorded_at) {
    if (storages_[storage]) return;
    storages_[storage] = t.storage().getWeakStorageImpl();
    shift_[storage] = byte_offset(t) - recorded_at;
  }
  /// Notes the results of a call that has run.
  void note_results(const traced_call& c, const ::torch::jit::Stack& stack);
  void set(std::size_t id, const at::Tensor& t) {
    tensors_[id] = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(t.getIntrusivePtr());
  }

  /// @return how the call differs from the next call of the candidate; null: not at all
  const char* differs(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack);
  /// Compares arguments; recorded ones have undefined tensors in place of operands.
  static bool same_but_tensors(const c10::IValue& a, const c10::IValue& b);

  const char* differs(const traced_tensor& o, const at::Tensor& t) const;

  /// Notes an operand, and compares the contents of its slot at the first time.
  void take_operand(const traced_tensor& o, const at::Tensor& t);
  /// Compares the tensor in a slot with that of the program; notes it as changed if it differs.
  void compare_slot(index_t k, const c10::Storage& s, const at::Tensor& t);

  /// True if, in all slots met so far, another candidate has the same constants except for numbers, and the same tensors of the
  /// module.
  bool has_same_outside(const candidate& other) const;

  /// Gives operands the geometry that the call gives them (`transpose_`).
  /// @return per changed tensor: a tensor with its old geometry; empty: the call does something else
  std::unordered_map<const c10::TensorImpl*, at::Tensor> reshape(const traced_call& c, const std::vector<c10::IValue>& arguments);
  static bool same_place(const byte_view& a, const byte_view& b) {
    return a.sizes == b.sizes && a.strides == b.strides && a.offset == b.offset;
  }

  std::vector<c10::IValue> results_of(const traced_call& c, const std::vector<c10::IValue>& arguments);

  /// Switches to another candidate with the same calls so far, which makes this call, too. Earlier candidates do not, except
  /// after a call that has raised an error: it is not among the calls of a candidate where it failed. @return true if there is
  /// one
  bool choose_another(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
    return choose([&] { return differs(op, stack) == nullptr; });
  }
  bool choose_another_end(const std::vector<at::Tensor>& returned) {
    return choose([&] { return !unfinished(returned); });
  }
  template <class F>
  bool choose(F suits) {
    for (const auto& [k, t] : changed_slots_)
      if (!recorded().slots[k].number) return false;  // the constants of the programs may differ
    const auto before = current_;
    const auto met = std::tuple(tensors_, storages_, shift_, outside_storages_, newly_shared_, changed_slots_, compared_numbers_);
    for (auto next = std::exchange(search_from_first_, false) ? 0 : before + 1; next < candidates_.size(); ++next) {
      if (next == before || common_calls(recorded(), *candidates_[next].forward->recorded) < next_call_ ||
          !has_same_outside(candidates_[next]))
        continue;
      current_ = next;
      bind();
      changed_slots_.clear();
      for (const auto& [k, t] : std::exchange(compared_numbers_, {})) compare_slot(k, t.storage(), t);
      if (suits() && run_at_once(candidates_[current_].forward->runs_at_once)) return true;
      current_ = before;
      std::tie(tensors_, storages_, shift_, outside_storages_, newly_shared_, changed_slots_, compared_numbers_) = met;
      reserve();
    }
    return false;
  }

  /// @return why the forward is not that of the candidate; nothing: it is
  std::optional<std::string> unfinished(const std::vector<at::Tensor>& returned);

  /// True if `t` lies over the memory of an output that was a copy in the recording, too.
  bool is_copy(std::size_t output, const at::Tensor& t) const;

  /// Restores all tensors from outside, their versions, and the generator.
  void put_back() const {
    log_->give_back();
    reset_versions();
    log_->generator().rewind();
  }
  void reset_versions() const;

  std::vector<candidate> candidates_;
  const std::vector<at::Tensor>& inputs_;
  bool backward_ = false, left_plan_ = false;
  std::size_t current_ = 0, next_call_ = 0, diverged_at_ = 0;
  const step_request* request_ = nullptr;  ///< null in a backward
  std::unique_ptr<resumed_recording> recording_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::shared_ptr<call_log> log_;             ///< null in a backward
  std::optional<still_generator> generator_;  ///< in a backward only
  std::vector<tensor_identity> tensors_;      ///< per tensor of the trace, once met
  std::vector<storage_identity> storages_;    ///< per storage of the trace
  std::vector<bool> read_, written_;          ///< per storage: a call that has not run reads or writes it
  std::unordered_map<const c10::StorageImpl*, index_t> outside_storages_;  ///< storages of tensors from outside
  bool newly_shared_ = false;   ///< two tensors share memory now that shared none in the recording
  std::vector<bool> ran_;       ///< per call so far: it has run
  std::vector<bool> compared_;  ///< per slot: its contents have been compared
  std::vector<bytes_t> shift_;  ///< per storage from outside: bytes by which its start differs from the recording
  std::vector<std::pair<index_t, at::Tensor>> changed_slots_, ahead_values_;
  std::vector<std::pair<index_t, at::Tensor>> compared_numbers_;  ///< numbers among the operands that have been compared
  std::vector<std::pair<at::Tensor, int64_t>> versions_;  ///< versions before the forward of tensors from outside that it writes
  bool search_from_first_ = false;                        ///< the last call has raised an error: see `choose`
  std::vector<double> numbers_;                           ///< numbers in the calls so far that may differ
  std::string divergence_;
};

}  // namespace remat::pytorch::detail
