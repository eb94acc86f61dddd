// SPDX-License-Identifier: Apache-2.0
/// @file
/// Logs the calls of a forward whose kernels have not run, and runs them if necessary. Private to the adapter.
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

/// The generator of a device during a forward or backward whose kernels draw later. Each draw moves the generator to an unlikely
/// state. So a state that the module sets is recognised, even if it sets the same state again.
class still_generator {
 public:
  explicit still_generator(c10::Device on);
  std::string current_state() const;
  void set(const std::string& state) const;
  /// True if the generator is in the state that `origin` describes.
  bool is_at(const draw_origin& origin) const;
  /// Notes that a call draws.
  void draw(std::size_t call);
  const std::string& start() const { return start_; }
  /// The generator is in its initial state, and the module has not set it.
  void restart() { expected_ = start_; }
  /// The state that the next draw finds if the module sets no other.
  const std::string& expected() const { return expected_; }
  /// Restores the initial state.
  void rewind() const;

 private:
  at::Generator generator_;
  std::string start_, expected_;                                 ///< states, in memory that no budget counts
  std::vector<std::pair<std::size_t, std::string>> draws_from_;  ///< calls that draw, and the states that they found
};

/// The calls of a forward that ran on hollow tensors, so that no kernel has run. `fill` runs the kernels in the order of the
/// calls, on the same operands, and puts the results under the hollow tensors. After that, all tensors that the module holds, and
/// the autograd graph over them, are those of an eager forward.
///
/// If the module reads values during its forward, all calls so far run ahead of the plan, which runs them again. Meanwhile only
/// data that may still be read stay in memory.
///
/// The log holds operands and results of all calls. That takes no memory for data, and it keeps addresses from being used again.
class call_log {
 public:
  struct entry {
    std::size_t call;
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments, results;
    bool grad_mode;
    std::string set_state;                   ///< state of the generator that the module has set before the call; empty: none
    bool has_run = false;                    ///< the call has run; it runs again only if the data of its results are gone
    std::vector<at::Tensor> positions = {};  ///< lists of positions that the plan has in place of masks
  };

  /// Begins with the forward. @param on device of the step
  explicit call_log(c10::Device on);

  /// @param call      number of the call in the forward
  /// @param arguments of the call
  /// @param results   hollow, or operands of the call
  /// @param draws     state from which the kernel draws, if it draws
  /// @param has_run   the call has run
  /// @param positions lists of positions that the plan has in place of masks
  void add(std::size_t call, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, std::vector<c10::IValue> results,
           const std::optional<draw_origin>& draws, bool has_run = false, std::vector<at::Tensor> positions = {});
  /// Call this before `add`. Until the end of the forward, saves the data of operands that the call reads and that other code may
  /// write (arrays of numpy), at most 1 MiB in all. Arguments of the forward, parameters, and memory that calls write are not
  /// saved.
  /// @param inputs number of arguments of the forward
  void watch(const trace& step, std::size_t inputs, const traced_call& c, const std::vector<c10::IValue>& arguments);
  /// Adds a call that only changes the geometry of tensors.
  /// @param before per changed tensor: a tensor with its old geometry
  void add_geometry_change(std::size_t call, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments,
                           std::vector<c10::IValue> results,
                           const std::unordered_map<const c10::TensorImpl*, at::Tensor>& before);
  /// Holds a tensor until `fill`, so that its address is not used again.
  void hold(const at::Tensor& t) { held_.push_back(t); }
  /// Hides the memory of a storage: until `fill`, reading it raises an error.
  void hide(const c10::Storage& s);
  /// Saves the present data of a storage. `fill` restores them before it runs the calls.
  void keep_data(const at::Tensor& t);
  /// The module gets access to the memory of a tensor, and may write it without an operator from now on.
  void expose(const at::Tensor& t);
  /// True if a call must not use its arguments before the pending calls have run: the module has access to the memory of an
  /// argument, and has written it, or the call writes it.
  bool uses_touched(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) const;
  /// True if the module has written memory, without an operator, that a logged call reads.
  bool is_any_touched() const;

  /// Replaces tensors that are about to get other memory by tensors over their present memory.
  void replace(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& by);
  /// Runs all kernels that have not run.
  /// @throws what a kernel throws, after the calls before it have run
  void fill();
  /// Runs only the chosen kernels, before the others. They must not draw. Calls that have run ahead will run again, unless the
  /// module has access to their memory.
  /// @param chosen per call of the forward
  void fill(const std::vector<bool>& chosen);

