// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lays out a scheduled program in an arena, and runs its steps there.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <remat/core/schedule.hpp>
#include <remat/layout/layout.hpp>
#include <remat/pytorch/bindings.hpp>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/profile.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// An operator no longer allocates as it did when it was measured. No wrong result has left the step; `session` plans anew.
struct plan_broken : error {
  using error::error;
};

/// How a plan places tensors in memory.
enum class placing {
  one,  ///< one step in flight: all tensors lie in an arena of the step
  /// Addresses are the same in every step, so that kernels can be replayed. Outputs and gradients of inputs lie in the arena,
  /// too, and so do copies of the inputs and of the gradients of outputs. If addresses cannot be fixed, `why_addresses_move` says
  /// why.
  fixed,
  /// Several steps in flight share memory. The arena of a step has the values that live from the forward to the backward. All
  /// others lie in a `working_memory`. Gradients get memory of their own.
  zones,
  /// The device's allocator chooses the address of each buffer, and gets the buffer back when it dies. For devices that cannot
  /// place (`device::can_place`).
  by_allocator
};

/// A program, a schedule for it, and a layout: an address for each allocation of the schedule. Immutable; shared by executors.
///
/// All tensors lie in the arena except those that the caller keeps: the outputs of the forward and the gradients of the inputs.
/// With `placing::by_allocator` there is no arena; `arena_bytes` is then the peak of the buffers.
class execution_plan {
 public:
  /// @param step     the program
  /// @param s        schedule of `to_problem(step, ...)`. It may fetch `fetchable` weights into the arena; the plan reads all
  ///                 other weights where the caller has them
  /// @param profiles allocation scripts of the nodes
  /// @param o        options of the layouts; the alignment must be at least 64, and at least that of the far memory if there are
  ///                 copies
  /// @param in_place bytes of weights that count although the plan reads them where they are
  /// @param how      how tensors are placed
  /// @throws bad_schedule if the schedule is invalid, or runs random draws or writes to buffers out of program order
  /// Complexity: that of `lay_out`, + O(operands + allocations of all steps).
  execution_plan(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles,
                 const layout_options& o = {}, bytes_t in_place = 0, placing how = placing::one);
  ~execution_plan();

  bytes_t arena_bytes() const;
  bytes_t working_bytes() const;  ///< bytes in the `working_memory` that steps in flight share; 0: none
  bytes_t held_bytes() const;     ///< bytes held from the forward to the backward, outputs included
  bytes_t live_peak() const;      ///< peak of the bytes alive in the arena: a lower bound on the arena
  /// Bytes outside of the arena: tensors that the caller keeps (outputs and their gradients, gradients of inputs, gradients that
  /// must be copies), and allocations of operators on other threads.
  bytes_t outside_bytes() const;
  bytes_t far_bytes() const;                        ///< bytes to reserve in far memory
  std::pair<bytes_t, bytes_t> moved_bytes() const;  ///< traffic per step: {to far memory, from far memory}
  bytes_t fetched_bytes() const;                    ///< traffic per step: weights fetched from the memory of the caller
  bytes_t in_place_bytes() const;                   ///< see the constructor
  bytes_t needed_bytes() const { return arena_bytes() + working_bytes() + outside_bytes() + in_place_bytes(); }
  std::size_t operations() const;  ///< computations, recomputations included
  std::size_t recomputed() const;  ///< recomputations
  const program& step() const;
  /// Why addresses change from step to step although `placing::fixed` was asked for; empty in all other cases.
  const std::string& why_addresses_move() const;
  bool placed() const;  ///< false: the device's allocator chooses the addresses (`placing::by_allocator`)

  /// Values that the backward reads, so that nobody may write them between forward and backward.
  struct reads {
    std::vector<bool> outputs;     ///< per output: the backward reads it
    std::vector<index_t> outside;  ///< parameters, buffers and inputs that the backward reads
  };
  const reads& read_in_backward() const;

  struct data;
  const data& get() const { return *data_; }

 private:
  std::unique_ptr<const data> data_;
};

/// Memory that steps in flight share (`placing::zones`): one piece per computing thread. Thread-safe.
class working_memory {
 public:
  struct piece {
    std::shared_ptr<region> in;
    ticket ended = {};  ///< end of the last work in this piece on the device
    bool busy = false;
  };

  /// @param of tier of the pieces; must outlive this object
  explicit working_memory(tier& of) : of_(of) {}

  /// Takes an idle piece, or reserves a new piece. A new piece replaces an idle piece that is too small.
  /// @param bytes smallest size of the piece, > 0
  /// @param last  preferred piece, if it is idle; null, or taken before for as many bytes
  /// @throws out_of_memory
  std::shared_ptr<piece> take(bytes_t bytes, const std::shared_ptr<piece>& last);
  void give_back(piece& p);

  const tier& of() const { return of_; }
  bytes_t bytes() const;  ///< bytes of all pieces
  bytes_t idle() const;   ///< bytes of the largest idle piece
  void release();         ///< frees idle pieces

 private:
  template <class F>
  bytes_t sum(F of) const;

  tier& of_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<piece>> pieces_;
};

