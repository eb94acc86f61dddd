// SPDX-License-Identifier: Apache-2.0
/// @file
/// The state of a session: kinds of steps (captured_steps.cpp), their costs (measured.cpp), their plans and executors
/// (plans.cpp). run_step.cpp runs steps by their plans. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
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
#include "../plan/captured_step.hpp"
#include "../plan/search.hpp"
#include "accounts.hpp"
#include "background.hpp"
#include "far_links.hpp"
#include "kinds.hpp"
#include "owned_mutex.hpp"

namespace remat::pytorch {

struct session::state : std::enable_shared_from_this<state> {
  state(std::shared_ptr<model> m, wrap_options o);

  /// The states of all sessions.
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

  std::uint64_t key_of(const invocation& call, const std::vector<at::Tensor>& inputs) {
    return keys_.of(call, inputs, signature, parameters, buffers, !options.follow);
  }

  /// Known uses of the outputs of calls with this key.
  std::shared_ptr<output_usage> usage_of(std::uint64_t k) {
    auto& known = used[k];
    if (!known) known = std::make_shared<output_usage>(usages_++, options.gradients_leave);
    return known;
  }

  /// The name of the step for `inputs`, among programs of one key that differ in the answers to the forward's questions.
  std::string path_of(const std::string& base, const std::vector<at::Tensor>& inputs) const;
  /// The kind of step for such inputs, if it has been captured and still holds; otherwise null.
  /// @param outputs known uses of the outputs
  /// @param uses    use of the outputs in this step; other threads may learn of others meanwhile
  std::shared_ptr<captured_step> known(const output_usage& outputs, const std::vector<output_use>& uses,
                                       const std::vector<at::Tensor>& inputs) const;
  /// As `known`, but captures the kind if it is new. Its steps write gradients and do not add to existing ones.
  std::shared_ptr<captured_step> step_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                          const std::shared_ptr<output_usage>& outputs, const std::vector<output_use>& uses);
  /// The variant of a known step for the existing gradients.
  /// @param graphs of this step that lead to the parameters already: one in its backward
  /// @param own    graph of the step, which leads to parameters, too; null: none
  std::shared_ptr<captured_step> variant_of(const std::shared_ptr<captured_step>& s, std::size_t graphs = 0,
                                            const detail::kept_graph* own = nullptr);
  /// The kind of step for such inputs and the existing gradients.
  std::shared_ptr<captured_step> kind_for(const invocation& call, const std::vector<at::Tensor>& inputs,
                                          const std::shared_ptr<output_usage>& outputs, const std::vector<output_use>& uses,
                                          std::size_t graphs);
  /// True if a forward can run once more for another use of the outputs. False if this use needs a capture and the model has
  /// changed.
  bool can_run_again(const invocation& call, const std::vector<at::Tensor>& inputs, const std::shared_ptr<output_usage>& outputs,
                     const std::vector<output_use>& uses);
  /// A variant of the step with another treatment of gradients.
  /// @param what describes the variant to users
  std::shared_ptr<captured_step> make_variant(const captured_step& s, program step, const char* what);
  /// A variant of the step that returns the summands of gradients.
  std::shared_ptr<captured_step> in_summands(const captured_step& s);
  /// Captures and measures a step.
  /// @param run training step that the forward belongs to; null: none
  std::shared_ptr<captured_step> make_captured_step(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                    const std::vector<output_use>& uses, detail::step_run* run = nullptr);
  /// Makes the program of a recorded step, and measures it.
  /// @param like    step of the same model
  /// @param of      tensors of the model in the recording
  /// @param forward to be followed; null: that of the recorded step, if steps are followed
  std::shared_ptr<captured_step> step_from(const std::shared_ptr<const detail::trace>& recorded, const captured_step& like,
                                           const std::shared_ptr<const module_tensors>& of,
                                           std::shared_ptr<const detail::recorded_forward> forward = nullptr);
  /// As `step_from`, for a step whose forward has just run. Tensors that the module keeps become further outputs.
  std::shared_ptr<captured_step> step_of_run(const std::shared_ptr<detail::trace>& recorded, const captured_step& like,
                                             const std::shared_ptr<const module_tensors>& of, detail::step_run& run);
  /// As `step_of_run`, for a step whose forward has left the path of the known step.
  std::shared_ptr<captured_step> step_of_path(const std::shared_ptr<detail::trace>& recorded, const captured_step& known,
                                              const std::shared_ptr<const module_tensors>& of, detail::step_run& run);
  /// Makes steps of this kind use these tensors of the model.
  /// @throws bad_binding if they differ in kind from the captured ones
  static void bind(captured_step& s, const std::shared_ptr<const module_tensors>& of);
  /// While the result lives, weights on the host look as if they were on the device of the steps. Null: weights are there.
  std::unique_ptr<detail::weights_elsewhere::disguise> disguise(const module_tensors& of);
  void keep(const std::string& name, const std::shared_ptr<captured_step>& s);
  static pytorch::device& device_for(const captured_step& s) { return device_of(device_of_step(*s.step)); }
  /// Measures a captured step.
  void complete(captured_step& s);
  std::vector<std::shared_ptr<captured_step>> kinds() const {
    std::vector<std::shared_ptr<captured_step>> all;
    for (const auto& [k, s] : captured_steps) {
      all.push_back(s);
      for (const auto& x : s->variants())
        if (x) all.push_back(x);
    }
    return all;
  }
  /// The step of the same graph that is nearest in size; null: none.
  /// @param planned considers only steps that have been planned
  std::shared_ptr<const captured_step> sibling(const captured_step& s, bool planned) const;
  /// Updates what is known of the model.
  void look();
  /// Moves back weights and buffers that the user has moved.
  /// @throws error if they cannot be moved
  void put_back_weights();
  /// The accelerator of these tensors, otherwise the host.
  c10::Device accelerator_of(const std::vector<at::Tensor>& tensors) const;
  /// The device of the inputs, otherwise of the parameters.
  c10::Device device_of_call(const std::vector<at::Tensor>& inputs) const;
  /// Sets up the workspaces of libraries on the device of the steps.
  /// @param lock of `mutex`; released meanwhile, since the thread of the device may wait for it
  void warm_up(const std::vector<at::Tensor>& inputs, std::unique_lock<owned_mutex>& lock);
  /// Drops the idle executors of `s`.
  void forget(const std::shared_ptr<captured_step>& s);
  /// Forgets this kind of steps.
  void drop(const std::shared_ptr<captured_step>& s);

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
  std::shared_ptr<const plan> plan_for(const std::shared_ptr<captured_step>& s, bytes_t available, bytes_t held_bytes);
  void announce(const plan& p, bytes_t available) const;
  using kind_of_uses = std::function<std::shared_ptr<captured_step>(const std::vector<output_use>&)>;
  /// The step for the expected use of the outputs. If no loss is known, and the last outputs are single numbers: the step for a
  /// loss that uses these, since such a model probably returns its loss.
  /// @param tight assumes the last outputs in any case: the budget has no room for gradients of all outputs
  std::shared_ptr<captured_step> likely(const kind_of_uses& kind, const std::shared_ptr<output_usage>& outputs,
                                        const std::vector<output_use>& uses, bool tight = false);
  /// An executor for the expected use of the outputs, or for any use if the expected one does not fit.
  /// @param kind returns the step for a use
  /// @throws over_budget if no plan fits
  std::shared_ptr<runner> expected(const kind_of_uses& kind, const std::vector<at::Tensor>& inputs,
                                   const std::shared_ptr<output_usage>& outputs, const std::vector<output_use>& uses);
  /// Searches for a better plan than an unfinished one, beside the steps.
  void refine(const runner& r, bytes_t held_bytes);
  /// Frees all idle memory.
  void release() { memory.release(); }
  /// Idle executors of all sessions release a tensor of a module until their next forward. Skips sessions that another thread
  /// works for.
  static void unbind_idle(const at::Tensor& t);
  /// An executor for the plan of `r`; if the device has less free memory than the budget allows, for a new plan.
  /// @param arena shared with idle executors; null: a new one
  std::unique_ptr<executor> reserve(runner& r, bytes_t held_bytes, const std::shared_ptr<region>& arena = nullptr);
  /// An executor for a step that begins now.
  std::shared_ptr<runner> acquire(const std::shared_ptr<captured_step>& s, const std::vector<at::Tensor>& inputs);
  /// As `acquire`, but the executor is still bound to the tensors of its last step.
  std::shared_ptr<runner> ready(const std::shared_ptr<captured_step>& s, const std::vector<at::Tensor>& inputs);
  void add(const std::shared_ptr<runner>& r);
  /// Binds an idle executor to the present tensors of the model.
  static void rebind(runner& r);
  /// As `ready`, if several steps are in flight at a time.
  /// @throws over_budget if no plan is known for the expected number of steps
  std::shared_ptr<runner> acquire_in_flight(const std::shared_ptr<captured_step>& s);
  /// Prepares a kind of steps for sharing memory.
  void share_memory(captured_step& s);
  /// A plan for a step while other steps hold the far memory.
  /// @throws out_of_memory `why`, if there is none
  std::shared_ptr<const plan> without_copies(const captured_step& s, bytes_t available, bytes_t held_bytes,
                                             const out_of_memory& why);
  /// Bytes that a step may take, and bytes that are held meanwhile.
  /// @throws over_budget if more is held than the budget allows
  std::pair<bytes_t, bytes_t> room(const captured_step& s);

