// SPDX-License-Identifier: Apache-2.0
// Argument lists of the calls of a plan. Tensors from outside are put in when they are known.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "../program/operators.hpp"
#include "executor_state.hpp"

namespace remat::pytorch {

executor::state::state(std::shared_ptr<const execution_plan> p, bindings b, device& d, far_memory f, const executor_options& o)
    : plan(std::move(p)),
      data(plan->get()),
      step(*data.step),
      slots(std::move(b)),
      on(d),
      memory(o.arena && o.arena->bytes() >= data.arena ? o.arena : on.memory().reserve(data.by_allocator ? 0 : data.arena)),
      working(o.working),
      far(std::move(f)),
      allocations(on.place()),
      lone(on.which(), step.nodes.size()) {
  if (&slots.step() != &step) throw broken_contract("remat: an executor got tensors for another program");
  bool others = false;
  for (const auto& m : data.moves)
    if (m.slot == none)
      others = true;
    else if (std::find(fetched.begin(), fetched.end(), m.slot) == fetched.end())
      fetched.push_back(m.slot);
  if (data.working > 0 && !working) throw broken_contract("remat: a plan in zones, and no working memory");
  if (others && (!far.memory || !far.out || !far.in)) throw broken_contract("remat: a plan with copies, and no far memory");
  if (!fetched.empty() && !far.in) throw broken_contract("remat: a plan that fetches weights, and no link");
  home_offsets.resize(data.gradient_sends.size());
  for (std::size_t i = 0; i < data.gradient_sends.size(); ++i) {
    if (data.gradient_sends[i] == none) continue;
    home_offsets[i] = host_gradient_bytes;
    host_gradient_bytes += allocated_bytes(on.which(), data.moves[data.gradient_sends[i]].bytes);  // aligned as the device needs
    leaving.push_back(i);
  }
  std::sort(leaving.begin(), leaving.end(), [&](auto x, auto y) { return data.gradient_sends[x] < data.gradient_sends[y]; });
  if (!leaving.empty())  // the caller must be able to read them, wherever other values go
    homes_in = far.out->joins_graphs_of(on.which()) ? far.memory : on_host(on.which()).memory;
  fetches.resize(step.parameters.size());
  for (index_t k = 0; k < data.moves.size(); ++k)
    for (auto i : leaving)
      if (data.moves[k].slot == step.parameters[i]) fetches[i].push_back(k);
  if (data.far > 0) beyond = far.memory->reserve(data.far);
  moving.resize(data.moves.size());
  const c10::DeviceGuard guard(on.which());
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  outside.resize(data.buffers.size());
  before_draw.resize(step.nodes.size());
  after_draw.resize(step.nodes.size());
  result.reserve(16);
  if (data.working == 0) prepare_all();  // otherwise prepared once a piece of working memory is known
  if (o.graphs) use_graphs();
}

executor::state::~state() {
  if (!graphs || !beyond || !ended) return;
  try {
    ended->wait();                   // copies in graphs hold no memory
  } catch (const std::exception&) {  // the copies are no longer needed
  }
}

void executor::state::use_graphs() {
  graphs.emplace(on, data.steps.size(), step.slots.size());
  if (data.slot_copies.empty())
    graphs->refuse(data.why_addresses_move.empty() ? "it was planned without fixed addresses" : data.why_addresses_move);
  else if (const auto why = on.cannot_capture(); !why.empty())
    graphs->refuse(why);
  const auto joins = [&](const auto& way) { return way && way->joins_graphs_of(on.which()); };
  captured_moves = graphs->why_not().empty() && fetched.empty() && joins(far.out) && joins(far.in);
}

at::Tensor executor::state::place_for(index_t k) {
  const auto& s = step.slots[k];
  const auto first = s.from == role::input ? s.offset % accelerator_alignment : s.offset;
  return tensor_of({none, s.type.sizes, s.type.strides, first, s.type.dtype, s.type.conj, s.type.neg},
                   storage_in_place(data.slot_copies[k], s.type.device));
}

void executor::state::prepare_all() {
  steps.clear();
  sockets.clear();
  places.assign(step.slots.size(), {});
  given.assign(step.slots.size(), {});
  for (std::size_t i = 0; i < data.steps.size(); ++i) steps.push_back(prepare(i));
  for (index_t k = 0; k < data.slot_copies.size(); ++k)
    if (data.slot_copies[k] != none) given[k] = place_for(k);
  for (index_t k = 0; k < step.slots.size(); ++k) bind(k);
  for (index_t b = 0; b < outside.size(); ++b)
    if (outside[b]) fill({b, none}, *outside[b], {}, 0);
  storages.clear();
  tensors.clear();
}

executor::state::prepared_step executor::state::prepare(std::size_t i) {
  const auto& planned = data.steps[i];
  prepared_step s;
  for (std::size_t k = 0; k < planned.copies.size(); ++k) {
    const auto& [from, to] = planned.copies[k];
    s.copies.push_back({copy_side(from, i, k, 0), copy_side(to, i, k, 1)});
  }
  for (std::size_t k = 0; k < planned.calls.size(); ++k) {
    const auto& c = planned.calls[k];
    std::size_t next = 0;
    prepared_call b{c.what, {}, {}, nullptr, facts(c.what->op).writes_lists};
    for (const auto& o : c.what->operands) {
      const auto& l = c.operands[next++];
      if (planned.again && only_first(*c.what, o.at)) continue;
      if (!in_arena(l)) sockets[outer(l)].push_back({i, k, o});
    }
    next = 0;
    std::map<index_t, location> at;
    for (const auto& o : c.what->operands) at[o.view] = c.operands[next++];
    b.stack = stack_of(*c.what, planned.again, [&](index_t v) { return in_arena(at[v]) ? in_place(at[v], v) : at::Tensor(); });
    put_numbers(b);
    s.calls.push_back(std::move(b));
  }
  for (std::size_t k = 0; k < planned.blocks.size(); ++k) {
    const auto& block = data.scripts[i].blocks[k];
    const auto b = planned.blocks[k];
    s.blocks.push_back(
        {block.bytes, block.deaths, b == none || data.buffers[b].outside ? nullptr : address(b), block.freed >= 0});
  }
  return s;
}

c10::Storage executor::state::storage_in_place(index_t b, c10::Device device) {
  auto& s = storages[b];
  if (!s) s = storage_over(address(b), static_cast<std::size_t>(data.buffers[b].bytes), device);
  return *s;
}

at::Tensor executor::state::in_place(const location& l, index_t view) {
  auto& t = tensors[{l.buffer, view}];
  if (!t.defined()) t = tensor_of(step.views[view], storage_in_place(l.buffer, step.values[l.value].device));
  return t;
}

at::Tensor executor::state::copy_side(const location& l, std::size_t i, std::size_t k, int side) {
  if (in_arena(l)) return bytes_of(storage_in_place(l.buffer, step.values[l.value].device), data.buffers[l.buffer].bytes);
  sockets[outer(l)].push_back({i, k, {side, -1, none}});
  return {};
}

void executor::state::fill(const location& l, const c10::Storage& s, const at::Tensor& whole, int64_t shift) {
  const auto found = sockets.find(outer(l));
  if (found == sockets.end()) return;
  std::map<index_t, at::Tensor> made;
  for (const auto& x : found->second) {
    if (x.at.view == none) {
      const auto bytes = l.buffer != none ? data.buffers[l.buffer].bytes : step.values[l.value].bytes;
      auto& copy = steps[x.step].copies[x.call];
      (x.at.at == 0 ? copy.first : copy.second) = bytes_of(s, bytes);
      continue;
    }
    auto& t = made[x.at.view];
    const auto& v = step.views[x.at.view];
    if (!t.defined()) t = v.whole && whole.defined() ? whole : tensor_of(v, s, shift);
    put(x, t);
  }
}

void executor::state::put(const socket& x, const at::Tensor& t) { put_tensor(steps[x.step].calls[x.call].stack, x.at, t); }

void executor::state::empty(const location& l) {
  const auto found = sockets.find(outer(l));
  if (found == sockets.end()) return;
  for (const auto& x : found->second)
    if (x.at.view != none)
      put(x, {});
    else
      (x.at.at == 0 ? steps[x.step].copies[x.call].first : steps[x.step].copies[x.call].second) = at::Tensor();
}

void executor::state::use(const bindings& now) {
  for (index_t k = 0; k < places.size(); ++k) {
    const auto v = step.slots[k].value;
    if (!slots[k].defined() || slots[k].is_same(now[k]) || step.values[v].slot != k) continue;
    empty({none, v});
    places[k] = {};
  }
  slots = now;
}

void executor::state::unbind(const c10::StorageImpl* s) {
  for (index_t k = 0; k < places.size(); ++k) {
    if (places[k].storage != s) continue;
    empty({none, step.slots[k].value});
    places[k] = {};
  }
}

void executor::state::bind(index_t k) {
  const auto& slot = step.slots[k];
  const auto& t = slots[k];
  if (!t.defined() || step.values[slot.value].slot != k) return;  // the first slot represents its storage
  const place now{t.storage().unsafeGetStorageImpl(), t.storage().data(), byte_offset(t)};
  if (places[k] == now) return;
  if (graphs) graphs->reads(k, static_cast<const char*>(now.data) + now.offset);
  fill({none, slot.value}, t.storage(), t, now.offset - slot.offset);
  if (step.is_given(slot.value) && slot.from != role::input && slot.from != role::gradient) places[k] = now;
}

}  // namespace remat::pytorch
