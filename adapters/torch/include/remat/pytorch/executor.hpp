// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs a program as a schedule says, inside an arena.
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

/// An operator no longer uses memory as it did when it was measured. Nothing wrong has left the step; `session` plans anew.
struct plan_broken : error {
  using error::error;
};

/// What the places of a plan are good for.
enum class placing {
  one,  ///< step in flight: all lies in an arena of its own
  /// Addresses are the same in every step, so that kernels can be replayed: outputs and gradients of inputs lie in the arena,
  /// too, and so do copies of the inputs and of the gradients of outputs. If a step cannot have that, `moves_because` says why.
  fixed,
  /// Steps in flight share memory: the arena has what lives from the forward to the backward, and all else lies in a
  /// `working_memory`. Gradients get memory of their own.
  zones,
  /// Nothing has a place: the device's allocator chooses one for each buffer, which goes back to it when the buffer dies. For
  /// devices that cannot place (`device::can_place`).
  by_allocator
};

/// A program, a schedule of it, and a place in memory for all that the schedule allocates. Immutable; shared by executors.
///
/// Everything lies in the arena but what the caller keeps: the outputs of the forward and the gradients of the inputs.
/// With `placing::by_allocator` there is no arena: `arena_bytes` is then the most that buffers take at a time.
class execution_plan {
 public:
  /// @param step     the program
  /// @param s        schedule of `to_problem(step, ...)`. Weights that it fetches, of those that are `fetchable`, it has in the
  ///                 arena; all others it reads where the caller has them
  /// @param profiles allocation scripts of the nodes
  /// @param o        options of the layouts; the alignment must be 64 at least, and that of the far memory if there are copies
  /// @param in_place bytes of weights that are to count although the plan reads them where they are
  /// @throws bad_schedule if the schedule is invalid, or runs what draws random numbers or writes buffers out of program order
  /// Complexity: that of `lay_out`, + O(operands + allocations of all steps).
  execution_plan(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles,
                 const layout_options& o = {}, bytes_t in_place = 0, placing how = placing::one);
  ~execution_plan();

  bytes_t arena_bytes() const;
  bytes_t working_bytes() const;  ///< of the memory that steps in flight share; 0: they share none
  bytes_t held_bytes() const;     ///< from the forward to the backward, outputs included
  bytes_t live_peak() const;      ///< largest sum of bytes alive in the arena: a lower bound on the arena
  /// Bytes outside of the arena: what the caller keeps (outputs and their gradients, gradients of inputs, gradients that must be
  /// copies), and what operators allocate on other threads.
  bytes_t outside_bytes() const;
  bytes_t far_bytes() const;                        ///< to be reserved in far memory
  std::pair<bytes_t, bytes_t> moved_bytes() const;  ///< per step: {to far memory, back}
  bytes_t fetched_bytes() const;                    ///< per step: of weights, from where the caller has them
  bytes_t in_place_bytes() const;                   ///< see the constructor
  bytes_t needed_bytes() const { return arena_bytes() + working_bytes() + outside_bytes() + in_place_bytes(); }
  std::size_t operations() const;  ///< nodes computed
  std::size_t recomputed() const;  ///< of these, again
  const program& step() const;
  const std::string& moves_because() const;
  bool placed() const;  ///< false: its device's allocator chooses the addresses (`placing::by_allocator`)

  /// What must not change between forward and backward.
  struct reads {
    std::vector<bool> outputs;     ///< per output
    std::vector<index_t> outside;  ///< parameters, buffers, inputs
  };
  const reads& read_in_backward() const;

  struct data;
  const data& get() const { return *data_; }

 private:
  std::unique_ptr<const data> data_;
};

/// Memory in which steps compute that share it (`placing::zones`): a piece for each thread that computes at a time. Thread-safe.
class working_memory {
 public:
  struct piece {
    std::shared_ptr<region> in;
    ticket ended = {};  ///< what was last given to the device
    bool busy = false;
  };

  /// @param of must outlive it
  explicit working_memory(tier& of) : of_(of) {}

  /// A piece of its own for somebody who computes: one that is idle, or a new one, in the place of one that is idle and too
  /// small.
  /// @param bytes that it has at least, > 0
  /// @param last  piece that the caller would like to have again
  /// @throws out_of_memory
  std::shared_ptr<piece> take(bytes_t bytes, const std::shared_ptr<piece>& last);
  void give_back(piece& p);

  const tier& of() const { return of_; }
  bytes_t bytes() const;  ///< of all pieces
  bytes_t idle() const;   ///< of the largest one in which nobody computes
  void release();         ///< idle pieces go