  /// A step whose forward is about to run by a plan.
  struct begun_step {
    std::shared_ptr<runner> r;                  ///< null: the forward has run eagerly
    std::vector<at::Tensor> inputs;             ///< inputs of the call, or their origins, and further inputs of the program
    std::vector<at::Tensor> hollow;             ///< outputs of the module's own code, without data; empty: it has not run
    std::shared_ptr<detail::kept_graph> graph;  ///< graph of the module's own code; null: none
    std::vector<at::Tensor> returned;           ///< results of the module's own code
    std::vector<double> numbers;                ///< for `executor::set_numbers`
  };
  /// Warns if two forwards of this model are in one `autocast` block, see docs/limits.md.
  void warn_of_casts();
  std::vector<at::Tensor> forward(const invocation& call, const std::vector<at::Tensor>& inputs, std::shared_ptr<void>* note);
  void prepare(const invocation& call, const std::vector<at::Tensor>& inputs);
  /// Calls `f`. An exception becomes `device_lost` if the device has failed for good.
  template <class F>
  auto or_device_lost(const std::vector<at::Tensor>& inputs, const F& f) const {
    try {
      return f();
    } catch (const std::exception&) {
      throw_if_lost(accelerator_of(inputs));
      throw;
    }
  }
  /// Runs the module's code, followed or recorded.
  begun_step follow(const invocation& call, const std::vector<at::Tensor>& inputs, std::unique_lock<owned_mutex>& lock);
  /// Records a step, and finds a plan for it.
  /// @param origins of the inputs, before the forward
  /// @param make    records the step, and runs its forward unless that has run
  /// @param trial   the step will not continue: an operator that cannot be recorded is an error
  begun_step record_step(const invocation& call, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> origins,
                         const std::shared_ptr<output_usage>& outputs, const std::vector<output_use>& uses,
                         const std::function<std::shared_ptr<captured_step>(detail::step_run&)>& make, bool trial = false);
  /// An executor for a step that is only recorded. Its forward runs once on the inputs. Only tensors that the module's own code
  /// keeps remain.
  std::shared_ptr<runner> try_step(const invocation& call, const std::vector<at::Tensor>& inputs);
  /// Finds an executor for a step whose forward has run without data. Warns if calls ahead of the plan exceed the budget.
  /// @param ahead peak of these calls, bytes
  void find_plan(begun_step& b, const invocation& call, const std::shared_ptr<captured_step>& s,
                 const std::shared_ptr<output_usage>& outputs, std::size_t ahead);
  /// Warns once per `before` if calls outside of the plan exceed the budget.
  /// @param bytes  taken by these calls
  /// @param before text of the warning before the number of bytes beyond the budget
  /// @param behind text after this number
  void warn_beyond(bytes_t bytes, const char* before, const char* behind);
  /// Notes the memory that a step has taken outside its plan. Warns once per kind of step if that exceeds the budget.
  void note_unplanned(const runner& r);
  /// The step of the same forward for another use of its outputs.
  /// @param graph  of the forward; null: the forward may run once more
  /// @param of     tensors of the model in that step
  /// @param leaves if not empty, the backward runs now, and its code must make the recorded calls
  /// @throws not_supported if the forward takes another path now
  std::shared_ptr<captured_step> same_step(const invocation& call, const std::vector<at::Tensor>& inputs,
                                           const captured_step& first, const std::vector<output_use>& uses,
                                           const detail::kept_graph* graph, const std::shared_ptr<const module_tensors>& of,
                                           const std::vector<at::Tensor>& leaves = {});
  /// True if both have the same forward with the same outputs.
  static bool same_forward(const captured_step& a, const captured_step& b);
  /// Steps with such outputs whose forward can be followed. Steps for `uses` come first, then those used last.
  std::vector<std::shared_ptr<captured_step>> followable(const output_usage& outputs, const std::vector<output_use>& uses) const;
  /// The same step, with tensors as inputs that were constants or other tensors.
  std::shared_ptr<captured_step> with_late_inputs(const std::shared_ptr<captured_step>& s, std::size_t inputs,
                                                  const std::vector<std::pair<index_t, at::Tensor>>& late);
  /// The fallbacks of a step whose backward is not the planned one.
  /// @param r       the executor of the step
  /// @param outputs of the forward
  second_plan second_plan_of(const invocation& call, const runner& r, const std::vector<at::Tensor>& outputs,
                             const begun_step& b);
  /// Runs the planned forward, and connects its outputs to the backward.
  std::vector<at::Tensor> run_step(const invocation& call, begun_step b);

