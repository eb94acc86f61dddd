// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calls of a forward whose kernels have not run yet, and how to run them after all. Private to the adapter.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lists.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

inline std::string text_of(const content& c) { return {reinterpret_cast<const char*>(c.data()), c.size()}; }

/// The generator of a device during a forward, or a backward, whose draws come later. Each of these moves it to a state that
/// nobody knows, so that one that the module sets is told from it, the same one once more too.
class still_generator {
 public:
  explicit still_generator(c10::Device on);
  std::string now() const;
  void set(const std::string& state) const;
  /// Is it where `origin` has it?
  bool is_at(const draw_origin& origin) const;
  /// A call draws.
  void draw(std::size_t call);
  const std::string& start() const { return start_; }
  /// It is where it was at the beginning, and nobody has set it.
  void restart() { place_ = start_; }
  /// The state that the next draw finds, if nobody sets another one.
  const std::string& place() const { return place_; }
  /// Gives it the state that it had at the beginning.
  void rewind() const;

 private:
  at::Generator generator_;
  std::string start_, place_;                              ///< beside the memory that the budget is for
  std::vector<std::pair<std::size_t, std::string>> from_;  ///< calls that draw, and the states that they found
};

/// The module's Python has run on hollow tensors: operators were called, no kernel has run. `fill` runs the kernels in the order
/// of the calls, on the operands of then, and puts their results under the hollow tensors. After that all tensors that the module
/// holds, and the autograd graph that it has built over them, are those of an eager forward.
///
/// Where the module wants to see values on its way, the calls until then run ahead of the plan, which runs them once more. Only
/// data that somebody may still look at stay meanwhile.
///
/// Holds operands and results of all calls, which costs no memory for data, and keeps addresses from being used again.
class call_log {
 public:
  struct entry {
    std::size_t call;
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments, results;
    bool grad_mode;
    std::string state;                       ///< not empty: the module has put the generator into this state before the call
    bool done = false;                       ///< it has run: runs again only if the data of its results are gone by then
    std::vector<at::Tensor> positions = {};  ///< those that the plan has in the place of masks among the arguments
  };

  /// The forward begins now. @param on device of the step
  explicit call_log(c10::Device on);

  /// @param call      its number in the forward
  /// @param arguments of the call
  /// @param results   hollow, or operands of the call
  /// @param draws     from where the kernel draws, if it does
  /// @param done      it has run
  /// @param positions that the plan has in the place of masks
  void add(std::size_t call, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, std::vector<c10::IValue> results,
           const std::optional<draw_origin>& draws, bool done = false, std::vector<at::Tensor> positions = {});
  /// A tensor whose address must not be used again meanwhile.
  void hold(const at::Tensor& t) { held_.push_back(t); }
  /// Storages of tensors whose memory nobody may read before `fill`.
  void hide(const c10::Storage& s);
  /// `fill` begins with the data that a storage has now.
  void keep_data(const at::Tensor& t);
  /// The module gets hold of the memory of a tensor, and may write it from now on without any operator.
  void expose(const at::Tensor& t);
  /// A call is about to use a tensor in a way that calls of before, which have not run, must not see.
  bool uses_touched(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) const;
  /// The module has written memory that a call has read which has not run.
  bool is_any_touched() const;

  /// Puts others over the same memory in the place of tensors that are about to get other memory.
  void replace(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& by);
  /// Runs the kernels that have not run.
  /// @throws what a kernel throws; the calls before it have run then
  void fill();
  /// Runs some kernels only, which do not draw, before the others.
  /// @param chosen per call of the forward
  void fill(const std::vector<bool>& chosen);

  /// Runs the kernels of all calls that have not run, and shows the memory of `wanted`. `fill` begins anew all the same.
  /// @param calls  of the forward: what those in the log write
  /// @param wanted tensors of the forward, whose data stay until the next call of this
  /// @return false: nothing has run, as the module has written memory without an operator, or a weight that is elsewhere
  /// @throws what a kernel throws
  bool run_ahead(const std::vector<traced_call>& calls, const std::vector<at::Tensor>& wanted);
  /// Gives tensors from outside the data that they had before the forward, until the next `run_ahead`.
  void show_before() const;
  /// A kernel is about to write before its turn: keeps data aside that calls have made ahead, until the next `run_ahead`.
  /// @param leave it writes on these data, not on made-up numbers
  /// @return there were such data
  bool set_aside(const at::Tensor& t, bool leave);
  /// Calls that have run ahead have made the data there.
  bool has_made(const c10::StorageImpl* s) const;
  /// The module may look at this memory whenever it likes.
  void pin(const at::Tensor& t) { pinned_.push_back(t.storage()); }
  bool has_pinned() const { return !pinned_.empty(); }
  bool is_pinned(const c10::StorageImpl* s) const;
  /// The memory of `t` belongs to it alone: no other tensor shares it beside those of calls, and no graph holds it.
  bool is_alone(const at::Tensor& t) const;
  /// The forward has ended: `show_before`, and data that calls have made ahead go.
  void give_back();
  /// @param make_room is called before the first calls run ahead, with memory beside that of the plan
  void before_ahead(std::function<void()> make_room) { make_room_ = std::move(make_room); }
  /// Calls are about to run beside the plan.
  void make_room() {
    if (const auto f = std::exchange(make_room_, nullptr)) f();
  }
  /// The step is recorded: data of constants that the module does not hold go. `fill` makes them again.
  void give_back_constants(const std::vector<traced_call>& calls);
  /// Most bytes that calls have taken that have run ahead.
  std::size_t most_ahead() const { return most_ahead_; }

