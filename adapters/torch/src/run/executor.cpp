// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>

#include <remat/pytorch/executor.hpp>

#include "../capture/operators.hpp"
#include "../clock.hpp"
#include "../device/home.hpp"
#include "../plan/memory_plan.hpp"
#include "../program/views.hpp"
#include "captured.hpp"
#include "lone_draws.hpp"

namespace remat::pytorch {
namespace {

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

}  // namespace

struct executor::state {
  using random = std::shared_ptr<const random_state>;

  state(std::shared_ptr<const execution_plan> p, bindings b, device& d, far_memory f, const executor_options& o)
      : plan(std::move(p)),
        data(plan->get()),
        step(*data.step),
        slots(std::move(b)),
        on(d),
        memory(o.arena && o.arena->bytes() >= data.arena ? o.arena : on.memory().reserve(data.arena)),
        working(o.working),
        far(std::move(f)),
        allocations(on.place()),
        lone(on.which(), step.nodes.size()) {
    if (&slots.step() != &step) throw broken_contract("remat: an executor got tensors for another program");
    bool others = false;
    for (const auto& m : data.moves)
      if (m.slot == none)
        others = true;
      else if (std::find(fetched.begin(), fetched.end(), m.slot) == fetched.end())
        fetched.push_back(m.slot);
    if (data.working > 0 && !working) throw broken_contract("remat: a plan in zones, and no working memory");
    if (others && (!far.memory || !far.out || !far.in)) throw broken_contract("remat: a plan with copies, and no far memory");
    if (!fetched.empty() && !far.in) throw broken_contract("remat: a plan that fetches weights, and no link");
    home_offsets.resize(data.leaves.size());
    for (std::size_t i = 0; i < data.leaves.size(); ++i) {
      if (data.leaves[i] == none) continue;
      home_offsets[i] = home_bytes;
      home_bytes += allocated_bytes(on.which(), data.moves[data.leaves[i]].bytes);  // addresses as the device wants them
      leaving.push_back(i);
    }
    std::sort(leaving.begin(), leaving.end(), [&](auto x, auto y) { return data.leaves[x] < data.leaves[y]; });
    if (!leaving.empty())  // in memory that the caller can read, whatever other values go to
      homes_in = far.out->joins_graphs_of(on.which()) ? far.memory : on_host(on.which()).memory;
    fetches.resize(step.parameters.size());
    for (index_t k = 0; k < data.moves.size(); ++k)
      for (auto i : leaving)
        if (data.moves[k].slot == step.parameters[i]) fetches[i].push_back(k);
    if (data.far > 0) beyond = far.memory->reserve(data.far);
    moving.resize(data.moves.size());
    const c10::DeviceGuard guard(on.which());
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    outside.resize(data.buffers.size());
    before_draw.resize(step.nodes.size());
    after_draw.resize(step.nodes.size());
    result.reserve(16);
    if (data.working == 0) prepare_all();  // otherwise when it is known where that lies
    if (o.graphs) use_graphs();
  }
  ~state() {
    if (!graphs || !beyond || !ended) return;
    try {
      ended->wait();                   // copies of graphs hold no memory
    } catch (const std::exception&) {  // nobody needs them any more
    }
  }
  void use_graphs() {
    graphs.emplace(on, data.steps.size(), step.slots.size());
    if (data.copied.empty())
      graphs->refuse(data.moving_because.empty() ? "it was planned without fixed addresses" : data.moving_because);
    else if (const auto why = on.cannot_capture(); !why.empty())
      graphs->refuse(why);
    const auto joins = [&](const auto& way) { return way && way->joins_graphs_of(on.which()); };
    captured_moves = graphs->why_not().empty() && fetched.empty() && joins(far.out) && joins(far.in);
  }

  /// The tensor in the arena into which slot k is copied. Inputs keep their alignment, not their offset.
  at::Tensor place_for(index_t k) {
    const auto& s = step.slots[k];
    const auto first = s.from == role::input ? s.offset % accelerator_alignment : s.offset;
    return tensor_of({none, s.type.sizes, s.type.strides, first, s.type.dtype, s.type.conj, s.type.neg},
                     storage_in_place(data.copied[k], s.type.device));
  }