  pytorch::report report(const captured_step& s, const plan& p) const;

  static inline std::atomic<std::uint64_t> sessions_ = 0;  ///< count of sessions of the process
  const std::uint64_t number = sessions_++;
  std::shared_ptr<model> trained;
  wrap_options options;
  owned_mutex mutex;
  std::vector<named_tensor> parameters, buffers;  ///< of the model, each once, at the last `look`
  std::shared_ptr<const module_tensors> now_;     ///< the same tensors
  std::string signature;                          ///< of the model, at the last `look`
  bool looked_ = false;
  std::unordered_map<std::string, std::shared_ptr<captured_step>> captured_steps;  ///< by name, see `path_of`
  std::unordered_map<std::uint64_t, std::shared_ptr<output_usage>> used;           ///< by `key_of`
  call_keys keys_;
  std::uint64_t clock_ = 0;
  std::uint64_t recorded_ = 0;  ///< count of forwards to be followed
  std::uint64_t usages_ = 0;    ///< count of usages so far
  std::unordered_set<std::string> warned_;
  bool warned_in_flight_ = false;
  bytes_t beyond_ = 0;  ///< bytes beyond the budget that a step may take, if it is on a new path and cannot do with less
  accounts memory{options, parameters};
  std::shared_ptr<const captured_step> last_setup;
  std::shared_ptr<const plan> last_plan;
  pytorch::report last_held;
  bytes_t last_behind = 0;  ///< bytes of arenas that only gradients kept alive, when the last step began
  far_links links{options};
  std::optional<detail::weights_elsewhere> elsewhere_;  ///< if steps run on another device than that of the weights
  abandoned_steps abandoned_;
  background worker;
  int replaced = 0;          ///< captures in a row because of a replaced tensor
  std::size_t verified = 0;  ///< steps that have been compared
};

}  // namespace remat::pytorch
