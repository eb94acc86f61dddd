// SPDX-License-Identifier: Apache-2.0
/// @file
/// Compares a planned step with the plain one (`wrap_options::verify`). Private to the adapter.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/program.hpp>
#include <remat/pytorch/session.hpp>

#include "../base/digest.hpp"
#include "../base/hooks.hpp"
#include "../capture/hollow.hpp"
#include "../capture/observe.hpp"
#include "output_node.hpp"
#include "second_run.hpp"

namespace remat::pytorch {

/// Digests of the results of plain runs. Tells which tensors are equal after all runs.
class plain_results {
 public:
  explicit plain_results(std::vector<std::string> names) : names_(std::move(names)) {}

  void add(const std::vector<std::uint64_t>& run) {
    if (first_.empty()) {
      first_ = run;
      steady_.assign(run.size(), true);
    }
    for (std::size_t i = 0; i < run.size(); ++i) steady_[i] = steady_[i] && run[i] == first_[i];
  }
  /// Excludes all tensors: they depend on tensors that differ, and cannot be computed again.
  void distrust() { steady_.assign(steady_.size(), false); }
  bool steady() const { return std::find(steady_.begin(), steady_.end(), false) == steady_.end(); }
  /// The first tensor that is equal after all plain runs, but not after the planned run.
  std::optional<std::string> changed(const std::vector<std::uint64_t>& planned) const {
    for (std::size_t i = 0; i < planned.size(); ++i)
      if (steady_[i] && planned[i] != first_[i]) return names_.at(i);
    return std::nullopt;
  }
  /// A text for users: "2 of 5 gradients are not compared: a, b". Empty if all are compared.
  std::string not_compared(const std::string& kind) const {
    constexpr std::size_t most = 8;
    std::string list;
    std::size_t n = 0;
    for (std::size_t i = 0; i < steady_.size(); ++i)
      if (!steady_[i] && ++n <= most + 1) list += n == 1 ? names_.at(i) : n <= most ? ", " + names_.at(i) : ", ...";
    if (n == 0) return {};
    return ". " + std::to_string(n) + " of " + std::to_string(names_.size()) + " " + kind + (n == 1 ? " is" : " are") +
           " not compared: " + list;
  }

 private:
  std::vector<std::string> names_;
  std::vector<std::uint64_t> first_;
  std::vector<bool> steady_;
};

/// Verifies one step. The plain step runs twice. The planned step must equal it in all tensors in which the plain runs agree.
class verification {
 public:
  struct names {
    std::vector<std::string> forward;    ///< outputs, then tensors that the step may write
    std::vector<std::string> gradients;  ///< of parameters, then of inputs that an output leads to
  };

  /// @param start state at the beginning of the step; outlives this object
  /// @param warn  called if plain steps are not equal
  verification(second_run& start, forward_function plain, names of, std::function<void(const std::string&)> warn)
      : start_(start),
        plain_(std::move(plain)),
        warn_(std::move(warn)),
        forward_(std::move(of.forward)),
        gradients_(std::move(of.gradients)),
        generators_(all_generators::now(start.device())) {}

  /// Runs the plain forward twice. The graph of the second run stays.
  void run_forward() {
    for (int k = 0; k < 2; ++k) forward_once();
  }
  /// @throws not_equal after restoring buffers and generator as the plain forward left them
  void compare_forward(const program& step, const std::vector<at::Tensor>& outputs) {
    std::vector<at::Tensor> returned;
    for (const auto i : step.results) returned.push_back(outputs[i]);
    const auto planned = left_by(returned);
    const auto generators = all_generators::now(start_.device());
    for (int k = 0; k < most_runs && forward_.changed(planned); ++k) forward_once();
    if (const auto name = forward_.changed(planned)) fail(*name);
    if (!(generators == generators_)) fail("the state of the generator");
  }

  /// Runs the plain backward, and then the whole plain step again.
  /// @param step     lives until the comparison
  /// @param incoming gradients of its outputs
  void run_backward(const program& step, const std::vector<at::Tensor>& incoming, const std::vector<at::Tensor>& parameters) {
    step_ = &step;
    incoming_ = incoming;
    parameters_ = parameters;
    const auto now = all_generators::now(start_.device());
    gradients_.add(backward(std::exchange(graph_, {})));
    now.restore();
    if (start_.is_unchanged())
      step_once();
    else if (!forward_.steady())
      gradients_.distrust();
  }
  /// True if a plain forward gives all outputs that get gradients. It does not give tensors that the module keeps.
  static bool gives_all(const program& step, const std::vector<at::Tensor>& incoming) {
    for (std::size_t k = 0; k < incoming.size(); ++k) {
      const bool returned = std::find(step.results.begin(), step.results.end(), k) != step.results.end();
      if (incoming[k].defined() && !returned && !is_input(step, k)) return false;
    }
    return true;
  }
  /// Call this in place of `run_backward` and `compare_backward` if a plain backward cannot run.
  void skip_backward(const std::string& why) const { warn_("the gradients of this step are not compared: " + why); }
  /// Warns if plain steps differ from each other.
  /// @throws not_equal if the planned step differs from them
  void compare_backward(const ::torch::autograd::variable_list& gradients) {
    const auto planned = digests_of(gradients);
    const auto generators = all_generators::now(start_.device());
    for (int k = 0; k < most_runs && start_.is_unchanged() && gradients_.changed(planned); ++k) step_once();
    if (!forward_.steady() || !gradients_.steady()) warn_(explanation());
    if (const auto name = gradients_.changed(planned)) fail("the gradient of " + *name);
    if (!(generators == generators_)) fail("the state of the generator after the backward");
  }

