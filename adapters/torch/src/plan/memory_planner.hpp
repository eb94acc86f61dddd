// SPDX-License-Identifier: Apache-2.0
// From a schedule to steps with buffers, and from buffers to offsets.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "memory_plan.hpp"

namespace remat::pytorch {

/// Value `v` is a constant or lies in memory of the caller.
inline bool from_outside(const program& p, index_t v) { return p.values[v].slot != none; }

/// Walks through a schedule, gives each live value a buffer, then places the buffers.
class memory_planner {
 public:
  memory_planner(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles);

  std::unique_ptr<execution_plan::data> run(layout_options o, bytes_t in_place, placing how);

 private:
  static constexpr std::int64_t events = std::int64_t{1} << 24;  // times within a step; more than its events
  static std::int64_t time(std::size_t i, int event = 0) { return static_cast<std::int64_t>(i) * events + event; }
  const program& program_() const { return *plan_.step; }

  void note_origin(const generator_origin& o);

  /// The schedule in the form of version 1 of the format, without tiers. Drops on other tiers are left out: prefetches determine
  /// the layout of far memory, and weights of the caller stay.
  static schedule without_tiers(const schedule& s);

  /// @throws bad_schedule if the schedule is invalid, reorders nodes with effects, or leaves out one of them
  void check() const;

  /// Finds the values from outside that the schedule fetches.
  void find_fetched();

  index_t new_buffer(bytes_t bytes, std::int64_t born) {
    plan_.buffers.push_back({bytes, born});
    return static_cast<index_t>(plan_.buffers.size() - 1);
  }
  void release(index_t b, std::int64_t when) {
    if (b != none && --plan_.buffers[b].values == 0) plan_.buffers[b].dies = when;
  }
  void drop(index_t v, std::int64_t when) {
    if (v < buffer_of_.size()) release(std::exchange(buffer_of_[v], none), when);  // others are tokens, which only order nodes
  }
  void move_in(index_t v, index_t b, std::int64_t when) {
    ++plan_.buffers[b].values;
    release(std::exchange(buffer_of_[v], b), when);  // if the old copy is still there, the recomputed value replaces it
  }
  location where(index_t v) const;

  void send(index_t v, std::size_t i, bytes_t alignment);
  void bring_back(index_t v, std::size_t i, bytes_t alignment);
  index_t begin(planned_move m);
  /// The following work waits for the unfinished moves of `v`.
  void wait_for(index_t v, std::size_t i);
  static bytes_t aligned(bytes_t bytes, bytes_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

  bool dies_after(std::size_t i, index_t v) const {
    for (++i; i < schedule_.steps.size() && schedule_.steps[i].what == action::drop; ++i)
      if (schedule_.steps[i].which == v) return true;
    return false;
  }

  void compute(std::size_t i, index_t n, bool again);

  /// Sets when each gradient is given: once no later step reads its parameter. This may be later than in the schedule.
  void find_early_gradients();
  /// The gradient of parameter `k` overlaps the gradient of another parameter.
  bool shares_bytes(index_t k) const;
  /// Gives the gradients that are due after step `i`. A gradient that the schedule gives at `i` but that is due later is held.
  void give_early_gradients(std::size_t i);

  /// Ends the forward: hands the outputs to the caller.
  void end_forward();
  location keep_for_caller(index_t view);
  /// With fixed addresses: reserves buffers for copies of the caller's tensors, from step `i` on.
  void reserve_slot_copies(role from, std::size_t i);
  /// Bytes that an allocator takes for a request of `bytes`.
  bytes_t rounded(bytes_t bytes) const { return aligned(bytes, allocation_unit_); }

  void finish();

  void note_reads();

  static constexpr bytes_t page_bytes = 4096;
  static bytes_t slack_of(const buffer& b, const layout_options& o) {
    return b.fetched && b.bytes >= 16 * page_bytes ? std::max<bytes_t>(0, page_bytes - o.alignment) : 0;
  }
  void place(const layout_options& o);
  /// Replaces `place` where the device's allocator chooses addresses: computes the peak, and when each buffer goes back.
  void place_by_allocator();

  const schedule schedule_;
  const program_profile& profiles_;
  std::multimap<std::size_t, early_gradient> early_gradients_;  ///< by the step after which they are given
  std::map<index_t, int> held_early_gradients_;                 ///< per buffer: early gradients in it that are not given yet
  bytes_t early_copy_bytes_ = 0;                                ///< bytes of the largest early gradient that is a copy
  execution_plan::data plan_;
  bool zones_ = false;
  bool by_allocator_ = false;
  std::int64_t loss_time_ = 0;                   ///< time at which the forward ends
  bytes_t allocation_unit_ = 64;                 ///< granularity of allocations outside of the arena, bytes
  bytes_t other_threads_peak_ = 0;               ///< peak of the bytes that other threads allocate in a step
  std::vector<bool> fetched_;                    ///< per value: the schedule fetches it; empty: it fetches none
  std::map<index_t, index_t> gradient_to_host_;  ///< from a gradient's value to its parameter on the host
  std::vector<index_t> buffer_of_;               ///< per value: its buffer; none: not on the device
  std::vector<index_t> send_of_;                 ///< per value: the move that sent it, or none
  std::vector<index_t> unfinished_sends_;        ///< per value: its move away that no step has waited for yet
  std::vector<index_t> unfinished_arrivals_;     ///< per value: its move back that no step has waited for yet
  std::vector<std::int64_t> step_times_;         ///< per step of the plan: the time at which it begins
  std::vector<move_step> pending_moves_;         ///< begins and waits to place before the next step
  std::vector<allocation> far_ranges_;           ///< live ranges of sent values in far memory
  std::vector<index_t> far_moves_;               ///< parallel to `far_ranges_`: the moves
};

}  // namespace remat::pytorch
