// SPDX-License-Identifier: Apache-2.0
// Steps all parameters one after another. The states of a few parameters are in memory at a time.
#include <ATen/ATen.h>

#include <remat/pytorch/free_memory.hpp>

#include "../base/trim.hpp"
#include "stepper.hpp"

namespace remat::pytorch {
namespace {

at::Tensor on_meta(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()).device(at::kMeta));
}

}  // namespace

void states_on_disk::stepper::step_all() {
  check();
  std::vector<parameter_of_group> list;
  for (const auto& group : optimizer_.param_groups)
    for (const auto& p : group.params())
      if (p.grad().defined()) list.push_back({p, &group});
  check_free_memory();
  reserve_states(list);
  disk_traffic traffic;
  const auto all = list.size();
  parameters rest(list);
  try {
    while (!rest.empty()) {
      const auto now = next_parcel(rest);
      traffic.ready(now[0].key(), disk_states(now));
      if (const auto following = next_parcel(rest.subspan(now.size())); !following.empty()) {
        std::vector<at::Tensor> beside;
        for (const auto& t : following) beside.insert(beside.end(), {t.p, t.p.grad()});
        traffic.ahead(following[0].key(), disk_states(following), std::move(beside));
      }
      apply(now);
      traffic.done(unneeded(now));
      rest = rest.subspan(now.size());
    }
  } catch (const copy_failed& e) {
    throw failed(e, std::to_string(all - rest.size()) + " of " + std::to_string(all) + " parameters have made the step");
  }
  drain(traffic);
}

void states_on_disk::stepper::drain(disk_traffic& traffic) {
  try {
    traffic.drain();
  } catch (const copy_failed& e) {
    throw failed(e, "all parameters have made the step, but their states may be lost");
  }
}

/// Finds out whether memory is short (no room for a second copy of the weights). If so, sessions give back idle memory.
void states_on_disk::stepper::check_free_memory() {
  if (!disk_) return;
  bytes_t weights = 0;
  for (const auto& group : optimizer_.param_groups)
    for (const auto& p : group.params())
      if (p.is_cpu()) weights += static_cast<bytes_t>(p.nbytes());
  memory_short_ = host_free() < weights;
  if (memory_short_) session::release_all();
}

/// The next parameters of one group, as many as may be in memory together.
states_on_disk::stepper::parameters states_on_disk::stepper::next_parcel(parameters rest) const {
  constexpr bytes_t most = 8 << 20;
  bytes_t bytes = 0;
  std::size_t end = 0;
  for (; end < rest.size() && rest[end].group == rest[0].group; ++end) {
    for (const auto& t : state_places(rest[end])) bytes += static_cast<bytes_t>(t.defined() ? t.nbytes() : 0);
    if (end > 0 && bytes > most) break;
  }
  return rest.first(end);
}

/// Places of the states of a parameter: the existing states, or the space reserved for them.
std::vector<at::Tensor> states_on_disk::stepper::state_places(const parameter_of_group& t) const {
  if (const auto state = optimizer_.param_states.find(t.key()); state != optimizer_.param_states.end())
    return optimizer_.tensors(*state->second);
  const auto room = reserved_.find(t.key());
  return room == reserved_.end() ? std::vector<at::Tensor>() : room->second;
}

/// States that are on the disk.
std::vector<at::Tensor> states_on_disk::stepper::disk_states(parameters of) const {
  std::vector<at::Tensor> found;
  if (!disk_) return found;
  for (const auto& t : of)
    if (const auto state = optimizer_.param_states.find(t.key()); state != optimizer_.param_states.end())
      for (auto& made : optimizer_.tensors(*state->second))
        if (disk_->holds(made)) found.push_back(std::move(made));
  return found;
}

