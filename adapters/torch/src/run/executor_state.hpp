// SPDX-License-Identifier: Apache-2.0
// What an executor is made of: argument lists over the arena, moves, and what leaves for the caller.
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
#include "lone_draws.hpp"

namespace remat::pytorch {

/// The executor of one module. `prepare.cpp` makes argument lists, `steps.cpp` runs forward and backward and hands over what
/// leaves the arena, `replay.cpp` runs the operations, `moves.cpp` copies values to and from far memory.
struct executor::state {
  /// A call ready to run.
  struct bound_call {
    const call* what = nullptr;
    std::vector<c10::IValue> stack;  ///< arguments; those from outside are put in when they are known
    c10::DispatchKeySet keys;
    const c10::KernelFunction* kernel = nullptr;  ///< looked up at the first run
    bool writes_lists = false;
  };

  struct bound_step {
    std::vector<bound_call> calls;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  ///< {from, to}, as bytes; undefined where not known yet
    std::vector<planned_block> blocks;
  };

  /// A place in an argument list for a tensor that is not in the arena.
  struct socket {
    std::size_t step = 0;
    std::size_t call = 0;
    operand at;  ///< its view; none: the source, and `at.at == 1` the target, of copy `call`
  };

  /// Allocations follow the plan while it is there.
  class active_placement {
   public:
    explicit active_placement(placement& p) : placement_(p) { placement_.start(); }
    ~active_placement() { placement_.stop(); }
    active_placement(const active_placement&) = delete;
    active_placement& operator=(const active_placement&) = delete;

   private:
    placement& placement_;
  };

  /// Where the tensor of a slot was when its sockets were filled.
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

  /// The tensor in the arena into which slot k is copied. Inputs keep their alignment, not their offset.
  at::Tensor place_for(index_t k);

  /// All argument lists, with the tensors that there are.
  void prepare_all();

