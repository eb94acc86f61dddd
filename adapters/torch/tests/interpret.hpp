// SPDX-License-Identifier: Apache-2.0
/// @file
/// A simple, slow interpreter of captured programs. Every value keeps its own storage, so any node can be recomputed.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include <remat/pytorch/bindings.hpp>

#include "devices.hpp"

namespace remat::pytorch {

class interpreter {
 public:
  /// The nodes that are recomputed during the run.
  enum class recompute { nothing, each_node_twice, random_nodes };

  struct outcome {
    std::vector<at::Tensor> outputs, parameter_grads, input_grads;
    std::size_t recomputed = 0;
  };

  interpreter(const program& p, const bindings& tensors)
      : p_(p), tensors_(tensors), storage_(p.values.size()), state_(p.nodes.size()), ends_(p.nodes.size()) {}

  /// @param loss returns the gradients of the outputs
  outcome run(const std::vector<at::Tensor>& inputs,
              const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& loss, recompute mode,
              unsigned seed = 0) {
    for (std::size_t v = 0; v < p_.values.size(); ++v) {
      const auto k = p_.values[v].slot;
      if (k == none || p_.slots[k].from == role::output_grad) continue;
      if (p_.slots[k].from == role::input) tensors_.set(k, inputs[p_.slots[k].position]);
      storage_[v] = tensors_[k].storage();
    }
    std::mt19937 random(seed);
    phases_[0] = generator().get_state();
    outcome result;
    for (index_t n = 0; n < p_.nodes.size(); ++n) {
      if (mode == recompute::random_nodes)
        for (int k = 0; k < 2 && n > 0; ++k) result.recomputed += again(static_cast<index_t>(random() % n));
      if (n == p_.loss) {
        go_to(p_.after_forward);
        for (auto v : p_.outputs) result.outputs.push_back(tensor(v).clone());
        auto grads = loss(result.outputs);
        for (std::size_t i = 0; i < p_.output_grads.size(); ++i) {
          if (p_.output_grads[i] == none) continue;
          const auto& view = p_.views[p_.output_grads[i]];
          auto g = at::empty_strided(view.sizes, view.strides, grads[i].options());
          g.copy_(grads[i]);
          storage_[view.value] = g.storage();
        }
        phases_[1] = generator().get_state();
        continue;
      }
      execute(n, false);
      if (mode == recompute::each_node_twice) result.recomputed += again(n);
    }
    go_to(p_.after_backward);
    for (auto v : p_.parameter_grads) result.parameter_grads.push_back(tensor(v));
    for (auto v : p_.input_grads) result.input_grads.push_back(v == none ? at::Tensor() : tensor(v));
    return result;
  }

 private:
  at::Tensor tensor(index_t view) const {
    const auto& v = p_.views[view];
    const auto k = p_.values[v.value].slot;
    if (v.whole) return p_.slots[k].from == role::input ? tensors_[k].detach() : tensors_[k];
    auto offset = v.offset;
    if (p_.from(v.value) == role::input) offset += tensors_[k].storage_offset() * static_cast<bytes_t>(tensors_[k].itemsize());
    auto t = at::empty({0}, at::TensorOptions().dtype(v.dtype).device(p_.values[v.value].device))
                 .set_(*storage_[v.value], offset / static_cast<bytes_t>(c10::elementSize(v.dtype)), v.sizes, v.strides);
    if (v.conj) t = at::_conj(t);
    if (v.neg) t = at::_neg_view(t);
    return t;
  }

  bool again(index_t n) {
    if (n == p_.loss || p_.nodes[n].once) return false;
    execute(n, true);
    return true;
  }

  static at::Generator generator() { return at::globalContext().defaultGenerator(test_device()); }

  void execute(index_t n, bool recomputation) {
    const auto& node = p_.nodes[n];
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& [old, fresh] : node.overwrites) {
      const auto bytes = static_cast<int64_t>(storage_[old]->nbytes());
      storage_[fresh] =
          at::empty({0}, at::TensorOptions().dtype(at::kByte)).set_(*storage_[old], 0, {bytes}, {1}).clone().storage();
    }
    at::Tensor before;
    if (node.random) {
      before = generator().get_state();
      if (recomputation)
        generator().set_state(state_[n]);
      else
        go_to(node.starts);
      state_[n] = generator().get_state();
    }
    for (const auto& c : node.calls) {
      std::vector<c10::IValue> stack = c.arguments;
      for (auto& argument : stack)
        if (argument.isList()) argument = c10::IValue(argument.toList().copy());
      for (const auto& o : c.operands) {
        const auto skipped = std::find(c.first_run_only.begin(), c.first_run_only.end(), o.at) != c.first_run_only.end();
        if (recomputation && skipped) continue;
        auto& argument = stack[static_cast<std::size_t>(o.at)];
        if (o.element < 0)
          argument = tensor(o.view);
        else
          argument.toList().set(static_cast<std::size_t>(o.element), c10::IValue(tensor(o.view)));
      }
      at::AutoGradMode grad_mode(c.grad_mode);
      c.op.callBoxed(stack);
      for (const auto& r : c.results) {
        const auto& value = stack[static_cast<std::size_t>(r.at)];
        const auto t = r.element < 0 ? value.toTensor() : value.toListRef()[static_cast<std::size_t>(r.element)].toTensor();
        storage_[p_.views[r.view].value] = t.storage();
      }
    }
    if (node.random && !recomputation) ends_[n] = generator().get_state();
    if (node.random && recomputation) generator().set_state(before);
  }

  void go_to(const generator_origin& o) {
    if (o.from == generator_origin::before) generator().set_state(state_[o.node]);
    if (o.from == generator_origin::after) generator().set_state(ends_[o.node]);
    if (o.from == generator_origin::forward) generator().set_state(phases_[0]);
    if (o.from == generator_origin::backward) generator().set_state(phases_[1]);
    if (o.from == generator_origin::fixed) {
      auto state = at::empty({static_cast<int64_t>(o.state.size())}, at::kByte);
      std::memcpy(state.mutable_data_ptr(), o.state.data(), o.state.size());
      generator().set_state(state);
    }
  }

  const program& p_;
  bindings tensors_;
  std::vector<std::optional<c10::Storage>> storage_;
  std::vector<at::Tensor> state_, ends_;  ///< of the generator, before and after each random node
  at::Tensor phases_[2];                  ///< of the generator, at the beginning of the forward and of the backward
};

}  // namespace remat::pytorch
