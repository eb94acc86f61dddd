// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <set>

#include <remat/core/evaluate.hpp>
#include <remat/torch/executor.hpp>

#include "effects.hpp"
#include "views.hpp"

namespace remat::torch {

/// Bytes that one or more values occupy one after the other (the versions of a storage that is written in place).
struct buffer {
  bytes_t bytes = 0;
  std::int64_t born = 0, dies = -1;  ///< -1: at the end
  int values = 0;                    ///< on the device now
  bool outside = false;              ///< the caller keeps it
  bytes_t offset = 0;                ///< in the arena
};

/// Where a value is during a step: in a buffer, or outside the program (parameter, input, ..): the value itself.
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

struct planned_step {
  index_t node = none;
  bool again = false;
  std::vector<placed_call> calls;
  std::vector<std::pair<location, location>> copies;  ///< {old, new}, before the calls
  std::vector<index_t> blocks;                        ///< per block of the script: buffer, or none: the ordinary allocator
};

struct execution_plan::data {
  std::shared_ptr<const program> step;
  std::vector<planned_step> steps;
  std::vector<allocation_script> scripts;  ///< per step
  std::size_t loss = 0;                    ///< first step of the backward
  std::vector<buffer> buffers;
  std::vector<location> outputs, parameter_grads, input_grads;
  std::vector<bool> copy_grad;  ///< per parameter: its gradient shares bytes with something else
  execution_plan::reads reads;
  struct saved_states {
    bool before = false, after = false;
  };
  std::vector<saved_states> saves;       ///< per node: states of the generator that are needed again
  bool saves_phase[2] = {false, false};  ///< the same when the forward, the backward begins
  bytes_t arena = 0, live = 0, outside = 0;
  std::size_t recomputed = 0;
};

namespace {

bool from_outside(const program& p, index_t v) { return p.values[v].from != role::internal; }

/// Bytes [first, second) of its storage that a view touches.
std::pair<bytes_t, bytes_t> extent(const tensor_view& v) {
  int64_t last = v.offset;
  for (std::size_t d = 0; d < v.sizes.size(); ++d) {
    if (v.sizes[d] == 0) return {0, 0};
    last += (v.sizes[d] - 1) * v.strides[d];
  }
  const auto element = static_cast<bytes_t>(c10::elementSize(v.dtype));
  return {v.offset * element, (last + 1) * element};
}

class planner {
 public:
  planner(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles)
      : schedule_(s), profiles_(profiles), now_(step->values.size(), none) {
    plan_.step = std::move(step);
    TORCH_CHECK(profiles.nodes.size() == program_().nodes.size(), "profiles of another program");
  }

  std::unique_ptr<execution_plan::data> run(const layout_options& o) {
    check();
    std::vector<bool> has_run(program_().nodes.size(), false);
    plan_.saves.resize(program_().nodes.size());
    for (const auto& n : program_().nodes) note_origin(n.starts);
    note_origin(program_().after_forward);
    note_origin(program_().after_backward);
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
      const auto [what, which] = schedule_.steps[i];
      if (what == action::drop) {
        drop(which, time(i));
      } else if (which == program_().loss) {
        leave_forward();
      } else {
        const bool again = has_run[which];
        has_run[which] = true;
        if (again && program_().nodes[which].random) plan_.saves[which].before = true;
        plan_.recomputed += again;
        compute(i, which, again);
      }
    }
    finish();
    note_reads();
    place(o);
    return std::make_unique<execution_plan::data>(std::move(plan_));
  }

 private:
  static constexpr std::int64_t events = std::int64_t{1} << 24;  // room for the events within a step
  static std::int64_t time(std::size_t i, int event = 0) { return static_cast<std::int64_t>(i) * events + event; }
  const program& program_() const { return *plan_.step; }