  /// All argument lists, with the tensors that there are.
  void prepare_all() {
    steps.clear();
    sockets.clear();
    places.assign(step.slots.size(), {});
    given.assign(step.slots.size(), {});
    for (std::size_t i = 0; i < data.steps.size(); ++i) steps.push_back(prepare(i));
    for (index_t k = 0; k < data.copied.size(); ++k)
      if (data.copied[k] != none) given[k] = place_for(k);
    for (index_t k = 0; k < step.slots.size(); ++k) bind(k);
    for (index_t b = 0; b < outside.size(); ++b)
      if (outside[b]) fill({b, none}, *outside[b], {}, 0);
    storages.clear();
    tensors.clear();
  }

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
  bound_step prepare(std::size_t i) {
    const auto& planned = data.steps[i];
    bound_step s;
    for (std::size_t k = 0; k < planned.copies.size(); ++k) {
      const auto& [from, to] = planned.copies[k];
      s.copies.push_back({copy_side(from, i, k, 0), copy_side(to, i, k, 1)});
    }
    for (std::size_t k = 0; k < planned.calls.size(); ++k) {
      const auto& c = planned.calls[k];
      std::size_t next = 0;
      bound_call b{c.what, {}, {}, nullptr, facts(c.what->op).writes_lists};
      for (const auto& o : c.what->operands) {
        const auto& l = c.operands[next++];
        if (planned.again && left_out(*c.what, o.at)) continue;
        if (!in_arena(l)) sockets[outer(l)].push_back({i, k, o});
      }
      next = 0;
      std::map<index_t, location> at;
      for (const auto& o : c.what->operands) at[o.view] = c.operands[next++];
      b.stack = stack_of(*c.what, planned.again, [&](index_t v) { return in_arena(at[v]) ? in_place(at[v], v) : at::Tensor(); });
      s.calls.push_back(std::move(b));
    }
    for (std::size_t k = 0; k < planned.blocks.size(); ++k) {
      const auto& block = data.scripts[i].blocks[k];
      const auto b = planned.blocks[k];
      s.blocks.push_back(
          {block.bytes, block.deaths, b == none || data.buffers[b].outside ? nullptr : address(b), block.freed >= 0});
    }
    return s;
  }

  static bool left_out(const call& c, int argument) {
    return std::find(c.first_run_only.begin(), c.first_run_only.end(), argument) != c.first_run_only.end();
  }
  bool in_arena(const location& l) const { return l.buffer != none && !data.buffers[l.buffer].outside; }
  /// What is outside is told by its buffer, or else by its value.
  static location outer(const location& l) { return l.buffer != none ? location{l.buffer, none} : l; }
  const std::shared_ptr<region>& region_of(index_t b) const { return data.buffers[b].working ? piece->in : memory; }
  char* address(index_t b) const { return region_of(b)->data() + data.buffers[b].offset; }

  c10::Storage storage_in_place(index_t b, c10::Device device) {
    auto& s = storages[b];
    if (!s)
      s = c10::Storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(data.buffers[b].bytes),
                       c10::DataPtr(address(b), device), nullptr, false);
    return *s;
  }
  at::Tensor in_place(const location& l, index_t view) {
    auto& t = tensors[{l.buffer, view}];
    if (!t.defined()) t = tensor_of(step.views[view], storage_in_place(l.buffer, step.values[l.value].device));
    return t;
  }
  static at::Tensor bytes_of(const c10::Storage& s, bytes_t bytes) { return tensor_of({none, {bytes}, {1}, 0, at::kByte}, s); }
  at::Tensor copy_side(const location& l, std::size_t i, std::size_t k, int side) {
    if (in_arena(l)) return bytes_of(storage_in_place(l.buffer, step.values[l.value].device), data.buffers[l.buffer].bytes);
    sockets[outer(l)].push_back({i, k, {side, -1, none}});
    return {};
  }

