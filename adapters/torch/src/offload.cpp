// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <typeinfo>

#include <remat/pytorch/offload.hpp>

#include "trim.hpp"

namespace remat::pytorch {

namespace autograd = ::torch::autograd;

namespace {

/// Memory of parameters and buffers, each with the tensors in it, in order.
std::vector<std::vector<at::Tensor>> sharing(const ::torch::nn::Module& module) {
  std::vector<std::vector<at::Tensor>> found;
  std::map<const void*, std::size_t> place;
  const auto add = [&](const at::Tensor& t) {
    if (!t.defined() || t.layout() != at::kStrided || !t.is_cpu() || t.is_quantized() || !t.has_storage()) return;
    const auto [at, fresh] = place.emplace(t.storage().unsafeGetStorageImpl(), found.size());
    if (fresh) found.emplace_back();
    found[at->second].push_back(t);
  };
  for (const auto& t : module.parameters()) add(t);
  for (const auto& t : module.buffers()) add(t);
  return found;
}

/// All bytes of the memory that `t` is in.
at::Tensor bytes_around(const at::Tensor& t) {
  const auto& memory = t.storage();
  return at::empty({0}, at::kByte).set_(memory, 0, {static_cast<std::int64_t>(memory.nbytes())}, {1});
}

void rebase(const std::vector<at::Tensor>& tensors, const at::Tensor& memory) {
  for (auto t : tensors)
    t.set_data(
        at::empty({0}, t.options().requires_grad(false)).set_(memory.storage(), t.storage_offset(), t.sizes(), t.strides()));
}

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

at::Tensor without_memory(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()).device(at::kMeta));
}

}  // namespace

void move_weights(::torch::nn::Module& module, disk& to) {
  std::vector<std::vector<at::Tensor>> found;
  std::vector<at::Tensor> bytes;
  for (auto& tensors : sharing(module))
    if (auto all = bytes_around(tensors.front()); movable(all) && !to.holds(all)) {
      found.push_back(std::move(tensors));
      bytes.push_back(std::move(all));
    }
  const auto homes = to.reserve(bytes);
  for (std::size_t i = 0; i < found.size(); ++i) {
    to.write(homes[i], bytes[i]);
    rebase(found[i], homes[i]);
    note_freed(static_cast<bytes_t>(bytes[i].nbytes()));
    bytes[i].reset();
    disk::evict({homes[i]});
  }
}

void bring_back_weights(::torch::nn::Module& module) {
  for (const auto& tensors : sharing(module))
    if (const auto all = bytes_around(tensors.front()); on_a_disk(all)) rebase(tensors, all.clone());
}

/// Moves gradients of parameters, after they have been accumulated.
class gradients_on_disk::taker : public std::enable_shared_from_this<taker> {
 public:
  explicit taker(std::shared_ptr<disk> to) : disk_(std::move(to)) {}

  void attach(const ::torch::nn::Module& module) {
    std::vector<at::Tensor> like;
    for (const auto& p : module.parameters())
      if (p.requires_grad() && p.is_leaf() && movable(p)) {
        of_.push_back(p);
        like.push_back(p);
      }
    const auto homes = disk_->reserve(like);
    for (std::size_t i = 0; i < of_.size(); ++i) {
      homes_[of_[i].unsafeGetTensorImpl()] = homes[i];
      auto& hook = autograd::impl::post_acc_grad_hooks(of_[i]);
      auto before = std::move(hook);
      hook = std::make_unique<arrival>(weak_from_this(), std::move(before));
    }
  }
  void detach() {
    for (const auto& p : of_) {
      auto& hook = autograd::impl::post_acc_grad_hooks(p);
      auto* const last = dynamic_cast<arrival*>(hook.get());
      if (last != nullptr && last->to.lock().get() == this) hook = std::exchange(last->before, nullptr);
    }
  }

 private:
  struct arrival final : autograd::PostAccumulateGradHook {
    arrival(std::weak_ptr<taker> t, std::unique_ptr<autograd::PostAccumulateGradHook> b)
        : to(std::move(t)), before(std::move(b)) {}
    void operator()(const at::Tensor& p) override {
      if (before) (*before)(p);
      if (const auto found = to.lock()) found->arrived(p);
    }
    std::weak_ptr<taker> to;
    std::unique_ptr<autograd::PostAccumulateGradHook> before;
  };