 private:
  static constexpr int most_runs = 2;  ///< further runs, if the planned step differs and two plain ones do not

  struct graph {
    std::vector<at::Tensor> inputs, given, outputs;  ///< given: the inputs as the forward gets them
  };

  static bool is_input(const program& step, std::size_t output) {
    return step.from(step.views[step.outputs[output]].value) == role::input;
  }
  static std::vector<std::uint64_t> digests_of(const std::vector<at::Tensor>& tensors) {
    std::vector<std::uint64_t> list;
    for (const auto& t : tensors) list.push_back((digest() << t).value());
    return list;
  }
  /// Digests of what a forward returned and wrote.
  std::vector<std::uint64_t> left_by(std::vector<at::Tensor> tensors) const {
    start_.each_written([&](const auto& t) { tensors.push_back(t); });
    return digests_of(tensors);
  }
  /// Runs the plain forward, inside of a `second_run`.
  graph forward(const std::vector<at::Tensor>& inputs) {
    const at::AutoGradMode grad_mode(true);
    std::vector<at::Tensor> given;
    for (const auto& t : inputs) given.push_back(start_.writes_input_with_gradient(t) ? passed_on(t) : t);
    graph made{inputs, given, plain_(given)};
    forward_.add(left_by(made.outputs));
    generators_ = all_generators::now(start_.device());
    return made;
  }
  /// A tensor over the same memory that is no leaf: a forward may write to it.
  static at::Tensor passed_on(const at::Tensor& t) {
    auto other = detail::twin_of(t);
    ::torch::autograd::set_history(
        other, c10::make_intrusive<output_node>(::torch::autograd::edge_list{::torch::autograd::impl::gradient_edge(t)}));
    return other;
  }
  void forward_once() {
    graph_ = {};  // frees the old graph first
    start_.run([&](const auto& inputs) { graph_ = forward(inputs); });
  }
  /// Runs a plain step from its start, during the backward of the planned step, and leaves everything as it is.
  void step_once() {
    const auto autocast = autocast_state::now();
    const auto now = all_generators::now(start_.device());
    start_.run([&](const auto& inputs) {
      at::autocast::clear_cache();  // cached casts of parameters would outlive the autocast of the forward
      auto made = forward(inputs);
      at::autocast::clear_cache();
      autocast.restore();
      now.restore();
      gradients_.add(backward(std::move(made)));
    });
  }
  std::vector<std::uint64_t> backward(graph made) {
    std::vector<at::Tensor> roots, given;
    std::set<std::size_t> taken;
    for (std::size_t i = 0; i < step_->results.size(); ++i) {
      const auto k = step_->results[i];
      if (!incoming_[k].defined() || !taken.insert(k).second) continue;
      roots.push_back(made.outputs.at(i));
      given.push_back(incoming_[k]);
    }
    for (std::size_t k = 0; k < incoming_.size(); ++k) {  // inputs that the forward has written and does not return
      if (!incoming_[k].defined() || taken.count(k) > 0 || !is_input(*step_, k)) continue;
      const auto value = step_->views[step_->outputs[k]].value;
      roots.push_back(made.given.at(step_->slots[step_->values[value].slot].position));
      given.push_back(incoming_[k]);
    }
    auto leaves = parameters_;
    for (std::size_t i = 0; i < made.inputs.size(); ++i)
      if (!step_->input_sources[i].empty()) leaves.push_back(made.inputs[i]);
    made = {};
    const without_hooks hooks(parameters_);
    const auto gradients = ::torch::autograd::grad(roots, leaves, given, std::nullopt, false, true);
    generators_ = all_generators::now(start_.device());
    return digests_of(gradients);
  }

  /// Explains why plain steps differ: two more runs show which operators do.
  std::string explanation() {
    std::string operators;
    if (start_.is_unchanged()) {
      const auto first = detail::observe([&] { step_once(); });
      for (const auto& [name, calls] : detail::differing(first, detail::observe([&] { step_once(); })))
        operators += (operators.empty() ? "" : ", ") + name + (calls > 1 ? " (" + std::to_string(calls) + " calls)" : "");
    }
    auto text = "the plain step is not equal to itself: other bits in a second run come from " +
                (operators.empty() ? "an operator that is not known" : operators);
    if (!at::globalContext().deterministicAlgorithms()) text += "; torch.use_deterministic_algorithms(True) may help";
    return text + forward_.not_compared("outputs and buffers") + gradients_.not_compared("gradients");
  }
  [[noreturn]] void fail(const std::string& what) const {
    start_.redo_writes();
    generators_.restore();
    throw not_equal("remat: " + what +
                    " of the planned step differs from the plain one; the plan may be out of date: invalidate()");
  }

  second_run& start_;
  forward_function plain_;
  std::function<void(const std::string&)> warn_;
  plain_results forward_, gradients_;
  all_generators generators_;  ///< state after the last plain run
  graph graph_;
  const program* step_ = nullptr;
  std::vector<at::Tensor> incoming_, parameters_;
};

}  // namespace remat::pytorch
