// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a session knows: the kinds of steps it has met (setups.cpp), their costs (measured.cpp), their plans and executors
/// (plans.cpp). A step runs by its plan in planned_step.cpp. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <remat/pytorch/session.hpp>

#include "../autograd/abandoned.hpp"
#include "../autograd/second_plan.hpp"
#include "../base/views.hpp"
#include "../capture/kept_graph.hpp"
#include "../capture/trace.hpp"
#include "../capture/weights_elsewhere.hpp"
#include "../device/accelerator.hpp"
#include "../device/home.hpp"
#include "../plan/planned.hpp"
#include "../plan/search.hpp"
#include "accounts.hpp"
#include "background.hpp"
#include "kinds.hpp"
#include "owned_mutex.hpp"

namespace remat::pytorch {

struct session::state : std::enable_shared_from_this<state> {
  state(std::shared_ptr<model> m, wrap_options o);

  /// Those of all sessions.
  class everybody {
   public:
    void add(const std::shared_ptr<state>& s) {
      const std::lock_guard lock(mutex_);
      std::erase_if(states_, [](const auto& x) { return x.expired(); });
      states_.push_back(s);
    }
    std::vector<std::shared_ptr<state>> alive() const {
      const std::lock_guard lock(mutex_);
      std::vector<std::shared_ptr<state>> list;
      for (const auto& weak : states_)
        if (auto s = weak.lock()) list.push_back(std::move(s));
      return list;
    }

   private:
    mutable std::mutex mutex_;
    std::vector<std::weak_ptr<state>> states_;
  };
  static everybody& all() {
    static everybody found;
    return found;
  }

  void log(const std::string& text) const {
    if (options.log) options.log(text);
  }
  void warn(const std::string& text) const { options.warn ? options.warn(text) : log(text); }
  void warn_once(const std::string& text) {
    if (warned_.insert(text).second) warn(text);
  }

  // --- kinds of steps --------------------------------------------------------------------------------------------------------

  const std::string& key_of(const invocation& call, const std::vector<at::Tensor>& inputs) {
    return keys_.of(call, inputs, signature, parameters, buffers, !options.follow);
  }

  /// What losses have made of the outputs of such calls.
  std::shared_ptr<usage> usage_of(const std::string& k) {
    auto& known = used[k];
    if (!known) known = std::make_shared<usage>(used.size(), options.gradients_leave);
    return known;
  }