  void arrived(const at::Tensor& p) {
    const auto grad = p.grad();
    if (!grad.defined() || grad.requires_grad()) return;
    auto& home = homes_[p.unsafeGetTensorImpl()];
    if (!disk_->holds(grad)) {
      if (!movable(grad)) return;
      if (!home.defined() || home.storage().use_count() > 1 || !alike(home, grad)) home = disk_->reserve({grad}).front();
      disk_->write(home, grad);
      p.mutable_grad() = home.detach();
    }
    if (const auto now = autograd::get_current_graph_task_id(); now != backward_) {
      backward_ = now;
      autograd::Engine::get_default_engine().queue_callback([me = shared_from_this()] { me->traffic_.drain(); });
    }
    // Of a home, what stands for it all the time: it is free for the next gradient although this one is still being written.
    traffic_.done({home.defined() && home.is_alias_of(p.grad()) ? home : grad});
  }

  std::shared_ptr<disk> disk_;
  disk_traffic traffic_;
  std::vector<at::Tensor> of_;
  std::map<const void*, at::Tensor> homes_;  ///< of a parameter: what takes its next gradient, if nobody holds that of before
  int backward_ = -1;                        ///< the last one
};

gradients_on_disk::gradients_on_disk(const ::torch::nn::Module& module, std::shared_ptr<disk> to)
    : taker_(std::make_shared<taker>(std::move(to))) {
  taker_->attach(module);
}

gradients_on_disk::~gradients_on_disk() { taker_->detach(); }

/// A parameter that has a gradient.
struct states_on_disk::todo {
  at::Tensor p;
  const ::torch::optim::OptimizerParamGroup* of;
  void* key() const { return p.unsafeGetTensorImpl(); }
};

states_on_disk::states_on_disk(std::shared_ptr<disk> to, tensors_of_state tensors)
    : disk_(std::move(to)), tensors_(std::move(tensors)) {
  if (!disk_) throw bad_option("offloaded: there is no disk");
}

void states_on_disk::step(const groups& all, states& of, const part_of_step& apply) {
  if (failure_) throw copy_failed(*failure_);
  std::vector<todo> list;
  for (const auto& group : all)
    for (const auto& p : group.params())
      if (p.grad().defined()) list.push_back({p, &group});
  settle(list, of, apply);

  const auto end_of_parcel = [&](std::size_t begin) {
    constexpr bytes_t parcel = 8 << 20;
    bytes_t bytes = 0;
    auto end = begin;
    for (; end < list.size() && list[end].of == list[begin].of; ++end) {
      for (const auto& t : homes(list[end], of)) bytes += static_cast<bytes_t>(t.defined() ? t.nbytes() : 0);
      if (end > begin && bytes > parcel) break;
    }
    return end;
  };
  const auto held = [&](std::size_t begin, std::size_t end) {
    std::vector<at::Tensor> found;
    for (auto i = begin; i < end; ++i)
      if (const auto state = of.find(list[i].key()); state != of.end())
        for (auto& t : tensors_(*state->second))
          if (disk_->holds(t)) found.push_back(std::move(t));
    return found;
  };

  const auto read_beside = [&](std::size_t begin, std::size_t end) {
    std::vector<at::Tensor> found;
    for (auto i = begin; i < end; ++i) found.insert(found.end(), {list[i].p, list[i].p.grad()});
    return found;
  };

  disk_traffic traffic;
  std::size_t done = 0;
  const auto failed = [&](const copy_failed& e, const std::string& what) {
    failure_ = std::string(e.what()) + "; " + what + ". Load a checkpoint";
    return copy_failed(*failure_);
  };
  try {
    traffic.ahead(held(0, end_of_parcel(0)));
    while (done < list.size()) {
      const auto end = end_of_parcel(done);
      traffic.arrived();
      traffic.ahead(held(end, end_of_parcel(end)), read_beside(end, end_of_parcel(end)));
      std::vector<at::Tensor> params;
      std::vector<std::vector<at::Tensor>> places;
      for (auto i = done; i < end; ++i) {
        params.push_back(list[i].p);
        places.push_back(homes(list[i], of));
      }
      apply(std::move(params), *list[done].of);
      for (auto i = done; i < end; ++i) bring_home(list[i], of, places[i - done]);
      auto unneeded = held(done, end);
      for (auto i = done; i < end; ++i) unneeded.push_back(list[i].p.grad());
      traffic.done(std::move(unneeded));
      done = end;
    }
  } catch (const copy_failed& e) {
    throw failed(e, std::to_string(done) + " of " + std::to_string(list.size()) + " parameters have made the step");
  }
  try {
    traffic.drain();
  } catch (const copy_failed& e) {
    throw failed(e, "all parameters have made the step, but their states may be lost");
  }
}