  void note_origin(const generator_origin& o) {
    if (o.from == generator_origin::before) plan_.saves[o.node].before = true;
    if (o.from == generator_origin::after) plan_.saves[o.node].after = true;
    if (o.from == generator_origin::forward) plan_.saves_phase[0] = true;
    if (o.from == generator_origin::backward) plan_.saves_phase[1] = true;
  }

  /// The schedule is valid, which includes that what has effects keeps its order, and leaves out none of that.
  void check() const {
    const auto p = to_problem(program_(), profiles_.seconds(), profiles_.workspace());
    evaluate(p, schedule_);
    const auto n = static_cast<index_t>(program_().nodes.size());
    std::vector<bool> has_run(n, false);
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
      const auto [what, which] = schedule_.steps[i];
      if (what == action::offload || what == action::prefetch)
        throw bad_schedule(i, "step " + std::to_string(i) + ": copies to the host are not supported");
      if (what == action::compute) has_run[which] = true;
    }
    for (index_t i = 0; i < n; ++i)
      if (!has_run[i] && has_effects(program_(), program_().nodes[i]))
        throw bad_schedule(schedule_.steps.size(), "node " + std::to_string(i) + " never runs");
  }

  index_t new_buffer(bytes_t bytes, std::int64_t born) {
    plan_.buffers.push_back({bytes, born});
    return static_cast<index_t>(plan_.buffers.size() - 1);
  }
  void leave(index_t b, std::int64_t when) {
    if (b != none && --plan_.buffers[b].values == 0) plan_.buffers[b].dies = when;
  }
  void drop(index_t v, std::int64_t when) {
    if (v < now_.size()) leave(std::exchange(now_[v], none), when);  // the others only order what has effects
  }
  void enter(index_t v, index_t b, std::int64_t when) {
    ++plan_.buffers[b].values;
    leave(std::exchange(now_[v], b), when);  // computed again while it was there: the new one counts
  }
  location where(index_t v) const { return from_outside(program_(), v) ? location{none, v} : location{now_[v], v}; }

  bool dies_after(std::size_t i, index_t v) const {
    for (++i; i < schedule_.steps.size() && schedule_.steps[i].what == action::drop; ++i)
      if (schedule_.steps[i].which == v) return true;
    return false;
  }

  void compute(std::size_t i, index_t n, bool again) {
    const auto& node = program_().nodes[n];
    const auto& script = again ? profiles_.nodes[n]->again : profiles_.nodes[n]->first;
    planned_step s{n, again, {}, {}, {}};
    std::map<index_t, location> here;  // outputs, and versions that share their buffer
    std::vector<index_t> entered;

    for (const auto& [old, fresh] : node.overwrites) {
      const auto from = where(old);
      const bool in_place = from.buffer != none && plan_.buffers[from.buffer].values == 1 && dies_after(i, old);
      const auto b = in_place ? from.buffer : new_buffer(program_().values[fresh].bytes, time(i));
      if (!in_place) s.copies.push_back({from, {b, fresh}});
      here[fresh] = {b, fresh};
    }
    for (const auto& block : script.blocks) {
      const bool temporary = block.result == none && block.freed >= 0;
      if (block.result == none && !temporary) {
        s.blocks.push_back(none);  // kept by the operator
        continue;
      }
      const auto b = new_buffer(block.bytes, time(i, block.born + 1));
      s.blocks.push_back(b);
      if (temporary)
        plan_.buffers[b].dies = time(i, block.freed + 1);
      else
        here[node.outputs[block.result]] = {b, node.outputs[block.result]};
    }
    for (const auto& c : node.calls) {
      placed_call placed{&c, {}, {}};
      for (const auto& o : c.operands) {
        const auto v = program_().views[o.view].value;
        const auto found = here.find(v);
        placed.operands.push_back(found != here.end() ? found->second : where(v));
      }
      for (const auto& r : c.results) {
        const auto v = program_().views[r.view].value;
        if (!here.count(v))  // not in the script: an empty tensor, or a script that could not tell
          here[v] = {new_buffer(program_().values[v].bytes, time(i)), v};
        placed.results.push_back(here[v]);
      }
      s.calls.push_back(std::move(placed));
    }
    for (auto v : node.outputs)
      if (const auto found = here.find(v); found != here.end()) enter(v, found->second.buffer, time(i + 1));
    elsewhere_ = std::max(elsewhere_, profiles_.nodes[n]->elsewhere);
    plan_.steps.push_back(std::move(s));
    plan_.scripts.push_back(script);
  }