  /// Puts the tensors of an outside storage where they are read.
  /// @param whole  the tensor itself, for views that are `whole`; undefined: none has to be
  /// @param shift  bytes that views lie further on than captured
  void fill(const location& l, const c10::Storage& s, const at::Tensor& whole, int64_t shift) {
    const auto found = sockets.find(outer(l));
    if (found == sockets.end()) return;
    std::map<index_t, at::Tensor> made;
    for (const auto& x : found->second) {
      if (x.at.view == none) {
        const auto bytes = l.buffer != none ? data.buffers[l.buffer].bytes : step.values[l.value].bytes;
        auto& copy = steps[x.step].copies[x.call];
        (x.at.at == 0 ? copy.first : copy.second) = bytes_of(s, bytes);
        continue;
      }
      auto& t = made[x.at.view];
      const auto& v = step.views[x.at.view];
      if (!t.defined()) t = v.whole && whole.defined() ? whole : tensor_of(v, s, shift);
      put(x, t);
    }
  }
  void put(const socket& x, const at::Tensor& t) {
    auto& argument = steps[x.step].calls[x.call].stack[static_cast<std::size_t>(x.at.at)];
    if (x.at.element < 0)
      argument = t;
    else
      argument.toList().set(static_cast<std::size_t>(x.at.element), c10::IValue(t));
  }
  void empty(const location& l) {
    const auto found = sockets.find(outer(l));
    if (found == sockets.end()) return;
    for (const auto& x : found->second)
      if (x.at.view != none)
        put(x, {});
      else
        (x.at.at == 0 ? steps[x.step].copies[x.call].first : steps[x.step].copies[x.call].second) = at::Tensor();
  }

  static int64_t byte_offset(const at::Tensor& t) { return t.storage_offset() * static_cast<int64_t>(t.itemsize()); }

  /// Puts the tensor of a slot where it is read, unless it is there: memory of parameters and buffers may have been replaced.
  void bind(index_t k) {
    const auto& slot = step.slots[k];
    const auto& t = slots[k];
    if (!t.defined() || step.values[slot.value].slot != k) return;  // the first slot of a storage stands for all
    const place now{t.storage().unsafeGetStorageImpl(), t.storage().data(), byte_offset(t)};
    if (places[k] == now) return;
    if (graphs) graphs->reads(k, static_cast<const char*>(now.data) + now.offset);
    fill({none, slot.value}, t.storage(), t, now.offset - slot.offset);
    if (step.is_given(slot.value) && slot.from != role::input && slot.from != role::gradient) places[k] = now;
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(!flying, "remat: forward of an executor with a step in flight");
    if (!allocations->in_front())
      throw plan_broken("remat: another allocator of " + on.memory().name() +
                        " memory was installed after remat's; nothing would lie where it was planned");
    const c10::DeviceGuard guard(on.which());
    on.enter(*memory);
    vacate();
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const computing now(*this);
    flying = true;
    try {
      for (index_t k = 0; k < step.slots.size(); ++k) {
        if (step.slots[k].from == role::input) set_input(k, inputs.at(step.slots[k].position));
        bind(k);
      }
      look_at_homes();
      begin_phase(0);
      run(0, data.loss, data.after_forward);
      go_to(step.after_forward);
      std::vector<at::Tensor> outputs;
      for (std::size_t i = 0; i < step.outputs.size(); ++i) {
        outputs.push_back(kept(data.outputs[i], step.outputs[i]));
        if (data.outputs[i].buffer != none) {
          auto counter = ::torch::autograd::impl::version_counter(outputs[i]);
          counter.set_version(step.output_versions[i]);
        }
        share_version(outputs);
      }
      count_writes(&written_tensor::forward);
      ended = on.mark();
      return outputs;
    } catch (...) {
      reset();
      throw;
    }
  }

