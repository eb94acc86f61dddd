// SPDX-License-Identifier: Apache-2.0
/// @file
/// `wrap`: a module that trains inside a budget of bytes, and otherwise is the module it was.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/torch/capture.hpp>
#include <remat/torch/profile.hpp>

namespace remat::torch {

/// No schedule is known that fits the budget.
struct over_budget : error {
  over_budget(const std::string& what, bytes_t asked_bytes, std::optional<bytes_t> smallest_bytes, bytes_t bound_bytes)
      : error(what), asked(asked_bytes), smallest(smallest_bytes), bound(bound_bytes) {}
  bytes_t asked;                    ///< the budget, bytes
  std::optional<bytes_t> smallest;  ///< smallest budget that is known to do, bytes
  bytes_t bound;                    ///< proven: no smaller one does, bytes
};

/// The inputs are not like those the module was wrapped for, and `wrap_options::fixed_shapes` is set.
struct unexpected_inputs : error {
  using error::error;
};

/// Something that eager mode can do and a wrapped module cannot: a second backward of one forward, a graph of the gradients.
struct not_supported : error {
  using error::error;
};

/// A planned step gave something else than the plain one (`wrap_options::verify`). The module's buffers and the generator are as
/// the plain step left them.
struct not_equal : error {
  using error::error;
};

/// How much memory a training step may take.
class budget {
 public:
  /// @param text a size such as `512MiB`, for everything the step needs; or `N%` of the activations of the plain step, beyond
  ///             what is held anyway
  /// @throws bad_option naming the text, for anything else
  budget(const std::string& text);
  budget(const char* text) : budget(std::string(text)) {}
  /// Everything the step needs: parameters, buffers, inputs, constants, optimizer, gradients, activations.
  /// @throws bad_option if negative
  budget(bytes_t bytes);
  /// Activations, outputs and new gradients only; what is held before the step begins comes on top.
  /// @throws bad_option if negative
  static budget activations(bytes_t bytes);

  std::optional<bytes_t> total;         ///< bytes
  std::optional<bytes_t> for_the_step;  ///< bytes beyond what is held
  double share = 1;                     ///< of the plain step, if neither is set

 private:
  budget() = default;
};

/// A method with its options, such as `[](const auto& p, bytes_t b, const limits& l) { return solve(p, b, rotor{}, l); }`.
using plan_solver = std::function<result(const problem&, bytes_t, const remat::limits&)>;

/// `automatic`, with HiGHS or GLPK, whichever there is, or without a MILP library.
plan_solver default_solver();

struct wrap_options {
  torch::budget budget = "100%";
  bytes_t optimizer = 0;                                 ///< bytes reserved for the states of the optimizer, >= 0
  remat::limits limits = {.seconds = 20, .gap = 0.005};  ///< of a search for a schedule
  plan_solver solver = default_solver();
  profile_options profile = {};
  bool fixed_shapes = false;  ///< refuse inputs of other shapes or types, instead of planning for them
  /// So many steps also run plain, in the memory that this takes, and are compared bit by bit: outputs, gradients, buffers, state
  /// of the generator. The first difference is a `not_equal`.
  std::size_t verify = 0;
  std::function<void(const std::string&)> log = {};  ///< told what is captured, planned, and why
};

/// What a plan takes, in bytes and seconds.
struct report {
  bytes_t parameters = 0, buffers = 0, inputs = 0, constants = 0, optimizer = 0;
  bytes_t gradients = 0;         ///< that existed when the step began
  bytes_t budget = 0;            ///< for all of it
  bytes_t left = 0;              ///< of the budget, for activations, outputs and new gradients
  bytes_t arena = 0;             ///< reserved for activations and new gradients
  bytes_t live_peak = 0;         ///< largest sum alive in the arena: the difference is fragmentation
  bytes_t outputs = 0;           ///< outside the arena: outputs, their gradients, gradients of inputs
  bytes_t store_all = 0;         ///< arena and outputs if nothing is recomputed
  bytes_t planned_peak = 0;      ///< of the schedule, as `evaluate` counts
  double step_seconds = 0;       ///< predicted time of the operators
  double store_all_seconds = 0;  ///< the same if nothing is recomputed
  double bound = 0;              ///< proven: no schedule within the budget of the search is faster, s
  double gap = 0;                ///< relative distance to the bound
  double capture_seconds = 0, profile_seconds = 0, plan_seconds = 0;
  std::size_t operations = 0;  ///< computed in a step
  std::size_t recomputed = 0;  ///< of these, again
  std::size_t unplanned = 0;   ///< allocations outside the plan so far
  std::string solver;

