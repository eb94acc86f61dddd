// SPDX-License-Identifier: Apache-2.0
/// @file
/// Counts the bytes that the steps of a session take and may take. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <remat/pytorch/budget.hpp>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/model.hpp>
#include <remat/pytorch/session.hpp>

#include "../plan/captured_step.hpp"

namespace remat::pytorch {

/// The executors of a session, and its bytes: held, taken by other steps, allowed by the budget.
class accounts {
 public:
  /// `options` and `parameters` must outlive this object.
  accounts(const wrap_options& options, const std::vector<named_tensor>& parameters)
      : options_(options), parameters_(parameters) {}

  /// Bytes that are held with any plan, without gradients.
  pytorch::report held(const captured_step& s, const std::vector<at::Tensor>& inputs) const;
  /// Bytes of existing gradients, without gradients in arenas that are counted as a whole. If several threads call the model: of
  /// all gradients that may exist. On a new thread: the previous answer.
  bytes_t gradients();
  /// True if steps may share memory: plans choose addresses, addresses may change, and weights are read in place.
  bool can_share() const {
    return !options_.graph && !options_.steps_on && !options_.fetched && (device_ == nullptr || device_->can_place());
  }
  /// Notes a kind of steps. Budgets relative to the plain step count the bytes of its store-all plan.
  void note_kind(const captured_step& s);
  /// Notes a call of the model on this thread, which may become a step.
  void note_call();
  /// True if several threads begin steps in turn. Each may read and replace gradients while another begins a step.
  bool several_threads() const { return alternating_ > 0; }
  std::size_t in_flight() const;
  /// A step begins. Notes how many steps of each kind are in flight at a time. The count starts anew when none is in flight.
  void note_step(const std::shared_ptr<captured_step>& kind);
  /// Call this while no step is in flight. The fewest bytes that the steps of the last time need, as far as their leanest plans
  /// are known; 0 if they were not all in flight at once.
  bytes_t least_of_last_step() const;
  /// The largest number of steps in flight, the last time or now.
  std::size_t at_a_time() const { return std::max({std::size_t{1}, learned(), in_flight()}); }
  /// As `at_a_time`, including a step that is about to begin.
  std::size_t expected() const { return std::max(learned(), in_flight() + 1); }
  /// True if one more step does not exceed the number of the last time.
  bool has_learned() const { return in_flight() < learned(); }
  /// Bytes that steps in flight hold: with zones, those from forward to backward; otherwise all that a step needs.
  bytes_t held_in_flight() const;
  /// The memory in which steps that share memory compute.
  std::shared_ptr<working_memory> working;

  /// Bytes of arenas of other steps, and of values that these handed out.
  /// @param but this executor and those that share its arena do not count; null: idle executors do not count
  bytes_t others(const runner* but = nullptr) const;
  /// Bytes of arenas that no step needs any more, but that still contain gradients.
  bytes_t behind() const;
  /// The budget in bytes. A relative budget is added to held bytes and existing gradients. Percentages are of the largest plain
  /// step so far, so that a smaller last batch of an epoch may take as much. Steps in flight add what they would take in a plain
  /// step. Shares of an accelerator are of its memory for tensors: free, or taken by tensors of this process.
  /// @param fixed     held bytes; its gradients do not count
  /// @param gradients bytes of existing gradients; if a step begins, gradients that stayed behind in arenas are added
  /// @param begins    a step begins
  bytes_t budget(const pytorch::report& fixed, bytes_t gradients, bool begins) const;
  /// Sets the device of the steps. Notes the bytes of a new device for tensors.
  void on(pytorch::device& d);

  /// Moves gradients of parameters out of the arena of `r`. On the host, gradients stay if other code may know their address.
  void evacuate(const executor& r) const;
  /// Moves values that are held out of an arena.
  /// @param gradients moves gradients, too
  /// @return true if no step runs in the arena, and nothing is left there
  bool vacate(const region& arena, bool gradients = true) const;
  /// An arena without a running step, for steps of another kind. Executors that share it stay ready. On a device, this avoids
  /// calls of the allocator that wait for all kernels, and values that are held are moved out. On the host, if no graph needs the
  /// addresses, gradients stay: pages around them can be given back.
  /// @return null: none
  std::shared_ptr<region> idle_arena() const;
  /// Frees all idle memory.
  void release();
  /// Drops the executors for which `gone` holds, and keeps their counters.
  template <class F>
  void let_go(F gone) {
    std::erase_if(runners, [&](const auto& r) {
      const bool goes = gone(*r);
      if (goes) unplanned += r->executor->unplanned_allocations(), waited += r->executor->waited_seconds();
      return goes;
    });
  }
  /// Forgets arenas that have been freed.
  void sweep();

  /// At most one of them is idle; several, if they share an arena.
  std::vector<std::shared_ptr<runner>> runners;
  std::size_t unplanned = 0;                      ///< unplanned allocations of dropped executors
  double waited = 0;                              ///< waiting of dropped executors for copies, s
  bool once_more = false;                         ///< a forward runs once more for its backward: no other steps are expected
  bytes_t outputs_of_before = 0;                  ///< bytes of the outputs of its first run that still exist
  bytes_t largest_plain = 0;                      ///< bytes of the largest plain step so far
  bytes_t largest_held = 0, largest_working = 0;  ///< the same for steps in zones: held by a step, and for computing

 private:
  std::size_t learned() const { return once_more ? 0 : in_flight() == 0 ? seen_ : last_; }

  const wrap_options& options_;
  const std::vector<named_tensor>& parameters_;
  std::size_t last_ = 0, seen_ = 0;                              ///< steps in flight at a time: the last time; this time so far
  std::map<std::shared_ptr<captured_step>, std::size_t> kinds_;  ///< steps of this time that have begun, by kind
  bytes_t gradients_ = 0;                                        ///< see `gradients`
  std::vector<std::uint64_t> threads_;                           ///< numbers of calling threads, the last caller at the end
  int alternating_ = 0;                                          ///< calls on one thread until steps count as single-threaded
  pytorch::device* device_ = nullptr;                            ///< of the last step
  bytes_t for_tensors_ = 0;                                      ///< bytes that an accelerator has for tensors; 0 on the host
  std::vector<std::weak_ptr<region>> retired_;                   ///< arenas that only gradients keep alive
};

}  // namespace remat::pytorch
