// SPDX-License-Identifier: Apache-2.0
// Forward and backward of a step: incoming tensors, and tensors that leave the arena.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>

#include "../device/home.hpp"
#include "executor_state.hpp"

namespace remat::pytorch {

std::vector<at::Tensor> executor::state::forward(const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK(!flying, "remat: forward of an executor with a step in flight");
  if (!allocations->in_front())
    throw plan_broken("remat: another allocator of " + on.memory().name() +
                      " memory was installed after remat's; nothing would lie where it was planned");
  const c10::DeviceGuard guard(on.which());
  on.enter(*memory);
  vacate();
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto if_it_fails = c10::make_scope_exit([this] { flying = false; });  // runs after the working memory is given back
  const computing now(*this);
  flying = true;
  try {
    for (index_t k = 0; k < step.slots.size(); ++k) {
      if (step.slots[k].from == role::input) set_input(k, inputs.at(step.slots[k].position));
      bind(k);
    }
    look_at_homes();
    begin_phase(0);
    run(0, data.loss, data.after_forward);
    go_to(step.after_forward);
    std::vector<at::Tensor> outputs;
    for (std::size_t i = 0; i < step.outputs.size(); ++i) {
      outputs.push_back(kept(data.outputs[i], step.outputs[i]));
      if (data.outputs[i].buffer != none) set_version(outputs[i], step.output_versions[i]);
      adopt_version_counter(outputs);
    }
    assumption_held = true;
    for (std::size_t i = 0; i < step.assumed_zero.size(); ++i)
      assumption_held = assumption_held && !kept(data.assumed_zero[i], step.assumed_zero[i]).any().item<bool>();
    count_writes(&written_tensor::forward);
    ended = on.mark();
    if_it_fails.release();
    return outputs;
  } catch (...) {
    let_go();
    throw;
  }
}

executor::gradients executor::state::backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums,
                                              const taker& take) {
  if (!flying) throw broken_contract("remat: backward without a forward");
  const landing at_exit{*this};  // runs after the working memory is given back
  const c10::DeviceGuard guard(on.which());
  receiver gets{take, c10::impl::tls_local_dispatch_key_set(), std::vector<at::Tensor>(step.parameter_grads.size())};
  gradients_still_held = 0;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  gradients g;
  std::optional<computing> now;
  try {
    now.emplace(*this);
    on.enter(*memory);
    on.wait(ended);
    for (std::size_t i = 0; i < step.outputs.size(); ++i)
      if (step.output_grads[i] != none) take_gradient(i, output_grads.at(i));
    for (std::size_t i = 0; i < data.sum_slots.size(); ++i) {
      const auto k = data.sum_slots[i];
      slots.set(k, i < sums.size() && sums[i].defined() ? sums[i].detach() : negative_zeros(step.slots[k].type));
      bind(k);
    }
    find_home();
    begin_phase(1);
    run(data.loss, data.steps.size(), data.after_backward, &gets);
    go_to(step.after_backward);
    count_writes(&written_tensor::backward);
    for (auto i : leaving) gets.kept[i] = arrived(i, gets);
    for (std::size_t i = 0; i < step.parameter_grads.size(); ++i) {
      if (data.given_early[i] || data.gradient_sends[i] != none) {
        g.parameters.push_back(std::move(gets.kept[i]));
        continue;
      }
      if (!data.sum_slots.empty()) {
        const bool added = i < sums.size() && sums[i].defined();
        g.parameters.push_back(added ? at::Tensor() : slots[data.sum_slots[i]]);
        if (added) sums[i].unsafeGetTensorImpl()->bump_version();
        continue;
      }
      auto t = kept(data.parameter_grads[i], step.parameter_grads[i]);
      g.parameters.push_back(data.copy_grad[i] ? t.clone() : t);
    }
    for (std::size_t i = 0; i < step.input_grads.size(); ++i)
      g.inputs.push_back(step.input_grads[i] == none ? at::Tensor() : kept(data.input_grads[i], step.input_grads[i]));
  } catch (...) {
    let_go();
    throw;
  }
  if (const auto failed = let_go()) std::rethrow_exception(failed);
  return g;
}

at::Tensor executor::state::negative_zeros(const tensor_type& type) {
  auto t = at::empty_strided(type.sizes, type.strides, at::TensorOptions().dtype(type.dtype).device(type.device));
  return t.is_complex() ? t.fill_(c10::complex<double>(-0.0, -0.0)) : t.fill_(-0.0);
}