  bytes_t held() const { return parameters + buffers + inputs + constants + optimizer + gradients; }
  bytes_t total() const { return held() + arena + outputs; }  ///< at most `budget`
  /// A table of all this.
  std::string text() const;
};

/// Runs a module by plans: the part of a wrapped module that does not depend on its type.
///
/// The first call with gradients captures, profiles and plans; so does every later one with other shapes, strides, types,
/// training flags or `requires_grad`, and one that finds less memory free (gradients to accumulate into, another step in
/// flight). All plans are kept. Without grad mode the module itself runs.
///
/// Every step in flight has an arena of its own. Gradients lie in the arena of their step; those that are still there when the
/// next one begins are moved out of its way, and count.
class plan_runner {
 public:
  plan_runner(std::shared_ptr<::torch::nn::Module> module, forward_function forward, wrap_options options);
  ~plan_runner();

  /// @throws cannot_capture, over_budget, unexpected_inputs
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);

  /// The plan that was used last, or made by `prepare`.
  /// @throws error before the first
  torch::report report() const;
  /// The problem of that plan, and its schedule.
  const problem& planning_problem() const;
  const schedule& planned_schedule() const;

  /// Captures, profiles and plans for such inputs without running.
  void prepare(const std::vector<at::Tensor>& inputs);

  /// Forgets all plans, for a module that has changed in a way that cannot be seen from outside: a member that is no parameter
  /// and no buffer, another path through its forward. Steps in flight end as they began.
  void invalidate();
  /// Gives back the memory that is kept for the next step, but for gradients in it. Plans stay.
  void release();

 private:
  struct state;
  std::shared_ptr<state> state_;
};

/// How results of a module become a list of tensors and back. Specialise it for your own structs:
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

/// A module of type M that runs by plan. Its parameters, buffers, children and their names are those of the module it wraps.
/// @tparam M a module with `forward`
/// @tparam A arguments of forward: `at::Tensor` each
template <class M, class... A>
class wrapped : public ::torch::nn::Module {
 public:
  using result_type = decltype(std::declval<M&>().forward(std::declval<const A&>()...));

  wrapped(std::shared_ptr<M> module, wrap_options options)
      : ::torch::nn::Module(module->name()), module_(module), runner_(module, call(module), std::move(options)) {
    for (const auto& p : module->named_parameters(false)) register_parameter(p.key(), p.value(), p.value().requires_grad());
    for (const auto& b : module->named_buffers(false)) register_buffer(b.key(), b.value());
    for (const auto& c : module->named_children()) register_module(c.key(), c.value());
  }

  result_type forward(const A&... inputs) { return output_trait<result_type>::make(runner_.forward({inputs...})); }
  result_type operator()(const A&... inputs) { return forward(inputs...); }

  void train(bool on = true) override {
    module_->train(on);
    ::torch::nn::Module::train(on);
  }

  /// The module itself.
  const std::shared_ptr<M>& module() const { return module_; }
  torch::report report() const { return runner_.report(); }
  plan_runner& runner() { return runner_; }

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
  plan_runner runner_;
};

/// Wraps a module so that its training step fits a budget.
///
/// Outputs, gradients, buffers and the state of the generator are those of the plain module, bit by bit. `backward`, hooks,
/// `autograd::grad`, accumulation, `no_grad`, `train` and `eval` work as before. Differences: one backward per forward; no graph
/// of the gradients. The plan is for the outputs that the last loss used; another loss runs the forward once more.
///
/// @param module  the module; shared, not copied
/// @param sample  arguments of forward, as in training: sizes, types and `requires_grad` count
/// @param options the budget, and how to plan
/// @return a module to use in its place
/// @throws over_budget if no schedule fits; bad_option; cannot_capture
/// Complexity: one training step, seven runs of each distinct operator, the search.
/// @code
/// auto net = remat::torch::wrap(gpt, std::tuple(ids, target), {.budget = "512MiB"});
/// net->forward(ids, target).backward();
/// @endcode
template <class M, class... A>
std::shared_ptr<wrapped<M, A...>> wrap(std::shared_ptr<M> module, const std::tuple<A...>& sample, wrap_options options = {}) {
  auto w = std::make_shared<wrapped<M, A...>>(std::move(module), std::move(options));
  w->runner().prepare(std::apply([](const auto&... t) { return std::vector<at::Tensor>{t...}; }, sample));
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

}  // namespace remat::torch
