// SPDX-License-Identifier: Apache-2.0
// State of an executor: argument lists over the arena, moves, and tensors for the caller.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <remat/pytorch/executor.hpp>

#include "../base/views.hpp"
#include "../plan/memory_plan.hpp"
#include "captured.hpp"
#include "repeatable_draws.hpp"

namespace remat::pytorch {

/// The executor of one module. `prepare.cpp` makes argument lists. `steps.cpp` runs forward and backward, and hands over tensors
/// that leave the arena. `replay.cpp` runs the operations. `moves.cpp` copies values to and from far memory.
struct executor::state {
  /// A call ready to run.
  struct prepared_call {
    const call* what = nullptr;
    std::vector<c10::IValue> stack;  ///< arguments; tensors from outside are put in when they are known
    c10::DispatchKeySet keys;
    const c10::KernelFunction* kernel = nullptr;  ///< looked up at the first run
    bool writes_lists = false;
  };

  struct prepared_step {
    std::vector<prepared_call> calls;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  ///< {from, to}, as bytes; undefined where not known yet
    std::vector<planned_block> blocks;
  };

  /// A place in an argument list for a tensor that is not in the arena.
  struct socket {
    std::size_t step = 0;
    std::size_t call = 0;
    operand at;  ///< argument and view; if the view is none: the source (`at.at == 0`) or target (1) of copy `call`
  };

  /// While it exists, allocations of the thread follow the plan.
  class active_placement {
   public:
    explicit active_placement(placement& p) : placement_(p) { placement_.start(); }
    ~active_placement() { placement_.stop(); }
    active_placement(const active_placement&) = delete;
    active_placement& operator=(const active_placement&) = delete;

   private:
    placement& placement_;
  };

  /// Where the tensor of a slot was when its sockets were filled. A change means that they must be filled again.
  struct place {
    const void* storage = nullptr;
    const void* data = nullptr;
    bytes_t offset = 0;
    bool operator==(const place&) const = default;
  };

  using random = std::shared_ptr<const random_state>;

  state(std::shared_ptr<const execution_plan> p, bindings b, device& d, far_memory f, const executor_options& o);
  ~state();
  void use_graphs();

  /// The tensor in the arena that takes the copy for slot `k`. Copies of inputs keep their alignment, not their offset.
  at::Tensor place_for(index_t k);

  /// Prepares all steps, and puts in all tensors that are known.
  void prepare_all();

  /// While it exists, a piece of the working memory belongs to this step.
  class computing {
   public:
    explicit computing(state& s) : in_(s) {
      if (s.data.working == 0) return;
      const auto last = s.last_piece.lock();
      s.piece = s.working->take(s.data.working, last);
      try {
        s.last_piece = s.piece;
        if (s.piece != last) s.prepare_all();
        s.on.enter(*s.piece->in);
        s.on.wait(s.piece->ended);
      } catch (...) {
        s.last_piece.reset();
        leave();
        throw;
      }
    }
    ~computing() {
      if (in_.piece == nullptr) return;
      try {
        in_.piece->ended = in_.on.mark();
      } catch (...) {  // every later call reports the failed device
      }
      leave();
    }
    computing(const computing&) = delete;
    computing& operator=(const computing&) = delete;

   private:
    void leave() { in_.working->give_back(*std::exchange(in_.piece, nullptr)); }
    state& in_;
  };

  /// Argument lists of step `i`, with all tensors that lie in the arena.
  prepared_step prepare(std::size_t i);

  void put_numbers(prepared_call& c) const {
    for (const auto& [at, which] : c.what->numbers) {
      const auto k = static_cast<std::size_t>(at);
      c.stack[k] = which < numbers.size() ? c10::IValue(numbers[which]) : c.what->arguments[k];
    }
  }
  bool in_arena(const location& l) const { return l.buffer != none && !data.buffers[l.buffer].outside; }
  /// Key of a location outside of the arena: its buffer, or else its value.
  static location outer(const location& l) { return l.buffer != none ? location{l.buffer, none} : l; }
  const std::shared_ptr<region>& region_of(index_t b) const { return data.buffers[b].working ? piece->in : memory; }
  char* address(index_t b) const { return region_of(b)->data() + data.buffers[b].offset; }