  /// A piece of the working memory belongs to this step while it computes.
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
      } catch (...) {  // the device has failed, and says so to all
      }
      leave();
    }
    computing(const computing&) = delete;
    computing& operator=(const computing&) = delete;

   private:
    void leave() { in_.working->give_back(*std::exchange(in_.piece, nullptr)); }
    state& in_;
  };

  /// Argument lists of a step, with all tensors that lie in the arena.
  bound_step prepare(std::size_t i);

  void put_numbers(bound_call& c) const {
    for (const auto& [at, which] : c.what->numbers) {
      const auto k = static_cast<std::size_t>(at);
      c.stack[k] = which < numbers.size() ? c10::IValue(numbers[which]) : c.what->arguments[k];
    }
  }
  static bool left_out(const call& c, int argument);
  bool in_arena(const location& l) const { return l.buffer != none && !data.buffers[l.buffer].outside; }
  /// What is outside is told by its buffer, or else by its value.
  static location outer(const location& l) { return l.buffer != none ? location{l.buffer, none} : l; }
  const std::shared_ptr<region>& region_of(index_t b) const { return data.buffers[b].working ? piece->in : memory; }
  char* address(index_t b) const { return region_of(b)->data() + data.buffers[b].offset; }

  c10::Storage storage_in_place(index_t b, c10::Device device);
  at::Tensor in_place(const location& l, index_t view);
  static at::Tensor bytes_of(const c10::Storage& s, bytes_t bytes) { return tensor_of({none, {bytes}, {1}, 0, at::kByte}, s); }
  at::Tensor copy_side(const location& l, std::size_t i, std::size_t k, int side);

  /// Puts the tensors of an outside storage where they are read.
  /// @param whole  the tensor itself, for views that are `whole`; undefined: none has to be
  /// @param shift  bytes that views lie further on than captured
  void fill(const location& l, const c10::Storage& s, const at::Tensor& whole, int64_t shift);
  void put(const socket& x, const at::Tensor& t);
  void empty(const location& l);

  /// Other tensors from now on. Argument lists let go of those of before, whose gradients may lie in the arena.
  void use(const bindings& now);
  /// Puts the tensor of a slot where it is read, unless it is there: memory of parameters and buffers may have been replaced.
  void bind(index_t k);
  /// Nothing holds this storage until the next `bind`.
  void unbind(const c10::StorageImpl* s);

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);

  gradients backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums, const taker& take);

  /// What leaves every number that is added to it as it is, zeros of either sign included.
  static at::Tensor negative_zeros(const tensor_type& type);

  /// Who gets the gradients that a backward gives.
  struct receiver {
    const taker& take;
    c10::impl::LocalDispatchKeySet keys;  ///< with which the caller works
    std::vector<at::Tensor> kept;         ///< for the end
  };
  static at::Tensor hand_over(std::size_t parameter, at::Tensor gradient, const receiver& to);

  /// Memory of the host for the gradients that leave. That of an earlier step if nobody holds those any more.
  void find_home();
  at::Tensor at_home(std::size_t i);

  /// Hands over a gradient as soon as it is on the host and the weight has been fetched for the last time: an optimizer may write
  /// the weight. The device goes on with the backward meanwhile.
  /// @return what is left to be done with it
  at::Tensor arrived(std::size_t i, receiver& to);

  void set_input(index_t k, const at::Tensor& t);
  void take_gradient(std::size_t i, const at::Tensor& incoming);

  /// A tensor that leaves the executor.
  at::Tensor kept(const location& l, index_t view);
  /// Memory of the arena as a storage that owns it.
  c10::Storage lend(const location& l);
  /// What the caller still holds of the arena gets memory of its own.
  void vacate();
  static void move_to_own_memory(const c10::Storage& s);

  /// Outputs that lie in one storage, other than by way of what is outside, are of one version.
  static void share_version(const std::vector<at::Tensor>& outputs);

  /// What the step wrote of outside tensors shows in their versions.
  void count_writes(int64_t written_tensor::*half);

  void begin_phase(std::size_t half);
  void go_to(const generator_origin& origin) const;

  void give(const gift& g, receiver& to);
  /// A gift that somebody goes on to hold gets memory of its own.
  void move_out(const gift& g, const c10::Storage& storage);

  /// @param then moves behind the last step
  void run(std::size_t first, std::size_t last, const std::vector<move_step>& then, receiver* whose = nullptr);
  /// Steps that the host need not part, from step i on.
  std::size_t end_of_piece(std::size_t i, std::size_t last) const;
  /// The host has to act before this step.
  /// @param drawn the last step in the piece that has drawn; null: there is none
  bool starts_piece(const planned_step& planned, const planned_step* drawn) const;
  /// Node `second` draws where node `first` has ended.
  bool follows_draw(index_t first, index_t second) const;
  /// Gives steps [i, end) to the device, with the generator where step i starts to draw, and puts it back after a recomputation.
  template <class F>
  void drawing(std::size_t i, std::size_t end, const F& give);
  void compute(std::size_t i);

  void make_moves(const std::vector<move_step>& list);
  void begin(index_t k);
  /// Where the bytes that a move fetches are now.
  block in_memory_of_caller(const planned_move& m) const;
  /// Which of the weights that are fetched leave the cache of a disk.
  void look_at_homes();
  void wait_for(index_t k);
  /// Names what move k carries.
  copy_failed failure_of(index_t k, const copy_failed& why) const;
  /// What a capture has begun ends within it.
  void join_moves();
  /// Kernels from now on run when no copy touches the arena.
  void let_moves_end();

  void execute(bound_call& c, const placed_call& planned);

  void hold(const location& l, const c10::Storage& s);

  /// Ends a step whose forward has begun, but for what `flying` says.
  /// @return what a device says that has failed
  std::exception_ptr let_go();
  /// Last of all: from then on another thread may begin a step.
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
  std::shared_ptr<working_memory::piece> piece;     ///< of it, while the step computes
  std::weak_ptr<working_memory::piece> last_piece;  ///< for which the argument lists are
  /// The same for tensors that leave: copies that are done may hold `memory` for a while yet.
  std::shared_ptr<region> lent{std::make_shared<std::shared_ptr<region>>(memory), memory.get()};
  far_memory far;
  std::shared_ptr<region> beyond;             ///< in far memory
  std::vector<ticket> moving;                 ///< per move of the step in flight
  bytes_t home_bytes = 0;                     ///< of the gradients that leave
  std::vector<bytes_t> home_offsets;          ///< per parameter
  std::vector<std::size_t> leaving;           ///< parameters whose gradients leave, in that order
  std::vector<std::vector<index_t>> fetches;  ///< of the parameters whose gradients leave
  std::shared_ptr<tier> homes_in;
  std::vector<std::shared_ptr<region>> homes;
  std::shared_ptr<region> home;                    ///< that of this step
  std::map<index_t, at::Tensor> homes_of_weights;  ///< per slot that is fetched
  std::vector<index_t> fetched;                    ///< slots of the weights that are, each once
  std::vector<bool> leaves;                        ///< per slot: its pages leave the system's cache when they have been read
  std::atomic<double> waited = 0;                  ///< for moves, s; read by other threads, too
  ticket ended;                                    ///< what was last given to the device
  std::unique_ptr<placement> allocations;
  std::vector<bound_step> steps;
  std::map<location, std::vector<socket>> sockets;   ///< by `outer`
  std::vector<place> places;                         ///< per slot
  std::vector<std::optional<c10::Storage>> outside;  ///< per buffer
  std::vector<random> before_draw, after_draw;       ///< per node, of its first run
  random phases[2];
  lone_draws lone;
  std::vector<at::Tensor> given;  ///< per slot: what the caller gives is copied there; undefined: it is not
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> lent_out;  ///< what the caller got of the arena, with fixed addresses
  std::optional<step_graphs> graphs;
  bool captured_moves = false;  ///< moves are part of the graphs
  std::vector<double> numbers;
  std::vector<c10::IValue> result;
  std::atomic<bool> flying = false;
  bool assumption_held = true;  ///< in the last forward
  std::atomic<std::size_t> held_gifts = 0;
  std::map<index_t, std::optional<c10::Storage>> storages;    ///< while the steps are prepared
  std::map<std::pair<index_t, index_t>, at::Tensor> tensors;  ///< the same: by buffer and view
};

}  // namespace remat::pytorch