  gradients backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums, const taker& take) {
    if (!flying) throw broken_contract("remat: backward without a forward");
    const c10::DeviceGuard guard(on.which());
    receiver gets{take, c10::impl::tls_local_dispatch_key_set(), std::vector<at::Tensor>(step.parameter_grads.size())};
    held_gifts = 0;
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    gradients g;
    std::optional<computing> now;
    try {
      now.emplace(*this);
      on.enter(*memory);
      on.wait(ended);
      for (std::size_t i = 0; i < step.outputs.size(); ++i)
        if (step.output_grads[i] != none) take_gradient(i, output_grads.at(i));
      for (std::size_t i = 0; i < data.sums.size(); ++i) {
        const auto k = data.sums[i];
        slots.set(k, i < sums.size() && sums[i].defined() ? sums[i].detach() : negative_zeros(step.slots[k].type));
        bind(k);
      }
      find_home();
      begin_phase(1);
      run(data.loss, data.steps.size(), data.after_backward, &gets);
      go_to(step.after_backward);
      count_writes(&written_tensor::backward);
      for (auto i : leaving) gets.kept[i] = arrived(i, gets);
      for (std::size_t i = 0; i < step.parameter_grads.size(); ++i) {
        if (data.given[i] || data.leaves[i] != none) {
          g.parameters.push_back(std::move(gets.kept[i]));
          continue;
        }
        if (!data.sums.empty()) {
          const bool added = i < sums.size() && sums[i].defined();
          g.parameters.push_back(added ? at::Tensor() : slots[data.sums[i]]);
          if (added) sums[i].unsafeGetTensorImpl()->bump_version();
          continue;
        }
        auto t = kept(data.parameter_grads[i], step.parameter_grads[i]);
        g.parameters.push_back(data.copy_grad[i] ? t.clone() : t);
      }
      for (std::size_t i = 0; i < step.input_grads.size(); ++i)
        g.inputs.push_back(step.input_grads[i] == none ? at::Tensor() : kept(data.input_grads[i], step.input_grads[i]));
    } catch (...) {
      reset();
      throw;
    }
    if (const auto failed = reset()) std::rethrow_exception(failed);
    return g;
  }

  /// What leaves every number that is added to it as it is, zeros of either sign included.
  static at::Tensor negative_zeros(const tensor_type& type) {
    auto t = at::empty_strided(type.sizes, type.strides, at::TensorOptions().dtype(type.dtype).device(type.device));
    return t.is_complex() ? t.fill_(c10::complex<double>(-0.0, -0.0)) : t.fill_(-0.0);
  }

  /// Who gets the gradients that a backward gives.
  struct receiver {
    const taker& take;
    c10::impl::LocalDispatchKeySet keys;  ///< with which the caller works
    std::vector<at::Tensor> kept;         ///< for the end
  };
  static at::Tensor hand_over(std::size_t parameter, at::Tensor gradient, const receiver& to) {
    if (!to.take) return gradient;
    const c10::impl::ForceDispatchKeyGuard as_the_caller(to.keys);
    return to.take(parameter, std::move(gradient));
  }

  /// Memory of the host for the gradients that leave. That of an earlier step if nobody holds those any more.
  void find_home() {
    if (home_bytes == 0) return;
    const auto idle = std::find_if(homes.begin(), homes.end(), [](const auto& r) { return r.use_count() == 1; });
    home = idle != homes.end() ? *idle : homes.emplace_back(homes_in->reserve(home_bytes));
  }
  at::Tensor at_home(std::size_t i) {
    const auto& view = step.views[step.parameter_grads[i]];
    return tensor_of(view, storage_in(home, home_offsets[i], step.values[view.value].bytes));
  }

  /// Hands over a gradient as soon as it is on the host and the weight has been fetched for the last time: an optimizer may write
  /// the weight. The device goes on with the backward meanwhile.
  /// @return what is left to be done with it
  at::Tensor arrived(std::size_t i, receiver& to) {
    try {
      moving[data.leaves[i]]->wait();
    } catch (const copy_failed& why) {
      throw failure_of(data.leaves[i], why);
    }
    for (auto k : fetches[i])
      if (moving[k]) moving[k]->wait();
    return hand_over(i, at_home(i), to);
  }

  void set_input(index_t k, const at::Tensor& t) {
    if (given[k].defined()) given[k].copy_(t);
    slots.set(k, given[k].defined() ? given[k] : t);
  }
  void take_gradient(std::size_t i, const at::Tensor& incoming) {
    const auto& view = step.views[step.output_grads[i]];
    const auto k = step.values[view.value].slot;
    auto t = incoming;
    const bool fits = t.defined() && !given[k].defined() && t.dtype() == view.dtype && t.sizes() == at::IntArrayRef(view.sizes) &&
                      same_strides(t.sizes(), t.strides(), view.strides) && t.is_conj() == view.conj && t.is_neg() == view.neg &&
                      t.storage_offset() == view.offset;
    if (!fits) {
      contiguous += t.defined() && !given[k].defined();
      const auto options = at::TensorOptions().dtype(view.dtype).device(step.values[view.value].device);
      const auto copy = given[k].defined() ? given[k] : at::empty_strided(view.sizes, view.strides, options);
      const auto written = first_of_expanded(copy, view.strides);
      t.defined() ? written.copy_(first_of_expanded(t, view.strides)) : written.zero_();
      t = copy;
    }
    t = t.detach();
    slots.set(k, t);
    bind(k);
  }

  /// A tensor that leaves the executor.
  at::Tensor kept(const location& l, index_t view) {
    const auto& v = step.views[view];
    if (l.buffer == none) {
      const auto k = step.values[l.value].slot;
      if (step.slots[k].from == role::constant)  // a new one each time, as in eager mode: it may be written
        return tensor_of(v, byte_tensor(step.constants[step.slots[k].position]).to(step.slots[k].type.device).storage());
      const auto& source = slots[k];
      auto t = v.whole ? source.detach() : tensor_of(v, source.storage(), byte_offset(source) - step.slots[k].offset);
      ::torch::autograd::impl::set_version_counter(t, ::torch::autograd::impl::version_counter(source));
      return t;
    }
    if (!data.buffers[l.buffer].kept) return tensor_of(v, lend(l), 0);
    if (!outside[l.buffer]) outside[l.buffer] = lend(l);
    return tensor_of(v, *outside[l.buffer]);
  }
  /// Memory of the arena as a storage that owns it.
  c10::Storage lend(const location& l) {
    const auto& b = data.buffers[l.buffer];
    auto s = storage_in(b.working ? piece->in : lent, b.offset, b.bytes);
    if (!data.copied.empty()) lent_out.push_back(s.getWeakStorageImpl());
    return s;
  }
  /// What the caller still holds of the arena gets memory of its own.
  void vacate() {
    if (lent_out.empty()) return;
    const c10::DeviceGuard guard(on.which());
    on.enter(*memory);
    on.wait(ended);  // on whatever stream it was
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& weak : std::exchange(lent_out, {}))
      if (const auto held = weak.lock(); held) move_to_own_memory(c10::Storage(held));
  }
  static void move_to_own_memory(const c10::Storage& s) {
    const auto bytes = static_cast<bytes_t>(s.nbytes());
    const auto own = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(s.device()));
    own.copy_(bytes_of(s, bytes));
    s.unsafeGetStorageImpl()->swap_data_ptr(*own.storage().unsafeGetStorageImpl());
  }

  /// Outputs that lie in one storage, other than by way of what is outside, are of one version.
  static void share_version(const std::vector<at::Tensor>& outputs) {
    const auto& last = outputs.back();
    for (std::size_t i = 0; i + 1 < outputs.size(); ++i)
      if (outputs[i].is_alias_of(last))
        return ::torch::autograd::impl::set_version_counter(last, ::torch::autograd::impl::version_counter(outputs[i]));
  }

  /// What the step wrote of outside tensors shows in their versions.
  void count_writes(int64_t written_tensor::*half) {
    for (const auto& w : step.written) {
      for (int64_t k = 0; k < w.*half; ++k) slots[w.slot].unsafeGetTensorImpl()->bump_version();
    }
  }

  void begin_phase(std::size_t half) {
    if (data.saves_phase[half]) phases[half] = on.random();
  }
  void go_to(const generator_origin& origin) const {
    switch (origin.from) {
      case generator_origin::next:
        return;
      case generator_origin::before:
        return on.random(*before_draw[origin.node]);
      case generator_origin::after:
        return on.random(*after_draw[origin.node]);
      case generator_origin::forward:
        return on.random(*phases[0]);
      case generator_origin::backward:
        return on.random(*phases[1]);
      case generator_origin::fixed:
        at::Generator(at::globalContext().defaultGenerator(on.which())).set_state(byte_tensor(origin.state));
    }
  }

  void give(const gift& g, receiver& to) {
    auto t = kept(g.at, step.parameter_grads[g.parameter]);
    if (g.copy) t = t.clone();
    const auto storage = t.storage();
    try {
      to.kept[g.parameter] = hand_over(g.parameter, std::move(t), to);
    } catch (...) {  // it may be held all the same
      move_out(g, storage);
      throw;
    }
    t.reset();
    move_out(g, storage);
  }
  /// A gift that somebody goes on to hold gets memory of its own.
  void move_out(const gift& g, const c10::Storage& storage) {
    if (storage.use_count() == 1) return;
    ++held_gifts;
    if (!g.copy) move_to_own_memory(storage);
  }

  /// @param then moves behind the last step
  void run(std::size_t first, std::size_t last, const std::vector<move_step>& then, receiver* whose = nullptr) {
    if (graphs) graphs->begin(first == 0 ? 0 : 1);
    for (std::size_t i = first; i < last;) {
      const auto end = graphs ? end_of_piece(i, last) : i + 1;
      if (!captured_moves) make_moves(data.steps[i].moves);
      const auto work = [&] {
        for (auto k = i; k < end; ++k) compute(k);
        if (captured_moves && end == last) make_moves(then);
        if (graphs && graphs->capturing()) join_moves();
      };
      drawing(i, end, [&] { graphs ? graphs->run(i, work) : work(); });
      const auto& planned = data.steps[end - 1];
      if (step.nodes[planned.node].random && !planned.again && data.saves[planned.node].after)
        after_draw[planned.node] = on.random();
      for (const auto& g : planned.gifts) give(g, *whose);
      i = end;
    }
    if (!captured_moves || first == last) make_moves(then);
  }
  /// Steps that the host need not part, from step i on.
  std::size_t end_of_piece(std::size_t i, std::size_t last) const {
    const planned_step* drawn = nullptr;
    for (auto k = i; k < last; ++k) {
      const auto& planned = data.steps[k];
      if (k > i && starts_piece(planned, drawn)) return k;
      if (step.nodes[planned.node].random) drawn = &planned;
      if (!planned.gifts.empty() || (drawn == &planned && !planned.again && data.saves[planned.node].after)) return k + 1;
    }
    return last;
  }
  /// The host has to act before this step.
  /// @param drawn the last step in the piece that has drawn; null: there is none
  bool starts_piece(const planned_step& planned, const planned_step* drawn) const {
    if (!captured_moves && !planned.moves.empty()) return true;
    const auto& node = step.nodes[planned.node];
    if (!node.random) return false;
    if (planned.again) return drawn == nullptr || !drawn->again || !follows_draw(drawn->node, planned.node);
    return (drawn != nullptr && drawn->again) || node.starts.from != generator_origin::next || data.saves[planned.node].before;
  }
  /// Node `second` draws where node `first` has ended.
  bool follows_draw(index_t first, index_t second) const {
    if (first >= second || step.nodes[second].starts.from != generator_origin::next) return false;
    if (first < step.loss && step.loss < second) return false;  // the caller may draw in between
    for (auto n = first + 1; n < second; ++n)
      if (step.nodes[n].random) return false;
    return true;
  }
  /// Gives steps [i, end) to the device, with the generator where step i starts to draw, and puts it back after a recomputation.
  template <class F>
  void drawing(std::size_t i, std::size_t end, const F& give) {
    const auto& planned = data.steps[i];
    const auto which = planned.node;
    const auto& node = step.nodes[which];
    if (!node.random) return give();
    const bool saved = data.saves[which].before;
    const auto start = [&] {
      if (planned.again) return on.random(*before_draw[which]);
      go_to(node.starts);
      if (saved) before_draw[which] = on.random();
    };
    const bool repeatable = !graphs && node.overwrites.empty();
    if (planned.again && lone.knows(which)) return lone.again(node, which, start, give, repeatable);
    if (!planned.again && saved && end == i + 1 && lone.possible()) return lone.first(node, which, start, give, repeatable);
    struct restored {
      device& on;
      random state;
      ~restored() {
        if (state) on.random(*state);
      }
    } const later{on, planned.again ? on.random() : nullptr};
    start();
    give();
  }
  void compute(std::size_t i) {
    const auto& planned = data.steps[i];
    const auto& node = step.nodes[planned.node];
    auto& s = steps[i];
    if (graphs) graphs->at(node.name);
    if (captured_moves) make_moves(planned.moves);
    for (std::size_t k = 0; k < planned.copies.size(); ++k) {
      const auto& to = planned.copies[k].second;
      if (!in_arena(to)) {
        const auto& value = step.values[to.value];
        auto fresh = at::empty({value.bytes}, at::TensorOptions().dtype(at::kByte).device(value.device));
        hold(to, fresh.storage());
      }
      s.copies[k].second.copy_(s.copies[k].first);
    }
    allocations->plan(s.blocks);
    for (std::size_t k = 0; k < s.calls.size(); ++k) execute(s.calls[k], planned.calls[k]);
    if (!allocations->finished())
      throw plan_broken("remat: " + node.name + " (node " + std::to_string(planned.node) +
                        ") did not give back memory as it did when it was measured; what it keeps would be overwritten");
  }

  void make_moves(const std::vector<move_step>& list) {
    for (const auto& [k, wait] : list) wait ? wait_for(k) : begin(k);
  }
  void begin(index_t k) {
    const auto& m = data.moves[k];
    std::vector<ticket> after{on.mark()};
    for (auto other : m.after) after.push_back(moving[other]);
    const block here{region_of(m.buffer), data.buffers[m.buffer].offset, m.bytes}, there{beyond, m.far, m.bytes};
    if (m.gradient != none) {
      moving[k] = far.out->copy({home, home_offsets[m.gradient], m.bytes}, here, std::move(after));
    } else if (m.slot != none)
      moving[k] = far.in->copy(here, in_memory_of_caller(m), std::move(after));
    else
      moving[k] = m.brings == none ? far.out->copy(there, here, std::move(after)) : far.in->copy(here, there, std::move(after));
  }
  /// Where the bytes that a move fetches are now.
  block in_memory_of_caller(const planned_move& m) const {
    const auto& t = homes_of_weights.at(m.slot);
    return home_of(t, byte_offset(t) - step.slots[m.slot].offset, m.bytes, leaves[m.slot] && !m.before_its_step);
  }
  /// Which of the weights that are fetched leave the cache of a disk.
  void look_at_homes() {
    if (fetched.empty()) return;
    std::vector<at::Tensor> read;
    for (auto k : fetched) {
      auto& t = homes_of_weights[k];  // the tensor itself may be in disguise when its memory is read
      if (!t.defined() || !t.is_alias_of(slots[k])) t = slots[k].detach();
      read.push_back(t);
    }
    const auto leave = let_go_of(read);
    leaves.assign(step.slots.size(), false);
    for (std::size_t i = 0; i < fetched.size(); ++i) leaves[fetched[i]] = leave[i];
  }
  void wait_for(index_t k) {
    if (graphs && graphs->capturing()) return on.wait(moving[k]);
    if (!moving[k]) return;  // part of a graph that has been replayed
    const auto begin = clock::now();
    const bool late = !moving[k]->reached();
    try {
      on.wait(moving[k]);
    } catch (const copy_failed& why) {
      throw failure_of(k, why);
    }
    if (late) waited += since(begin);
  }
  /// Names what move k carries.
  copy_failed failure_of(index_t k, const copy_failed& why) const {
    const auto& m = data.moves[k];
    const auto& v = step.values[m.value];
    const auto what = m.gradient != none ? "gradient of parameter " + step.slots[step.parameters[m.gradient]].name
                                         : "value " + (v.name.empty() ? std::to_string(m.value) : v.name);
    return copy_failed("remat: " + what + " of " + std::to_string(v.bytes) + " bytes: " + why.what());
  }
  /// What a capture has begun ends within it.
  void join_moves() {
    for (auto& t : moving) on.wait(std::exchange(t, nullptr));
  }
  /// Kernels from now on run when no copy touches the arena.
  void let_moves_end() {
    for (auto& t : moving) {
      try {
        on.wait(t);
      } catch (...) {  // nobody needs it any more
      }
      t = nullptr;
    }
  }

  void execute(bound_call& c, const placed_call& planned) {
    result = c.stack;
    if (c.writes_lists)
      for (auto& argument : result)
        if (argument.isList()) argument = c10::IValue(argument.toList().copy());
    if (c.kernel == nullptr) {
      c.keys = c.what->op.dispatchKeyExtractor().getDispatchKeySetBoxed(&result);
      c.kernel = &c.what->op.lookup(c.keys);
    }
    {
      at::AutoGradMode grad_mode(c.what->grad_mode);
      const active_placement on_plan(*allocations);
      c.kernel->callBoxed(c.what->op, c.keys, &result);
    }
    for (std::size_t k = 0; k < planned.results.size(); ++k) {
      const auto& r = c.what->results[k];
      const auto& l = planned.results[k];
      const auto t = result_of(result, r);
      if (!in_arena(l)) {
        hold(l, t.storage());
      } else if (data.buffers[l.buffer].bytes > 0 && t.storage().data() != address(l.buffer)) {  // unplanned
        const auto device = t.device();
        tensor_of(step.views[r.view], storage_in_place(l.buffer, device), 0).copy_(t);
        storages.erase(l.buffer);
      }
    }
    result.clear();
  }

  void hold(const location& l, const c10::Storage& s) {
    outside[l.buffer] = s;
    fill(l, s, {}, 0);
  }

  /// @return what a device says that has failed
  std::exception_ptr reset() {
    const c10::DeviceGuard guard(on.which());
    let_moves_end();
    for (std::size_t b = 0; b < outside.size(); ++b) outside[b].reset();
    slots.clear_step();
    for (const auto& [l, list] : sockets)
      if (l.buffer != none || !slots[step.values[l.value].slot].defined()) empty(l);
    std::exception_ptr failed;
    home = nullptr;
    ended = nullptr;
    try {
      ended = on.mark();
    } catch (...) {
      failed = std::current_exception();
    }
    flying = false;  // from here on another thread may begin a step
    return failed;
  }

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
  std::vector<c10::IValue> result;
  std::atomic<bool> flying = false;
  std::size_t contiguous = 0;
  std::atomic<std::size_t> held_gifts = 0;
  std::map<index_t, std::optional<c10::Storage>> storages;    ///< while the steps are prepared
  std::map<std::pair<index_t, index_t>, at::Tensor> tensors;  ///< the same: by buffer and view
};

