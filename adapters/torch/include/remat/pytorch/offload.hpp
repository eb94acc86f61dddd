// SPDX-License-Identifier: Apache-2.0
/// @file
/// Weights, gradients and states of optimizers on a disk; activations go there by `wrap_options::far`.
///
/// @code
/// const auto scratch = std::make_shared<remat::pytorch::disk>("/scratch");
/// remat::pytorch::move_weights(*gpt, *scratch);
/// const remat::pytorch::gradients_on_disk gradients(*gpt, scratch);
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "64MiB", .gradients_leave = true, .far =
/// remat::pytorch::on_disk("/scratch")}); remat::pytorch::offloaded<torch::optim::AdamW> optimizer(scratch, net->parameters(),
/// torch::optim::AdamWOptions(3e-4));
/// @endcode
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/pytorch/disk.hpp>

namespace remat::pytorch {

/// Puts weights into page-locked memory of the host near an accelerator, in one piece. They stay the same tensors, and share
/// memory as before. Weights that are page-locked already stay where they are.
/// @param weights of the host or of a device
/// @throws not_available, out_of_memory; nothing is moved then
/// Complexity: one copy of each storage.
/// @code
/// remat::pytorch::pin_weights(gpt->parameters(), c10::kCUDA);
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "8GiB", .steps_on = c10::Device(c10::kCUDA, 0)});
/// @endcode
void pin_weights(const std::vector<at::Tensor>& weights, c10::Device near);

/// Moves parameters and buffers to a disk. They stay the same tensors, tied and views of each other as they were; what shared
/// their memory without being of the module no longer does. Those of less than a page stay.
/// @param module on the host
/// @throws out_of_memory before anything is moved; copy_failed
void move_weights(::torch::nn::Module& module, disk& to);

/// Brings parameters and buffers that are on a disk into ordinary memory.
void bring_back_weights(::torch::nn::Module& module);

/// Moves each gradient of a module to a disk as soon as it is complete, after hooks that the parameter has already. `grad()` is
/// an ordinary tensor there, to be clipped, accumulated and stepped with as ever. A backward ends when its gradients are written,
/// and throws copy_failed if one could not be.
///
/// With `wrap_options::gradients_leave` no more than a few are in memory at a time.
class gradients_on_disk {
 public:
  /// Sets space aside for a gradient of each parameter.
  /// @throws out_of_memory
  gradients_on_disk(const ::torch::nn::Module& module, std::shared_ptr<disk> to);
  /// Leaves gradients where they are, and takes no more.
  ~gradients_on_disk();
  gradients_on_disk(const gradients_on_disk&) = delete;
  gradients_on_disk& operator=(const gradients_on_disk&) = delete;

 private:
  class taker;
  std::shared_ptr<taker> taker_;
};

/// When parameters step.
enum class stepping {
  after,   ///< in `step()`, when all gradients are there, as ever
  overlap  ///< each within the backward, as soon as its gradient is there, which is freed; `step()` ends that
};

/// Keeps the states of an optimizer on a disk, and steps some parameters at a time. What `offloaded` is made of.
class states_on_disk {
 public:
  using groups = std::vector<::torch::optim::OptimizerParamGroup>;
  using states = ska::flat_hash_map<void*, std::unique_ptr<::torch::optim::OptimizerParamState>>;
  /// Members of an optimizer, which live as long as this, and what it does.
  struct optimizer {
    const groups& all;
    states& of;
    /// Steps these parameters of a group.
    std::function<void(std::vector<at::Tensor>, const ::torch::optim::OptimizerParamGroup&)> apply;
    /// Handles of the tensors in the state of a parameter, undefined ones among them, in the same order each time.
    std::function<std::vector<at::Tensor>(::torch::optim::OptimizerParamState&)> tensors;
  };

  /// @param to null: states stay in memory, for `stepping::overlap`
  /// @throws bad_option
  states_on_disk(std::shared_ptr<disk> to, stepping when, optimizer whose);
  ~states_on_disk();
  states_on_disk(const states_on_disk&) = delete;
  states_on_disk& operator=(const states_on_disk&) = delete;

  /// A step of all parameters that have gradients, or the end of one.
  /// @throws out_of_memory before a weight changes; copy_failed; not_supported
  at::Tensor step(const ::torch::optim::Optimizer::LossClosure& closure);
  /// States are those of a checkpoint. Gradients since the last step are dropped.
  void loaded();
  /// @throws not_supported between a backward and its step
  void check_idle(const std::string& what) const;

 private:
  class stepper;
  stepping when_;
  std::shared_ptr<stepper> stepper_;
};

