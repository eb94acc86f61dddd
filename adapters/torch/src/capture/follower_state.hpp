// SPDX-License-Identifier: Apache-2.0
// The forward or backward that is followed: the recorded call at hand, and the tensors met so far.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/views.hpp"
#include "call_log.hpp"
#include "follower.hpp"
#include "resumed_recording.hpp"

namespace remat::pytorch::detail {

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
  follower(const std::vector<candidate>& candidates, const std::vector<at::Tensor>& inputs, const step_request& what);

  /// Follows the backward of a step.
  follower(const candidate& step, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& output_grads);

  /// That of this thread; null: it follows none.
  static follower* of_thread();
  /// The same, if its calls have not run, and are not recorded anew.
  static follower* at_work() {
    auto* f = of_thread();
    return f != nullptr && f->fresh() == nullptr && !f->eager() ? f : nullptr;
  }

  void run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);

  /// From here on eagerly.
  void diverge(std::string why);
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
    if (!eager()) fill();
  }
  /// The module is about to look at the memory of a tensor, and perhaps to write it, now or later.
  void read(const at::Tensor& t, bool may_write) {
    if (!show(t, may_write)) diverge("the module reads the memory of a tensor directly");
  }

  bool has_drawn() const {
    const auto& calls = recorded().calls;
    return std::any_of(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(at_),
                       [](const auto& c) { return c.draws.has_value(); });
  }

  std::size_t calls() const { return at_; }
  const call_log* log() const { return log_.get(); }
  auto writes(std::size_t since, std::size_t until, bool all) const { return writes_since(*log_, recorded(), since, until, all); }

  bool left() const { return left_; }
  /// The backward has ended. @return how it differs
  std::string finish();

  followed finish(std::vector<at::Tensor> returned);

 private:
  /// @return the module may look at the memory of a tensor
  bool show(const at::Tensor& t, bool may_write);
  /// Runs the calls until now, in the place of the plan.
  void fill() {
    log_->make_room();
    log_->fill();
  }
  /// Runs the calls until now ahead of the plan. @return false: they cannot
  bool run_ahead(const std::vector<at::Tensor>& wanted) { return log_->run_ahead(recorded().calls, wanted); }
  /// A call whose results depend on values: looks at these.
  /// @param positions gets those in its masks
  /// @param made      gets its results, if it does not take masks
  /// @return why no candidate goes on like this; nothing: the present one does
  std::optional<std::string> ask(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack,
                                 std::vector<at::Tensor>& positions, std::optional<::torch::jit::Stack>& made);
  /// A tensor that depends on values: an input of the plan.
  void take_value(std::size_t id, const at::Tensor& t);
  /// Runs those of the calls until now, unless they write what another one reads, which has not run.
  /// @return it has
  bool run_now(const std::vector<bool>& chosen);
  /// The module returns or keeps memory that calls have made ahead of the plan, and that would be another's after it.
  bool keeps_read_memory(const std::vector<at::Tensor>& returned) const;
  /// The module has a constant in its hands, or returns one.
  bool gives_constants(const std::vector<at::Tensor>& returned) const;
  /// No candidate makes the calls of this forward: tries to record it from here on.
  bool record_on(const std::string& why);
  std::unique_ptr<recorded_run> finish_recording(const std::vector<at::Tensor>& returned);
  still_generator& generator() { return backward_ ? *generator_ : log_->generator(); }
  const trace& recorded() const { return *candidates_[current_].what->recorded; }
  const traced_call& call() const { return recorded().calls[at_]; }

  void run_backward(const c10::OperatorHandle& op, ::torch::jit::Stack& stack);

  void reserve();
  /// Takes parameters, buffers and inputs for known.
  void bind();
  void bind(std::size_t id, const at::Tensor& t);
  /// A storage is seen for the first time, or again.
  /// @param recorded_at where `t` began in it when it was recorded
  void locate(index_t storage, const at::Tensor& t, bytes_t recorded_at) {
    if (live_[storage]) return;
    live_[storage] = t.storage().getWeakStorageImpl();
    shift_[storage] = byte_offset(t) - recorded_at;
  }
  /// What a call has made that has run.
  void meet_results(const traced_call& c, const ::torch::jit::Stack& stack);
  void set(std::size_t id, const at::Tensor& t) {
    tensors_[id] = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(t.getIntrusivePtr());
  }

  /// @return how the call differs from the next one of the candidate, or null
  const char* differs(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack);
  /// In the recorded arguments undefined tensors are in the place of operands.
  static bool same_but_tensors(const c10::IValue& a, const c10::IValue& b);

  const char* differs(const traced_tensor& o, const at::Tensor& t) const;

  /// An operand, seen for the first time, or again.
  void take(const traced_tensor& o, const at::Tensor& t);
  /// Is what lies in a slot what the program has there?
  void look_at(index_t k, const c10::Storage& s, const at::Tensor& t);

  /// Another candidate has the same constants, but for numbers, and the same tensors of the module, in the slots that have been
  /// met until now.
  bool has_same_outside(const candidate& other) const;

  /// Gives operands the geometry that a call gives them (`transpose_`).
  /// @return there are some: the call does nothing else
  bool reshape(const traced_call& c, const std::vector<c10::IValue>& arguments);
  static bool same_place(const byte_view& a, const byte_view& b) {
    return a.sizes == b.sizes && a.strides == b.strides && a.offset == b.offset;
  }

  std::vector<c10::IValue> results_of(const traced_call& c, const std::vector<c10::IValue>& arguments);

  /// A candidate that has made the same calls until now, and makes this one.
  bool choose_another(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
    return choose([&] { return differs(op, stack) == nullptr; });
  }
  bool choose_another_end(const std::vector<at::Tensor>& returned) {
    return choose([&] { return !unfinished(returned); });
  }
  template <class F>
  bool choose(F suits) {
    for (const auto& [k, t] : late_)
      if (!recorded().slots[k].number) return false;  // the programs may have other constants
    const auto before = current_;
    const auto met = std::tuple(tensors_, live_, shift_, of_, shared_, late_);
    for (auto next = before + 1; next < candidates_.size(); ++next) {
      if (common_calls(recorded(), *candidates_[next].what->recorded) < at_ || !has_same_outside(candidates_[next])) continue;
      current_ = next;
      bind();
      late_.clear();
      for (const auto& [k, t] : std::exchange(scalars_, {})) look_at(k, t.storage(), t);
      if (suits() && run_now(candidates_[current_].what->runs)) return true;
      current_ = before;
      std::tie(tensors_, live_, shift_, of_, shared_, late_) = met;
      reserve();
    }
    return false;
  }

  /// @return what keeps the forward from being that of the candidate
  std::optional<std::string> unfinished(const std::vector<at::Tensor>& returned);

  /// A tensor that was copied when it was recorded, too, over the memory of a call.
  bool is_copy(std::size_t output, const at::Tensor& t) const;

  /// Everything outside is as before the forward.
  void put_back() const {
    log_->give_back();
    reset_versions();
    log_->generator().rewind();
  }
  void reset_versions() const;

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
  std::vector<std::pair<index_t, at::Tensor>> scalars_;   ///< that are operands, as far as they have been compared
  std::vector<std::pair<at::Tensor, int64_t>> versions_;  ///< of tensors from outside that the forward writes
  std::vector<double> numbers_;                           ///< of calls until now
  std::string why_;
};

}  // namespace remat::pytorch::detail