std::shared_ptr<working_memory::piece> working_memory::take(bytes_t bytes, const std::shared_ptr<piece>& last) {
  std::lock_guard lock(mutex_);
  const auto take = [](const auto& p) {
    p->busy = true;
    return p;
  };
  const auto idle = [&](const auto& p) { return !p->busy; };
  if (last && idle(last) && std::find(pieces_.begin(), pieces_.end(), last) != pieces_.end()) return take(last);
  for (const auto& p : pieces_)
    if (idle(p) && p->in->bytes() >= bytes) return take(p);
  if (const auto small = std::find_if(pieces_.begin(), pieces_.end(), idle); small != pieces_.end()) pieces_.erase(small);
  return take(pieces_.emplace_back(std::make_shared<piece>(piece{of_.reserve(bytes)})));
}
void working_memory::give_back(piece& p) {
  std::lock_guard lock(mutex_);
  p.busy = false;
}
template <class F>
bytes_t working_memory::sum(F of) const {
  std::lock_guard lock(mutex_);
  bytes_t bytes = 0;
  for (const auto& p : pieces_) bytes = of(bytes, *p);
  return bytes;
}
bytes_t working_memory::bytes() const {
  return sum([](bytes_t all, const piece& p) { return all + p.in->bytes(); });
}
bytes_t working_memory::idle() const {
  return sum([](bytes_t most, const piece& p) { return p.busy ? most : std::max(most, p.in->bytes()); });
}
void working_memory::release() {
  std::lock_guard lock(mutex_);
  std::erase_if(pieces_, [](const auto& p) { return !p->busy; });
}

