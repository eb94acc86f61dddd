// SPDX-License-Identifier: Apache-2.0
// Copies of values to and from far memory, of weights from the caller's memory, and of gradients to the host.
#include <algorithm>

#include "../base/clock.hpp"
#include "../device/home.hpp"
#include "executor_state.hpp"

namespace remat::pytorch {

void executor::state::find_home() {
  if (host_gradient_bytes == 0) return;
  const auto idle = std::find_if(homes.begin(), homes.end(), [](const auto& r) { return r.use_count() == 1; });
  home = idle != homes.end() ? *idle : homes.emplace_back(homes_in->reserve(host_gradient_bytes));
}

at::Tensor executor::state::at_home(std::size_t i) {
  const auto& view = step.views[step.parameter_grads[i]];
  return tensor_of(view, storage_in(home, home_offsets[i], step.values[view.value].bytes));
}

at::Tensor executor::state::arrived(std::size_t i, receiver& to) {
  try {
    moving[data.gradient_sends[i]]->wait();
  } catch (const copy_failed& why) {
    throw failure_of(data.gradient_sends[i], why);
  }
  for (auto k : fetches[i])
    if (moving[k]) moving[k]->wait();
  return hand_over(i, at_home(i), to);
}

void executor::state::make_moves(const std::vector<move_step>& list) {
  for (const auto& [k, wait] : list) wait ? wait_for(k) : begin(k);
}

void executor::state::begin(index_t k) {
  const auto& m = data.moves[k];
  std::vector<ticket> after{on.mark()};
  for (auto other : m.after) after.push_back(moving[other]);
  const block here{region_of(m.buffer), data.buffers[m.buffer].offset, m.bytes}, there{beyond, m.far, m.bytes};
  if (m.gradient != none) {
    moving[k] = far.out->copy({home, home_offsets[m.gradient], m.bytes}, here, std::move(after));
  } else if (m.slot != none)
    moving[k] = far.in->copy(here, in_memory_of_caller(m), std::move(after));
  else
    moving[k] =
        m.brings_back == none ? far.out->copy(there, here, std::move(after)) : far.in->copy(here, there, std::move(after));
}

block executor::state::in_memory_of_caller(const planned_move& m) const {
  const auto& t = homes_of_weights.at(m.slot);
  return home_of(t, byte_offset(t) - step.slots[m.slot].offset, m.bytes, leaves[m.slot] && !m.last_fetch_before_update);
}

void executor::state::look_at_homes() {
  if (fetched.empty()) return;
  std::vector<at::Tensor> read;
  for (auto k : fetched) {
    auto& t = homes_of_weights[k];  // kept, because the weight itself may be disguised during the read
    if (!t.defined() || !t.is_alias_of(slots[k])) t = slots[k].detach();
    read.push_back(t);
  }
  const auto leave = tensors_to_evict(read);
  leaves.assign(step.slots.size(), false);
  for (std::size_t i = 0; i < fetched.size(); ++i) leaves[fetched[i]] = leave[i];
}

void executor::state::wait_for(index_t k) {
  if (graphs && graphs->capturing()) return on.wait(moving[k]);
  if (!moving[k]) return;  // part of a replayed graph
  const auto begin = clock::now();
  const bool late = !moving[k]->reached();
  try {
    on.wait(moving[k]);
  } catch (const copy_failed& why) {
    throw failure_of(k, why);
  }
  if (late) waited += since(begin);
}

copy_failed executor::state::failure_of(index_t k, const copy_failed& why) const {
  const auto& m = data.moves[k];
  const auto& v = step.values[m.value];
  const auto what = m.gradient != none ? "gradient of parameter " + step.slots[step.parameters[m.gradient]].name
                                       : "value " + (v.name.empty() ? std::to_string(m.value) : v.name);
  return copy_failed("remat: " + what + " of " + std::to_string(v.bytes) + " bytes: " + why.what());
}

void executor::state::join_moves() {
  for (auto& t : moving) on.wait(std::exchange(t, nullptr));
}

void executor::state::let_moves_end() {
  for (auto& t : moving) {
    try {
      on.wait(t);
    } catch (...) {  // the copy is no longer needed
    }
    t = nullptr;
  }
}

}  // namespace remat::pytorch
