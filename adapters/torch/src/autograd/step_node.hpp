// SPDX-License-Identifier: Apache-2.0
/// @file
/// The backward of a planned step, for autograd. Private to the adapter.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/device.hpp>

#include "../base/views.hpp"
#include "../plan/captured_step.hpp"
#include "accumulation.hpp"
#include "finished_edges.hpp"
#include "given_gradients.hpp"
#include "leaf_edges.hpp"
#include "second_plan.hpp"
#include "second_run.hpp"
#include "shown_gradients.hpp"
#include "verification.hpp"

namespace remat::pytorch {

/// The backward of one forward.
class step_node final : public ::torch::autograd::Node {
 public:
  /// @param connected per output: its gradient comes to this node
  /// @param beside    runs the forward again; null: never needed
  /// @param checks    compares with the plain step, whose forwards have run; null: no comparison
  /// @param replan    plans for the outputs that the loss has used
  step_node(std::shared_ptr<runner> r, std::vector<watched> w, const std::vector<at::Tensor>& inputs, std::vector<bool> connected,
            std::shared_ptr<second_run> beside, std::unique_ptr<verification> checks, second_plan replan)
      : device_(device_of_step(*r->kind->step)),
        bound_(r->bound),
        connected_(std::move(connected)),
        runner_(std::move(r)),
        watched_(std::move(w)),
        beside_(std::move(beside)),
        checks_(std::move(checks)),
        replan_(std::move(replan)),
        handed_(replan_.handed),
        verify_(checks_ != nullptr) {
    const auto& trained = bound_->trained;
    const auto& kind = *runner_->kind;
    for (std::size_t k = 0; k < trained.size(); ++k) edges_.lead_to(trained[k], kind.edges[k]);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (!kind.step->input_sources[i].empty()) {
        edges_.lead_to(inputs[i], kind.edges[trained.size() + i]);
        if (replan_.graph) inputs_.push_back(inputs[i]);
      }
  }
  ~step_node() override { give_back(); }

  /// Call this before code watches the gradient of an output. If other outputs are computed from it, the output gets its edge in
  /// the graph of the module's own code, and the backward will use that graph.
  /// @param t  the output
  /// @param at its position among the connected outputs
  /// @return true if the output gets that edge
  bool observe(const at::Tensor& t, std::size_t at) {
    if (!runner_ || !replan_.graph) return false;
    std::size_t i = 0;
    for (; i < connected_.size(); ++i)
      if (connected_[i] && at-- == 0) break;
    if (i == connected_.size() || !replan_.graph->feeds_other_outputs(i)) return false;
    ::torch::autograd::impl::set_gradient_edge(t, replan_.graph->edge_of(i));
    return true;
  }

  std::string name() const override { return "RematStepBackward"; }
  void release_variables() override { give_back(); }

 protected:
  static constexpr const char* as_it_is = "for this step use the module as it is (in Python within remat.of(model).paused())";

  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&& incoming) override {
    try {
      for (std::size_t i = 0; handed_ && i < incoming.size(); ++i)
        if (incoming[i].defined()) incoming[i] = std::move(handed_->gradients[i]);
      const c10::OptionalStreamGuard as_they_are(handed_ ? handed_->stream : std::nullopt);
      auto found = gradients(std::move(incoming));
      if (!::torch::autograd::get_current_graph_task_keep_graph() && !open_)
        after_backward([](step_node& self) { self.finished_.emplace(self); });
      return found;
    } catch (const std::exception&) {
      try {
        throw_if_lost(device_);
        throw;
      } catch (const std::exception&) {
        detail::translate_raised();
        throw;
      }
    }
  }

