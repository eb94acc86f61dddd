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
  std::optional<bytes_t> smallest;  ///< smallest budget that is known to do, bytes
  bytes_t bound;                    ///< proven: no smaller one does, bytes
  std::string largest;              ///< operator with the largest working set, and its bytes
};

/// The inputs are not like those planned for, and `wrap_options::new_shapes` is `error`.
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

/// Told how a search goes on; the answer `stop` ends it with what it has.
using plan_observer = std::function<control(const progress&)>;

/// A method with its options, such as
/// `[](const auto& p, bytes_t b, const limits& l, const plan_observer& o) { return solve(p, b, rotor{}, l, o); }`.
using plan_solver = std::function<result(const problem&, bytes_t, const remat::limits&, const plan_observer&)>;

/// `automatic`, with HiGHS or GLPK, whichever there is, or without a MILP library.
plan_solver default_solver();

/// What to do with inputs of other shapes or types than those planned so far, or in another mode.
enum class new_shape {
  nearest,  ///< take over the decisions for another size of the same graph, and look for better ones beside the training
  plan,     ///< search
  plain,    ///< run the model itself, in the memory that takes
  error     ///< `unexpected_inputs`
};

struct wrap_options {
  pytorch::budget budget = "100%";
  bytes_t most = max_bytes;  ///< that any budget comes to, >= 0
  bytes_t optimizer = 0;     ///< bytes reserved for the states of the optimizer, >= 0
  /// Hooks that are told of accumulated gradients free each of them, from the first step on. Otherwise that is learned: where all
  /// parameters have such hooks, and these have freed all gradients once, gradients are given to them while the backward goes on.
  bool gradients_leave = false;
  remat::limits limits = {.seconds = 20, .gap = 0.005};  ///< of a search for a schedule
  /// A step waits so long for its plan, if one is found by then that fits. What this leaves of `limits.seconds` is spent beside
  /// the following steps; they adopt what is found. >= 0, seconds.
  double first_seconds = 1;
  plan_solver solver = default_solver();
  /// Tells a solver other than the default one, with its options, from others in the cache of plans; empty: they are not kept.
  std::string solver_name = {};
  profile_options profile = {};
  /// Not empty: costs are `estimate`s for such a device, and plans are made (`session::prepare`) but not run, nor kept on disk.
  device_rates device = {};
  /// Where values may go that are dear to compute again; empty: nowhere. Rates that it does not name are measured when the first
  /// step is captured.
  /// A limit below 1 MiB is taken for nowhere then.
  far_memory far = far_memory();
  /// Without `far`, for steps on an accelerator: bytes of pinned memory of the host for such values. The device is that of the
  /// first step.
  std::optional<bytes_t> host_budget = {};
  /// Where steps run whose parameters are on the host. Parameters are fetched from there as planned, and their gradients go
  /// there; buffers and inputs must be on that device. Nothing: where parameters and inputs are.
  std::optional<c10::Device> steps_on = {};
  /// Parameters and buffers that have their homes beyond the device: steps fetch them before they are used, drop them, and fetch
  /// them again, as planned, and they count where they are in the arena. Without it what lies on a disk counts nowhere: the
  /// system has to page it. Where there is room for all of them they are read where they are, and count all the time. Asked when
  /// a step is captured, of those that are `fetchable`; empty: none is. It needs a solver that plans for tiers.
  /// @code
  /// remat::pytorch::move_weights(*gpt, *scratch);
  /// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "512MiB", .fetched = remat::pytorch::worth_fetching});
  /// @endcode
  std::function<bool(const at::Tensor&)> fetched = {};
  /// Captures the kernels of each plan as graphs (`at::accelerator::Graph`) in its second step, and replays them from then on:
  /// recomputations, copies on streams and random numbers included. Plans count copies of the inputs, and need no other memory.
  /// Plans for several shapes share one arena. A plan that cannot be captured warns once, names the cause, and launches its
  /// kernels one by one. For accelerators; on the host a step throws `cannot_capture`.
  bool graph = false;
  /// Runs the module's own code in every step, on tensors without data, and compares its calls of operators with the recorded
  /// ones. State that it reads or changes is then that of eager mode. A call that takes another path runs eagerly, and the next
  /// one is recorded.
  /// Without it the code is not run after a capture: for forwards that are pure functions of tensors, flags and
  /// `invocation::signature`. With it, C++ code of the forward must not ask the default generator for its state after a draw: the
  /// numbers are drawn later.
  bool follow = false;
  /// What cannot be planned is an error; else it runs as it is, and `warn` is told once. With `steps_on` it is an error in any
  /// case: weights are not where the module would run.
  bool strict = true;
  plan_cache cache = plan_cache();  ///< of what was found in earlier processes
  new_shape new_shapes = new_shape::nearest;
  std::size_t most_shapes = 64;  ///< kinds of inputs whose plans are kept, >= 1: those that were used last
  /// So many steps also run plain, in the memory that this takes, and are compared bit by bit: outputs, gradients, buffers, state
  /// of the generator. The first difference is a `not_equal`.
  ///
  /// The plain step runs at least twice: the forward twice before the planned forward, and a whole step in the backward. Kernels
  /// with atomic additions may give other bits each time. A tensor that differs between two plain runs is not compared. A warning
  /// then names these tensors, and the operators that gave other results for equal operands.
  std::size_t verify = 0;
  std::function<void(const std::string&)> log = {};   ///< told what is captured, planned, and why; on any thread
  std::function<void(const std::string&)> warn = {};  ///< told what the user should look at; empty: `log` is told
  plan_observer watch = {};                           ///< of searches that a step waits for
};