struct executor_options {
  /// Captures kernels as a graph in the second step and replays the graph from then on. For a plan with fixed addresses. If a
  /// capture fails, a warning names the operator and the cause once, and kernels are launched one by one.
  bool graphs = false;
  /// Arena to use if it is large enough. Executors that do not run at the same time may share it.
  std::shared_ptr<region> arena = {};
  /// Shared memory, for a plan with `placing::zones`.
  std::shared_ptr<working_memory> working = {};
};

/// Runs a plan: `forward`, then `backward` once, and again. One step is in flight at a time.
///
/// Not thread-safe; the two calls may come from different threads. Outputs, gradients, buffers and the state of the generator
/// equal those of eager mode bit by bit.
class executor {
 public:
  /// Allocates the arena and prepares every argument.
  /// @param plan    the plan; several executors may share it
  /// @param tensors tensors of the module
  /// @param on      device of the step; must outlive the executor
  /// @param far     far memory for a plan with copies; its alignment is at most that of the plan's layout. The link `in` also
  ///                fetches weights, and may be set without `memory`
  /// @param o       options
  /// @throws broken_contract if the tensors belong to another program, or copies lack a far memory or a link
  /// @throws out_of_memory if the device or the far memory has no room
  executor(std::shared_ptr<const execution_plan> plan, bindings tensors, device& on = host_device(), far_memory far = {},
           const executor_options& o = {});
  ~executor();

  /// Sets numbers that calls take as arguments from the next forward on.
  /// @param numbers by the second index of `call::numbers`; arguments beyond the end of the list stay as captured
  void set_numbers(std::vector<double> numbers);

  /// True if the values of the last forward are as the program assumes (`program::assumed_zero`). If false, the step has no
  /// backward.
  bool as_assumed() const;

  /// Runs the first half of the schedule.
  /// @param inputs tensors with the sizes, strides and types of the capture
  /// @return the outputs, without autograd; they belong to the caller
  /// @throws c10::Error; any exception of an operator; copy_failed naming the value. The executor can be used again afterwards
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);

  struct gradients {
    std::vector<at::Tensor> parameters;  ///< per parameter, in the arena, which they keep alive; undefined where added to a sum
    std::vector<at::Tensor> inputs;      ///< per input; undefined where no gradient was asked for
  };
  /// Receives a gradient of a `giving` program during the backward, and may write to its parameter.
  /// @return the gradient, to have `backward` return it as well; otherwise undefined
  using taker = std::function<at::Tensor(std::size_t parameter, at::Tensor gradient)>;

  /// Runs the second half of the schedule. A gradient of a `giving` program may still be held when `take` returns. It then moves
  /// out of the arena, into memory outside the plan.
  /// @param output_grads gradient per output; undefined means zero; ignored where the output is not differentiable
  /// @param sums for an `accumulating` program, per parameter: tensor to which its gradient is added; undefined: it is returned
  /// @param take receiver for a `giving` program; empty: all gradients are returned at the end
  /// @throws broken_contract without a forward before; the exceptions of `forward` and `take`
  gradients backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums = {},
                     const taker& take = {});

  /// Call this within a kernel of a backward.
  /// @return {position in `program::parameters`, gradient}: gradients that nodes before the running one have made, and that
  ///         `backward` will return
  /// Complexity: O(parameters).
  std::vector<std::pair<std::size_t, at::Tensor>> complete_gradients();

  /// Replaces the tensors of the module.
  /// @throws broken_contract while a step is in flight, or if the tensors belong to another program
  void use(const bindings& tensors);

  /// Releases a tensor of the module until the next forward.
  void unbind(const at::Tensor& t);
  /// Drops a step in flight and the tensors it holds.
  void reset();

  bool in_flight() const;
  /// True if a gradient of an earlier step in the arena is still held.
  bool arena_in_use() const;
  /// Lets another executor use the arena. Its kernels wait for the last step of this executor. With fixed addresses, tensors of
  /// the arena that are still held move into memory of their own; the tensor objects stay the same.
  void vacate();
  /// Why kernels are launched one by one, although graphs were asked for; empty: no cause.
  std::string not_captured() const;
  /// Gives back all pages of the arena except those of the gradients of the last step. The executor must not run again.
  void leave_gradients_only();
  /// True if `t` lies in the arena.
  bool owns(const at::Tensor& t) const;
  /// Moves tensors of an earlier step out of the arena into memory of their own: all tensors with this storage.
  void move_out(const c10::Storage& storage) const;
  const std::shared_ptr<region>& memory() const;
  const std::shared_ptr<region>& arena() const;  ///< as `memory`, for another executor (`executor_options`)
  const execution_plan& plan() const;

  std::size_t unplanned_allocations() const;  ///< allocations outside the plan so far
  /// The operation that has taken most bytes outside the plan so far, and these bytes; `none`: no operation has.
  std::pair<index_t, bytes_t> largest_unplanned() const;
  double waited_seconds() const;             ///< time spent waiting for copies so far, s
  std::size_t gradients_still_held() const;  ///< gradients of the last backward that were still held after `taker` returned

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace remat::pytorch