  /// Runs the kernels of all calls that have not run, and makes the memory of `wanted` readable. A later `fill` starts from the
  /// beginning nevertheless.
  /// @param calls  of the forward; they tell which operands a logged call writes
  /// @param wanted tensors of the forward, whose data stay until the next `run_ahead`
  /// @return true if the calls have run; false if nothing has run: the module has written memory without an operator, or a call
  ///         writes a weight whose memory is elsewhere
  /// @throws what a kernel throws
  bool run_ahead(const std::vector<traced_call>& calls, const std::vector<at::Tensor>& wanted);
  /// Runs the kernel of the next call after all calls so far, and drops its results. Nothing runs if the call can only fail for
  /// indices out of range, and these are known to be in range.
  /// @param calls as for `run_ahead`
  /// @param stack ends with the arguments
  /// @return false if the calls cannot run ahead
  /// @throws what the kernel throws
  bool try_kernel(const std::vector<traced_call>& calls, const c10::OperatorHandle& op, const ::torch::jit::Stack& stack);
  /// Hides the memory of tensors that calls have made, unless the module may read it. After `run_ahead` of these tensors.
  void hide_made(const std::vector<at::Tensor>& tensors) const;
  /// Gives tensors from outside their data from before the forward, until the next `run_ahead`.
  void show_before() const;
  /// Call this before a kernel writes out of turn. Sets data aside that calls ahead of the plan have made, until the next
  /// `run_ahead`.
  /// @param leave true: the kernel works on these data, and a copy is set aside; false: the data are moved away, and the kernel
  ///              gets made-up numbers
  /// @return true if there were such data
  bool set_aside(const at::Tensor& t, bool leave);
  /// True if a call that ran at once made the storage.
  bool made_at_once(const c10::StorageImpl* s) const;
  /// True if the storage holds data of the calls that have run ahead.
  bool holds_ahead_data(const c10::StorageImpl* s) const;
  /// True if a later call may free these data, which calls have made ahead.
  bool may_free(const c10::StorageImpl* s) const { return ahead_data_.count(s) > 0 && !is_pinned(s); }
  /// From now on the module may read this memory at any time.
  void pin(const at::Tensor& t) { pinned_.push_back(t.storage()); }
  bool has_pinned() const { return !pinned_.empty(); }
  /// True if this call of the forward has run ahead.
  bool has_run_ahead(std::size_t call) const { return run_ahead_count_ > 0 && call <= calls_[run_ahead_count_ - 1].call; }
  bool is_pinned(const c10::StorageImpl* s) const;
  /// True if the module has access to this memory.
  bool is_exposed(const c10::StorageImpl* s) const;
  /// Storages of results that no call uses, and that other code holds. Functions in Python copy the tensors that factories make.
  std::unordered_set<const c10::StorageImpl*> copied() const;
  /// True if only `t` uses its memory: no tensor outside of the log shares it, and no graph holds it.
  bool is_alone(const at::Tensor& t) const;
  /// The forward has ended: calls `show_before`, and frees the data that calls have made ahead.
  void give_back();
  /// @param make_room is called once, before calls first run beside the plan, with memory of their own
  void before_first_run_ahead(std::function<void()> make_room) { make_room_ = std::move(make_room); }
  /// Calls are about to run beside the plan: calls the function of `before_first_run_ahead`.
  void make_room() {
    if (const auto f = std::exchange(make_room_, nullptr)) f();
  }
  /// The forward has ended: frees the data of constants, unless the module holds them. `fill` makes them again.
  void give_back_constants(const std::vector<traced_call>& calls);
  /// Peak of the data of calls that have run ahead, in bytes.
  std::size_t peak_ahead() const { return peak_ahead_; }

  still_generator& generator() { return generator_; }
  /// In the order of the calls, without calls that only change the geometry of a tensor.
  const std::vector<entry>& calls() const { return calls_; }
  /// The calls that only change the geometry of tensors. Their arguments have the old geometry.
  const std::vector<entry>& geometry_changes() const { return geometry_changes_; }
  bool filled() const { return filled_; }
  /// How many references the log has to each tensor.
  std::unordered_map<const c10::TensorImpl*, std::size_t> references() const;