/// Runs a model by plans.
///
/// The first call with gradients captures, profiles and plans; so does every later one with other shapes, strides, types,
/// training flags or `requires_grad`, and one that finds less memory free (gradients to accumulate into, another step in
/// flight). Without grad mode the model itself runs.
///
/// Thread-safe, but a forward looks at the gradients of the parameters, which nobody may write to or replace meanwhile on another
/// thread. Gradients lie in the arena of their step; those that are still there when the next one begins are moved out of its
/// way, and count.
///
/// Several steps may be in flight: forwards before their backwards. They share what only one of them needs at a time. How many
/// there are is learned in the first round, which may take more than the budget, with a warning; from the second round on it is
/// planned for as many.
class session {
 public:
  explicit session(std::shared_ptr<model> trained, wrap_options options = {});
  /// Ends a search beside the steps, and waits for that: not to be called with a lock that `wrap_options::log` takes.
  ~session();

  /// One forward; with grad mode on, and anything that requires a gradient, by a plan.
  /// @param call   what to run
  /// @param inputs its tensors
  /// @param note   set to the `note` of the call that ran: this one, or the one that was captured
  /// @return what it returns
  /// @throws cannot_capture, over_budget, unexpected_inputs, what the forward throws
  std::vector<at::Tensor> forward(const invocation& call, const std::vector<at::Tensor>& inputs,
                                  std::shared_ptr<void>* note = nullptr);

  /// The plan that was used last, or made by `prepare`.
  /// @throws error before the first
  pytorch::report report() const;
  /// All plans that are kept, the one used last first.
  std::vector<pytorch::report> reports() const;
  /// The problem of that plan, and its schedule. Where weights could be fetched and are not, they are held.
  const problem& planning_problem() const;
  const schedule& planned_schedule() const;
  /// Of each operation of that problem: the line of the module's code that calls it, or an empty text (`when_recorded`).
  std::vector<std::string> planned_lines() const;

  /// Captures, profiles and plans for such inputs without running.
  void prepare(const invocation& call, const std::vector<at::Tensor>& inputs);

  /// Another budget from the next step on. Plans for other budgets are kept.
  void set_budget(const budget& b);
  /// Forgets all plans, for a module that has changed in a way that cannot be seen from outside: a member that is no parameter
  /// and no buffer, another path through its forward. Steps in flight end as they began.
  void invalidate();
  /// Gives back the memory that is kept for the next step, but for gradients in it. Plans stay.
  void release();
  /// The same for all sessions of the process but those that are at work on another thread.
  static void release_all();

 private:
  struct state;
  std::shared_ptr<state> state_;
};

}  // namespace remat::pytorch
