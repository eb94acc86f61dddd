// SPDX-License-Identifier: Apache-2.0
/// @file
/// A schedule as a list of steps in which each tensor has its place in memory. Private to the adapter.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/executor.hpp>

namespace remat::pytorch {

/// Memory that holds one value, or several values one after another (the versions of a storage that is written in place).
struct buffer {
  bytes_t bytes = 0;
  std::int64_t born = 0, dies = -1;  ///< times of `memory_planner`; `dies` -1: alive at the end
  int values = 0;                    ///< number of its values that are on the device now
  bool kept = false;                 ///< the caller keeps it
  bool outside = false;              ///< memory outside of the arena
  bool fetched = false;  ///< destination of fetches; starts at a page if it is large, since disks read fast into such memory
  bool working = false;  ///< in the memory that steps in flight share
  bytes_t offset = 0;    ///< in the arena or, if `working`, in the shared memory
};

/// Where a value is during a step: in a buffer (a fetched weight, too), or in memory from outside (parameter, input, ...).
struct location {
  index_t buffer = none;  ///< none: from outside
  index_t value = none;
  auto operator<=>(const location&) const = default;
};

/// A call of a step, with the places of its operands and results.
struct placed_call {
  const call* what = nullptr;
  std::vector<location> operands, results;  ///< parallel to the lists of the call; none for operands that are left out
};

/// A copy of a value: to far memory, back from far memory, or from the caller's memory (a fetch).
struct planned_move {
  index_t value = none, buffer = none;
  bytes_t bytes = 0;           ///< size of the copy: bytes of the value, rounded up
  bytes_t far = 0;             ///< offset in far memory
  index_t brings_back = none;  ///< the move to far memory whose bytes it brings back, or none
  index_t slot = none;         ///< slot of the caller's tensor that it fetches, or none; neither this nor `brings_back`: it sends
  index_t gradient = none;     ///< parameter whose gradient it sends to the caller's memory, or none
  bool last_fetch_before_update = false;  ///< last fetch of a weight with a given gradient: its receiver may step the weight soon
  std::vector<index_t> after = {};        ///< moves that must be done before it begins
};

/// A move begins (`wait` false), or the following work waits for its end.
struct move_step {
  index_t move;
  bool wait;
};

/// A gradient that the step gives to the caller.
struct early_gradient {
  index_t parameter = none;  ///< position in `program::parameters`
  location at;
  bool copy = false;  ///< other values share its bytes, so the caller gets a copy
};

struct node_run {
  index_t node = none;
  bool again = false;
  std::vector<move_step> moves;  ///< begin before the copies and calls
  std::vector<placed_call> calls;
  std::vector<std::pair<location, location>> copies;  ///< {old, new}, made before the calls
  std::vector<index_t> blocks;  ///< per block of the script: its buffer; none: memory of the ordinary allocator
  std::vector<early_gradient> early_gradients = {};  ///< after the calls
  std::vector<index_t> frees = {};  ///< buffers outside of the arena that go back to the allocator after the step
};

struct execution_plan::data {
  std::shared_ptr<const program> step;
  std::vector<node_run> steps;
  std::vector<allocation_script> scripts;  ///< per step
  std::size_t loss = 0;                    ///< first step of the backward
  std::vector<planned_move> moves;
  std::vector<move_step> after_forward, after_backward;
  std::vector<buffer> buffers;
  std::vector<location> outputs, assumed_zero, parameter_grads, input_grads;
  std::vector<bool> copy_grad;    ///< per parameter: the caller gets a copy of its gradient, because other values share the bytes
  std::vector<bool> given_early;  ///< per parameter: its gradient is an early gradient; the backward does not return it
  std::vector<index_t> slot_copies;     ///< per slot: buffer for a copy of the caller's tensor, or none: read in place. Empty:
                                        ///< addresses change from step to step
  std::string why_addresses_move;       ///< why addresses change although fixed ones were requested
  std::vector<index_t> gradient_sends;  ///< per parameter: the move that sends its gradient to the host, or none
  std::vector<index_t> sum_slots;       ///< per parameter: slot to which its gradient is added; empty: gradients are returned
  execution_plan::reads reads;
  struct saved_states {
    bool before = false, after = false;
  };
  std::vector<saved_states> saves;       ///< per node: save the generator state before or after its draw, for later use
  bool saves_phase[2] = {false, false};  ///< save the generator state at the beginning of {forward, backward}
  bytes_t arena = 0, live = 0, outside = 0, far = 0, in_place = 0;
  bytes_t working = 0;        ///< size of the memory that steps in flight share
  bool by_allocator = false;  ///< no arena is reserved; `arena` is the peak of the buffers
  bytes_t held = 0;           ///< from the forward to the backward, outputs included
  std::size_t recomputed = 0;
};

}  // namespace remat::pytorch