/// Where the states of a parameter are, or are to be.
std::vector<at::Tensor> states_on_disk::homes(const todo& t, states& of) const {
  if (const auto state = of.find(t.key()); state != of.end()) return tensors_(*state->second);
  const auto room = rooms_.find(t.key());
  return room == rooms_.end() ? std::vector<at::Tensor>() : room->second;
}

/// Moves what a step has made anew to where it was before, or to the room that is set aside for it.
void states_on_disk::bring_home(const todo& t, states& of, const std::vector<at::Tensor>& places) {
  const auto state = of.find(t.key());
  if (state == of.end()) return;
  rooms_.erase(t.key());
  auto made = tensors_(*state->second);
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (!movable(made[i]) || disk_->holds(made[i])) continue;
    const bool fits = i < places.size() && disk_->holds(places[i]) && alike(places[i], made[i]);
    const auto home = fits ? places[i] : disk_->reserve({made[i]}).front();
    disk_->write(home, made[i]);
    note_freed(static_cast<bytes_t>(made[i].nbytes()));
    made[i].set_data(home);
  }
}

/// Sees to it that all states are on the disk or have room there.
void states_on_disk::settle(const std::vector<todo>& all, states& of, const part_of_step& apply) {
  std::vector<at::Tensor> elsewhere, wanted;
  for (const auto& t : all)
    if (const auto state = of.find(t.key()); state != of.end())
      for (auto& made : tensors_(*state->second))
        if (movable(made) && !disk_->holds(made)) elsewhere.push_back(std::move(made));
  std::map<const void*, std::vector<at::Tensor>> rooms;
  for (const auto& t : all)
    if (of.find(t.key()) == of.end() && rooms_.find(t.key()) == rooms_.end()) rooms[t.key()] = rehearse(t, of, apply);
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

/// Steps a parameter like this one, to see what the class does.
/// @return tensors without memory, like the states that can be on a disk; undefined ones for others
std::vector<at::Tensor> states_on_disk::rehearse(const todo& t, states& of, const part_of_step& apply) const {
  auto twin = at::zeros_like(t.p.detach());
  twin.requires_grad_();
  twin.mutable_grad() = at::zeros_like(t.p.detach());
  apply({twin}, *t.of);
  const auto state = of.find(twin.unsafeGetTensorImpl());
  if (state == of.end()) return {};
  auto like = tensors_(*state->second);
  of.erase(state);
  for (auto& made : like) {
    note_freed(static_cast<bytes_t>(made.defined() ? made.nbytes() : 0));
    made = movable(made) ? without_memory(made) : at::Tensor();
  }
  return like;
}

std::vector<at::Tensor> tensors_of(::torch::optim::OptimizerParamState& state) {
  namespace optim = ::torch::optim;
  const auto* of = &state;
  if (const auto* s = dynamic_cast<const optim::AdamWParamState*>(of))
    return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  if (const auto* s = dynamic_cast<const optim::AdamParamState*>(of)) return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  if (const auto* s = dynamic_cast<const optim::SGDParamState*>(of)) return {s->momentum_buffer()};
  if (const auto* s = dynamic_cast<const optim::RMSpropParamState*>(of))
    return {s->square_avg(), s->momentum_buffer(), s->grad_avg()};
  if (const auto* s = dynamic_cast<const optim::AdagradParamState*>(of)) return {s->sum()};
  throw bad_option(std::string("offloaded: it is not known which tensors are in a ") + typeid(state).name() +
                   "; override `tensors` to tell");
}

}  // namespace remat::pytorch
