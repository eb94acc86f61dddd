// SPDX-License-Identifier: Apache-2.0
/// @file
/// Weights of a module that lie in memory of the host, while the module runs on another device. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace remat::pytorch::detail {

/// The parameters of a module whose weights lie on the host, and their disguises.
class weights_elsewhere {
 public:
  /// @param on where the module runs
  explicit weights_elsewhere(c10::Device on) : on_(on) {}

  /// While it lives, parameters on the host look as if they were on the device, without data there, so that the module's code
  /// runs on hollow tensors. Graphs built meanwhile have gradient accumulators of their own. Disguises of one thread may nest.
  /// Other threads must not use the parameters meanwhile, except for their memory.
  class disguise {
   public:
    disguise(weights_elsewhere& of, const std::vector<at::Tensor>& parameters);
    ~disguise();
    disguise(const disguise&) = delete;
    disguise& operator=(const disguise&) = delete;
    /// Copies the data of all parameters to the device, until this object ends.
    /// @throws c10::OutOfMemoryError if the device has too little memory
    void lend();

   private:
    friend class lent_weights;
    struct hidden {
      std::size_t at;
      at::Tensor data;
      c10::intrusive_ptr<::torch::autograd::Node> accumulator;  ///< null: none
    };
    /// Gives the parameters their data again.
    void undo();
    weights_elsewhere& of_;
    const disguise* before_;
    std::vector<hidden> hidden_;
    std::vector<c10::Storage> lent_;
  };

 private:
  friend class lent_weights;
  struct entry {
    at::Tensor parameter, hollow;
    c10::intrusive_ptr<::torch::autograd::Node> accumulator;  ///< of graphs built in disguise
  };
  /// Makes entries for the parameters as they are now.
  void update_entries(const std::vector<at::Tensor>& parameters);

  c10::Device on_;
  std::vector<entry> entries_;
};

/// While it lives, disguised weights among the arguments of a call have their data on the device.
class lent_weights {
 public:
  explicit lent_weights(const std::vector<c10::IValue>& arguments);
  ~lent_weights();
  lent_weights(const lent_weights&) = delete;
  lent_weights& operator=(const lent_weights&) = delete;

 private:
  std::vector<c10::Storage> lent_;
};

}  // namespace remat::pytorch::detail