  still_generator& generator() { return generator_; }
  /// In the order of the calls. Those that only give a tensor another geometry are not among them.
  const std::vector<entry>& calls() const { return calls_; }
  bool filled() const { return filled_; }
  /// How often it refers to each tensor.
  std::unordered_map<const c10::TensorImpl*, std::size_t> references() const;

 private:
  void run(const entry& c) const;
  void look();
  void begin_anew();
  bool has_to_run(const entry& c) const;
  bool has_operands(const std::vector<at::Tensor>& wanted) const;
  std::unordered_set<const c10::StorageImpl*> used_lately(const std::vector<at::Tensor>& wanted) const;
  void save_written(const traced_call& c, const entry& e);
  bool writes_elsewhere(const std::vector<traced_call>& calls) const;
  void forget_ahead();

  /// The state that the module has put the generator into before a call; empty: none.
  std::string set_before(std::size_t call, const draw_origin& draws);

  still_generator generator_;
  std::vector<std::pair<std::size_t, std::string>> drawn_;  ///< calls that draw, and from which state; empty: nobody knows
  std::vector<entry> calls_;
  std::vector<at::Tensor> held_;
  std::vector<c10::Storage> hidden_;
  struct saved_storage {
    c10::Storage storage;
    at::Tensor data;  ///< bytes
    bool of(const at::Tensor& t) const { return storage.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl(); }
    bool touched() const;
    void exchange();        ///< the data with what is there now
    void put_back() const;  ///< a copy of the data
  };
  const saved_storage* exposed(const at::Tensor& t) const;
  std::vector<saved_storage> kept_, exposed_;
  std::size_t stale_ = 0;  ///< position of the first of `kept_` that has not been put back for calls that run ahead
  bool filled_ = false;

  // --- of calls that have run ahead ------------------------------------------------------------------------------------------
  struct known_storage {
    c10::Storage storage;
    bool outside = false;                      ///< no call has made it
    bool stays = false;                        ///< made by a call that has run at once
    bool real = false;                         ///< its data are those of the step after the calls that have run ahead
    std::vector<std::size_t> results_of = {};  ///< calls
  };
  bool is_held(const known_storage& s) const;
  struct outside_storage {
    c10::Storage storage;
    at::Tensor before, now;  ///< bytes: before the forward, and after the calls that have run ahead
  };
  std::unordered_map<const c10::StorageImpl*, known_storage> storages_;
  std::vector<const c10::StorageImpl*> stay_;         ///< some that stay
  std::unordered_set<const c10::StorageImpl*> made_;  ///< those that calls have made ahead, as far as their data are there
  std::vector<outside_storage> written_;
  std::vector<saved_storage> aside_;
  std::vector<c10::Storage> pinned_;
  std::vector<const c10::StorageImpl*> shown_;  ///< of `wanted`, until the next call of `run_ahead`
  std::function<void()> make_room_;
  std::size_t ahead_ = 0, looked_ = 0;  ///< entries that have run ahead; whose storages are known
  std::string place_;                   ///< state of the generator after those that have run ahead
  std::size_t window_ = 4;              ///< data of so many calls stay, as code that is not Python may hold them
  std::size_t most_ahead_ = 0;
};

/// Of calls [since, until), those that write memory from outside, for `repeat_writes`.
std::vector<std::pair<c10::OperatorHandle, std::vector<c10::IValue>>> writes_since(const call_log& log, const trace& calls,
                                                                                   std::size_t since, std::size_t until,
                                                                                   bool all);

/// A storage that may get memory later, which nobody may read until then.
c10::Storage hollow_storage(std::size_t bytes, c10::Device on);

}  // namespace remat::pytorch::detail
