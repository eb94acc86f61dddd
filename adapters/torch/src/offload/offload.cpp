// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <map>
#include <mutex>

#include <remat/pytorch/offload.hpp>

#include "../base/trim.hpp"
#include "../base/views.hpp"
#include "../device/home.hpp"
#include "arrival.hpp"

namespace remat::pytorch {

namespace autograd = ::torch::autograd;

namespace {

/// Storages of parameters and buffers, in order: for each storage, the tensors in it.
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

void rebase(const std::vector<at::Tensor>& tensors, const at::Tensor& memory) {
  for (auto t : tensors)
    t.set_data(at::empty({0}, t.options().requires_grad(false).device(memory.device()))
                   .set_(memory.storage(), t.storage_offset(), t.sizes(), t.strides()));
}

}  // namespace

void move_weights(::torch::nn::Module& module, disk& to) {
  std::vector<std::vector<at::Tensor>> found;
  std::vector<at::Tensor> bytes;
  for (auto& tensors : sharing(module))
    if (auto all = bytes_over(tensors.front().storage()); movable(all) && !to.holds(all)) {
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
    if (const auto all = bytes_over(tensors.front().storage()); on_a_disk(all)) rebase(tensors, all.clone());
}

void pin_weights(const std::vector<at::Tensor>& weights, c10::Device near) {
  const at::NoGradGuard no_grad;
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(near.type());
  const auto is_pinned = [&](const at::Tensor& w) { return w.is_cpu() && hooks.isPinnedPtr(w.storage().data()); };
  std::map<const void*, std::vector<at::Tensor>> by_memory;
  for (const auto& w : weights)
    if (w.has_storage() && w.storage().nbytes() > 0 && !is_pinned(w)) by_memory[w.storage().unsafeGetStorageImpl()].push_back(w);
  const auto bytes_of = [](const auto& tensors) { return static_cast<bytes_t>(tensors.front().storage().nbytes()); };
  bytes_t total = 0;
  for (const auto& [memory, tensors] : by_memory) total += allocated_bytes(near, bytes_of(tensors));
  if (total == 0) return;
  const auto all = on_host(near, total).memory->reserve(total);
  bytes_t at = 0;
  for (const auto& [memory, tensors] : by_memory) {
    const auto bytes = bytes_of(tensors);
    const auto there = bytes_over(storage_in(all, at, bytes));
    there.copy_(bytes_over(tensors.front().storage()));
    rebase(tensors, there);
    at += allocated_bytes(near, bytes);
  }
}

/// Moves gradients of parameters to a disk, after their accumulation.
class gradients_on_disk::taker final : public gradient_taker, public std::enable_shared_from_this<taker> {
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
      arrival::of(of_[i]).moves = weak_from_this();
    }
  }
  void detach() {
    for (const auto& p : of_)
      if (auto* const hook = arrival::find(p); hook != nullptr && hook->moves.lock().get() == this) {
        hook->moves.reset();
        arrival::tidy(p);
      }
  }

  void arrived(const at::Tensor& p) override {
    const std::lock_guard lock(mutex_);
    const auto grad = p.grad();
    if (!grad.defined() || grad.requires_grad()) return;
    auto& home = homes_[p.unsafeGetTensorImpl()];
    if (!disk_->holds(grad)) {
      if (!movable(grad)) return;
      if (!home.defined() || home.storage().use_count() > 1 || !alike(home, grad)) home = disk_->reserve({grad}).front();
      disk_->take_gradient(p, home);
    }
    if (const auto now = autograd::get_current_graph_task_id(); now != backward_) {
      backward_ = now;
      autograd::Engine::get_default_engine().queue_callback([me = shared_from_this()] { me->traffic_.drain(); });
    }
    // If the gradient lies in its home, pass the home. A second handle of this tensor does not raise the use count of the
    // storage, so the home is free for the next gradient while this gradient is still being written.
    traffic_.done({home.defined() && home.is_alias_of(p.grad()) ? home : grad});
  }

 private:
  std::shared_ptr<disk> disk_;
  disk_traffic traffic_;
  std::vector<at::Tensor> of_;
  std::map<const void*, at::Tensor> homes_;  ///< per parameter: place of its next gradient, unless the last is held
  int backward_ = -1;                        ///< id of the last backward
  std::mutex mutex_;                         ///< backwards may run on several threads
};

gradients_on_disk::gradients_on_disk(const ::torch::nn::Module& module, std::shared_ptr<disk> to)
    : taker_(std::make_shared<taker>(std::move(to))) {
  taker_->attach(module);
}

gradients_on_disk::~gradients_on_disk() { taker_->detach(); }

}  // namespace remat::pytorch
