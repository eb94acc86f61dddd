// SPDX-License-Identifier: Apache-2.0
// Outputs and gradients of a step, and offsets of its buffers.
#include "memory_planner.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "../base/views.hpp"
#include "../program/effects.hpp"

namespace remat::pytorch {
namespace {

/// Byte range [first, second) of its storage that a view touches.
std::pair<bytes_t, bytes_t> extent(const byte_view& v) {
  const auto bytes = at::detail::computeStorageNbytes(v.sizes, v.strides, c10::elementSize(v.dtype));
  return {v.offset, v.offset + static_cast<bytes_t>(bytes)};
}

}  // namespace

void memory_planner::find_early_gradients() {
  std::vector<std::size_t> last_read(program_().values.size(), 0);
  for (std::size_t i = 0; i < schedule_.steps.size(); ++i)
    if (schedule_.steps[i].what == action::compute)
      for (auto v : program_().nodes[schedule_.steps[i].which].inputs) last_read[v] = i;
  for (auto n = program_().nodes.rbegin(); n != program_().nodes.rend(); ++n)  // a read of a later version reads the same storage
    for (const auto& [old, fresh] : n->overwrites) last_read[old] = std::max(last_read[old], last_read[fresh]);
  std::set<index_t> kept;
  for (const auto* views : {&program_().outputs, &program_().input_grads})
    for (auto v : *views)
      if (v != none) kept.insert(program_().views[v].value);
  for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
    const auto k = schedule_.steps[i].what == action::compute ? program_().nodes[schedule_.steps[i].which].gives : none;
    if (k == none) continue;
    const auto v = program_().views[program_().parameter_grads[k]].value;
    const auto when = std::max(i, last_read[program_().slots[program_().parameters[k]].value]);
    early_gradients_.emplace(when, early_gradient{k, {none, v}, last_read[v] > when || kept.count(v) > 0 || shares_bytes(k)});
  }
}

bool memory_planner::shares_bytes(index_t k) const {
  const auto& own = program_().views[program_().parameter_grads[k]];
  const auto range = extent(own);
  for (index_t other = 0; other < program_().parameter_grads.size(); ++other) {
    const auto& view = program_().views[program_().parameter_grads[other]];
    const auto theirs = extent(view);
    if (other != k && view.value == own.value && theirs.first < range.second && range.first < theirs.second) return true;
  }
  return false;
}

void memory_planner::give_early_gradients(std::size_t i) {
  if (const auto k = program_().nodes[schedule_.steps[i].which].gives; k != none) {
    auto& g = std::find_if(early_gradients_.begin(), early_gradients_.end(), [&](const auto& x) {
                return x.second.parameter == k;
              })->second;
    wait_for(g.at.value, i);
    g.at = where(g.at.value);
    if (const auto b = g.at.buffer; b != none) ++plan_.buffers[b].values, ++held_early_gradients_[b];
  }
  const auto [first, last] = early_gradients_.equal_range(i);
  for (auto g = first; g != last; ++g) {
    auto what = g->second;
    const auto& [b, v] = what.at;
    what.copy =
        what.copy || b == none || plan_.buffers[b].kept ||
        plan_.buffers[b].values > held_early_gradients_[b] + (buffer_of_[v] == b ? 1 : 0);  // another value lives in the buffer
    if (what.copy) early_copy_bytes_ = std::max(early_copy_bytes_, rounded(program_().values[v].bytes));
    plan_.steps.back().early_gradients.push_back(what);
    if (b != none) --held_early_gradients_[b];
    release(b, time(i + 1));
  }
}

void memory_planner::end_forward() {
  plan_.after_forward = std::exchange(pending_moves_, {});
  plan_.loss = plan_.steps.size();
  for (auto v : program_().outputs) plan_.outputs.push_back(keep_for_caller(v));
  for (auto v : program_().assumed_zero) plan_.assumed_zero.push_back(where(program_().views[v].value));
  plan_.held = plan_.outside;
  for (auto v : program_().output_grads)
    if (v != none) plan_.outside += rounded(program_().values[program_().views[v].value].bytes);
}

location memory_planner::keep_for_caller(index_t view) {
  const auto l = where(program_().views[view].value);
  if (l.buffer == none || std::exchange(plan_.buffers[l.buffer].kept, true)) return l;
  ++plan_.buffers[l.buffer].values;  // an extra reference: the buffer is never reused in place and never dies
  if (plan_.slot_copies.empty()) {
    plan_.buffers[l.buffer].outside = true;
    plan_.outside += rounded(plan_.buffers[l.buffer].bytes);
  }
  return l;
}

void memory_planner::reserve_slot_copies(role from, std::size_t i) {
  for (index_t k = 0; k < plan_.slot_copies.size(); ++k) {
    if (program_().slots[k].from != from) continue;
    plan_.slot_copies[k] = new_buffer(program_().values[program_().slots[k].value].bytes, time(i));
    plan_.buffers[plan_.slot_copies[k]].kept = true;
  }
}