 private:
  void run(const entry& c) const;
  /// How many references to a storage the log has beside those of tensors.
  std::size_t references_to(const c10::StorageImpl* s) const;
  void note_storages();
  void begin_anew();
  bool has_to_run(const entry& c) const;
  bool has_operands(const std::vector<at::Tensor>& wanted) const;
  std::unordered_set<const c10::StorageImpl*> used_lately(const std::vector<at::Tensor>& wanted) const;
  void save_written(const traced_call& c, const entry& e);
  bool writes_elsewhere(const std::vector<traced_call>& calls) const;
  void forget_ahead();

  /// @return the state of the generator that the module has set before a call; empty: it set none
  std::string state_set_before(std::size_t call, const draw_origin& draws);

  still_generator generator_;
  std::vector<std::pair<std::size_t, std::string>> drawn_;  ///< calls that draw, and the states they draw from; empty: unknown
  std::vector<entry> calls_, geometry_changes_;
  std::vector<at::Tensor> held_;
  std::vector<c10::Storage> hidden_;
  struct saved_storage {
    c10::Storage storage;
    at::Tensor data;  ///< bytes
    bool of(const at::Tensor& t) const { return storage.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl(); }
    bool touched() const;
    void exchange();        ///< `data` with the present contents of the storage
    void put_back() const;  ///< copies `data` to the storage
  };
  const saved_storage* exposed(const at::Tensor& t) const;
  std::vector<saved_storage> saved_, exposed_, watched_;
  std::vector<c10::Storage> written_by_calls_;  ///< memory that others may write, too
  std::size_t watched_bytes() const;
  void end_watch();
  std::size_t first_stale_ = 0;  ///< first entry of `saved_` that was not yet put back for calls that run ahead
  bool filled_ = false;

  // --- of calls that have run ahead ------------------------------------------------------------------------------------------
  struct known_storage {
    c10::Storage storage;
    bool outside = false;                      ///< no logged call has made it
    bool stays = false;                        ///< made by a call that has run at once
    bool real = false;                         ///< holds the data of the step after the last call that has run ahead
    std::vector<std::size_t> results_of = {};  ///< positions in `calls_`
  };
  bool has_values(const std::vector<traced_call>& calls, const at::Tensor& t);
  bool indices_are_right(const std::vector<traced_call>& calls, const c10::OperatorHandle& op,
                         const std::vector<c10::IValue>& arguments);
  bool is_held(const known_storage& s) const;
  static void hide_again(const known_storage& s);
  void restore_ahead();
  std::size_t free_ahead_data(known_storage& s, const std::unordered_set<const c10::StorageImpl*>& needed);
  void run_pending(const std::vector<traced_call>& calls,
                   const std::unordered_map<const c10::StorageImpl*, std::size_t>& last_use,
                   const std::unordered_set<const c10::StorageImpl*>& needed);
  struct outside_storage {
    c10::Storage storage;
    at::Tensor before, now;  ///< bytes before the forward, and after the calls that have run ahead
  };
  std::unordered_map<const c10::StorageImpl*, known_storage> storages_;
  std::vector<const c10::StorageImpl*> staying_;            ///< storages that stay, perhaps not all of them
  std::unordered_set<const c10::StorageImpl*> ahead_data_;  ///< storages with data that calls have made ahead
  std::vector<outside_storage> written_outside_;
  std::vector<saved_storage> set_aside_;
  std::vector<c10::Storage> pinned_;
  std::vector<const c10::StorageImpl*> shown_;  ///< readable storages of `wanted`, until the next `run_ahead`
  std::function<void()> make_room_;
  std::size_t run_ahead_count_ = 0, noted_ = 0;  ///< counts of entries that have run ahead, and of entries with known storages
  std::string ahead_state_;                      ///< state of the generator after the last call that has run ahead
  std::size_t recent_calls_ = 4;  ///< data of the last `recent_calls_` calls stay, because code other than Python may hold them
  std::size_t peak_ahead_ = 0;
};

/// The calls of [since, until) that write memory from outside, for `repeat_writes`.
std::vector<std::pair<c10::OperatorHandle, std::vector<c10::IValue>>> writes_since(const call_log& log, const trace& calls,
                                                                                   std::size_t since, std::size_t until,
                                                                                   bool all);

/// A storage without memory, which it may get later. Until then, reads of its memory raise an error.
c10::Storage hollow_storage(std::size_t bytes, c10::Device on);

}  // namespace remat::pytorch::detail
