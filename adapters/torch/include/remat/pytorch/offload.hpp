// SPDX-License-Identifier: Apache-2.0
/// @file
/// Weights, gradients and states of optimizers on a disk. For activations see `wrap_options::far`.
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

/// Moves weights into one piece of page-locked memory of the host, for an accelerator. The tensor objects stay the same, and
/// share memory as before. Weights that are page-locked already do not move.
/// @param weights tensors of the host or of a device
/// @param near    the accelerator
/// @throws not_available, out_of_memory; no weight has moved then
/// Complexity: one copy of each storage.
/// @code
/// remat::pytorch::pin_weights(gpt->parameters(), c10::kCUDA);
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "8GiB", .steps_on = c10::Device(c10::kCUDA, 0)});
/// @endcode
void pin_weights(const std::vector<at::Tensor>& weights, c10::Device near);

/// Moves parameters and buffers to a disk. The tensor objects stay the same; ties and views between them remain. Tensors outside
/// the module no longer share memory with them. Storages of less than a page stay in memory.
/// @param module a module on the host
/// @throws out_of_memory before any tensor has moved; copy_failed
/// Complexity: one copy of each storage.
void move_weights(::torch::nn::Module& module, disk& to);

/// Moves parameters and buffers of a module from disks to ordinary memory.
void bring_back_weights(::torch::nn::Module& module);

/// Moves each gradient of a module to a disk as soon as it is complete, after the hooks that the parameter has already. `grad()`
/// is then an ordinary tensor on the disk; clipping, accumulation and steps work as usual. A backward ends when its gradients are
/// written, and throws copy_failed if a write failed.
///
/// With `wrap_options::gradients_leave` at most a few gradients are in memory at a time.
class gradients_on_disk {
 public:
  /// Reserves disk space for the gradient of each parameter.
  /// @throws out_of_memory
  gradients_on_disk(const ::torch::nn::Module& module, std::shared_ptr<disk> to);
  /// Later gradients stay in memory. Gradients on the disk stay there.
  ~gradients_on_disk();
  gradients_on_disk(const gradients_on_disk&) = delete;
  gradients_on_disk& operator=(const gradients_on_disk&) = delete;

 private:
  class taker;
  std::shared_ptr<taker> taker_;
};

/// When parameters step.
enum class stepping {
  after,   ///< in `step()`, when all gradients are complete, as in eager mode
  overlap  ///< each within the backward, as soon as its gradient is complete; the gradient is freed, and `step()` ends the step
};

/// Keeps the states of an optimizer on a disk, and steps a few parameters at a time. Implements `offloaded`.
class states_on_disk {
 public:
  using groups = std::vector<::torch::optim::OptimizerParamGroup>;
  using states = ska::flat_hash_map<void*, std::unique_ptr<::torch::optim::OptimizerParamState>>;
  /// The optimizer: references to its members, which must outlive this object, and its arithmetic.
  struct optimizer {
    const groups& param_groups;  ///< all groups of parameters
    states& param_states;        ///< state of each parameter
    /// Steps some parameters of a group.
    std::function<void(std::vector<at::Tensor>, const ::torch::optim::OptimizerParamGroup&)> apply;
    /// Handles of the tensors in the state of a parameter, undefined tensors included, always in the same order.
    std::function<std::vector<at::Tensor>(::torch::optim::OptimizerParamState&)> tensors;
  };

  /// @param to    the disk; null: states stay in memory (with `stepping::overlap` only)
  /// @param when  when parameters step
  /// @param whose the optimizer
  /// @throws bad_option without a disk for `stepping::after`
  states_on_disk(std::shared_ptr<disk> to, stepping when, optimizer whose);
  ~states_on_disk();
  states_on_disk(const states_on_disk&) = delete;
  states_on_disk& operator=(const states_on_disk&) = delete;