 private:
  ::torch::autograd::variable_list gradients(::torch::autograd::variable_list&& incoming) {
    if (open_) return std::move(incoming);
    detail::graph_contents inside;
    const bool batched = std::any_of(incoming.begin(), incoming.end(), is_batched);
    if (replan_.graph) {
      if (runner_) inside = replan_.graph->contents();
      if (const auto [why, always] = not_planned(batched); !why.empty())
        return by_graph(given_by(std::move(incoming)), why, always);
    }
    if (!runner_) {
      if (ran_kept_)
        throw not_supported(std::string("remat: a wrapped module runs one backward per forward, also with retain_graph=true; ") +
                            as_it_is);
      TORCH_CHECK(false, ::torch::autograd::ERR_BACKWARD_TWICE);
    }
    if (at::GradMode::is_enabled())
      throw not_supported(std::string("remat: no graph of the gradients (create_graph=true) of a wrapped module; ") + as_it_is);
    if (batched) throw not_supported(std::string("remat: no several gradients at once (vmap) of a wrapped module; ") + as_it_is);
    if (!replan_.graph && under_autocast())
      throw not_supported("remat: the backward of a wrapped module must not run under autocast; leave it after the forward");
    for (const auto& w : watched_) require_unchanged(w, *runner_->kind->step);
    ran_kept_ = ::torch::autograd::get_current_graph_task_keep_graph();
    if (ran_kept_) keep_edges();
    auto r = std::exchange(runner_, nullptr);
    const auto kind = r->kind;
    if (!kind->step->assumed_zero.empty()) kind->outputs->learn_assumption(true);
    auto checks = std::exchange(checks_, nullptr);
    const bool hooks = !inside.hooked.empty();
    const auto read = std::exchange(watched_, {});
    auto unread = read;  // parameters whose hooks have not been called
    std::erase_if(unread, [&](const auto& w) {
      return !kind->has_early_gradient || w.slot == none || kind->step->slots[w.slot].from != role::parameter;
    });
    const auto& step = *kind->step;
    const auto given = given_by(std::move(incoming));
    auto uses = uses_of(given, step, device_.type());
    if (checks && hooks) std::exchange(checks, nullptr)->skip_backward("hooks inside of the model would be called twice");
    if (checks && !verification::gives_all(step, given))
      std::exchange(checks, nullptr)->skip_backward("the loss depends on a tensor that the module keeps");
    if (checks) checks->run_backward(step, given, bound_->trained);
    const auto right = [&](const captured_step& s) {
      return s.hook_places == inside.hook_places && serves(*s.step, given) && same_autocast(s.uses, uses);
    };
    const bool does = right(*kind);
    const bool known = kind->outputs->learn(step, kind->uses, uses);
    const bool sums = kind->sums && edges_.meet_others(inside);
    if (sums) kind->outputs->expect_summands(true);
    const bool possible = !(known && does && !(sums && kind->outputs->in_summands())) && beside_ &&
                          beside_->possible([&](const auto& inputs) { return replan_.possible(inputs, uses); });
    if (does && !possible && !inside.custom_nodes.empty()) {
      const auto differs = [&] {
        const auto there = replan_.disguise ? replan_.disguise(false) : nullptr;
        return replan_.graph->differs({kind->forward, {bound_, &bound_->slots}}, inside.hooked, leaves());
      };
      if (const auto why = differs(); !why.empty()) {
        runner_ = std::move(r);
        replan_.other_code();
        return by_graph(given, "code in the backward that does not do what was planned (" + why + ")", false);
      }
    }
    const auto beside = beside_;  // checks refer to it
    auto replan = replan_;
    if ((!ran_kept_ && !hooks) || !replan_.graph) {  // they refer to the module's arguments
      beside_.reset();
      replan_ = {};
    }
    if (!does || possible) {                         // runs the forward once more, by another plan
      std::exchange(r, nullptr)->executor->reset();  // frees its arena
      const auto to = inside.custom_nodes.empty() ? std::vector<at::Tensor>() : leaves();
      beside->run([&](const auto& inputs) { r = replan.make(inputs, known && does ? kind->uses : uses, possible, to); });
      if (!right(*r->kind)) throw broken_contract("remat: a second plan for another use of the outputs");
      unread.clear();
    }
    replan = {};  // frees the graph, which leads to parameters: gradients leave early only to unshared ones
    if (hooks) {
      auto result = with_hooks(std::move(r), given, unread, inside);
      for (const auto& w : read) require_unchanged(w, step);  // hooks must not write what kernels read
      return result;
    }
    auto result = planned(*r, given, unread);
    if (checks) checks->compare_backward(edges_.added_up(result));
    if (in_backward()) edges_.trim(result);
    return result;
  }

