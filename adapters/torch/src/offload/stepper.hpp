// SPDX-License-Identifier: Apache-2.0
/// @file
/// Steps the parameters of an optimizer while their states come from the disk and go back: one after another (step_all.cpp), or
/// each within the backward (step_early.cpp). Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/session.hpp>

#include "arrival.hpp"

namespace remat::pytorch {

namespace optim = ::torch::optim;

/// Error for uses that stepping within the backward rules out.
inline not_supported refusal_to_overlap(const std::string& reason, const std::string& advice = "use stepping::after") {
  return not_supported(reason + ": with stepping::overlap parameters step as soon as their gradients are there; " + advice);
}

class states_on_disk::stepper final : public early_stepper, public std::enable_shared_from_this<stepper> {
 public:
  stepper(std::shared_ptr<disk> to, optimizer whose) : disk_(std::move(to)), optimizer_(std::move(whose)) {}
  ~stepper() override {
    for (const auto& p : attached_) arrival::tidy(p);
  }

  // --- all parameters after each other -----------------------------------------------------------------------------------------

  /// Steps all parameters that have gradients.
  void step_all();
  void loaded();

  // --- within the backward -----------------------------------------------------------------------------------------------------

  /// Installs hooks on all trainable parameters.
  void attach();
  void arrived(const at::Tensor& p) override;
  bool at_once() const override { return first_step_done_; }
  /// Ends a step: checks the gradients, and steps the remaining parameters.
  void finish();
  /// @throws not_supported between a backward and its step
  void check_idle(const std::string& what) const {
    if (!taken_.empty()) throw refusal_to_overlap(what + " came between backward and step()");
  }

 private:
  /// A parameter to step.
  struct parameter_of_group {
    at::Tensor p;
    const optim::OptimizerParamGroup* group;
    void* key() const { return p.unsafeGetTensorImpl(); }
  };
  using parameters = std::span<const parameter_of_group>;

  void check_free_memory();
  void check() const {
    if (failure_) throw copy_failed(*failure_);
  }
  copy_failed failed(const copy_failed& e, const std::string& what) {
    failure_ = std::string(e.what()) + "; " + what + ". Load a checkpoint";
    return copy_failed(*failure_);
  }
  void drain(disk_traffic& traffic);
  void reserve_states(parameters all);
  std::vector<at::Tensor> probe_states(const parameter_of_group& t) const;
  parameters next_parcel(parameters rest) const;
  std::vector<at::Tensor> state_places(const parameter_of_group& t) const;
  std::vector<at::Tensor> disk_states(parameters of) const;
  std::vector<at::Tensor> unneeded(parameters of) const;
  void apply(parameters to);
  void bring_home(const parameter_of_group& t, const std::vector<at::Tensor>& places);
  void step_now(const parameter_of_group& t);
  void clear();

  std::shared_ptr<disk> disk_;  ///< null: states stay in memory
  optimizer optimizer_;
  std::map<const void*, std::vector<at::Tensor>> reserved_;  ///< per parameter: space for states that do not exist yet
  std::optional<std::string> failure_;                       ///< set by a failure: no step can follow
  bool memory_short_ = false;                                ///< memory is short

  /// A gradient that was taken from its parameter.
  struct taken {
    at::Tensor p, stand_in;
    at::Tensor gradient;  ///< kept until the first step is complete; afterwards undefined, because it has been used
  };
  std::mutex mutex_;              ///< hooks may run on several threads
  bool first_step_done_ = false;  ///< a whole step has shown that no other code needs the gradients
  bool dropped_ = false;          ///< gradients were dropped before a step used them
  std::map<const void*, taken> taken_;
  std::map<const void*, std::size_t> group_of_;  ///< per parameter: its group when the first gradient arrived
  std::map<std::size_t, std::unique_ptr<optim::OptimizerOptions>> settings_;  ///< per group: its options at its first gradient
  std::map<const void*, at::Tensor> successors_;                              ///< per parameter: its successor in the last step
  at::Tensor last_stepped_;
  std::unique_ptr<disk_traffic> traffic_;
  std::vector<at::Tensor> attached_;
};

}  // namespace remat::pytorch
