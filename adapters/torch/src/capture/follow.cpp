// SPDX-License-Identifier: Apache-2.0
// Runs forwards and backwards of modules under a follower of the thread.
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "../program/operators.hpp"
#include "dispatch.hpp"
#include "follower_state.hpp"
#include "recorder.hpp"
#include "same_calls.hpp"

namespace remat::pytorch::detail {

follower* follower::of_thread() {
  return static_cast<follower*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2));
}

recorded_forward::recorded_forward(std::shared_ptr<const trace> t) : recorded(std::move(t)) {
  const auto& r = *recorded;
  for (const auto& slot : r.slots) filled_by_hand.push_back(slot.from == role::constant || slot.from == role::input);
  for (const auto k : r.tensors)
    if (k != none) filled_by_hand[k] = false;
  std::vector<bool> written(r.storages.size()), used(r.storages.size());
  for (const auto& c : r.calls)
    for (const auto& o : c.operands) {
      written[o.view.value] = written[o.view.value] || o.written;
      used[o.view.value] = used[o.view.value] || !is_view(c.op);
    }
  for (index_t k = 0; k < r.slots.size(); ++k)
    if (written[r.slots[k].value] && r.slots[k].from != role::constant && r.slots[k].from != role::output_grad)
      written_slots.push_back(k);
  runs_at_once.resize(r.calls.size());
  for (const auto& c : r.calls) makes_constant.push_back(c.constant);
  const auto filled = [&](const traced_tensor& x) {
    const auto k = r.storages[x.view.value].slot;
    return k != none && (filled_by_hand[k] || r.slots[k].from == role::constant);
  };
  const auto only_by_hand = [&](const traced_call& c, const traced_tensor& x) {  // written and read, without operators
    const auto& s = r.storages[x.view.value];
    return makes_uninitialized(c.op) && !used[x.view.value] && s.device.is_cpu() &&
           static_cast<std::size_t>(s.bytes) <= constant_limit;
  };
  std::vector<bool> needed(r.storages.size());
  for (std::size_t i = r.calls.size(); i-- > 0;) {
    const auto& c = r.calls[i];
    if (c.ahead) runs_at_once[i] = true;
    if (c.ahead || c.assumes_zero) continue;
    if (!c.positions.empty() && c.masks_known)
      for (const auto& o : c.operands)
        if (o.at == takes_masks(c.op) && r.storages[o.view.value].slot == none) needed[o.view.value] = true;
    runs_at_once[i] = returns_numbers(c);
    if (runs_at_once[i] && !is_dynamic(c.op, [](int) { return false; }))
      continue;  // about the geometry of tensors (`_fused_sdp_choice`)
    for (const auto& o : c.operands)
      runs_at_once[i] = runs_at_once[i] || (o.written && (needed[o.view.value] || (c.constant && filled(o))));
    for (const auto& x : c.results)
      runs_at_once[i] = runs_at_once[i] || needed[x.view.value] || (c.constant && filled(x)) || only_by_hand(c, x);
    if (!runs_at_once[i]) continue;
    for (const auto& o : c.operands)
      if (r.storages[o.view.value].slot == none) needed[o.view.value] = true;
  }
}

followed follow(const std::vector<candidate>& candidates, const forward_function& forward, const std::vector<at::Tensor>& inputs,
                const step_request& request) {
  const auto f = std::make_shared<follower>(candidates, inputs, request);
  at::autocast::clear_cache();  // older casts are not among the calls, and new ones will be hollow
  std::vector<at::Tensor> returned;
  {
    const c10::DebugInfoGuard here(c10::DebugInfoKind::TEST_INFO_2, f);
    const c10::impl::IncludeDispatchKeyGuard keys(c10::DispatchKeySet({record_key, reader_key}));
    try {
      returned = forward(inputs);
    } catch (...) {
      f->note_exception();
      throw;
    }
  }
  auto result = f->finish(std::move(returned));
  if (result.match || result.recording) at::autocast::clear_cache();
  return result;
}

std::string differing_backward(const candidate& step, const std::vector<at::Tensor>& tensors,
                               std::vector<at::Tensor> output_grads,
                               const std::function<void(std::vector<at::Tensor>)>& backward) {
  const auto f = std::make_shared<follower>(step, tensors, output_grads);
  const c10::DebugInfoGuard here(c10::DebugInfoKind::TEST_INFO_2, f);
  try {
    backward(std::move(output_grads));
  } catch (const std::exception&) {
    if (!f->has_left_plan()) {
      f->finish();
      throw;
    }
    forget_caught();
  }
  return f->finish();
}

}  // namespace remat::pytorch::detail