  /// Why no plan makes this backward, and whether that holds for later ones of such calls; an empty text: a plan does.
  std::pair<std::string, bool> not_planned(bool batched) const {
    if (at::GradMode::is_enabled()) return {"a graph of the gradients (create_graph=True)", true};
    if (batched) return {"several gradients at once (vmap)", true};
    if (!runner_) return {"another backward of the same forward", true};
    if (!device_.is_cpu() && autocast_on(c10::kCPU)) return {"a backward under autocast of the host", true};
    if (!runner_->executor->as_assumed())
      return {"a backward that asks whether values are zero, and here some are", runner_->kind->outputs->learn_assumption(false)};
    if (::torch::autograd::AnomalyMode::is_enabled()) return {"anomaly detection", false};
    return {};
  }
  /// The gradient of each output; undefined: none.
  std::vector<at::Tensor> given_by(::torch::autograd::variable_list incoming) const {
    std::vector<at::Tensor> given;
    std::size_t next = 0;
    for (bool c : connected_) given.push_back(c ? std::move(incoming[next++]) : at::Tensor());
    return given;
  }
  /// The tensors that get gradients.
  std::vector<at::Tensor> leaves() const {
    auto all = bound_->trained;
    all.insert(all.end(), inputs_.begin(), inputs_.end());
    return all;
  }
  /// Runs the backward of autograd through the graph of the module's own code.
  ::torch::autograd::variable_list by_graph(const std::vector<at::Tensor>& given, const std::string& why, bool always) {
    const auto& graph = *replan_.graph;
    if (replan_.disguise && at::GradMode::is_enabled())
      throw not_supported("remat: " + why + " would need weights on the device for longer than this step, which are in memory " +
                          "of the host; " + as_it_is);
    if (runner_) std::exchange(runner_, nullptr)->executor->reset();
    checks_.reset();
    if (!graph.filled()) replan_.as_it_is(why, always);
    std::vector<std::vector<at::Tensor>> found;
    {
      const auto there = replan_.disguise ? replan_.disguise(true) : nullptr;
      if (!graph.filled()) beside_->run([&](const auto&) { replan_.graph->fill(); });
      found = graph.gradients(given, leaves());
    }
    ::torch::autograd::variable_list result(num_outputs());
    for (std::size_t l = 0; l < found.size(); ++l) {
      auto k = edges_.first()[l];
      if (!task_should_compute_output(k)) continue;
      for (auto& summand : found[l]) {
        if (l < bound_->trained.size()) bring_home(summand, bound_->trained[l]);
        result[k++] = std::move(summand);
      }
    }
    if (!replan_.disguise && ::torch::autograd::get_current_graph_task_keep_graph()) open();
    return result;
  }
  static void bring_home(at::Tensor& gradient, const at::Tensor& parameter) {
    if (gradient.defined() && !gradient.is_cpu() && parameter.is_cpu()) gradient = gradient.cpu();
  }
  /// From the next backward on, gradients go through the graph itself. Its nodes then run once for all graphs that lead to them.
  void open() {
    ::torch::autograd::edge_list to;
    for (std::size_t i = 0; i < connected_.size(); ++i)
      if (connected_[i]) to.push_back(replan_.graph->edge_of(i));
    after_backward([edges = std::move(to)](step_node& self) mutable {
      self.next_edges() = std::move(edges);
      self.open_ = true;
    });
  }
  /// Restores edges that this backward removes, for the next one.
  void keep_edges() {
    after_backward([edges = next_edges()](step_node& self) mutable { self.next_edges() = std::move(edges); });
  }
  /// False if somebody calls this node outside of any backward (`y.grad_fn(g)`).
  static bool in_backward() { return ::torch::autograd::get_current_graph_task_id() >= 0; }
  /// Calls `f(*this)` at the end of the whole backward, if there is one.
  template <class F>
  void after_backward(F f) {
    if (!in_backward()) return;
    ::torch::autograd::Engine::get_default_engine().queue_callback(
        [self = c10::intrusive_ptr<step_node>::reclaim_copy(this), f = std::move(f)]() mutable { f(*self); });
  }
  /// Per gradient: the parameter in whose `.grad` hooks inside of the forward see it; undefined: they do not.
  std::vector<at::Tensor> showing(const runner& r, const std::vector<at::Tensor>& given,
                                  const detail::graph_contents& inside) const;
  /// Runs the planned backward, which calls hooks. If one returns what the plan cannot read, leaves the plan.
  ::torch::autograd::variable_list with_hooks(std::shared_ptr<runner> r, const std::vector<at::Tensor>& given,
                                              std::vector<watched>& unread, const detail::graph_contents& inside);
  /// @param shown gets gradients before the backward ends; null: no hooks are called inside of the forward
  ::torch::autograd::variable_list planned(runner& r, const std::vector<at::Tensor>& given, std::vector<watched>& unread,
                                           const shown_gradients* shown = nullptr) {
    planned_backwards::begin();  // not earlier: a capture for a second run watches gradients, too
    const auto& step = *r.kind->step;
    const auto& trained = bound_->trained;
    const auto place = places_of(r, bound_->trained);
    auto free = edges_.first();  // per leaf the edge for its next gradient
    const auto reached = [&](const std::vector<bool>& sources) { return is_reached(sources, given); };
    std::vector<at::Tensor> sums;
    const auto* captured = ::torch::autograd::get_current_graph_task_exec_info();
    const bool to_parameters = !verify_ && shown == nullptr && in_backward() && (captured == nullptr || captured->empty());
    // If other graphs lead to a parameter (several forwards, a penalty on weights), autograd first adds up all their gradients.
    std::size_t added = 0, left = 0;
    if (to_parameters)
      for (std::size_t i = 0; i < step.parameters.size(); ++i) {
        const auto k = place[i];
        const bool adds = reached(step.parameter_sources[i]) && only_adds(trained[k]);
        sums.push_back(adds && edges_.is_alone(k) && !r.kind->in_summands ? gradient_of(trained[k]) : at::Tensor());
        if (adds) ++(edges_.is_alone(k) ? added : left);
      }
    if (added + left > 0) r.kind->outputs->learn_alone(left == 0);
    const bool hooked = to_parameters && std::all_of(trained.begin(), trained.end(),
                                                     [](const auto& p) { return has_post_hook(p) || !is_large(p); });
    // If nothing else leads to a parameter, its gradient goes there as soon as it is complete.
    const auto take = [&](std::size_t k, at::Tensor gradient) {
      std::erase_if(unread, [&, v = step.slots[step.parameters[k]].value](const auto& w) {
        if (step.slots[w.slot].value != v) return false;
        require_unchanged(w, step);
        return true;
      });
      if (!reached(step.parameter_sources[k])) return at::Tensor();
      const auto edge = edges_.first()[place[k]];
      if (!hooked || r.kind->in_summands || !task_should_compute_output(edge) || !edges_.is_alone(place[k])) return gradient;
      accumulate(*next_edge(edge).function, std::move(gradient));
      edges_.cut(place[k]);
      return at::Tensor();
    };
    executor::gradients g;
    try {
      std::vector<accumulation_lock> only_this;  // no other backward adds to these gradients
      for (std::size_t i = 0; i < sums.size(); ++i)
        if (sums[i].defined() && adds_itself(step, i)) only_this.emplace_back(*next_edge(edges_.first()[place[i]]).function);
      g = r.executor->backward(given, sums, take);
    } catch (const plan_broken&) {
      r.kind->broken = true;
      throw;
    }
    if (r.executor->largest_unplanned().second > 0) r.on_unplanned(r);
    for (std::size_t i = 0; i < g.parameters.size(); ++i) bring_home(g.parameters[i], trained[place[i]]);
    for (const auto& w : unread) require_unchanged(w, step);  // hooks must not write other parameters, as in eager mode
    std::size_t held = r.executor->gradients_still_held();
    if (r.kind->has_early_gradient) {
      if (hooked && held > 0) r.kind->outputs->learn_gradients_leave(false);
    } else if (hooked) {  // the same at the end, to see whether hooks free gradients
      bool any = false;
      for (std::size_t i = 0; i < step.parameters.size(); ++i) {
        if (!is_large(trained[place[i]]) || !g.parameters[i].defined()) continue;
        const auto memory = g.parameters[i].storage();
        g.parameters[i] = take(i, std::move(g.parameters[i]));
        held += memory.use_count() > 1;
        any = true;
      }
      if (any && held == 0) r.kind->outputs->learn_gradients_leave(true);
    }
    ::torch::autograd::variable_list result(num_outputs());
    for (std::size_t i = 0; i < step.parameters.size(); ++i)
      if (const auto k = free[place[i]]++; reached(step.parameter_sources[i]) && (shown == nullptr || !shown->has(i)))
        result[k] = std::move(g.parameters[i]);
    const auto inputs = step.input_grads.size() - r.kind->input_of_summand.size();
    std::vector<std::size_t> leaf;  // per input
    for (std::size_t i = 0, l = trained.size(); i < inputs; ++i) leaf.push_back(step.input_sources[i].empty() ? l : l++);
    for (std::size_t i = 0; i < step.input_grads.size(); ++i) {
      if (step.input_grads[i] == none || !reached(step.input_sources[i])) continue;
      result[free[leaf[i < inputs ? i : r.kind->input_of_summand[i - inputs]]]++] = std::move(g.inputs[i]);
    }
    return result;
  }
  void give_back() {
    finished_.reset();
    if (runner_) std::exchange(runner_, nullptr)->executor->reset();
    watched_.clear();
    checks_.reset();
    beside_.reset();
    replan_ = {};
    inputs_.clear();
    bound_.reset();
  }

  c10::Device device_;
  std::shared_ptr<const bound_tensors> bound_;
  std::vector<bool> connected_;
  leaf_edges edges_{*this};
  std::optional<finished_edges> finished_;  ///< from the end of a backward on that leaves no graph
  std::shared_ptr<runner> runner_;          ///< empty once the backward has run
  std::vector<watched> watched_;
  std::vector<at::Tensor> inputs_;  ///< inputs that may get gradients
  std::shared_ptr<second_run> beside_;
  std::unique_ptr<verification> checks_;  ///< refers to `beside_`
  second_plan replan_;
  std::shared_ptr<handed_over> handed_;
  bool verify_ = false, ran_kept_ = false;
  bool open_ = false;  ///< gradients of the outputs pass through to the graph
};

}  // namespace remat::pytorch