  /// Of one key, programs for several answers to what the forward asks; the result is that of the one for `inputs`.
  std::string path_of(const std::string& base, const std::vector<at::Tensor>& inputs) const;
  /// The kind of step for such inputs if it has been captured and still holds, or null.
  /// @param outputs what their losses have made of the outputs
  /// @param uses    what the loss of this step makes of them; other threads may learn of others meanwhile
  std::shared_ptr<setup> known(const usage& outputs, const std::vector<output_use>& uses,
                               const std::vector<at::Tensor>& inputs) const;
  /// The same, captured if it is new, its gradients written where there are none yet.
  std::shared_ptr<setup> setup_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                   const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses);
  /// For the gradients there are, of a step that is known.
  /// @param graphs of this step that lead to the parameters already: one in its backward
  /// @param own graph of the step, which leads to parameters, too; null: there is none
  std::shared_ptr<setup> variant_of(const std::shared_ptr<setup>& s, std::size_t graphs = 0,
                                    const detail::kept_graph* own = nullptr);
  /// The kind of step for such inputs and the gradients there are.
  std::shared_ptr<setup> kind_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                  const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses, std::size_t graphs);
  /// Can a forward run once more, for another use of the outputs? Not if that has to be captured and the model is another one
  /// now.
  bool can_run_again(const invocation& call, const std::vector<at::Tensor>& inputs, const std::shared_ptr<usage>& outputs,
                     const std::vector<output_use>& uses);
  /// The same step with other gradients.
  /// @param what it is, for people
  std::shared_ptr<setup> make_variant(const setup& s, program step, const char* what);
  /// The same step, which hands out gradients as summands.
  std::shared_ptr<setup> in_summands(const setup& s);
  /// Captures and measures.
  /// @param run of the step whose forward it is, if it is
  std::shared_ptr<setup> make_setup(const invocation& call, const std::vector<at::Tensor>& inputs,
                                    const std::vector<output_use>& uses, detail::step_run* run = nullptr);
  /// The program of a recorded step, measured.
  /// @param like of the same model
  /// @param of   tensors of the model, as they were recorded
  /// @param forward to be followed; null: that of the recorded step, if steps are followed
  std::shared_ptr<setup> setup_from(const std::shared_ptr<const detail::trace>& recorded, const setup& like,
                                    const std::shared_ptr<const module_tensors>& of,
                                    std::shared_ptr<const detail::recorded_forward> forward = nullptr);
  /// The same for a step whose forward has been run meanwhile, with what the module keeps of it as further outputs.
  std::shared_ptr<setup> setup_of_run(const std::shared_ptr<detail::trace>& recorded, const setup& like,
                                      const std::shared_ptr<const module_tensors>& of, detail::step_run& run);
  /// The same for a step whose forward has left the path of a known one.
  std::shared_ptr<setup> setup_of_path(const std::shared_ptr<detail::trace>& recorded, const setup& known,
                                       const std::shared_ptr<const module_tensors>& of, detail::step_run& run);
  /// Steps of this kind use these tensors of the model from now on.
  /// @throws bad_binding if they are not like those that it was captured with
  static void bind(setup& s, const std::shared_ptr<const module_tensors>& of);
  /// Weights of the host look as if they were where the steps run, while the result lives. Null: they are there.
  std::unique_ptr<detail::weights_elsewhere::disguise> disguise(const module_tensors& of);
  void keep(const std::string& name, const std::shared_ptr<setup>& s);
  static pytorch::device& device_for(const setup& s) { return device_of(device_of_step(*s.step)); }
  /// Where values of steps on `on` may go: the far memory of the options, or pinned memory for `host_budget`.
  far_memory& far_for(pytorch::device& on);
  /// Measures a captured step.
  void complete(setup& s);
  /// The values that steps fetch, and their tensors.
  std::pair<std::vector<bool>, std::vector<at::Tensor>> fetched_by(const setup& s) const;
  /// Times of the operations of a step, s, of which copies slow down the part that waits for memory.
  std::vector<double> beside_copies(const program& step, std::vector<double> seconds, const copy_rates& rates,
                                    const std::vector<bool>& fetched) const;
  /// The problem in which weights are fetched.
  problem fetching_problem(setup& s, const std::vector<bool>& fetched, const std::vector<at::Tensor>& weights);
  std::vector<std::shared_ptr<setup>> kinds() const {
    std::vector<std::shared_ptr<setup>> all;
    for (const auto& [k, s] : setups) {
      all.push_back(s);
      for (const auto& x : s->variants())
        if (x) all.push_back(x);
    }
    return all;
  }
  /// Of the steps of the same graph, the one whose size is next.
  /// @param planned only of those that have been planned
  std::shared_ptr<const setup> sibling(const setup& s, bool planned) const;
  /// Looks at the model as it is now.
  void look();
  /// Weights and buffers that the user has moved come back.
  /// @throws error if they cannot
  void put_back_weights();
  /// The accelerator that steps on these tensors need, or the host.
  c10::Device accelerator_of(const std::vector<at::Tensor>& tensors) const;
  /// That of the inputs, or of the parameters.
  c10::Device device_of_call(const std::vector<at::Tensor>& inputs) const;
  /// Sets up the workspaces of libraries on the device that steps need.
  /// @param lock of `mutex`: let go meanwhile, since the thread of the device may wait for it
  void warm_up(const std::vector<at::Tensor>& inputs, std::unique_lock<owned_mutex>& lock);
  /// Lets go of the executors for `s` that are idle.
  void forget(const std::shared_ptr<setup>& s);
  /// Such steps are not known any more.
  void drop(const std::shared_ptr<setup>& s);

  // --- plans -----------------------------------------------------------------------------------------------------------------

  search_options searching() const {
    return {.solver = options.solver,
            .solver_name = options.solver_name,
            .cache = options.cache,
            .limits = options.limits,
            .watch = options.watch,
            .log = [this](const std::string& text) { log(text); },
            .first_seconds = options.first_seconds};
  }
  /// A plan that needs at most `available` bytes.
  std::shared_ptr<const plan> plan_for(const std::shared_ptr<setup>& s, bytes_t available, bytes_t held_bytes);
  void announce(const plan& p, bytes_t available) const;
  using kind_of_uses = std::function<std::shared_ptr<setup>(const std::vector<output_use>&)>;
  /// The step for the use of the outputs that is expected. If no loss has been seen, and the last outputs are single numbers: for
  /// these, as such a model returns its loss.
  /// @param tight for the last outputs whatever they are: the budget has no room for gradients of all
  std::shared_ptr<setup> likely(const kind_of_uses& kind, const std::shared_ptr<usage>& outputs,
                                const std::vector<output_use>& uses, bool tight = false);
  /// An executor for the use of the outputs that is expected, or, if that does not fit, for any.
  /// @param kind gives the step for a use
  std::shared_ptr<runner> expected(const kind_of_uses& kind, const std::vector<at::Tensor>& inputs,
                                   const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses);
  /// Looks for a better plan than an unfinished one, beside the steps.
  void refine(const runner& r, bytes_t held_bytes);
  /// What is idle makes room.
  void release() { memory.release(); }
  /// Executors of all sessions that are idle let go of a tensor of a module until their next forward. Not those for whose session
  /// another thread is at work.
  static void unbind_idle(const at::Tensor& t);
  /// An executor for a plan; one for less if the device has less free memory than the budget allows.
  /// @param arena to be shared with executors that are idle; null: it gets one of its own
  std::unique_ptr<executor> reserve(runner& r, bytes_t held_bytes, const std::shared_ptr<region>& arena = nullptr);
  /// An executor for a step that begins now.
  std::shared_ptr<runner> acquire(const std::shared_ptr<setup>& s, const std::vector<at::Tensor>& inputs);
  /// The same, with the tensors of the last step that it has run.
  std::shared_ptr<runner> ready(const std::shared_ptr<setup>& s, const std::vector<at::Tensor>& inputs);
  /// An idle executor gets the tensors of the model as they are now.
  static void rebind(runner& r);
  /// The same where several steps are in flight at a time.
  /// @throws over_budget if no plan is known for as many as are expected
  std::shared_ptr<runner> acquire_in_flight(const std::shared_ptr<setup>& s);
  /// What steps of a kind need that share memory.
  void share_memory(setup& s);
  /// A plan for a step beside others that have taken the far memory.
  /// @throws out_of_memory as it was, if there is none
  std::shared_ptr<const plan> without_copies(const setup& s, bytes_t available, bytes_t held_bytes, const out_of_memory& why);
  /// Bytes that a step may take, and those that are held meanwhile.
  std::pair<bytes_t, bytes_t> room(const setup& s);

  /// A step whose forward is about to run by a plan.
  struct begun_step {
    std::shared_ptr<runner> r;       ///< null: the forward has run as it is
    std::vector<at::Tensor> inputs;  ///< those of the call, or their origins, and what its program takes beside them
    std::vector<at::Tensor> hollow;  ///< the outputs that the module's own code has made, without data; empty: it has not run
    std::shared_ptr<detail::kept_graph> graph;  ///< that it has built; null: it is gone
    std::vector<at::Tensor> returned;           ///< what it gave
    std::vector<double> numbers;                ///< for `executor::set_numbers`
  };
  /// Two forwards of this model are in one `autocast` block, see docs/limits.md.
  void warn_of_casts();
  std::vector<at::Tensor> forward(const invocation& call, const std::vector<at::Tensor>& inputs, std::shared_ptr<void>* note);
  void prepare(const invocation& call, const std::vector<at::Tensor>& inputs);
  /// Calls `f`, whose exceptions are `device_lost` if the device has failed for good.
  template <class F>
  auto told_of_loss(const std::vector<at::Tensor>& inputs, const F& f) const {
    try {
      return f();
    } catch (const std::exception&) {
      throw_if_lost(accelerator_of(inputs));
      throw;
    }
  }
  /// Runs the module's code, followed or recorded.
  begun_step follow(const invocation& call, const std::vector<at::Tensor>& inputs, std::unique_lock<owned_mutex>& lock);
  /// @param origins of the inputs, before the forward
  /// @param make    records the step, whose forward runs meanwhile, unless it has run
  /// @param trial   the step will not go on: what cannot be recorded is an error
  begun_step record_step(const invocation& call, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> origins,
                         const std::shared_ptr<usage>& outputs, const std::vector<output_use>& uses,
                         const std::function<std::shared_ptr<setup>(detail::step_run&)>& make, bool trial = false);
  /// An executor for a step that is only recorded. Its forward runs once, on the inputs, and leaves nothing but what the module's
  /// own code keeps.
  std::shared_ptr<runner> try_step(const invocation& call, const std::vector<at::Tensor>& inputs);
  /// An executor for a step whose forward has run without data.
  /// @param ahead bytes that calls have taken which ran ahead of the plan
  void find_plan(begun_step& b, const invocation& call, const std::shared_ptr<setup>& s, const std::shared_ptr<usage>& outputs,
                 std::size_t ahead);
  /// Warns once if calls that run beside the plan take more than the budget has for them.
  /// @param bytes  that they take
  /// @param before what the warning says before the excess, and behind it
  void warn_beyond(bytes_t bytes, const char* before, const char* behind);
  /// The step of the same forward for another use of its outputs.
  /// @param graph of the forward; null: it may run once more
  /// @param of    tensors of the model in that step
  /// @param leaves not empty: the backward runs now, and its code has to do what was recorded
  /// @throws not_supported if it takes another path by now
  std::shared_ptr<setup> same_step(const invocation& call, const std::vector<at::Tensor>& inputs, const setup& first,
                                   const std::vector<output_use>& uses, const detail::kept_graph* graph,
                                   const std::shared_ptr<const module_tensors>& of, const std::vector<at::Tensor>& leaves = {});
  /// Both have the same forward, of the same outputs.
  static bool same_forward(const setup& a, const setup& b);
  /// Steps of such outputs whose forward can be followed, those for `uses` first, the one used last first.
  std::vector<std::shared_ptr<setup>> followable(const usage& outputs, const std::vector<output_use>& uses) const;
  /// The same step with tensors as inputs that were constants, or had another place.
  std::shared_ptr<setup> with_late_inputs(const std::shared_ptr<setup>& s, std::size_t inputs,
                                          const std::vector<std::pair<index_t, at::Tensor>>& late);
  /// What that step falls back to.
  /// @param outputs of its forward
  second_plan second_plan_of(const invocation& call, const runner& r, const std::vector<at::Tensor>& outputs,
                             const begun_step& b);
  /// Runs the planned forward, and connects its outputs to the backward.
  std::vector<at::Tensor> run_step(const invocation& call, begun_step b);

  pytorch::report report(const setup& s, const plan& p) const;

  std::shared_ptr<model> trained;
  wrap_options options;
  owned_mutex mutex;
  std::vector<named_tensor> parameters, buffers;  ///< of the model, each once, when `look` was called last
  std::shared_ptr<const module_tensors> now_;     ///< the same
  std::string signature;                          ///< of the model, then
  bool looked_ = false;
  std::unordered_map<std::string, std::shared_ptr<setup>> setups;  ///< by the use of the outputs
  std::unordered_map<std::string, std::shared_ptr<usage>> used;    ///< by `key_of`
  call_keys keys_;
  std::uint64_t clock_ = 0;
  std::uint64_t recorded_ = 0;  ///< forwards to be followed
  std::unordered_set<std::string> warned_;
  bool warned_in_flight_ = false;
  bytes_t beyond_ = 0;  ///< that a step may take beyond the budget: it is on a new path, and cannot do with less
  accounts memory{options, parameters};
  std::shared_ptr<const setup> last_setup;
  std::shared_ptr<const plan> last_plan;
  pytorch::report last_held;
  std::optional<copy_rates> rates_of_weights_;
  std::optional<interference> interference_;
  std::map<std::string, far_memory> pinned_;            ///< by device, for `host_budget`
  std::optional<detail::weights_elsewhere> elsewhere_;  ///< while steps run on another device than the weights are on
  abandoned_steps abandoned_;
  background worker;
  int replaced = 0;          ///< captures in a row that a replaced tensor made out of date
  std::size_t verified = 0;  ///< steps that were compared
};

}  // namespace remat::pytorch