/// Tensors that need not be in memory once these parameters have stepped: states and gradients. If memory is short, the
/// parameters, too, because the system cannot evict them before they are written.
std::vector<at::Tensor> states_on_disk::stepper::unneeded(parameters of) const {
  auto found = disk_states(of);
  for (const auto& t : of) {
    found.push_back(t.p.grad());
    if (memory_short_) found.push_back(t.p);
  }
  std::erase_if(found, [](const auto& t) { return !on_a_disk(t); });
  return found;
}

/// Steps these parameters, and moves new states to their places.
void states_on_disk::stepper::apply(parameters to) {
  std::vector<at::Tensor> params;
  std::vector<std::vector<at::Tensor>> places;
  for (const auto& t : to) {
    params.push_back(t.p);
    places.push_back(state_places(t));
  }
  optimizer_.apply(std::move(params), *to[0].group);
  for (std::size_t i = 0; i < to.size(); ++i) bring_home(to[i], places[i]);
}

/// Moves states that a step has made anew to their previous places, or to the space reserved for them.
void states_on_disk::stepper::bring_home(const parameter_of_group& t, const std::vector<at::Tensor>& places) {
  const auto state = optimizer_.param_states.find(t.key());
  if (!disk_ || state == optimizer_.param_states.end()) return;
  reserved_.erase(t.key());
  auto made = optimizer_.tensors(*state->second);
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (!movable(made[i]) || disk_->holds(made[i])) continue;
    const bool fits = i < places.size() && disk_->holds(places[i]) && alike(places[i], made[i]);
    const auto home = fits ? places[i] : disk_->reserve({made[i]}).front();
    disk_->write(home, made[i]);
    note_freed(static_cast<bytes_t>(made[i].nbytes()));
    made[i].set_data(home);
  }
}

/// Ensures that all states are on the disk or have space there.
void states_on_disk::stepper::reserve_states(parameters all) {
  if (!disk_) return;
  std::vector<at::Tensor> elsewhere, wanted;
  for (const auto& t : all)
    if (const auto state = optimizer_.param_states.find(t.key()); state != optimizer_.param_states.end())
      for (auto& made : optimizer_.tensors(*state->second))
        if (movable(made) && !disk_->holds(made)) elsewhere.push_back(std::move(made));
  std::map<const void*, std::vector<at::Tensor>> rooms;
  for (const auto& t : all)
    if (optimizer_.param_states.find(t.key()) == optimizer_.param_states.end() && reserved_.find(t.key()) == reserved_.end())
      rooms[t.key()] = probe_states(t);
  wanted = elsewhere;
  for (const auto& [key, like] : rooms)
    for (const auto& t : like)
      if (t.defined()) wanted.push_back(t);
  auto homes = disk_->reserve(wanted);
  auto next = homes.begin();
  for (auto& t : elsewhere) {
    disk_->write(*next, t);
    t.set_data(*next);
    disk::evict({*next++});
  }
  for (auto& [key, like] : rooms) {
    for (auto& t : like)
      if (t.defined()) t = *next++;
    reserved_[key] = std::move(like);
  }
}

/// Steps a parameter like this one, to see which states the optimizer makes.
/// @return tensors without memory for the states that a disk can hold; undefined tensors for other states
std::vector<at::Tensor> states_on_disk::stepper::probe_states(const parameter_of_group& t) const {
  auto twin = at::zeros_like(t.p.detach());
  twin.requires_grad_();
  twin.mutable_grad() = at::zeros_like(t.p.detach());
  optimizer_.apply({twin}, *t.group);
  const auto state = optimizer_.param_states.find(twin.unsafeGetTensorImpl());
  if (state == optimizer_.param_states.end()) return {};
  auto like = optimizer_.tensors(*state->second);
  optimizer_.param_states.erase(state);
  for (auto& made : like) {
    note_freed(static_cast<bytes_t>(made.defined() ? made.nbytes() : 0));
    made = movable(made) ? on_meta(made) : at::Tensor();
  }
  return like;
}

}  // namespace remat::pytorch
