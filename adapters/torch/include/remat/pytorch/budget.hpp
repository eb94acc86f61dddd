// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much memory a training step may take, and how much a plan takes.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>

namespace remat::pytorch {

/// The quantity that a budget in per cent refers to.
enum class share {
  usual,        ///< on the host as `activations`, on an accelerator as `device`
  activations,  ///< activations of a step that recomputes nothing
  device        ///< memory of the accelerator, less its context and libraries
};

/// How much memory a training step may take.
class budget {
 public:
  /// @param text a size, or a share N >= 0 in per cent:
  ///             - `512MiB`: bytes for everything the step needs
  ///             - `N% of activations`: bytes beyond what is held anyway, as a share of the activations of a step that recomputes
  ///               nothing. With several shapes the largest step so far counts; with several steps in flight all of them count
  ///             - `N% of device`: bytes for everything the step needs, as a share (N <= 100) of the memory of the accelerator,
  ///               less its context and libraries
  ///             - `N%`: `N% of device` for steps on an accelerator, else `N% of activations`
  /// @throws bad_option naming the text, for any other text
  budget(const std::string& text);
  budget(const char* text) : budget(std::string(text)) {}
  /// A budget for everything the step needs: parameters, buffers, inputs, constants, optimizer, gradients, activations.
  /// @throws bad_option if negative
  budget(bytes_t bytes);
  /// A budget for activations, outputs and new gradients only. Bytes held before the step begins come on top.
  /// @throws bad_option if negative
  static budget activations(bytes_t bytes);

  std::optional<bytes_t> total;         ///< bytes for everything
  std::optional<bytes_t> for_the_step;  ///< bytes beyond what is held
  double share = 1;                     ///< fraction of `share_of`, if neither of the above is set
  pytorch::share share_of = pytorch::share::usual;

  bool is_share() const { return !total && !for_the_step; }

 private:
  budget() = default;
};

/// Memory and time of a plan, in bytes and seconds.
struct report {
  bytes_t parameters = 0, inputs = 0, constants = 0, optimizer = 0;
  bytes_t workspaces = 0;  ///< memory that libraries keep on an accelerator
  bytes_t buffers = 0;     ///< buffers, `copies` included
  /// Copies of tensors that the step writes and may have to restore, and results of calls that run ahead of the plan.
  bytes_t copies = 0;
  bytes_t gradients = 0;         ///< gradients that existed when the step began
  bytes_t budget = 0;            ///< upper limit of `total()`
  bytes_t left = 0;              ///< part of the budget that is left for activations, outputs and new gradients
  bytes_t arena = 0;             ///< memory reserved for activations and new gradients
  bool placed = true;            ///< false: the device's allocator chooses addresses, and may reserve more than `arena`
  bytes_t live_peak = 0;         ///< peak of the bytes alive in the arena; `arena - live_peak` is fragmentation
  bytes_t outputs = 0;           ///< outside the arena: outputs, their gradients, gradients of inputs
  bytes_t in_place = 0;          ///< weights that the plan could fetch but reads where they are
  bytes_t store_all = 0;         ///< arena and outputs if nothing is recomputed, weights that could be fetched included
  bytes_t plain_peak = 0;        ///< peak of the step in eager mode beyond what is held, without workspaces of kernels
  bytes_t workspace = 0;         ///< largest workspace of a kernel
  std::size_t in_flight = 1;     ///< steps in flight; `arena`, `outputs` and `store_all` are sums over them
  double step_seconds = 0;       ///< predicted time of the operators
  double store_all_seconds = 0;  ///< predicted time if nothing is recomputed
  double bound = 0;              ///< lower bound on the time of any schedule within the budget of the search, s
  double gap = 0;                ///< relative distance of the predicted time to `bound`
  double capture_seconds = 0, profile_seconds = 0, plan_seconds = 0;
  std::size_t operations = 0;             ///< computations in a step, recomputations included
  std::size_t recomputed = 0;             ///< recomputations in a step
  std::size_t unplanned_allocations = 0;  ///< allocations outside the plan so far
  bytes_t unplanned_bytes = 0;            ///< most bytes that an operation has taken outside the plan so far
  std::string unplanned_operation = {};   ///< name and line of that operation
  bytes_t far = 0;                        ///< reserved far memory
  bytes_t moved_out = 0, moved_in = 0;    ///< traffic per step: to far memory, from far memory
  bytes_t fetched = 0;                    ///< traffic per step: weights that lie outside the device
  double waited = 0;                      ///< time spent waiting for copies so far, s
  std::string solver;
  /// The solver found no schedule for this budget. The plan comes from the search for the smallest budget, which also tries
  /// schedules of its own.
  bool fallback = false;
  std::string planned_for;     ///< description of the inputs
  remat::status status = {};   ///< status of the schedule
  bytes_t smallest = 0;        ///< smallest budget known to suffice
  bytes_t smallest_bound = 0;  ///< lower bound on every budget that suffices

  bytes_t held() const { return parameters + buffers + inputs + constants + optimizer + workspaces + gradients; }
  bytes_t total() const { return held() + arena + outputs + in_place; }  ///< at most `budget`
  /// The report as a table of text.
  std::string text() const;
};

}  // namespace remat::pytorch
