// SPDX-License-Identifier: Apache-2.0
/// @file
/// Trains a model by plans.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/pytorch/budget.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/model.hpp>
#include <remat/pytorch/plan_cache.hpp>
#include <remat/pytorch/profile.hpp>

namespace remat::pytorch {

/// No schedule is known that fits the budget.
struct over_budget : error {
  over_budget(const std::string& what, bytes_t asked_bytes, std::optional<bytes_t> smallest_bytes, bytes_t bound_bytes,
              std::string largest_node)
      : error(what), asked(asked_bytes), smallest(smallest_bytes), bound(bound_bytes), largest(std::move(largest_node)) {}
  bytes_t asked;                    ///< the budget, bytes
  std::optional<bytes_t> smallest;  ///< smallest budget known to suffice, bytes
  bytes_t bound;                    ///< lower bound on every budget that suffices, bytes
  std::string largest;              ///< operator with the largest working set, and its bytes
};

/// No plan covers these inputs, and `wrap_options::new_shapes` is `error`.
struct unexpected_inputs : error {
  using error::error;
};

/// A use that eager mode supports and a wrapped module does not: a second backward of one forward, a graph of the gradients.
struct not_supported : error {
  using error::error;
};

/// A planned step gave other results than the plain step (`wrap_options::verify`). The module's buffers and the generator are as
/// the plain step left them.
struct not_equal : error {
  using error::error;
};

/// Receives the progress of a search. If it returns `stop`, the search ends with its best schedule so far.
using plan_observer = std::function<control(const progress&)>;

/// A method with its options, such as
/// `[](const auto& p, bytes_t b, const limits& l, const plan_observer& o) { return solve(p, b, rotor{}, l, o); }`.
using plan_solver = std::function<result(const problem&, bytes_t, const remat::limits&, const plan_observer&)>;

/// `automatic` with HiGHS or GLPK, whichever is available, or without a MILP library.
plan_solver default_solver();

/// What to do with inputs of new shapes or types, or in another mode.
enum class new_shape {
  nearest,  ///< take over the decisions for another size of the same graph, and search for better ones beside the training
  plan,     ///< search before the step
  plain,    ///< run the model plain, with the memory of a plain step
  error     ///< throw `unexpected_inputs`
};

struct wrap_options {
  pytorch::budget budget = "100%";
  bytes_t max_budget = max_bytes;  ///< upper limit of every budget, bytes >= 0
  bytes_t optimizer = 0;           ///< bytes reserved for the states of the optimizer, >= 0
  /// True: hooks on accumulated gradients free every gradient, from the first step on. False: this is learned. If all parameters
  /// have such hooks, and the hooks have freed all gradients once, later steps give gradients to the hooks during the backward.
  bool gradients_leave = false;
  remat::limits limits = {.seconds = 20, .gap = 0.005};  ///< limits of a search for a schedule
  /// Longest time that a step waits for its plan, s >= 0, provided that a schedule within the budget is found by then. The rest
  /// of `limits.seconds` is spent beside the following steps, which adopt better schedules.
  double first_seconds = 1;
  plan_solver solver = default_solver();
  /// Identifies the solver and its options in the cache of plans, if `solver` is not the default; empty: plans are not cached.
  std::string solver_name = {};
  profile_options profile = {};
  /// Not empty: costs are `estimate`s for this device. Plans are made (`session::prepare`), but neither run nor cached on disk.
  device_rates device = {};
  /// Far memory for values that are expensive to recompute; empty: none. Unset rates are measured when the first step is
  /// captured; in this case a far memory with a limit below 1 MiB is ignored.
  far_memory far = far_memory();
  /// Without `far`, for steps on an accelerator: bytes of pinned memory of the host for such values. The device is that of the
  /// first step.
  std::optional<bytes_t> host_budget = {};
  /// Device of the steps of a model with parameters on the host. Plans fetch parameters from the host and send their gradients
  /// there; buffers and inputs must be on the device. Nothing: steps run where parameters and inputs are.
  std::optional<c10::Device> steps_on = {};
  /// Selects parameters and buffers that plans fetch from outside the device, drop, and fetch again. They count while they are in
  /// the arena. If all of them fit, steps read them where they are, and they count all the time. Without this option, tensors on
  /// a disk do not count; the operating system pages them. Called for `fetchable` tensors when a step is captured; empty: no
  /// tensor is fetched. Needs a solver that plans for tiers.
  /// @code
  /// remat::pytorch::move_weights(*gpt, *scratch);
  /// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "512MiB", .fetched = remat::pytorch::worth_fetching});
  /// @endcode
  std::function<bool(const at::Tensor&)> fetched = {};
  /// Captures the kernels of each plan as graphs (`at::accelerator::Graph`) in its second step, and replays them from then on:
  /// recomputations, copies on streams and random numbers included. Plans count copies of the inputs; no other memory is added.
  /// Plans for several shapes share one arena. A plan that cannot be captured warns once, names the cause, and launches its
  /// kernels one by one. For accelerators; on the host a step throws `cannot_capture`.
  bool graph = false;
  /// True: the code of the module runs in every step on tensors without data, and its operator calls are compared with the
  /// recorded calls. The state that the code reads or changes is that of eager mode. A call with another path runs eagerly, and
  /// the next call is recorded. C++ code of the forward must not read the state of the default generator after a draw, because
  /// the numbers are drawn later.
  ///
  /// False: the code does not run after a capture. This is for forwards that are pure functions of tensors, flags and
  /// `invocation::signature`.
  bool follow = false;
  /// True: a call that cannot be planned throws. False: it runs plain, and `warn` receives the reason once. With `steps_on` it
  /// always throws, because the weights are not on the device of the step.
  bool strict = true;
  plan_cache cache = plan_cache();  ///< cache of plans of earlier processes
  new_shape new_shapes = new_shape::nearest;
  std::size_t max_shapes = 64;  ///< number of kinds of inputs whose plans are kept, >= 1; the least recently used are dropped
  /// Number of steps that also run plain, with the memory of a plain step, and are compared bit by bit: outputs, gradients,
  /// buffers, state of the generator. The first difference throws `not_equal`.
  ///
  /// The plain step runs at least twice: the forward twice before the planned forward, and a whole step in the backward. Kernels
  /// with atomic additions may give other bits each time. A tensor that differs between two plain runs is not compared. A warning
  /// then names these tensors, and the operators that gave other results for equal operands.
  std::size_t verify = 0;
  std::function<void(const std::string&)> log = {};   ///< receives what is captured and planned, and why; on any thread
  std::function<void(const std::string&)> warn = {};  ///< receives warnings for the user; empty: `log` receives them
  plan_observer watch = {};                           ///< observes searches that a step waits for
};

/// A plan with its problem.
struct step_plan {
  pytorch::report report;
  remat::problem problem;  ///< weights that could be fetched but are read where they are count as held
  bytes_t counted_twice;   ///< schedules may need fewer bytes than the problem says, by at most this: memory that is overwritten
  remat::schedule schedule;
  /// Per operation: the line of the module's code that calls it, or an empty text (`set_source_line_callback`).
  std::vector<std::string> lines;
};

/// Trains a model by plans.
///
/// The first call with gradients captures, profiles and plans. So does a later call with other shapes, strides, types, training
/// flags or `requires_grad`. A call that finds less free memory (gradients to accumulate into, another step in flight) is planned
/// anew. Without grad mode the model runs plain.
///
/// Thread-safe, with one exception: a forward reads the gradients of the parameters, so no other thread may write or replace them
/// meanwhile. Gradients lie in the arena of their step. Gradients that are still held when the next step begins move out of the
/// arena, and count.
///
/// Several steps may be in flight: forwards before their backwards. They share memory that only one step needs at a time. The
/// session learns the number of steps in flight in the first round, which may exceed the budget, with a warning. From the second
/// round on it plans for this number.
class session {
 public:
  /// @param trained the model
  /// @param options budget, solver, far memory and more
  /// @throws bad_option naming an option out of range, or options that exclude each other
  explicit session(std::shared_ptr<model> trained, wrap_options options = {});
  /// Ends a search beside the steps, and waits for its end. The caller must not hold a lock that `wrap_options::log` takes.
  ~session();

