// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>

#include "executor_state.hpp"

namespace remat::pytorch {

std::shared_ptr<working_memory::piece> working_memory::take(bytes_t bytes, const std::shared_ptr<piece>& last) {
  std::lock_guard lock(mutex_);
  const auto take = [](const auto& p) {
    p->busy = true;
    return p;
  };
  const auto idle = [&](const auto& p) { return !p->busy; };
  if (last && idle(last) && std::find(pieces_.begin(), pieces_.end(), last) != pieces_.end()) return take(last);
  for (const auto& p : pieces_)
    if (idle(p) && p->in->bytes() >= bytes) return take(p);
  if (const auto small = std::find_if(pieces_.begin(), pieces_.end(), idle); small != pieces_.end()) pieces_.erase(small);
  return take(pieces_.emplace_back(std::make_shared<piece>(piece{of_.reserve(bytes)})));
}
void working_memory::give_back(piece& p) {
  std::lock_guard lock(mutex_);
  p.busy = false;
}
template <class F>
bytes_t working_memory::sum(F of) const {
  std::lock_guard lock(mutex_);
  bytes_t bytes = 0;
  for (const auto& p : pieces_) bytes = of(bytes, *p);
  return bytes;
}
bytes_t working_memory::bytes() const {
  return sum([](bytes_t all, const piece& p) { return all + p.in->bytes(); });
}
bytes_t working_memory::idle() const {
  return sum([](bytes_t most, const piece& p) { return p.busy ? most : std::max(most, p.in->bytes()); });
}
void working_memory::release() {
  std::lock_guard lock(mutex_);
  std::erase_if(pieces_, [](const auto& p) { return !p->busy; });
}

executor::executor(std::shared_ptr<const execution_plan> plan, bindings tensors, device& on, far_memory far,
                   const executor_options& o)
    : state_(std::make_unique<state>(std::move(plan), std::move(tensors), on, std::move(far), o)) {}
executor::~executor() = default;
std::vector<at::Tensor> executor::forward(const std::vector<at::Tensor>& inputs) { return state_->forward(inputs); }
executor::gradients executor::backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums,
                                       const taker& take) {
  return state_->backward(output_grads, sums, take);
}
void executor::use(const bindings& tensors) {
  if (state_->flying || &tensors.step() != &state_->step)
    throw broken_contract("remat: an executor got tensors during a step, or those for another program");
  state_->use(tensors);
}
void executor::unbind(const at::Tensor& t) {
  if (!state_->flying) state_->unbind(t.storage().unsafeGetStorageImpl());
}
bool executor::as_assumed() const { return state_->assumption_held; }

void executor::set_numbers(std::vector<double> numbers) {
  if (numbers == state_->numbers) return;
  state_->numbers = std::move(numbers);
  for (auto& s : state_->steps)
    for (auto& c : s.calls) state_->put_numbers(c);
}
void executor::reset() {
  const state::landing at_exit{*state_};
  state_->let_go();
}
bool executor::in_flight() const { return state_->flying; }
bool executor::arena_in_use() const { return state_->lent.use_count() > 1; }
void executor::vacate() { state_->vacate(); }
std::string executor::not_captured() const { return state_->graphs ? state_->graphs->why_not() : ""; }
void executor::leave_gradients_only() {
  std::vector<std::pair<bytes_t, bytes_t>> kept;
  const auto& data = state_->data;
  for (std::size_t i = 0; i < data.parameter_grads.size(); ++i)
    if (const auto& l = data.parameter_grads[i]; !data.copy_grad[i] && l.buffer != none)
      kept.emplace_back(data.buffers[l.buffer].offset, data.buffers[l.buffer].bytes);
  state_->memory->discard_except(std::move(kept));
}
std::vector<std::pair<std::size_t, at::Tensor>> executor::complete_gradients() {
  auto& s = *state_;
  const auto& p = s.step;
  if (s.gradient_nodes.empty()) {
    std::vector<index_t> producer(p.values.size(), none);
    for (index_t n = 0; n < p.nodes.size(); ++n)
      for (auto v : p.nodes[n].outputs) producer[v] = n;
    for (auto g : p.parameter_grads) s.gradient_nodes.push_back(producer[p.views[g].value]);
  }
  std::vector<std::pair<std::size_t, at::Tensor>> complete;
  for (std::size_t k = 0; k < s.gradient_nodes.size(); ++k) {
    const auto& d = s.data;
    if (s.gradient_nodes[k] == none || s.gradient_nodes[k] >= s.running) continue;
    if (d.given_early[k] || d.gradient_sends[k] != none || d.copy_grad[k] || d.parameter_grads[k].buffer == none) continue;
    complete.emplace_back(k, s.kept(d.parameter_grads[k], p.parameter_grads[k]));
  }
  return complete;
}
bool executor::owns(const at::Tensor& t) const { return state_->memory->holds(t.storage().data()); }
void executor::move_out(const c10::Storage& storage) const {
  const c10::DeviceGuard guard(state_->on.which());
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  move_to_own_memory(storage);
}
const std::shared_ptr<region>& executor::memory() const { return state_->lent; }
const std::shared_ptr<region>& executor::arena() const { return state_->memory; }
const execution_plan& executor::plan() const { return *state_->plan; }
std::size_t executor::unplanned_allocations() const { return state_->allocations->unplanned_allocations(); }
std::pair<index_t, bytes_t> executor::largest_unplanned() const {
  return {state_->most_unplanned_at, state_->most_unplanned_bytes};
}
double executor::waited_seconds() const { return state_->waited; }
std::size_t executor::gradients_still_held() const { return state_->gradients_still_held; }

}  // namespace remat::pytorch
