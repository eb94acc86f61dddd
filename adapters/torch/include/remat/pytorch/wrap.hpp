// SPDX-License-Identifier: Apache-2.0
/// @file
/// `wrap`: makes a C++ module train within a budget of bytes, with unchanged results.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <remat/pytorch/session.hpp>

namespace remat::pytorch {

/// Converts the results of a module to a list of tensors and back. Specialise it for your own structs:
/// `static std::vector<at::Tensor> list(const R&)` and `static R make(std::vector<at::Tensor>)`.
template <class R>
struct output_trait;

template <>
struct output_trait<at::Tensor> {
  static std::vector<at::Tensor> list(const at::Tensor& r) { return {r}; }
  static at::Tensor make(std::vector<at::Tensor> list) { return std::move(list.at(0)); }
};
template <>
struct output_trait<std::vector<at::Tensor>> {
  static std::vector<at::Tensor> list(const std::vector<at::Tensor>& r) { return r; }
  static std::vector<at::Tensor> make(std::vector<at::Tensor> list) { return list; }
};
template <class... T>
struct output_trait<std::tuple<T...>> {
  static std::vector<at::Tensor> list(const std::tuple<T...>& r) {
    return std::apply([](const auto&... t) { return std::vector<at::Tensor>{t...}; }, r);
  }
  static std::tuple<T...> make(std::vector<at::Tensor> list) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) { return std::tuple<T...>{list.at(I)...}; }
    (std::index_sequence_for<T...>());
  }
};

/// A C++ module as a model.
class module_model final : public model {
 public:
  explicit module_model(std::shared_ptr<::torch::nn::Module> module) : module_(std::move(module)) {}
  std::string name() const override { return module_->name(); }
  std::vector<named_tensor> parameters() override { return list(module_->named_parameters()); }
  std::vector<named_tensor> buffers() override { return list(module_->named_buffers()); }
  std::string signature() override {
    std::string modes;
    for (const auto& m : module_->modules()) modes += m->is_training() ? 't' : 'e';
    return modes;
  }

 private:
  static std::vector<named_tensor> list(const ::torch::OrderedDict<std::string, at::Tensor>& named) {
    std::vector<named_tensor> all;
    for (const auto& n : named) all.push_back({n.key(), n.value()});
    return all;
  }
  std::shared_ptr<::torch::nn::Module> module_;
};

/// A module of type M that runs by plans. It has the parameters, buffers and children of the wrapped module, under their names.
/// @tparam M a module with `forward`
/// @tparam A types of the arguments of `forward`: `at::Tensor` each
template <class M, class... A>
class wrapped : public ::torch::nn::Module {
 public:
  using result_type = decltype(std::declval<M&>().forward(std::declval<const A&>()...));

  wrapped(std::shared_ptr<M> module, wrap_options options)
      : ::torch::nn::Module(module->name()),
        module_(module),
        call_{call(module)},
        session_(std::make_shared<module_model>(module), std::move(options)) {
    for (const auto& p : module->named_parameters(false)) register_parameter(p.key(), p.value(), p.value().requires_grad());
    for (const auto& b : module->named_buffers(false)) register_buffer(b.key(), b.value());
    for (const auto& c : module->named_children()) register_module(c.key(), c.value());
  }

  result_type forward(const A&... inputs) { return output_trait<result_type>::make(session_.forward(call_, {inputs...})); }
  result_type operator()(const A&... inputs) { return forward(inputs...); }

  void train(bool on = true) override {
    module_->train(on);
    ::torch::nn::Module::train(on);
  }

  /// The wrapped module.
  const std::shared_ptr<M>& module() const { return module_; }
  pytorch::report report() const { return session_.report(); }
  pytorch::session& session() { return session_; }
  /// Captures, profiles and plans for such inputs, without a step.
  void prepare(const A&... inputs) { session_.prepare(call_, {inputs...}); }

 private:
  static forward_function call(std::shared_ptr<M> module) {
    return [module](const std::vector<at::Tensor>& in) {
      return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return output_trait<result_type>::list(module->forward(static_cast<const A&>(in.at(I))...));
      }
      (std::index_sequence_for<A...>());
    };
  }

  std::shared_ptr<M> module_;
  invocation call_;
  pytorch::session session_;
};

/// Wraps a module so that its training step fits a budget.
///
/// Outputs, gradients, buffers and the state of the generator equal those of the plain module bit by bit. `backward`, hooks,
/// `autograd::grad`, accumulation, `no_grad`, `train` and `eval` work as before. A plan assumes that the loss uses the same
/// outputs as in the last step; if it uses others, the forward runs once more. A second backward of a forward, and a graph of the
/// gradients, are errors; with `wrap_options::follow` they work, with the memory of a plain step.
///
/// @param module  the module; shared, not copied
/// @param sample  arguments of forward, as in training: sizes, types and `requires_grad` count
/// @param options the budget, and how to plan
/// @return a module to use in place of `module`
/// @throws over_budget if no schedule fits; bad_option; cannot_capture
/// Complexity: one training step, seven runs of each distinct operator, the search.
/// @code
/// auto net = remat::pytorch::wrap(gpt, std::tuple(ids, target), {.budget = "512MiB"});
/// net->forward(ids, target).backward();
/// @endcode
template <class M, class... A>
std::shared_ptr<wrapped<M, A...>> wrap(std::shared_ptr<M> module, const std::tuple<A...>& sample, wrap_options options = {}) {
  auto w = std::make_shared<wrapped<M, A...>>(std::move(module), std::move(options));
  std::apply([&](const auto&... t) { w->prepare(t...); }, sample);
  return w;
}
template <class M>
auto wrap(std::shared_ptr<M> module, const at::Tensor& sample, wrap_options options = {}) {
  return wrap(std::move(module), std::tuple<at::Tensor>(sample), std::move(options));
}
template <class M, class Sample>
auto wrap(const ::torch::nn::ModuleHolder<M>& module, const Sample& sample, wrap_options options = {}) {
  return wrap(module.ptr(), sample, std::move(options));
}

}  // namespace remat::pytorch