void memory_planner::finish() {
  for (index_t v = 0; v < buffer_of_.size(); ++v) wait_for(v, schedule_.steps.size());
  plan_.after_backward = std::exchange(pending_moves_, {});
  plan_.outside += other_threads_peak_ + early_copy_bytes_;
  for (std::size_t k = 0; k < plan_.given_early.size(); ++k) {
    const auto of = [&](const planned_move& m) { return m.slot == program_().parameters[k]; };
    const auto last = std::find_if(plan_.moves.rbegin(), plan_.moves.rend(), of);
    if (plan_.given_early[k] && last != plan_.moves.rend()) last->last_fetch_before_update = true;
  }
  for (auto v : program_().input_grads) plan_.input_grads.push_back(v == none ? location{} : keep_for_caller(v));
  std::vector<std::pair<index_t, std::pair<bytes_t, bytes_t>>> taken;
  for (std::size_t k = 0; k < plan_.given_early.size(); ++k) {
    if (plan_.given_early[k] || plan_.gradient_sends[k] != none) {
      plan_.copy_grad.push_back(false);
      plan_.parameter_grads.emplace_back();
      continue;
    }
    const auto& view = program_().views[program_().parameter_grads[k]];
    const auto l = where(view.value);
    const auto range = extent(view);
    const bool sum = l.buffer == none && program_().from(l.value) == role::gradient;
    const bool moved = std::any_of(plan_.moves.begin(), plan_.moves.end(), [&](const auto& m) { return m.buffer == l.buffer; });
    const bool shared = !sum && (l.buffer == none || plan_.buffers[l.buffer].kept || (zones_ && moved) ||
                                 std::any_of(taken.begin(), taken.end(), [&](const auto& t) {
                                   return t.first == l.buffer && t.second.first < range.second && range.first < t.second.second;
                                 }));
    if (sum)
      plan_.sum_slots.push_back(program_().values[l.value].slot);
    else if (shared)
      plan_.outside += rounded(range.second - range.first);
    else
      taken.emplace_back(l.buffer, range);
    if (zones_ && !sum && !shared) {
      keep_for_caller(program_().parameter_grads[k]);
      plan_.outside += rounded(range.second - range.first);  // memory for autograd's sum with gradients of other steps
    }
    plan_.copy_grad.push_back(shared);
    plan_.parameter_grads.push_back(l);
  }
}

void memory_planner::note_reads() {
  std::set<index_t> outside, buffers;
  for (std::size_t i = plan_.loss; i < plan_.steps.size(); ++i) {
    auto note = [&](const location& l) {
      if (l.buffer != none) buffers.insert(l.buffer);
      if (from_outside(program_(), l.value)) outside.insert(l.value);
    };
    for (const auto& c : plan_.steps[i].calls)
      for (const auto& l : c.operands) note(l);
    for (const auto& [from, to] : plan_.steps[i].copies) note(from);
  }
  for (const auto& l : plan_.outputs) plan_.reads.outputs.push_back(l.buffer != none && buffers.count(l.buffer) > 0);
  plan_.reads.outside.assign(outside.begin(), outside.end());
}

void memory_planner::place_by_allocator() {
  plan_.by_allocator = true;
  const auto end = time(schedule_.steps.size() + 1);
  std::vector<allocation> list;
  for (index_t b = 0; b < plan_.buffers.size(); ++b) {
    auto& x = plan_.buffers[b];
    if (x.outside || x.bytes == 0) continue;
    x.outside = true;
    const auto dies = x.dies < 0 ? end : std::max(x.dies, x.born + 1);
    list.push_back({x.born, dies, rounded(x.bytes)});
    if (x.born < loss_time_ && loss_time_ < dies) plan_.held += rounded(x.bytes);
    if (x.dies < 0 || step_times_.empty()) continue;
    const auto last = std::lower_bound(step_times_.begin(), step_times_.end(), x.dies) - step_times_.begin();
    plan_.steps[static_cast<std::size_t>(std::max<std::ptrdiff_t>(last, 1) - 1)].frees.push_back(b);
  }
  plan_.arena = plan_.live = peak_load_of(list).bytes;
}

void memory_planner::place(const layout_options& o) {
  const auto end = time(schedule_.steps.size() + 1);
  struct zone {
    std::vector<allocation> list;
    std::vector<index_t> which;
  } arena, working;
  bytes_t held = 0;
  for (index_t b = 0; b < plan_.buffers.size(); ++b) {
    auto& x = plan_.buffers[b];
    if (x.outside || x.bytes == 0) continue;
    const auto dies = x.dies < 0 ? end : std::max(x.dies, x.born + 1);
    const bool stays = x.born < loss_time_ && loss_time_ < dies;
    if (stays) held += rounded(x.bytes);
    x.working = zones_ && !stays;
    auto& z = x.working ? working : arena;
    z.list.push_back({x.born, dies, x.bytes + slack_of(x, o)});
    z.which.push_back(b);
  }
  const auto bytes_of = [&](const zone& z) {
    const auto l = lay_out(z.list, o);
    for (std::size_t i = 0; i < z.which.size(); ++i) {
      auto& x = plan_.buffers[z.which[i]];
      x.offset = slack_of(x, o) > 0 ? aligned(l.offsets[i], page_bytes) : l.offsets[i];
    }
    plan_.live += l.live_peak;
    return plan_.moves.empty() ? l.arena : aligned(l.arena, o.alignment);
  };
  plan_.arena = bytes_of(arena);
  plan_.working = bytes_of(working);
  plan_.held += zones_ ? plan_.arena : held;
  const auto beyond = lay_out(far_ranges_, {.alignment = o.alignment, .tries = 0});
  for (std::size_t i = 0; i < far_ranges_.size(); ++i) plan_.moves[far_moves_[i]].far = beyond.offsets[i];
  for (auto& m : plan_.moves) {
    if (m.brings_back != none) m.far = plan_.moves[m.brings_back].far;
    TORCH_CHECK(!plan_.buffers[m.buffer].kept, "a value that the caller gets is moved");
  }
  plan_.far = beyond.arena;
}

}  // namespace remat::pytorch
