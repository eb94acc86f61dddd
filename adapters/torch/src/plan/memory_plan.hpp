// SPDX-License-Identifier: Apache-2.0
/// @file
/// A schedule as steps whose memory has its place. Private to the adapter.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/executor.hpp>

namespace remat::pytorch {

/// Bytes that one or more values occupy one after the other (the versions of a storage that is written in place).
struct buffer {
  bytes_t bytes = 0;
  std::int64_t born = 0, dies = -1;  ///< -1: at the end
  int values = 0;                    ///< on the device now
  bool kept = false;                 ///< the caller keeps it
  bool outside = false;              ///< the same, and it is not in the arena
  bool fetched = false;              ///< begins with a page if it is large: disks read such memory fast
  bool working = false;              ///< in the memory that steps in flight share
  bytes_t offset = 0;                ///< in the arena, or in that memory
};

/// Where a value is during a step: in a buffer, as a weight that has been fetched is, or outside (parameter, input, ..): the
/// value itself.
struct location {
  index_t buffer = none;  ///< none: from outside
  index_t value = none;
  auto operator<=>(const location&) const = default;
};

/// A call of a step, with the places of its tensors.
struct placed_call {
  const call* what = nullptr;
  std::vector<location> operands, results;  ///< parallel to those of the call; operands left out are none
};

/// A value goes to far memory or comes back, or is fetched from the caller's memory.
struct planned_move {
  index_t value = none, buffer = none;
  bytes_t bytes = 0;                ///< of the copy: those of the value, rounded up
  bytes_t far = 0;                  ///< where it lies there
  index_t brings = none;            ///< the move whose bytes it brings back
  index_t slot = none;              ///< the tensor of the caller whose bytes it fetches; both none: it sends them
  index_t gradient = none;          ///< the parameter whose gradient it sends to memory of the caller
  bool before_its_step = false;     ///< the last of a weight whose gradient is given: somebody may step it soon
  std::vector<index_t> after = {};  ///< moves that have to be done before it begins
};

/// A move begins, or what follows waits for its end.
struct move_step {
  index_t move;
  bool wait;
};

/// A gradient goes to the caller.
struct gift {
  index_t parameter = none;  ///< position among those of the program
  location at;
  bool copy = false;  ///< it shares bytes with something else
};

struct planned_step {
  index_t node = none;
  bool again = false;
  std::vector<move_step> moves;  ///< before all else
  std::vector<placed_call> calls;
  std::vector<std::pair<location, location>> copies;  ///< {old, new}, before the calls
  std::vector<index_t> blocks;                        ///< per block of the script: buffer, or none: the ordinary allocator
  std::vector<gift> gifts = {};                       ///< after all else
  std::vector<index_t> frees = {};                    ///< buffers outside of the arena that go back to the allocator then
};

struct execution_plan::data {
  std::shared_ptr<const program> step;
  std::vector<planned_step> steps;
  std::vector<allocation_script> scripts;  ///< per step
  std::size_t loss = 0;                    ///< first step of the backward
  std::vector<planned_move> moves;
  std::vector<move_step> after_forward, after_backward;
  std::vector<buffer> buffers;
  std::vector<location> outputs, assumed_zero, parameter_grads, input_grads;
  std::vector<bool> copy_grad;  ///< per parameter: its gradient shares bytes with something else
  std::vector<bool> given;      ///< per parameter: its gradient is a gift, and nothing at the end
  std::vector<index_t> copied;  ///< per slot: buffer into which what the caller gives is copied; none: it is read where it is.
                                ///< Empty: addresses change from step to step
  std::string moving_because;   ///< why they do, where fixed ones were asked for
  std::vector<index_t> leaves;  ///< per parameter: the move that sends its gradient to the host, or none
  std::vector<index_t> sums;    ///< per parameter: slot to which its gradient is added; empty: gradients are handed out
  execution_plan::reads reads;
  struct saved_states {
    bool before = false, after = false;
  };
  std::vector<saved_states> saves;       ///< per node: states of the generator that are needed again
  bool saves_phase[2] = {false, false};  ///< the same when the forward, the backward begins
  bytes_t arena = 0, live = 0, outside = 0, far = 0, in_place = 0;
  bytes_t working = 0;        ///< of the memory that steps in flight share
  bool by_allocator = false;  ///< `arena` is the most that is alive; no such region is reserved
  bytes_t held = 0;           ///< from the forward to the backward, outputs included
  std::size_t recomputed = 0;
};

}  // namespace remat::pytorch
