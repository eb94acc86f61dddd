// SPDX-License-Identifier: Apache-2.0
// Runs the operations of a plan: draws, graphs, calls of kernels.
#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include "../program/operators.hpp"
#include "executor_state.hpp"

namespace remat::pytorch {

void executor::state::begin_phase(std::size_t half) {
  if (data.saves_phase[half]) phases[half] = on.random();
}

void executor::state::go_to(const generator_origin& origin) const {
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
      set_state(at::globalContext().defaultGenerator(on.which()), byte_tensor(origin.state));
  }
}

void executor::state::give(const early_gradient& g, receiver& to) {
  auto t = kept(g.at, step.parameter_grads[g.parameter]);
  if (g.copy) t = t.clone();
  const auto storage = t.storage();
  try {
    to.kept[g.parameter] = hand_over(g.parameter, std::move(t), to);
  } catch (...) {  // the receiver may hold it nevertheless
    move_out(g, storage);
    throw;
  }
  t.reset();
  move_out(g, storage);
}

void executor::state::move_out(const early_gradient& g, const c10::Storage& storage) {
  if (!in_arena(g.at) || storage.use_count() == 1) return;
  ++gradients_still_held;
  if (!g.copy) move_to_own_memory(storage);
}

void executor::state::run(std::size_t first, std::size_t last, const std::vector<move_step>& then, receiver* whose) {
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
    for (const auto& g : planned.early_gradients) give(g, *whose);
    for (auto b : planned.frees) {
      outside[b].reset();
      empty({b, none});
    }
    i = end;
  }
  if (!captured_moves || first == last) make_moves(then);
}

std::size_t executor::state::end_of_piece(std::size_t i, std::size_t last) const {
  const node_run* drawn = nullptr;
  for (auto k = i; k < last; ++k) {
    const auto& planned = data.steps[k];
    if (k > i && starts_piece(planned, drawn)) return k;
    if (step.nodes[planned.node].random) drawn = &planned;
    if (!planned.early_gradients.empty() || (drawn == &planned && !planned.again && data.saves[planned.node].after)) return k + 1;
  }
  return last;
}

bool executor::state::starts_piece(const node_run& planned, const node_run* drawn) const {
  if (!captured_moves && !planned.moves.empty()) return true;
  const auto& node = step.nodes[planned.node];
  if (!node.random) return false;
  if (planned.again) return drawn == nullptr || !drawn->again || !follows_draw(drawn->node, planned.node);
  return (drawn != nullptr && drawn->again) || node.starts.from != generator_origin::next || data.saves[planned.node].before;
}

bool executor::state::follows_draw(index_t first, index_t second) const {
  if (first >= second || step.nodes[second].starts.from != generator_origin::next) return false;
  if (first < step.loss && step.loss < second) return false;  // the caller may draw in between
  for (auto n = first + 1; n < second; ++n)
    if (step.nodes[n].random) return false;
  return true;
}

template <class F>
void executor::state::drawing(std::size_t i, std::size_t end, const F& give) {
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
  const auto restored = c10::make_scope_exit([&, before = planned.again ? on.random() : nullptr] {
    if (before) on.random(*before);
  });
  start();
  give();
}

void executor::state::compute(std::size_t i) {
  const auto& planned = data.steps[i];
  const auto& node = step.nodes[planned.node];
  auto& s = steps[i];
  running = planned.node;
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
  if (const auto bytes = allocations->unplanned_bytes(); bytes > most_unplanned_bytes) {
    most_unplanned_at = planned.node;
    most_unplanned_bytes = bytes;
  }
  if (!allocations->finished())
    throw plan_broken("remat: " + node.name + " (node " + std::to_string(planned.node) +
                      ") did not give back memory as it did when it was measured; what it keeps would be overwritten");
}

void executor::state::execute(prepared_call& c, const placed_call& planned) {
  result = c.stack;
  if (c.writes_lists) own_lists(result);
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
    const auto& t = tensor_at(result, r);
    if (t.sizes() != at::IntArrayRef(step.views[r.view].sizes)) {
      require_kernel_geometry(c.what->op);
      throw plan_broken("remat: " + c.what->op.schema().name() +
                        " gave a tensor of another size than it was planned with. The next step is recorded anew");
    }
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

void executor::state::hold(const location& l, const c10::Storage& s) {
  outside[l.buffer] = s;
  fill(l, s, {}, 0);
}

}  // namespace remat::pytorch