  /// The caller gets the outputs.
  void leave_forward() {
    plan_.loss = plan_.steps.size();
    for (auto v : program_().outputs) plan_.outputs.push_back(keep(v));
    for (auto v : program_().output_grads)
      if (v != none) plan_.outside += page(program_().values[program_().views[v].value].bytes);
  }
  location keep(index_t view) {
    const auto l = where(program_().views[view].value);
    if (l.buffer != none && !std::exchange(plan_.buffers[l.buffer].outside, true)) {
      plan_.outside += page(plan_.buffers[l.buffer].bytes);
      ++plan_.buffers[l.buffer].values;  // never written in place, never dead
    }
    return l;
  }
  static bytes_t page(bytes_t bytes) { return (bytes + 63) / 64 * 64; }

  void finish() {
    plan_.outside += elsewhere_;
    for (auto v : program_().input_grads) plan_.input_grads.push_back(v == none ? location{} : keep(v));
    std::vector<std::pair<index_t, std::pair<bytes_t, bytes_t>>> taken;
    for (auto v : program_().parameter_grads) {
      const auto& view = program_().views[v];
      const auto l = where(view.value);
      const auto range = extent(view);
      const bool shared =
          l.buffer == none || plan_.buffers[l.buffer].outside || std::any_of(taken.begin(), taken.end(), [&](const auto& t) {
            return t.first == l.buffer && t.second.first < range.second && range.first < t.second.second;
          });
      if (shared)
        plan_.outside += page(range.second - range.first);
      else
        taken.emplace_back(l.buffer, range);
      plan_.copy_grad.push_back(shared);
      plan_.parameter_grads.push_back(l);
    }
  }

  void note_reads() {
    std::set<index_t> outside, buffers;
    for (std::size_t i = plan_.loss; i < plan_.steps.size(); ++i) {
      auto note = [&](const location& l) { l.buffer == none ? outside.insert(l.value) : buffers.insert(l.buffer); };
      for (const auto& c : plan_.steps[i].calls)
        for (const auto& l : c.operands) note(l);
      for (const auto& [from, to] : plan_.steps[i].copies) note(from);
    }
    for (const auto& l : plan_.outputs) plan_.reads.outputs.push_back(l.buffer != none && buffers.count(l.buffer) > 0);
    plan_.reads.outside.assign(outside.begin(), outside.end());
  }

  void place(const layout_options& o) {
    const auto end = time(schedule_.steps.size() + 1);
    std::vector<allocation> list;
    std::vector<index_t> which;
    for (index_t b = 0; b < plan_.buffers.size(); ++b) {
      const auto& x = plan_.buffers[b];
      if (x.outside || x.bytes == 0) continue;
      list.push_back({x.born, x.dies < 0 ? end : std::max(x.dies, x.born + 1), x.bytes});
      which.push_back(b);
    }
    const auto l = lay_out(list, o);
    for (std::size_t i = 0; i < which.size(); ++i) plan_.buffers[which[i]].offset = l.offsets[i];
    plan_.arena = l.arena;
    plan_.live = l.live_peak;
  }

  const schedule& schedule_;
  const program_profile& profiles_;
  execution_plan::data plan_;
  bytes_t elsewhere_ = 0;     ///< most that other threads allocate during a step
  std::vector<index_t> now_;  ///< per value: its buffer, none if it is not on the device
};

}  // namespace

execution_plan::execution_plan(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles,
                               const layout_options& o)
    : data_(planner(std::move(step), s, profiles).run(o)) {}
