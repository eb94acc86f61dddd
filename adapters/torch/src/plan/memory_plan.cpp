// SPDX-License-Identifier: Apache-2.0
#include "memory_plan.hpp"

#include "memory_planner.hpp"

namespace remat::pytorch {

execution_plan::execution_plan(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles,
                               const layout_options& o, bytes_t in_place, placing how)
    : data_(memory_planner(std::move(step), s, profiles).run(o, in_place, how)) {}
execution_plan::~execution_plan() = default;
bytes_t execution_plan::arena_bytes() const { return data_->arena; }
bytes_t execution_plan::working_bytes() const { return data_->working; }
bytes_t execution_plan::held_bytes() const { return data_->held; }
bytes_t execution_plan::live_peak() const { return data_->live; }
bytes_t execution_plan::far_bytes() const { return data_->far; }
std::pair<bytes_t, bytes_t> execution_plan::moved_bytes() const {
  std::pair<bytes_t, bytes_t> sum;
  for (const auto& m : data_->moves)
    if (m.slot == none && m.gradient == none) (m.brings_back == none ? sum.first : sum.second) += m.bytes;
  return sum;
}
bytes_t execution_plan::fetched_bytes() const {
  bytes_t sum = 0;
  for (const auto& m : data_->moves)
    if (m.slot != none) sum += m.bytes;
  return sum;
}
bytes_t execution_plan::in_place_bytes() const { return data_->in_place; }
bytes_t execution_plan::outside_bytes() const { return data_->outside; }
std::size_t execution_plan::operations() const { return data_->steps.size(); }
std::size_t execution_plan::recomputed() const { return data_->recomputed; }
const program& execution_plan::step() const { return *data_->step; }
const std::string& execution_plan::why_addresses_move() const { return data_->why_addresses_move; }
bool execution_plan::placed() const { return !data_->by_allocator; }
const execution_plan::reads& execution_plan::read_in_backward() const { return data_->reads; }

}  // namespace remat::pytorch