executor::executor(std::shared_ptr<const execution_plan> plan, bindings tensors, device& on, far_memory far,
                   const executor_options& o)
    : state_(std::make_unique<state>(std::move(plan), std::move(tensors), on, std::move(far), o)) {}
executor::~executor() = default;
std::vector<at::Tensor> executor::forward(const std::vector<at::Tensor>& inputs) { return state_->forward(inputs); }
executor::gradients executor::backward(const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& sums,
                                       const taker& take) {
  return state_->backward(output_grads, sums, take);
}
void executor::use(const bindings& tensors) {
  if (state_->flying || &tensors.step() != &state_->step)
    throw broken_contract("remat: an executor got tensors during a step, or those for another program");
  state_->slots = tensors;
}
void executor::reset() { state_->reset(); }
bool executor::in_flight() const { return state_->flying; }
bool executor::arena_in_use() const { return state_->lent.use_count() > 1; }
void executor::vacate() { state_->vacate(); }
std::string executor::not_captured() const { return state_->graphs ? state_->graphs->why_not() : ""; }
void executor::leave_gradients_only() {
  std::vector<std::pair<bytes_t, bytes_t>> kept;
  const auto& data = state_->data;
  for (std::size_t i = 0; i < data.parameter_grads.size(); ++i)
    if (const auto& l = data.parameter_grads[i]; !data.copy_grad[i] && l.buffer != none)
      kept.emplace_back(data.buffers[l.buffer].offset, data.buffers[l.buffer].bytes);
  state_->memory->discard_except(std::move(kept));
}
bool executor::owns(const at::Tensor& t) const {
  const auto* data = static_cast<const char*>(t.storage().data());
  const auto& m = *state_->memory;
  return m.data() <= data && data < m.data() + m.bytes();
}
const std::shared_ptr<region>& executor::memory() const { return state_->lent; }
const std::shared_ptr<region>& executor::arena() const { return state_->memory; }
const execution_plan& executor::plan() const { return *state_->plan; }
std::size_t executor::unplanned() const { return state_->allocations->unplanned(); }
bytes_t executor::unplanned_bytes() const { return state_->allocations->unplanned_bytes(); }
double executor::waited_seconds() const { return state_->waited; }
std::size_t executor::made_contiguous() const { return state_->contiguous; }
std::size_t executor::held_gifts() const { return state_->held_gifts; }

}  // namespace remat::pytorch