execution_plan::~execution_plan() = default;
bytes_t execution_plan::arena_bytes() const { return data_->arena; }
bytes_t execution_plan::live_peak() const { return data_->live; }
bytes_t execution_plan::outside_bytes() const { return data_->outside; }
std::size_t execution_plan::operations() const { return data_->steps.size(); }
std::size_t execution_plan::recomputed() const { return data_->recomputed; }
const program& execution_plan::step() const { return *data_->step; }
const execution_plan::reads& execution_plan::read_in_backward() const { return data_->reads; }

namespace {

/// A call ready to run.
struct bound_call {
  const call* what = nullptr;
  std::vector<c10::IValue> stack;  ///< arguments; those from outside are put in when they are known
  c10::DispatchKeySet keys;
  const c10::KernelFunction* kernel = nullptr;  ///< looked up at the first run
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

/// What a parameter or buffer was when its sockets were filled.
struct binding {
  const void* storage = nullptr;
  const void* data = nullptr;
  int64_t offset = 0;    ///< bytes
  int64_t captured = 0;  ///< offset when the executor was made
};

}  // namespace

struct executor::state {
  explicit state(std::shared_ptr<const execution_plan> p)
      : plan(std::move(p)), data(plan->get()), step(*data.step), memory(std::make_shared<arena>(data.arena)) {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    outside.resize(data.buffers.size());
    bound.resize(step.values.size());
    before_draw.resize(step.nodes.size());
    after_draw.resize(step.nodes.size());
    result.reserve(16);
    for (std::size_t i = 0; i < data.steps.size(); ++i) steps.push_back(prepare(i));
    for (index_t v = 0; v < step.values.size(); ++v) bind_owned(v);
    storages.clear();
    tensors.clear();
  }

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
      bound_call b{c.what, {}, {}, nullptr};
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
  char* address(index_t b) const { return memory->data() + data.buffers[b].offset; }

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
  static at::Tensor bytes_of(const c10::Storage& s, bytes_t bytes) {
    return tensor_of({none, {bytes}, {1}, 0, at::kByte, false, false, false}, s, 0);
  }
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

  /// Parameters, buffers and constants: looked at before each step, as their memory may have been replaced.
  void bind_owned(index_t v) {
    const auto& value = step.values[v];
    if (!value.tensor.defined()) return;
    const auto& t = value.tensor;
    auto& last = bound[v];
    binding now{t.storage().unsafeGetStorageImpl(), t.storage().data(), byte_offset(t), last.captured};
    if (last.storage == now.storage && last.data == now.data && last.offset == now.offset) return;
    if (last.storage == nullptr) now.captured = now.offset;
    fill({none, v}, t.storage(), t, now.offset - now.captured);
    last = now;
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(!flying, "remat: forward of an executor with a step in flight");
    if (!meter::in_front())
      throw plan_broken(
          "remat: another allocator of host memory was installed after remat's; nothing would lie where it was planned");
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    flying = true;
    try {
      for (index_t v = 0; v < step.values.size(); ++v) {
        bind_owned(v);
        if (step.values[v].from != role::input) continue;
        const auto& t = given[v] = inputs.at(step.values[v].position);
        fill({none, v}, t.storage(), t, byte_offset(t));
      }
      begin_phase(generator_origin::forward);
      run(0, data.loss);
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
      return outputs;
    } catch (...) {
      reset();
      throw;
    }
  }

