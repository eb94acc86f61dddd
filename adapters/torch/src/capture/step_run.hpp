// SPDX-License-Identifier: Apache-2.0
/// @file
/// Records the forward of a training step while it runs. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/pytorch/model.hpp>

#include "call_log.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

class recorder;

/// Runs the module's code once, on hollow tensors that later get the results of the planned step. If the step cannot be planned,
/// the calls so far run after all, and the step continues eagerly.
class step_run {
 public:
  /// @param strict       a call that cannot be recorded is an error, and no call runs then
  /// @param runs_again   the forward will run once more, from its beginning
  /// @param vary_numbers later steps may make calls with other numbers
  explicit step_run(bool strict = false, bool runs_again = false, bool vary_numbers = false)
      : strict_(strict), runs_again_(runs_again), vary_numbers_(vary_numbers) {}
  void begin(c10::Device on) { log_ = std::make_shared<call_log>(on); }
  /// Continues a forward whose calls so far are in `log`.
  void resume(std::shared_ptr<call_log> log) {
    log_ = std::move(log);
    log_->generator().restart();
    ran_ = true;
  }
  /// Runs the module. Its operators go to `call`.
  /// @throws what the module throws, after its calls have run as in eager mode
  std::vector<at::Tensor> forward(recorder& r, const forward_function& f, const std::vector<at::Tensor>& arguments);
  void call(recorder& r, const c10::OperatorHandle& op, ::torch::jit::Stack& stack);
  /// The module has returned `tensors`.
  void note_returned(recorder& r, std::vector<at::Tensor> tensors);
  /// Call this in a handler: the module has thrown.
  void note_exception(recorder& r);
  /// True if the module's code has run, at least in part.
  bool ran() const { return ran_; }
  /// What the module has thrown; null: nothing.
  const std::exception_ptr& thrown() const { return thrown_; }
  /// Call this before the module reads the memory of a tensor, and perhaps writes it.
  void read(recorder& r, const at::Tensor& t, bool may_write);
  /// Continues the forward eagerly.
  void fall_back(recorder& r, const std::string& why);
  bool strict() const { return strict_; }
  bool eager() const { return log_ && log_->filled(); }
  const std::string& why() const { return why_; }

  /// Notes the results of the forward at its end.
  /// @param outputs      returned tensors, each once; gets tensors that the module keeps and that need a gradient
  /// @param custom_nodes nodes of the graph that are not PyTorch's own and may hold tensors
  void end_forward(recorder& r, std::vector<at::Tensor>& outputs, const std::vector<::torch::autograd::Node*>& custom_nodes);
  /// The number of references of this object to tensors.
  std::unordered_map<const c10::TensorImpl*, std::size_t> references() const;
  /// The step is not planned: gives all tensors of the forward their data, for the autograd graph over them.
  void finish_eagerly();
  /// Makes tensors that the module keeps, and that need no gradient, further outputs.
  /// @param t gets them
  /// @return true if there are any
  bool add_kept(trace& t);
  /// Tensors by their numbers.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  const std::shared_ptr<call_log>& log() const { return log_; }
  const std::vector<at::Tensor>& returned() const { return returned_; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  /// Inputs of the plan that follow those of the forward.
  const std::vector<at::Tensor>& values() const { return values_; }

 private:
  struct kept_tensor {
    std::size_t id;
    at::Tensor tensor;
    byte_view view;
    int64_t version;
  };
  bool is_output(const at::Tensor& t) const;
  void run_calls(recorder& r, const std::string& why);

  std::shared_ptr<call_log> log_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> returned_, outputs_;  ///< results of the forward; each of them once, then kept tensors
  std::vector<at::Tensor> values_;
  std::vector<kept_tensor> kept_;
  std::vector<std::pair<at::Tensor, int64_t>> versions_;  ///< versions of tensors from outside, after the forward
  std::string why_;
  std::exception_ptr thrown_;
  bool strict_, runs_again_, vary_numbers_, ran_ = false;
};

}  // namespace remat::pytorch::detail