  /// Runs one forward. It runs by a plan if grad mode is on and any tensor requires a gradient; otherwise plain.
  /// @param call   the forward to run
  /// @param inputs tensors of the forward
  /// @param note   set to the `note` of the call that ran: this call, or the captured one
  /// @return the results of the forward
  /// @throws cannot_capture, over_budget, unexpected_inputs; exceptions of the forward
  std::vector<at::Tensor> forward(const invocation& call, const std::vector<at::Tensor>& inputs,
                                  std::shared_ptr<void>* note = nullptr);

  /// True if plans are kept, and one has been used, or made by `prepare`.
  bool has_used_plan() const;
  /// Memory and time of the plan that was used last, or made by `prepare`.
  /// @throws error before the first plan
  pytorch::report report() const;
  /// Reports of all plans that are kept, the last used first.
  std::vector<pytorch::report> reports() const;
  /// The plan of `report`, with its problem.
  /// @throws error before the first plan
  step_plan planned() const;

  /// Captures, profiles and plans for such inputs, without a step.
  /// @throws cannot_capture, over_budget, unexpected_inputs; exceptions of the forward
  void prepare(const invocation& call, const std::vector<at::Tensor>& inputs);

  /// Sets the budget from the next step on. Plans for other budgets are kept.
  void set_budget(const budget& b);
  /// Drops all plans. For a module that has changed in a way that is invisible from outside: a member that is neither parameter
  /// nor buffer, another path through its forward. Steps in flight end with their old plans.
  void invalidate();
  /// Gives back the memory that is kept for the next step, except gradients in it. Plans stay.
  void release();
  /// Calls `release` of all sessions of the process, except those at work on another thread.
  static void release_all();

 private:
  struct state;
  std::shared_ptr<state> state_;
};

}  // namespace remat::pytorch