at::Tensor executor::state::hand_over(std::size_t parameter, at::Tensor gradient, const receiver& to) {
  if (!to.take) return gradient;
  const c10::impl::ForceDispatchKeyGuard as_the_caller(to.keys);
  return to.take(parameter, std::move(gradient));
}

void executor::state::set_input(index_t k, const at::Tensor& t) {
  if (given[k].defined()) given[k].copy_(t);
  slots.set(k, given[k].defined() ? given[k] : t);
}

void executor::state::take_gradient(std::size_t i, const at::Tensor& incoming) {
  const auto& view = step.views[step.output_grads[i]];
  const auto k = step.values[view.value].slot;
  auto t = incoming;
  const bool fits = t.defined() && !given[k].defined() && t.dtype() == view.dtype && t.sizes() == at::IntArrayRef(view.sizes) &&
                    same_strides(t.sizes(), t.strides(), view.strides) && t.is_conj() == view.conj && t.is_neg() == view.neg &&
                    t.storage_offset() == view.offset;
  if (!fits) {
    const auto options = at::TensorOptions().dtype(view.dtype).device(step.values[view.value].device);
    const auto copy = given[k].defined() ? given[k] : at::empty_strided(view.sizes, view.strides, options);
    const auto written = first_of_expanded(copy, view.strides);
    t.defined() ? written.copy_(first_of_expanded(t, view.strides)) : written.zero_();
    t = copy;
  }
  t = t.detach();
  slots.set(k, t);
  bind(k);
}

at::Tensor executor::state::kept(const location& l, index_t view) {
  const auto& v = step.views[view];
  if (l.buffer == none) {
    const auto k = step.values[l.value].slot;
    if (step.slots[k].from == role::constant)  // a new tensor each time, as in eager mode: it may be written
      return tensor_of(v, byte_tensor(step.constants[step.slots[k].position]).to(step.slots[k].type.device).storage());
    const auto& source = slots[k];
    auto t = v.whole ? source.detach() : tensor_of(v, source.storage(), byte_offset(source) - step.slots[k].offset);
    ::torch::autograd::impl::set_version_counter(t, ::torch::autograd::impl::version_counter(source));
    return t;
  }
  if (const auto& b = data.buffers[l.buffer]; !b.kept && !b.outside) return tensor_of(v, lend(l), 0);
  if (!outside[l.buffer]) outside[l.buffer] = lend(l);
  return tensor_of(v, *outside[l.buffer]);
}

c10::Storage executor::state::lend(const location& l) {
  const auto& b = data.buffers[l.buffer];
  auto s = storage_in(b.working ? piece->in : lent, b.offset, b.bytes);
  if (!data.slot_copies.empty()) lent_out.push_back(s.getWeakStorageImpl());
  return s;
}

void executor::state::vacate() {
  if (lent_out.empty()) return;
  const c10::DeviceGuard guard(on.which());
  on.enter(*memory);
  on.wait(ended);  // on any stream
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& weak : std::exchange(lent_out, {}))
    if (const auto held = weak.lock(); held) move_to_own_memory(c10::Storage(held));
}

void executor::state::adopt_version_counter(const std::vector<at::Tensor>& outputs) {
  const auto& last = outputs.back();
  for (std::size_t i = 0; i + 1 < outputs.size(); ++i)
    if (outputs[i].is_alias_of(last))
      return ::torch::autograd::impl::set_version_counter(last, ::torch::autograd::impl::version_counter(outputs[i]));
}

void executor::state::count_writes(int64_t written_tensor::*half) {
  for (const auto& w : step.written) {
    for (int64_t k = 0; k < w.*half; ++k) slots[w.slot].unsafeGetTensorImpl()->bump_version();
  }
}

std::exception_ptr executor::state::let_go() {
  const c10::DeviceGuard guard(on.which());
  let_moves_end();
  for (std::size_t b = 0; b < outside.size(); ++b) outside[b].reset();
  slots.clear_step();
  for (const auto& [l, list] : sockets)
    if (l.buffer != none || !slots[step.values[l.value].slot].defined()) empty(l);
  std::exception_ptr failed;
  home = nullptr;
  ended = nullptr;
  try {
    ended = on.mark();
  } catch (...) {
    failed = std::current_exception();
  }
  return failed;
}

}  // namespace remat::pytorch
