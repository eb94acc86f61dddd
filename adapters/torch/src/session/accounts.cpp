// SPDX-License-Identifier: Apache-2.0
#include "accounts.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <utility>

#include <remat/pytorch/paged_memory.hpp>

#include "../base/hooks.hpp"
#include "../capture/hollow.hpp"

namespace remat::pytorch {
namespace {

/// The number of this thread. Unlike a `std::thread::id`, it is not reused when the thread ends.
std::uint64_t number_of_thread() {
  static std::atomic<std::uint64_t> next = 0;
  thread_local const auto number = next++;
  return number;
}

}  // namespace

pytorch::report accounts::held(const captured_step& s, const std::vector<at::Tensor>& inputs) const {
  pytorch::report r;
  r.parameters = s.parameter_bytes;
  r.buffers = s.buffer_bytes + s.copy_bytes;
  r.copies = s.copy_bytes;
  r.inputs = unpaged_bytes(inputs);
  r.constants = s.constants;
  r.optimizer = options_.optimizer;
  r.workspaces = device_ == nullptr ? 0 : device_->workspaces();
  return r;
}

bytes_t accounts::gradients() {
  if (alternating_ == 1) return gradients_;
  std::vector<at::Tensor> counted;
  for (const auto& [name, p] : parameters_) {
    if (several_threads()) {
      if (p.requires_grad()) counted.push_back(p);
      continue;
    }
    const auto& g = gradient_of(p);
    if (!g.defined() || !g.has_storage()) continue;
    if (device_ != nullptr && g.device().type() != device_->which().type()) continue;
    const bool inside = std::any_of(retired_.begin(), retired_.end(), [&](const auto& weak) {
      const auto a = weak.lock();
      return a && a->holds(g.storage().data());
    });
    if (!inside) counted.push_back(g);
  }
  return gradients_ = unpaged_bytes(counted);
}

bytes_t accounts::others(const runner* but) const {
  bytes_t sum = 0;
  for (const auto& r : runners) {
    const bool keeps_arena = but != nullptr && r->plan->execution->placed();
    if (keeps_arena ? r->executor->memory().get() != but->executor->memory().get() : r->executor->in_flight())
      sum += r->plan->execution->needed_bytes();
  }
  return sum + behind() + outputs_of_before;
}

std::size_t accounts::in_flight() const {
  return static_cast<std::size_t>(
      std::count_if(runners.begin(), runners.end(), [](const auto& r) { return r->executor->in_flight(); }));
}

void accounts::note_call() {
  if (::torch::autograd::get_current_graph_task_id() != -1) return;  // on a thread of autograd
  constexpr int until_there_is_one = 64;
  constexpr std::size_t most_known = 16;
  const auto now = number_of_thread();
  if (!threads_.empty() && threads_.back() == now) {
    alternating_ = std::max(0, alternating_ - 1);
    return;
  }
  if (std::erase(threads_, now) > 0)
    alternating_ = until_there_is_one;
  else if (!threads_.empty())
    alternating_ = std::max(1, alternating_);
  threads_.push_back(now);
  if (threads_.size() > most_known) threads_.erase(threads_.begin());
}

void accounts::note_kind(const captured_step& s) {
  largest_plain = std::max(largest_plain, s.store_all->execution->needed_bytes());
}

void accounts::note_step(const std::shared_ptr<captured_step>& kind) {
  if (in_flight() == 0) {
    last_ = std::exchange(seen_, 0);
    kinds_.clear();
  }
  ++kinds_[kind];
  seen_ = std::max(seen_, in_flight() + 1);
}

bytes_t accounts::least_of_last_step() const {
  bytes_t held = 0, one = 0;
  std::size_t begun = 0;
  for (const auto& [kind, steps] : kinds_) {
    begun += steps;
    if (!kind->least_in_flight) continue;
    const auto& p = *kind->least_in_flight->execution;
    held += static_cast<bytes_t>(steps) * p.held_bytes();
    one = std::max(one, p.needed_bytes() - p.held_bytes());
  }
  return begun == seen_ ? held + one : 0;  // otherwise some steps ended before others began
}

bytes_t accounts::held_in_flight() const {
  bytes_t sum = 0;
  for (const auto& r : runners)
    if (r->executor->in_flight()) sum += r->plan->zones ? r->plan->execution->held_bytes() : r->plan->execution->needed_bytes();
  return sum;
}

bytes_t accounts::behind() const {
  bytes_t sum = 0;
  for (const auto& a : retired_)
    if (const auto memory = a.lock()) sum += memory->resident();
  return sum;
}

void accounts::on(pytorch::device& d) {
  if (device_ == &d) return;
  device_ = &d;
  for_tensors_ = d.which().is_cpu() ? 0 : d.free_bytes() + d.use().live - d.workspaces();
}

bytes_t accounts::budget(const pytorch::report& fixed, bytes_t gradients, bool begins) const {
  const auto held = fixed.held() - fixed.gradients;
  const auto& b = options_.budget;
  if (b.share_of == share::device && for_tensors_ == 0)
    throw bad_option("the budget is a share of a device, but the step runs on the host");
  if (b.share_of == share::device || (b.share_of == share::usual && for_tensors_ > 0 && b.is_share()))
    return std::min(options_.max_budget, static_cast<bytes_t>(b.share * static_cast<double>(for_tensors_)));
  bytes_t plain = working ? working->bytes() - working->idle() : 0;  // of other threads that compute now
  for (const auto& r : runners)
    if (r->executor->in_flight())
      plain += r->plan->zones ? r->kind->all_in_flight->execution->held_bytes() : r->kind->store_all->execution->needed_bytes();
  const auto flying = in_flight(), most = can_share() ? at_a_time() : 1;
  const bool several = begins ? flying > 0 || most > 1 : most > 1;
  if (can_share() && several) {
    plain += static_cast<bytes_t>(std::max(most, flying + (begins ? 1 : 0)) - flying) * largest_held + largest_working;
  } else if (begins) {
    plain += largest_plain;
  }
  if (begins) gradients += behind();
  plain = std::max(plain, largest_plain);
  const auto bytes = b.total          ? *b.total
                     : b.for_the_step ? held - fixed.copies + gradients + *b.for_the_step
                                      : held + gradients + static_cast<bytes_t>(std::ceil(b.share * static_cast<double>(plain)));
  return std::min(options_.max_budget, bytes);
}

void accounts::evacuate(const executor& r) const {
  if (several_threads()) return;  // another thread may use the gradients

  // Parameters, by where their gradients lie.
  std::unordered_map<const c10::StorageImpl*, std::vector<const at::Tensor*>> owners;
  for (const auto& [name, p] : parameters_)
    if (const auto& g = gradient_of(p); g.defined() && g.has_storage() && r.owns(g))
      owners[g.storage().unsafeGetStorageImpl()].push_back(&p);
  const bool on_host = r.memory()->on().is_cpu();
  for (const auto& [storage, parameters] : owners) {
    std::optional<python_lock> nobody_reads;
    if (on_host) nobody_reads.emplace();
    std::vector<accumulation_lock> nobody_adds;
    const bool moves = std::all_of(parameters.begin(), parameters.end(), [&](const auto* p) {
      nobody_adds.emplace_back(*p, std::try_to_lock);
      const auto& g = gradient_of(*p);
      if (nobody_adds.back().failed() || !g.defined() || g.storage().unsafeGetStorageImpl() != storage) return false;
      // On the host, other code may keep the address.
      return !on_host || (g.storage().use_count() == parameters.size() && !detail::held_by_python(g));
    });
    if (moves) r.move_out(gradient_of(*parameters.front()).storage());
  }
}

bool accounts::vacate(const region& arena, bool gradients) const {
  for (const auto& r : runners) {
    if (r->executor->memory().get() != &arena) continue;
    if (r->executor->in_flight()) return false;
    r->executor->vacate();
    if (gradients && r->executor->arena_in_use()) evacuate(*r->executor);
    if (r->executor->arena_in_use()) return false;
  }
  return true;
}

std::shared_ptr<region> accounts::idle_arena() const {
  std::shared_ptr<region> found;
  for (const auto& r : runners) {
    if (r->plan->zones) continue;
    if (!options_.graph && r->plan->execution->far_bytes() > 0) continue;  // an idle executor would keep far memory
    const bool gradients = options_.graph || !r->executor->memory()->on().is_cpu();
    if (vacate(*r->executor->memory(), gradients) && !found) found = r->executor->arena();
  }
  return found;
}

void accounts::release() {
  if (working) working->release();
  for (const auto& r : runners)
    if (!r->executor->in_flight()) r->executor->vacate();
  for (const auto& r : runners)
    if (!r->executor->in_flight() && r->executor->arena_in_use()) {
      r->executor->leave_gradients_only();
      if (!r->executor->memory()->on().is_cpu()) evacuate(*r->executor);  // a device cannot give back parts of an arena
      retired_.push_back(r->executor->memory());
    }
  const auto before = runners.size();
  let_go([](const runner& r) { return !r.executor->in_flight(); });
  sweep();
  if (runners.size() < before) device_->empty_cache();  // makes room for blocks of other sizes
}

void accounts::sweep() {
  std::erase_if(retired_, [](const auto& a) { return a.expired(); });
}

}  // namespace remat::pytorch
