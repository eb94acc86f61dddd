// SPDX-License-Identifier: Apache-2.0
// From a schedule to steps with buffers, and to places for these.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "memory_plan.hpp"

namespace remat::pytorch {

/// Value v is memory of the caller or a constant.
inline bool from_outside(const program& p, index_t v) { return p.values[v].slot != none; }

/// Goes through a schedule and gives each value that lives a buffer; then places the buffers.
class memory_planner {
 public:
  memory_planner(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles);

  std::unique_ptr<execution_plan::data> run(layout_options o, bytes_t in_place, placing how);

 private:
  static constexpr std::int64_t events = std::int64_t{1} << 24;  // room for the events within a step
  static std::int64_t time(std::size_t i, int event = 0) { return static_cast<std::int64_t>(i) * events + event; }
  const program& program_() const { return *plan_.step; }

  void note_origin(const generator_origin& o);

  /// As version 1 of the format has it, without tiers. Drops beyond the device are left out: far memory is laid out by what comes
  /// back, and the caller's weights stay.
  static schedule without_tiers(const schedule& s);

  /// The schedule is valid, which includes that what has effects keeps its order, and leaves out none of that.
  void check() const;

  /// What the schedule brings, and is from outside.
  void find_fetched();

  index_t new_buffer(bytes_t bytes, std::int64_t born) {
    plan_.buffers.push_back({bytes, born});
    return static_cast<index_t>(plan_.buffers.size() - 1);
  }
  void leave(index_t b, std::int64_t when) {
    if (b != none && --plan_.buffers[b].values == 0) plan_.buffers[b].dies = when;
  }
  void drop(index_t v, std::int64_t when) {
    if (v < now_.size()) leave(std::exchange(now_[v], none), when);  // the others only order what has effects
  }
  void enter(index_t v, index_t b, std::int64_t when) {
    ++plan_.buffers[b].values;
    leave(std::exchange(now_[v], b), when);  // computed again while it was there: the new one counts
  }
  location where(index_t v) const;

  void send(index_t v, std::size_t i, bytes_t alignment);
  void bring_back(index_t v, std::size_t i, bytes_t alignment);
  index_t begin(planned_move m);
  /// What follows waits for the moves of a value that go on.
  void wait_for(index_t v, std::size_t i);
  static bytes_t aligned(bytes_t bytes, bytes_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

  bool dies_after(std::size_t i, index_t v) const {
    for (++i; i < schedule_.steps.size() && schedule_.steps[i].what == action::drop; ++i)
      if (schedule_.steps[i].which == v) return true;
    return false;
  }

  void compute(std::size_t i, index_t n, bool again);

  /// When gradients are given: once nothing reads their parameters, and so not always where the schedule has it.
  void find_gifts();
  /// The gradient of parameter k lies where that of another one does.
  bool shares_bytes(index_t k) const;
  /// Gives what is given behind step i. What the schedule gives there is held until then.
  void give(std::size_t i);

  /// The caller gets the outputs.
  void leave_forward();
  location keep(index_t view);
  /// With fixed addresses, what the caller gives lies in the arena from step `i` on.
  void copy_given(role from, std::size_t i);
  /// What an allocator takes for so many bytes.
  bytes_t rounded(bytes_t bytes) const { return aligned(bytes, unit_); }

  void finish();

  void note_reads();

  static constexpr bytes_t page_bytes = 4096;
  static bytes_t slack_of(const buffer& b, const layout_options& o) {
    return b.fetched && b.bytes >= 16 * page_bytes ? std::max<bytes_t>(0, page_bytes - o.alignment) : 0;
  }
  void place(const layout_options& o);
  /// Instead of `place`: what is alive at a time, and when buffers go back to the allocator.
  void leave_to_allocator();

  const schedule schedule_;
  const program_profile& profiles_;
  std::multimap<std::size_t, gift> gifts_;  ///< by the step behind which they are given
  std::map<index_t, int> held_gifts_;       ///< per buffer: those that lie there
  bytes_t gift_copies_ = 0;                 ///< of the largest gift that is a copy
  execution_plan::data plan_;
  bool zones_ = false;
  bool by_allocator_ = false;
  std::int64_t loss_ = 0;                        ///< when the forward ends
  bytes_t unit_ = 64;                            ///< of allocations outside of the arena, bytes
  bytes_t elsewhere_ = 0;                        ///< most that other threads allocate during a step
  std::vector<bool> fetched_;                    ///< per value; empty: none is
  std::map<index_t, index_t> leaving_gradient_;  ///< by value: the parameter of the host
  std::vector<index_t> now_;                     ///< per value: its buffer, none if it is not on the device
  std::vector<index_t> sent_;                    ///< per value: the move that sent it
  std::vector<index_t> leaving_, coming_;        ///< per value: the move that nobody has waited for
  std::vector<std::int64_t> begun_;              ///< per step of the plan: when it begins
  std::vector<move_step> pending_;               ///< before what comes next
  std::vector<allocation> far_;                  ///< of what is sent, in far memory
  std::vector<index_t> far_of_;                  ///< the same: the moves
};

}  // namespace remat::pytorch
