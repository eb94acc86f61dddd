// SPDX-License-Identifier: Apache-2.0
/// @file
/// Knowledge and plans of a session for one kind of inputs. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/result.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/session.hpp>

#include "output_usage.hpp"

namespace remat::pytorch {

/// A plan for one budget.
struct plan {
  std::shared_ptr<const execution_plan> execution;
  bool zones = false;     ///< for several steps in flight
  bool fallback = false;  ///< see `report::fallback`
  remat::schedule schedule;
  remat::result result;
  double plan_seconds = 0;
  std::string taken_from = {};      ///< inputs of the plan whose schedule was reused; empty: the schedule was searched for
  bool unfinished = false;          ///< a longer search may find a better plan
  mutable bool superseded = false;  ///< a better plan exists by now; guarded by the lock of the session
};

namespace detail {
struct recorded_forward;
struct trace;
}  // namespace detail

/// All tensors of a module at one time, each once.
struct module_tensors {
  std::vector<at::Tensor> parameters, buffers;
};

/// The tensors of a module that one kind of steps uses. The next step may use others (`torch.func.functional_call`).
struct bound_tensors {
  std::shared_ptr<const module_tensors> of;
  std::vector<at::Tensor> trained;  ///< parameters that an output depends on
  bindings slots;
};

/// All that is known of one kind of inputs.
struct captured_step {
  std::shared_ptr<output_usage> outputs;
  std::vector<output_use> uses;                ///< per output: the use that the step was captured for
  std::shared_ptr<const bound_tensors> bound;  ///< tensors of the module in the last step
  std::vector<std::size_t> trained;            ///< positions of the trained parameters among all parameters
  std::vector<std::size_t> place;              ///< per parameter of the program: position among the trained ones
  std::vector<std::size_t> edges;              ///< per trained parameter, then per input: edges of the forward's graph to it
  std::vector<std::size_t> input_of_summand;   ///< per further gradient of an input (a summand): the input

  std::shared_ptr<const detail::recorded_forward> forward;  ///< recorded path for following
  std::vector<std::size_t> hook_places;                     ///< places of hooks in its graph, see `detail::graph_contents`
  std::atomic<bool> hooks_known = false;                    ///< a step has run, and its hooks returned what the plan can read
  std::shared_ptr<const program> step;
  program_profile profiles;
  std::shared_ptr<const questions> asked;
  std::shared_ptr<void> note;  ///< caller's data of the captured invocation
  remat::problem problem;
  bytes_t counted_twice = 0;  ///< overwritten memory is two values of the problem: most such bytes of one operation
  bytes_t least_budget = 0;   ///< lower bound on every budget, found without search
  remat::problem
      store_all_problem;   ///< problem of the store-all plan, with weights read in place; equals `problem` if none are fetched
  far_memory far;          ///< set if the problem allows copies
  std::string inputs;      ///< description for messages
  std::string variant;     ///< treatment of gradients, for messages; empty: the usual one
  std::size_t graph = 0;   ///< hash of the program without sizes
  layout_options layouts;  ///< no tries for a large program if similar steps are known: the first layout has to do
  std::shared_ptr<const plan> store_all;
  std::shared_ptr<const plan> all_in_flight;  ///< the same in zones; set once several steps are in flight
  bytes_t parameter_bytes = 0, buffer_bytes = 0, constants = 0;
  bytes_t plain_peak = 0;  ///< of the eager step, beyond the bytes held before it
  bytes_t copy_bytes = 0;  ///< copies of written tensors for a second forward, and results of calls that run in following
  double capture_seconds = 0;
  bool warned = false;  ///< the user was warned that it exceeds the budget
  std::pair<std::string, bytes_t> largest_unplanned =
      {};                 ///< see `executor::largest_unplanned`: name and line of the operation, bytes
  bool new_path = false;  ///< its forward took a path that was not planned before, so the first search is short
  std::shared_ptr<captured_step> adding, giving;  ///< the same step as `accumulating` or `giving`, made on demand
  std::atomic<bool> has_early_gradient = false;   ///< it is the `giving` variant
  std::shared_ptr<const detail::trace> sums;      ///< recording whose sums of gradients can be split into summands; null: none
  std::shared_ptr<captured_step> summands;        ///< the same step with gradients as summands, made on demand
  bool in_summands = false;                       ///< it is the variant with summands
  std::uint64_t last_used = 0;                    ///< number of the session's step in which it was last used
  std::map<bytes_t, std::shared_ptr<const plan>> plans;  ///< by available bytes
  /// Plans in zones, by available bytes and number of steps in flight.
  std::map<std::pair<bytes_t, std::size_t>, std::shared_ptr<const plan>> plans_in_flight;
  std::shared_ptr<const plan> least_in_flight;  ///< among plans that exceeded their bytes: the one with the least held bytes
  mutable std::map<bytes_t, std::shared_ptr<const plan>> plans_without_copies;  ///< while other steps occupy far memory
  std::exception_ptr refusal;                                                   ///< error of the last search that found no plan
  std::pair<bytes_t, bytes_t> refused = {};                                     ///< {available, held} bytes of that search
  mutable std::mutex least_mutex;
  mutable std::shared_ptr<const plan> least;  ///< see `leanest`
  placing places = placing::one;              ///< of its steps, unless steps in flight share memory
  std::atomic<bool> uncaptured = false;       ///< its kernels cannot be captured as a graph
  std::atomic<bool> broken = false;           ///< an operator allocated differently from its profile

  std::string described() const { return inputs + variant; }
  /// The same step with other treatment of gradients; null: not needed so far.
  std::array<std::shared_ptr<captured_step>, 3> variants() const { return {adding, giving, summands}; }
};

/// An executor, and what it was made for.
struct runner {
  std::shared_ptr<captured_step> kind;
  std::shared_ptr<const pytorch::plan> plan;
  std::unique_ptr<pytorch::executor> executor;
  std::shared_ptr<const bound_tensors> bound;  ///< the tensors that it uses
  bytes_t available = 0;                       ///< bytes that the plan was made for
  std::size_t steps = 0;
  std::function<void(const runner&)> on_unplanned = {};  ///< called if a backward has taken memory outside the plan
};

}  // namespace remat::pytorch