 private:
  template <class F>
  bytes_t sum(F of) const;

  tier& of_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<piece>> pieces_;
};

struct executor_options {
  /// Kernels are captured in the second step and replayed from then on, for a plan with fixed addresses. If a capture fails, a
  /// warning names the operator and the cause once, and kernels are launched one by one.
  bool graphs = false;
  /// The arena, if it is large enough: executors that do not run at the same time may share one.
  std::shared_ptr<region> arena = {};
  /// For a plan in zones.
  std::shared_ptr<working_memory> working = {};
};

/// One step in flight: `forward`, then `backward` once, then it may run again.
///
/// Not thread-safe; the two calls may come from different threads. Equals eager mode bit by bit: outputs, gradients, buffers,
/// state of the generator.
class executor {
 public:
  /// Allocates the arena and prepares every argument.
  /// @param plan    may be that of several executors
  /// @param tensors of the module
  /// @param on      must outlive the executor
  /// @param far     where a plan with copies puts values; its alignment is at most that of the plan's layout. Its `in`, which may
  ///                be there without a memory, fetches weights
  /// @throws broken_contract if the tensors are those for another program, or copies lack a far memory or a link
  /// @throws out_of_memory if the device or the far memory has no room
  executor(std::shared_ptr<const execution_plan> plan, bindings tensors, device& on = host_device(), far_memory far = {},
           const executor_options& o = {});
  ~executor();

  /// From the next forward on.
  /// @param numbers arguments of calls, in the places that `call::numbers` tells; those that are not there are as captured
  void set_numbers(std::vector<double> numbers);

  /// Whether the values of the last forward are what the program assumes (`program::assumed_zero`). If not, the step has no
  /// backward.
  bool as_assumed() const;

  /// @param inputs sizes, strides and types as captured
  /// @return the outputs, without autograd; they belong to the caller
  /// @throws c10::Error, what operators throw, copy_failed naming the value; the executor can be used again afterwards
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);

  struct gradients {
    std::vector<at::Tensor> parameters;  ///< in the arena, and owners of it; undefined where added to a sum
    std::vector<at::Tensor> inputs;      ///< undefined where none was asked for
  };
  /// Takes a gradient of a `giving` program while the backward goes on, and may write to its parameter.
  /// @return the gradient if it is to be among those at the end; otherwise undefined
  using taker = std::function<at::Tensor(std::size_t parameter, at::Tensor gradient)>;

  /// A gradient of a `giving` program that somebody still holds when `take` returns is moved out of the arena, into memory that
  /// was not planned.
  /// @param output_grads gradient per output; undefined means zero; ignored where the output is not differentiable
  /// @param sums for an `accumulating` program, per parameter: what its gradient is added to; undefined: it is handed out
  /// @param take for a `giving` program; empty: all gradients are handed out at the end
  /// @throws broken_contract without a forward before; what `forward` and `take` throw
  gradients backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums = {},
                     const taker& take = {});

  /// Takes other tensors of the module.
  /// @throws broken_contract while a step is in flight, or if they are those for another program
  void use(const bindings& tensors);

  /// Lets go of a tensor of the module until the next forward.
  void unbind(const at::Tensor& t);
  /// Forgets a step in flight and the tensors it holds.
  void reset();

  bool in_flight() const;
  /// Somebody still holds a gradient of an earlier step in the arena.
  bool arena_in_use() const;
  /// Lets another executor use the arena: later kernels run after the last step. With fixed addresses, what somebody still holds
  /// of the arena moves into memory of its own; the tensors stay the same.
  void vacate();
  /// Why kernels are launched one by one, although graphs were asked for; empty: they need not be.
  std::string not_captured() const;
  /// Gives back all pages of the arena but those of the gradients of the last step; the executor must not run again.
  void leave_gradients_only();
  /// `t` lies in the arena.
  bool owns(const at::Tensor& t) const;
  /// Gives tensors of an earlier step that lie in the arena memory of their own: all that share this storage.
  void move_out(const c10::Storage& storage) const;
  const std::shared_ptr<region>& memory() const;
  const std::shared_ptr<region>& arena() const;  ///< the same, for another executor (`executor_options`)
  const execution_plan& plan() const;

  std::size_t unplanned() const;   ///< allocations outside the plan so far
  double waited_seconds() const;   ///< for copies, so far
  std::size_t held_gifts() const;  ///< given gradients that somebody went on to hold, in the last backward

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace remat::pytorch