  gradients backward(const std::vector<at::Tensor>& output_grads) {
    if (!flying) throw broken_contract("remat: backward without a forward");
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    try {
      for (std::size_t i = 0; i < step.outputs.size(); ++i)
        if (step.output_grads[i] != none) take_gradient(i, output_grads.at(i));
      begin_phase(generator_origin::backward);
      run(data.loss, data.steps.size());
      go_to(step.after_backward);
      count_writes(&written_tensor::backward);
      gradients g;
      for (std::size_t i = 0; i < step.parameter_grads.size(); ++i) {
        auto t = kept(data.parameter_grads[i], step.parameter_grads[i]);
        g.parameters.push_back(data.copy_grad[i] ? t.clone() : t);
      }
      for (std::size_t i = 0; i < step.input_grads.size(); ++i)
        g.inputs.push_back(step.input_grads[i] == none ? at::Tensor() : kept(data.input_grads[i], step.input_grads[i]));
      reset();
      return g;
    } catch (...) {
      reset();
      throw;
    }
  }

  void take_gradient(std::size_t i, const at::Tensor& incoming) {
    const auto& view = step.views[step.output_grads[i]];
    auto t = incoming;
    const bool fits = t.defined() && t.dtype() == view.dtype && t.sizes() == at::IntArrayRef(view.sizes) &&
                      t.strides() == at::IntArrayRef(view.strides) && t.is_conj() == view.conj && t.is_neg() == view.neg &&
                      t.storage_offset() == view.offset;
    if (!fits) {
      contiguous += t.defined();
      const auto options = at::TensorOptions().dtype(view.dtype).device(step.values[view.value].device);
      auto copy = at::empty_strided(view.sizes, view.strides, options);
      t = t.defined() ? copy.copy_(t) : copy.zero_();
    }
    t = t.detach();
    given[view.value] = t;
    fill({none, view.value}, t.storage(), t, 0);
  }

