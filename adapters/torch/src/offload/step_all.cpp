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
  std::vector<todo> list;
  for (const auto& group : whose_.all)
    for (const auto& p : group.params())
      if (p.grad().defined()) list.push_back({p, &group});
  check_free_memory();
  settle(list);
  disk_traffic traffic;
  const auto all = list.size();
  some rest(list);
  try {
    while (!rest.empty()) {
      const auto now = parcel(rest);
      traffic.ready(now[0].key(), held(now));
      if (const auto following = parcel(rest.subspan(now.size())); !following.empty()) {
        std::vector<at::Tensor> beside;
        for (const auto& t : following) beside.insert(beside.end(), {t.p, t.p.grad()});
        traffic.ahead(following[0].key(), held(following), std::move(beside));
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
  for (const auto& group : whose_.all)
    for (const auto& p : group.params())
      if (p.is_cpu()) weights += static_cast<bytes_t>(p.nbytes());
  short_ = host_free() < weights;
  if (short_) session::release_all();
}

/// The next parameters of one group, as many as may be in memory together.
states_on_disk::stepper::some states_on_disk::stepper::parcel(some rest) const {
  constexpr bytes_t most = 8 << 20;
  bytes_t bytes = 0;
  std::size_t end = 0;
  for (; end < rest.size() && rest[end].of == rest[0].of; ++end) {
    for (const auto& t : homes(rest[end])) bytes += static_cast<bytes_t>(t.defined() ? t.nbytes() : 0);
    if (end > 0 && bytes > most) break;
  }
  return rest.first(end);
}

/// Places of the states of a parameter: the existing states, or the space reserved for them.
std::vector<at::Tensor> states_on_disk::stepper::homes(const todo& t) const {
  if (const auto state = whose_.of.find(t.key()); state != whose_.of.end()) return whose_.tensors(*state->second);
  const auto room = rooms_.find(t.key());
  return room == rooms_.end() ? std::vector<at::Tensor>() : room->second;
}

/// States that are on the disk.
std::vector<at::Tensor> states_on_disk::stepper::held(some of) const {
  std::vector<at::Tensor> found;
  if (!disk_) return found;
  for (const auto& t : of)
    if (const auto state = whose_.of.find(t.key()); state != whose_.of.end())
      for (auto& made : whose_.tensors(*state->second))
        if (disk_->holds(made)) found.push_back(std::move(made));
  return found;
}

/// Tensors that need not be in memory once these parameters have stepped: states and gradients. If memory is short, the
/// parameters, too, because the system cannot evict them before they are written.
std::vector<at::Tensor> states_on_disk::stepper::unneeded(some of) const {
  auto found = held(of);
  for (const auto& t : of) {
    found.push_back(t.p.grad());
    if (short_) found.push_back(t.p);
  }
  std::erase_if(found, [](const auto& t) { return !on_a_disk(t); });
  return found;
}

/// Steps these parameters, and moves new states to their places.
void states_on_disk::stepper::apply(some to) {
  std::vector<at::Tensor> params;
  std::vector<std::vector<at::Tensor>> places;
  for (const auto& t : to) {
    params.push_back(t.p);
    places.push_back(homes(t));
  }
  whose_.apply(std::move(params), *to[0].of);
  for (std::size_t i = 0; i < to.size(); ++i) bring_home(to[i], places[i]);
}

/// Moves states that a step has made anew to their previous places, or to the space reserved for them.
void states_on_disk::stepper::bring_home(const todo& t, const std::vector<at::Tensor>& places) {
  const auto state = whose_.of.find(t.key());
  if (!disk_ || state == whose_.of.end()) return;
  rooms_.erase(t.key());
  auto made = whose_.tensors(*state->second);
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
void states_on_disk::stepper::settle(some all) {
  if (!disk_) return;
  std::vector<at::Tensor> elsewhere, wanted;
  for (const auto& t : all)
    if (const auto state = whose_.of.find(t.key()); state != whose_.of.end())
      for (auto& made : whose_.tensors(*state->second))
        if (movable(made) && !disk_->holds(made)) elsewhere.push_back(std::move(made));
  std::map<const void*, std::vector<at::Tensor>> rooms;
  for (const auto& t : all)
    if (whose_.of.find(t.key()) == whose_.of.end() && rooms_.find(t.key()) == rooms_.end()) rooms[t.key()] = probe_states(t);
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
    rooms_[key] = std::move(like);
  }
}

/// Steps a parameter like this one, to see which states the optimizer makes.
/// @return tensors without memory for the states that a disk can hold; undefined tensors for other states
std::vector<at::Tensor> states_on_disk::stepper::probe_states(const todo& t) const {
  auto twin = at::zeros_like(t.p.detach());
  twin.requires_grad_();
  twin.mutable_grad() = at::zeros_like(t.p.detach());
  whose_.apply({twin}, *t.of);
  const auto state = whose_.of.find(twin.unsafeGetTensorImpl());
  if (state == whose_.of.end()) return {};
  auto like = whose_.tensors(*state->second);
  whose_.of.erase(state);
  for (auto& made : like) {
    note_freed(static_cast<bytes_t>(made.defined() ? made.nbytes() : 0));
    made = movable(made) ? on_meta(made) : at::Tensor();
  }
  return like;
}

}  // namespace remat::pytorch
