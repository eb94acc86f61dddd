// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is known of a kind of inputs, and planned for it. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/result.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/session.hpp>

#include "usage.hpp"

namespace remat::pytorch {

/// What was planned for one budget.
struct plan {
  std::shared_ptr<const execution_plan> run;
  bool zones = false;     ///< for several steps in flight
  bool fallback = false;  ///< see `report::fallback`
  schedule steps;
  result found;
  double plan_seconds = 0;
  std::string taken_from = {};                   ///< decisions of a plan for these inputs; empty: it has been searched for
  bool unfinished = false;                       ///< a longer search may find a better one
  mutable std::atomic<bool> superseded = false;  ///< there is a better one by now
};

namespace detail {
struct recorded_forward;
struct trace;
}  // namespace detail

/// The tensors of a module at a time, each once.
struct module_tensors {
  std::vector<at::Tensor> parameters, buffers;
};

/// Those of them that a kind of steps uses. A module may have others in the next step (`torch.func.functional_call`).
struct bound_tensors {
  std::shared_ptr<const module_tensors> of;
  std::vector<at::Tensor> trained;  ///< of the parameters, those that an output leads to
  bindings slots;
};

/// Everything known of one kind of inputs.
struct setup {
  std::shared_ptr<usage> outputs;
  std::vector<output_use> uses;                ///< of the outputs, as it was captured for
  std::shared_ptr<const bound_tensors> bound;  ///< of the module as it was in the last step
  std::vector<std::size_t> trained;            ///< positions of the trained ones among its parameters
  std::vector<std::size_t> place;              ///< per parameter of the program: position among the trained ones
  std::vector<std::size_t> edges;              ///< per trained one, and then per input: how many edges of the forward lead there
  std::vector<std::size_t> more_of;            ///< per gradient of an input behind those of all: of which it is a summand

  std::shared_ptr<const detail::recorded_forward> forward;  ///< to be followed
  std::shared_ptr<const program> step;
  program_profile profiles;
  std::shared_ptr<const questions> asked;
  std::shared_ptr<void> note;  ///< of the invocation that was captured
  problem p;
  problem in_place;        ///< of the store-all plan, where `p` has weights fetched; otherwise `p`
  far_memory far;          ///< if the problem allows copies
  std::string inputs;      ///< for people
  std::size_t graph = 0;   ///< hash of the program without sizes
  layout_options layouts;  ///< no tries where it is large, and steps like it are known: a first one does
  std::shared_ptr<const plan> store_all;
  std::shared_ptr<const plan> all_in_flight;  ///< the same in zones, once several steps are in flight
  bytes_t parameter_bytes = 0, buffer_bytes = 0, constants = 0;
  bytes_t plain_peak = 0;  ///< of the step in eager mode, beyond what is held before it
  bytes_t copy_bytes = 0;  ///< of what a step writes, while the forward may have to run once more; and results of calls that run
                           ///< while it is followed
  double capture_seconds = 0;
  bool warned = false;    ///< that it takes more than the budget
  bool new_path = false;  ///< its forward has left those that were planned before: a short search has to do at first
  std::shared_ptr<setup> adding, giving;      ///< the same step for `accumulating` and `giving`, once they are needed
  std::atomic<bool> given_early = false;      ///< it is the latter
  std::shared_ptr<const detail::trace> sums;  ///< null: there are no sums of gradients that it could hand out in summands
  std::shared_ptr<setup> summands;            ///< the same step, which does so, once it is needed
  bool in_summands = false;                   ///< it is that
  std::uint64_t last_used = 0;                ///< steps of the session before
  std::map<bytes_t, std::shared_ptr<const plan>> plans;  ///< by bytes available
  /// In zones: by bytes available, and steps in flight that these are for.
  std::map<std::pair<bytes_t, std::size_t>, std::shared_ptr<const plan>> plans_in_flight;
  std::shared_ptr<const plan> least_in_flight;  ///< of those that took more, the one that holds least
  mutable std::map<bytes_t, std::shared_ptr<const plan>> plans_without_copies;  ///< the same, while others hold the far memory
  std::exception_ptr refusal;                                                   ///< of the last search that found no plan
  std::pair<bytes_t, bytes_t> refused = {};  ///< what it was for: bytes available, and bytes held
  mutable std::mutex least_mutex;
  mutable std::shared_ptr<const plan> least;  ///< see `leanest`
  placing places = placing::one;              ///< of its steps, where these do not share memory
  std::atomic<bool> uncaptured = false;       ///< its kernels cannot be captured
  std::atomic<bool> broken = false;           ///< an operator did not do as it did when it was measured

  /// The same step with other gradients; null: not needed so far.
  std::array<std::shared_ptr<setup>, 3> variants() const { return {adding, giving, summands}; }
};

/// An executor, and what it was made for.
struct runner {
  std::shared_ptr<setup> kind;
  std::shared_ptr<const plan> what;
  std::unique_ptr<executor> run;
  std::shared_ptr<const bound_tensors> bound;  ///< whose tensors it has
  bytes_t available = 0;                       ///< what the plan was made for
  std::size_t steps = 0;
};

}  // namespace remat::pytorch