  /// A tensor that leaves the executor.
  at::Tensor kept(const location& l, index_t view) {
    const auto& v = step.views[view];
    if (l.buffer == none) {
      const auto& value = step.values[l.value];
      const auto& source = value.tensor.defined() ? value.tensor : given.at(l.value);
      auto t = v.whole ? source.detach() : tensor_of(v, source.storage(), value.from == role::input ? byte_offset(source) : 0);
      ::torch::autograd::impl::set_version_counter(t, ::torch::autograd::impl::version_counter(source));
      return t;
    }
    if (data.buffers[l.buffer].outside) return tensor_of(v, *outside[l.buffer]);
    auto* owner = new std::shared_ptr<arena>(memory);
    c10::DataPtr place(
        address(l.buffer), owner, [](void* p) { delete static_cast<std::shared_ptr<arena>*>(p); }, step.values[l.value].device);
    return tensor_of(v,
                     c10::Storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(data.buffers[l.buffer].bytes),
                                  std::move(place), nullptr, false),
                     0);
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
      const auto& t = w.tensor.defined() ? w.tensor : given_input(w.input);
      for (int64_t k = 0; k < w.*half; ++k) t.unsafeGetTensorImpl()->bump_version();
    }
  }
  const at::Tensor& given_input(std::size_t position) const {
    for (const auto& [v, t] : given)
      if (step.values[v].from == role::input && step.values[v].position == position) return t;
    throw broken_contract("remat: input " + std::to_string(position) + " was not given");
  }

  void begin_phase(generator_origin::kind phase) {
    if (data.saves_phase[phase == generator_origin::backward])
      phases[phase == generator_origin::backward] = generator_state::now();
  }
  void go_to(const generator_origin& origin) const {
    switch (origin.from) {
      case generator_origin::next:
        return;
      case generator_origin::before:
        return before_draw[origin.node]->restore();
      case generator_origin::after:
        return after_draw[origin.node]->restore();
      case generator_origin::forward:
        return phases[0]->restore();
      case generator_origin::backward:
        return phases[1]->restore();
      case generator_origin::fixed:
        at::Generator(at::detail::getDefaultCPUGenerator()).set_state(origin.state);
    }
  }

  void run(std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const auto& planned = data.steps[i];
      const auto& node = step.nodes[planned.node];
      auto& s = steps[i];
      for (std::size_t k = 0; k < planned.copies.size(); ++k) {
        const auto& to = planned.copies[k].second;
        if (!in_arena(to)) {
          const auto& value = step.values[to.value];
          auto fresh = at::empty({value.bytes}, at::TensorOptions().dtype(at::kByte).device(value.device));
          hold(to, fresh.storage());
        }
        s.copies[k].second.copy_(s.copies[k].first);
      }
      struct restored {
        std::optional<generator_state> state;
        ~restored() {
          if (state) state->restore();
        }
      } later;
      if (node.random && planned.again) {
        later.state = generator_state::now();
        before_draw[planned.node]->restore();
      } else if (node.random) {
        go_to(node.starts);
        if (data.saves[planned.node].before) before_draw[planned.node] = generator_state::now();
      }
      allocations.plan(s.blocks);
      for (std::size_t k = 0; k < s.calls.size(); ++k) execute(s.calls[k], planned.calls[k]);
      if (!allocations.finished())
        throw plan_broken("remat: " + node.name + " (node " + std::to_string(planned.node) +
                          ") did not give back memory as it did when it was measured; what it keeps would be overwritten");
      if (node.random && !planned.again && data.saves[planned.node].after) after_draw[planned.node] = generator_state::now();
    }
  }

  void execute(bound_call& c, const placed_call& planned) {
    result = c.stack;
    if (c.kernel == nullptr) {
      c.keys = c.what->op.dispatchKeyExtractor().getDispatchKeySetBoxed(&result);
      c.kernel = &c.what->op.lookup(c.keys);
    }
    {
      at::AutoGradMode grad_mode(c.what->grad_mode);
      allocations.start();
      try {
        c.kernel->callBoxed(c.what->op, c.keys, &result);
      } catch (...) {
        allocations.stop();
        throw;
      }
      allocations.stop();
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

  void reset() {
    flying = false;
    for (std::size_t b = 0; b < outside.size(); ++b) outside[b].reset();
    given.clear();
    for (const auto& [l, list] : sockets)
      if (l.buffer != none || !step.values[l.value].tensor.defined()) empty(l);
  }

  std::shared_ptr<const execution_plan> plan;
  const execution_plan::data& data;
  const program& step;
  std::shared_ptr<arena> memory;
  std::vector<bound_step> steps;
  std::map<location, std::vector<socket>> sockets;                      ///< by `outer`
  std::vector<binding> bound;                                           ///< per value
  std::map<index_t, at::Tensor> given;                                  ///< inputs and incoming gradients
  std::vector<std::optional<c10::Storage>> outside;                     ///< per buffer
  std::vector<std::optional<generator_state>> before_draw, after_draw;  ///< per node, of its first run
  std::optional<generator_state> phases[2];
  std::vector<c10::IValue> result;
  planned_allocations allocations;
  bool flying = false;
  std::size_t contiguous = 0;
  std::map<index_t, std::optional<c10::Storage>> storages;    ///< while the steps are prepared
  std::map<std::pair<index_t, index_t>, at::Tensor> tensors;  ///< the same: by buffer and view
};

executor::executor(std::shared_ptr<const execution_plan> plan) : state_(std::make_unique<state>(std::move(plan))) {}
executor::~executor() = default;
std::vector<at::Tensor> executor::forward(const std::vector<at::Tensor>& inputs) { return state_->forward(inputs); }
executor::gradients executor::backward(const std::vector<at::Tensor>& output_grads) { return state_->backward(output_grads); }
void executor::reset() { state_->reset(); }
bool executor::in_flight() const { return state_->flying; }
bool executor::arena_in_use() const { return state_->memory.use_count() > 1; }
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
const std::shared_ptr<arena>& executor::memory() const { return state_->memory; }
const execution_plan& executor::plan() const { return *state_->plan; }
std::size_t executor::unplanned() const { return state_->allocations.unplanned(); }
bytes_t executor::unplanned_bytes() const { return state_->allocations.unplanned_bytes(); }
std::size_t executor::made_contiguous() const { return state_->contiguous; }

}  // namespace remat::torch