/// The tensors in states of the optimizers of LibTorch.
/// @throws bad_option for another class: derive from `offloaded`, with a `tensors` of your own
std::vector<at::Tensor> tensors_of(::torch::optim::OptimizerParamState& state);

/// An optimizer whose states are on a disk, or that steps while gradients arrive; otherwise it is a Plain, and so are its
/// results, bit by bit.
///
/// Groups, options, schedulers, closures, `save` and `load` are as ever. Parameters step some at a time (8 MiB of states, or one
/// of them), while the states of the next are read and those of the last are written. All space is taken before the first step
/// changes a weight, which runs once on zeros for each parameter, to see which states there are. While memory is short (no room
/// is left for the weights once more, on the machine or in a memory cgroup), weights on a disk are written and leave the memory
/// as they step, and sessions give back what they keep for their next steps.
///
/// With `stepping::overlap` each parameter steps within the backward, and its gradient is freed. What needs the gradients later
/// is refused: clipping, accumulation, closures, `zero_grad`, `save` or changed options between backward and `step()`. The first
/// step keeps all gradients, though nobody sees them, so that it refuses before a weight has changed. A weight that the rest of
/// the backward still needs raises PyTorch's own error. Wrapped models plan with gradients that leave from the third step on,
/// with `gradients_on_disk` and `wrap_options::gradients_leave` from the first.
///
/// @tparam Plain treats each parameter by itself: AdamW, Adam, SGD, RMSprop, Adagrad of torch::optim
/// @code
/// remat::pytorch::offloaded<torch::optim::AdamW> optimizer(scratch, net->parameters(), torch::optim::AdamWOptions(3e-4));
/// remat::pytorch::offloaded<torch::optim::SGD> early(scratch, remat::pytorch::stepping::overlap, net->parameters(),
///                                                    torch::optim::SGDOptions(0.1));
/// @endcode
template <class Plain>
class offloaded : public Plain {
  static_assert(std::is_base_of_v<::torch::optim::Optimizer, Plain>);
  static_assert(!std::is_base_of_v<::torch::optim::LBFGS, Plain>, "LBFGS makes its step of all parameters together");

 public:
  /// @param to   for `stepping::overlap` null, too: states stay in memory
  /// @param told what Plain is made of: parameters or groups, and options
  /// @throws bad_option; what Plain throws
  template <class... Told>
  offloaded(std::shared_ptr<disk> to, stepping when, Told&&... told)
      : Plain(std::forward<Told>(told)...),
        states_(std::move(to), when,
                {this->param_groups_, this->state_,
                 [this](std::vector<at::Tensor> params, const ::torch::optim::OptimizerParamGroup& of) {
                   const hidden_groups all(this->param_groups_);
                   this->param_groups_.emplace_back(std::move(params), of.options().clone());
                   Plain::step();
                 },
                 [this](::torch::optim::OptimizerParamState& s) { return tensors(s); }}) {}
  template <class... Told>
  explicit offloaded(std::shared_ptr<disk> to, Told&&... told)
      : offloaded(std::move(to), stepping::after, std::forward<Told>(told)...) {}
  offloaded(const offloaded&) = delete;
  offloaded& operator=(const offloaded&) = delete;

  /// @throws out_of_memory before a weight changes. copy_failed if the disk fails: after all parameters have stepped if states
  /// could not be written, or else before some have, which it says; no step follows until a checkpoint is loaded. With
  /// `stepping::overlap` a backward throws the same, and both not_supported.
  at::Tensor step(::torch::optim::Optimizer::LossClosure closure = nullptr) override { return states_.step(closure); }

  void save(::torch::serialize::OutputArchive& archive) const override {
    states_.check_idle("save()");
    Plain::save(archive);
  }
  void load(::torch::serialize::InputArchive& archive) override {
    Plain::load(archive);
    states_.loaded();
  }

 protected:
  /// Handles of the tensors in a state, undefined ones among them, in the same order each time.
  virtual std::vector<at::Tensor> tensors(::torch::optim::OptimizerParamState& state) { return tensors_of(state); }

 private:
  /// Takes the groups out of an optimizer, and puts them back.
  struct hidden_groups {
    explicit hidden_groups(states_on_disk::groups& of) : place(of), groups(std::move(of)) { place.clear(); }
    ~hidden_groups() { place = std::move(groups); }
    hidden_groups(const hidden_groups&) = delete;
    hidden_groups& operator=(const hidden_groups&) = delete;
    states_on_disk::groups& place;
    states_on_disk::groups groups;
  };

  states_on_disk states_;
};

}  // namespace remat::pytorch
