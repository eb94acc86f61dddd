// SPDX-License-Identifier: Apache-2.0
/// @file
/// Weights in memory of the host, of a module that runs on another device. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace remat::pytorch::detail {

/// The parameters of such a module.
class weights_elsewhere {
 public:
  /// @param on where the module runs
  explicit weights_elsewhere(c10::Device on) : on_(on) {}

  /// While it lives, parameters of the host look as if they were on the device, without data there: the module's code runs on
  /// hollow tensors. Graphs that are built meanwhile have accumulators of gradients of their own. Those of one thread may nest.
  /// The parameters must not be used by another thread meanwhile, but for their memory.
  class disguise {
   public:
    disguise(weights_elsewhere& of, const std::vector<at::Tensor>& parameters);
    ~disguise();
    disguise(const disguise&) = delete;
    disguise& operator=(const disguise&) = delete;
    /// All of them have their data on the device, too, until its end.
    /// @throws c10::OutOfMemoryError
    void lend();

   private:
    friend class weights_there;
    struct hidden {
      std::size_t at;
      at::Tensor data;
      c10::intrusive_ptr<::torch::autograd::Node> accumulator;  ///< null: there is none
    };
    weights_elsewhere& of_;
    const disguise* before_;
    std::vector<hidden> hidden_;
    std::vector<c10::Storage> lent_;
  };

 private:
  friend class weights_there;
  struct entry {
    at::Tensor parameter, hollow;
    c10::intrusive_ptr<::torch::autograd::Node> accumulator;  ///< of graphs that were built in disguise
  };
  /// Entries for these parameters, as they are now.
  void look(const std::vector<at::Tensor>& parameters);

  c10::Device on_;
  std::vector<entry> entries_;
};

/// While it lives, weights in disguise among the arguments of a call have their data on the device.
class weights_there {
 public:
  explicit weights_there(const std::vector<c10::IValue>& arguments);
  ~weights_there();
  weights_there(const weights_there&) = delete;
  weights_there& operator=(const weights_there&) = delete;

 private:
  std::vector<c10::Storage> lent_;
};

}  // namespace remat::pytorch::detail