  /// Steps all parameters that have gradients. With `stepping::overlap` ends the step of the backward.
  /// @param closure as for an optimizer of LibTorch; may be empty
  /// @return the loss of the closure; undefined without a closure
  /// @throws out_of_memory before a weight changes; copy_failed; not_supported
  at::Tensor step(const ::torch::optim::Optimizer::LossClosure& closure);
  /// To be called after the optimizer has loaded a saved state. Drops gradients since the last step.
  void loaded();
  /// Checks that no step is pending.
  /// @param what operation that needs this, for the message
  /// @throws not_supported between a backward and its step
  void check_idle(const std::string& what) const;

 private:
  class stepper;
  stepping when_;
  std::shared_ptr<stepper> stepper_;
};

/// The tensors in a state of an optimizer of LibTorch.
/// @throws bad_option for another class: derive from `offloaded` and override `tensors`
std::vector<at::Tensor> tensors_of(::torch::optim::OptimizerParamState& state);

/// An optimizer with its states on a disk, or with steps during the backward. Its results equal those of `Plain` bit by bit.
///
/// Groups, options, schedulers, closures, `save` and `load` work as usual. A few parameters step at a time: those of 8 MiB of
/// states, or one larger parameter. Meanwhile the next states are read and the last ones are written. All disk space is reserved
/// before the first step changes a weight. To see which states there are, the first step runs once on zeros for each parameter.
/// Memory is short when the weights would not fit a second time, on the machine or in a memory cgroup. Then weights on a disk are
/// written and evicted as they step, and sessions give back memory that they keep for their next steps.
///
/// With `stepping::overlap` each parameter steps within the backward, and its gradient is freed. Operations that need gradients
/// later are refused: clipping, accumulation, closures; `zero_grad`, `save` or changed options between backward and `step()`. The
/// first step keeps all gradients out of sight, so that it can refuse before a weight has changed. PyTorch raises its own error
/// for a weight that the rest of the backward still needs. Wrapped models plan with gradients that leave from the third step on;
/// with `gradients_on_disk` and `wrap_options::gradients_leave` from the first.
///
/// @tparam Plain an optimizer that steps each parameter by itself: AdamW, Adam, SGD, RMSprop, Adagrad of torch::optim
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
  /// @param to   the disk; null, with `stepping::overlap` only: states stay in memory
  /// @param when when parameters step
  /// @param arguments arguments of the constructor of Plain: parameters or groups, and options
  /// @throws bad_option; exceptions of Plain
  template <class... Arguments>
  offloaded(std::shared_ptr<disk> to, stepping when, Arguments&&... arguments)
      : Plain(std::forward<Arguments>(arguments)...),
        states_(std::move(to), when,
                {this->param_groups_, this->state_,
                 [this](std::vector<at::Tensor> params, const ::torch::optim::OptimizerParamGroup& of) {
                   const hidden_groups all(this->param_groups_);
                   this->param_groups_.emplace_back(std::move(params), of.options().clone());
                   Plain::step();
                 },
                 [this](::torch::optim::OptimizerParamState& s) { return tensors(s); }}) {}
  template <class... Arguments>
  explicit offloaded(std::shared_ptr<disk> to, Arguments&&... arguments)
      : offloaded(std::move(to), stepping::after, std::forward<Arguments>(arguments)...) {}
  offloaded(const offloaded&) = delete;
  offloaded& operator=(const offloaded&) = delete;

  /// @throws out_of_memory before a weight changes
  /// @throws copy_failed if the disk fails: after all parameters have stepped if a state could not be written, else before some
  ///         have stepped; the message tells which. No step is possible until a saved state is loaded
  /// @throws not_supported with `stepping::overlap`. A backward then throws these three as well
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
  /// Handles of the tensors in a state, undefined tensors included, always in the same order.
  virtual std::vector<at::Tensor> tensors(::torch::optim::OptimizerParamState& state) { return tensors_of(state); }

 private:
  /// Takes the groups out of an optimizer while it exists.
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