  c10::Storage storage_in_place(index_t b, c10::Device device);
  at::Tensor in_place(const location& l, index_t view);
  static at::Tensor bytes_of(const c10::Storage& s, bytes_t bytes) { return tensor_of({none, {bytes}, {1}, 0, at::kByte}, s); }
  at::Tensor copy_side(const location& l, std::size_t i, std::size_t k, int side);

  /// Puts tensors for an outside storage into all its sockets.
  /// @param whole  the tensor for views that are `whole`; undefined: make them from the storage
  /// @param shift  bytes by which views lie further on than captured
  void fill(const location& l, const c10::Storage& s, const at::Tensor& whole, int64_t shift);
  void put(const socket& x, const at::Tensor& t);
  void empty(const location& l);

  /// Takes other tensors of the module. Argument lists drop the old tensors, whose gradients may lie in the arena.
  void use(const bindings& now);
  /// Puts the tensor of slot `k` into its sockets, if the tensor or its memory has changed.
  void bind(index_t k);
  /// Drops all references to this storage until the next `bind`.
  void unbind(const c10::StorageImpl* s);

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);

  gradients backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums, const taker& take);

  /// Zeros that are neutral in additions: x + (-0.0) equals x bit by bit, for zeros of either sign too.
  static at::Tensor negative_zeros(const tensor_type& type);

  /// The receiver of the gradients that a backward gives.
  struct receiver {
    const taker& take;
    c10::impl::LocalDispatchKeySet keys;  ///< dispatch keys of the caller
    std::vector<at::Tensor> kept;         ///< gradients to return at the end, per parameter
  };
  static at::Tensor hand_over(std::size_t parameter, at::Tensor gradient, const receiver& to);

  /// Finds host memory for the gradients that leave: memory of an earlier step if it is no longer held, or else new memory.
  void find_home();
  at::Tensor at_home(std::size_t i);

  /// Waits until the gradient of parameter `i` is on the host and its weight has been fetched for the last time, then hands the
  /// gradient over. After that an optimizer may write the weight. The device continues with the backward meanwhile.
  /// @return the gradient if it is to be returned at the end
  at::Tensor arrived(std::size_t i, receiver& to);

  void set_input(index_t k, const at::Tensor& t);
  void take_gradient(std::size_t i, const at::Tensor& incoming);

  /// The tensor for a view that leaves the executor.
  at::Tensor kept(const location& l, index_t view);
  /// Memory of the arena as a storage that shares ownership of the arena.
  c10::Storage lend(const location& l);
  /// Moves memory of the arena that the caller still holds into memory of its own.
  void vacate();

  /// Lets outputs of one storage share a version counter, unless the storage is from outside.
  static void adopt_version_counter(const std::vector<at::Tensor>& outputs);

  /// Increments the versions of outside tensors that the step has written.
  void count_writes(int64_t written_tensor::*half);

  void begin_phase(std::size_t half);
  void go_to(const generator_origin& origin) const;

  void give(const early_gradient& g, receiver& to);
  /// Moves an early gradient into memory of its own if its receiver still holds it.
  void move_out(const early_gradient& g, const c10::Storage& storage);

  /// @param then moves after the last step
  void run(std::size_t first, std::size_t last, const std::vector<move_step>& then, receiver* whose = nullptr);
  /// End of the piece that begins with step `i`: the host need not act between its steps.
  std::size_t end_of_piece(std::size_t i, std::size_t last) const;
  /// True if the host must act before this step.
  /// @param drawn the last step of the piece that drew random numbers, or null
  bool starts_piece(const node_run& planned, const node_run* drawn) const;
  /// True if node `second` draws from the state in which node `first` ended.
  bool follows_draw(index_t first, index_t second) const;
  /// Issues steps [i, end), with the generator in the state in which step `i` starts to draw. After a recomputation it restores
  /// the generator.
  template <class F>
  void drawing(std::size_t i, std::size_t end, const F& give);
  void compute(std::size_t i);

  void make_moves(const std::vector<move_step>& list);
  void begin(index_t k);
  /// The current memory of the weight that a move fetches.
  block in_memory_of_caller(const planned_move& m) const;
  /// Decides which fetched weights leave the page cache.
  void look_at_homes();
  void wait_for(index_t k);
  /// The error `why`, with the name of the value of move `k`.
  copy_failed failure_of(index_t k, const copy_failed& why) const;
  /// Waits in the device for all moves that the capture has begun, because they must end within the capture.
  void join_moves();
  /// Makes later kernels wait for all copies that touch the arena.
  void let_moves_end();

  void execute(prepared_call& c, const placed_call& planned);

  void hold(const location& l, const c10::Storage& s);

  /// Ends a step whose forward has begun, except for `flying`.
  /// @return the error of a failed device, or null
  std::exception_ptr let_go();
  /// Ends the step, as the last action: another thread may then begin a step.
  struct landing {
    state& of;
    ~landing() { of.flying = false; }
  };

  std::shared_ptr<const execution_plan> plan;
  const execution_plan::data& data;
  const program& step;
  bindings slots;
  device& on;
  std::shared_ptr<region> memory;
  std::shared_ptr<working_memory> working;          ///< null: the plan has no zones
  std::shared_ptr<working_memory::piece> piece;     ///< taken from `working` while the step computes
  std::weak_ptr<working_memory::piece> last_piece;  ///< piece that the argument lists refer to
  /// An alias of `memory` for tensors that leave. Its count excludes finished copies, which may hold `memory` a while longer.
  std::shared_ptr<region> lent{std::make_shared<std::shared_ptr<region>>(memory), memory.get()};
  far_memory far;
  std::shared_ptr<region> beyond;             ///< reserved part of far memory
  std::vector<ticket> moving;                 ///< per move, in the current step
  bytes_t host_gradient_bytes = 0;            ///< bytes of the gradients that leave
  std::vector<bytes_t> home_offsets;          ///< per parameter
  std::vector<std::size_t> leaving;           ///< parameters whose gradients leave, in the order of their moves
  std::vector<std::vector<index_t>> fetches;  ///< per parameter whose gradient leaves: its fetches
  std::shared_ptr<tier> homes_in;
  std::vector<std::shared_ptr<region>> homes;
  std::shared_ptr<region> home;                    ///< memory for the gradients of this step
  std::map<index_t, at::Tensor> homes_of_weights;  ///< per fetched slot
  std::vector<index_t> fetched;                    ///< slots of the fetched weights, each once
  std::vector<bool> leaves;                        ///< per slot: its pages leave the page cache after each read
  std::atomic<double> waited = 0;                  ///< time of waits for moves, s; other threads read it, too
  ticket ended;                                    ///< end of the work given to the device so far
  std::unique_ptr<placement> allocations;
  std::vector<prepared_step> steps;
  std::map<location, std::vector<socket>> sockets;   ///< by `outer` location
  std::vector<place> places;                         ///< per slot
  std::vector<std::optional<c10::Storage>> outside;  ///< per buffer
  std::vector<random> before_draw, after_draw;       ///< per node: state around the draw of its first run
  random phases[2];
  repeatable_draws lone;
  std::vector<at::Tensor> given;                                    ///< per slot: copy of the caller's tensor; undefined: none
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> lent_out;  ///< with fixed addresses: storages the caller got
  std::optional<step_graphs> graphs;
  bool captured_moves = false;  ///< moves are part of the graphs
  std::vector<double> numbers;
  index_t running = none;               ///< node whose calls run
  std::vector<index_t> gradient_nodes;  ///< per parameter: the node that makes its gradient
  std::vector<c10::IValue> result;
  std::atomic<bool> flying = false;
  bool assumption_held = true;  ///< of the last forward
  std::atomic<std::size_t> gradients_still_held = 0;
  std::atomic<index_t> most_unplanned_at = none;  ///< see `largest_unplanned`
  std::atomic<bytes_t> most_unplanned_bytes = 0;
  std::map<index_t, std::optional<c10::Storage>> storages;    ///< cache during `prepare_all`
  std::map<std::pair<index_t, index_t>, at::Tensor> tensors;  ///< likewise, by buffer and view
};

}  // namespace remat::pytorch
