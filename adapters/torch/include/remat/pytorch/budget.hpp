// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much memory a training step may take, and what it does take.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>

namespace remat::pytorch {

/// What a share is of.
enum class share {
  usual,        ///< activations on the host, memory on an accelerator
  activations,  ///< activations of a step that recomputes nothing
  device        ///< memory of the accelerator, after its context and libraries
};

/// How much memory a training step may take.
class budget {
 public:
  /// @param text a size such as `512MiB`, for everything the step needs; or `N% of activations`: those of a step that recomputes
  ///             nothing (of the largest so far, if it is called with several shapes; of all that are in flight), beyond what is
  ///             held anyway; or `N% of device`: of the memory of an accelerator, after its context and libraries, for everything
  ///             the step needs. `N%` alone is of the device where there is an accelerator, else of the activations
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
  double share = 1;                     ///< if neither is set
  pytorch::share share_of = pytorch::share::usual;

  bool is_share() const { return !total && !for_the_step; }

 private:
  budget() = default;
};

/// What a plan takes, in bytes and seconds.
struct report {
  bytes_t parameters = 0, inputs = 0, constants = 0, optimizer = 0;
  bytes_t workspaces = 0;     ///< that libraries keep on an accelerator
  bytes_t buffers = 0;        ///< with the copies
  bytes_t copies = 0;         ///< of what the step writes, as it may have to put that back; and results of calls that run at once
  bytes_t gradients = 0;      ///< that existed when the step began
  bytes_t budget = 0;         ///< for all of it
  bytes_t left = 0;           ///< of the budget, for activations, outputs and new gradients
  bytes_t arena = 0;          ///< reserved for activations and new gradients
  bool placed = true;         ///< false: the device's allocator chooses addresses, and may reserve more than `arena`
  bytes_t live_peak = 0;      ///< largest sum alive in the arena: the difference is fragmentation
  bytes_t outputs = 0;        ///< outside the arena: outputs, their gradients, gradients of inputs
  bytes_t in_place = 0;       ///< weights that could be fetched, and are read where they are
  bytes_t store_all = 0;      ///< arena and outputs if nothing is recomputed, with weights that could be fetched
  bytes_t plain_peak = 0;     ///< of the step in eager mode, beyond what is held; workspaces of kernels not counted
  bytes_t workspace = 0;      ///< largest of a kernel
  std::size_t in_flight = 1;  ///< steps at a time: arena, outputs and `store_all` are those of all
  bytes_t planned_peak = 0;   ///< of the schedule, as `evaluate` counts
  double step_seconds = 0;    ///< predicted time of the operators
  double store_all_seconds = 0;  ///< the same if nothing is recomputed
  double bound = 0;              ///< proven: no schedule within the budget of the search is faster, s
  double gap = 0;                ///< relative distance to the bound
  double capture_seconds = 0, profile_seconds = 0, plan_seconds = 0;
  std::size_t operations = 0;           ///< computed in a step
  std::size_t recomputed = 0;           ///< of these, again
  std::size_t unplanned = 0;            ///< allocations outside the plan so far
  bytes_t far = 0;                      ///< reserved in far memory
  bytes_t moved_out = 0, moved_in = 0;  ///< by a step: to far memory, back
  bytes_t fetched = 0;                  ///< by a step: of weights that have their homes beyond the device
  double waited = 0;                    ///< for copies so far, s
  std::string solver;
  /// The solver found no schedule for this budget. The plan is the one that the search for the smallest budget found, which also
  /// tries schedules of its own.
  bool fallback = false;
  std::string planned_for;     ///< description of the inputs
  remat::status status = {};   ///< of the schedule
  bytes_t smallest = 0;        ///< smallest budget that is known to do
  bytes_t smallest_bound = 0;  ///< proven: no smaller one does

  bytes_t held() const { return parameters + buffers + inputs + constants + optimizer + workspaces + gradients; }
  bytes_t total() const { return held() + arena + outputs + in_place; }  ///< at most `budget`
  /// A table of all this.
  std::string text() const;
};

}  // namespace remat::pytorch
