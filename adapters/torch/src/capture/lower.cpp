// SPDX-License-Identifier: Apache-2.0
// Lowers recorded calls to storage versions and nodes.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <map>
#include <set>

#include "../base/gradient_hooks.hpp"
#include "../base/views.hpp"
#include "../program/edit.hpp"
#include "../program/fold.hpp"
#include "../program/in_place.hpp"
#include "../program/merge.hpp"
#include "../program/operators.hpp"
#include "../program/pack.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {
namespace {

void add_once(std::vector<index_t>& list, index_t x) {
  if (std::find(list.begin(), list.end(), x) == list.end()) list.push_back(x);
}

c10::OperatorHandle find_op(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

class lowering {
 public:
  explicit lowering(const trace& recorded) : trace_(recorded) {
    current_.assign(recorded.storages.size(), none);
    token_.assign(recorded.storages.size(), none);
    outside_readers_.resize(recorded.storages.size());
    program_.slots = recorded.slots;
    program_.constants = recorded.constants;
    for (index_t s = 0; s < recorded.storages.size(); ++s)
      if (from(s) != role::internal && from(s) != role::output_grad) current_[s] = new_value(recorded.storages[s]);
    for (auto& s : program_.slots)
      if (s.from != role::output_grad) s.value = current_[s.value];
    program_.parameters = recorded.parameters;
  }

  program run() {
    const auto before_loss = assumed_calls();
    for (std::size_t i = 0; i < trace_.calls.size(); ++i) {
      if (i == trace_.backward) {
        for (std::size_t k = i; k < trace_.calls.size(); ++k)
          if (before_loss[k]) add_call(k);
        add_loss();
      }
      if (!before_loss[i]) add_call(i);
      numbers_ += trace_.calls[i].numbers.size();
    }
    if (program_.loss == none) add_loss();
    for (std::size_t s = 0; s < token_.size(); ++s)
      if (token_[s] != none)  // another forward may write the storage before the backward of this step
        for (auto reader : outside_readers_[s]) program_.nodes[reader].once = true;
    for (const auto& v : trace_.parameter_grads) program_.parameter_grads.push_back(view(v));
    for (const auto& v : trace_.input_grads) program_.input_grads.push_back(v ? view(*v) : none);
    program_.results = trace_.results;
    program_.output_versions = trace_.output_versions;
    program_.differentiable = trace_.differentiable;
    program_.parameter_sources = trace_.parameter_sources;
    program_.input_sources = trace_.input_sources;
    program_.written = trace_.written;
    program_.after_forward = origin(trace_.after_forward);
    program_.after_backward = origin(trace_.after_backward);
    const auto needed = needed_nodes();
    return with_only(std::move(program_), needed);
  }

 private:
  role from(index_t storage) const {
    const auto slot = trace_.storages[storage].slot;
    return slot == none ? role::internal : trace_.slots[slot].from;
  }
  bool writable_in_place(index_t storage) const {
    const auto origin = from(storage);
    return origin == role::internal || origin == role::output_grad || origin == role::constant;
  }

  index_t new_value(storage_value v) {
    const auto id = static_cast<index_t>(program_.values.size());
    program_.values.push_back(std::move(v));
    producer_.push_back(none);
    readers_.emplace_back();
    return id;
  }
  index_t new_output(index_t n, index_t storage, const std::string& name) {
    storage_value v;
    v.bytes = trace_.storages[storage].bytes;
    v.name = name;
    v.device = trace_.storages[storage].device;
    return add_output(n, std::move(v));
  }
  index_t add_output(index_t n, storage_value v) {
    const auto id = new_value(std::move(v));
    producer_[id] = n;
    program_.nodes[n].outputs.push_back(id);
    return id;
  }

  /// A view of the present version of a storage; returns its position.
  index_t view(byte_view v) {
    v.value = current_[v.value];
    if (const auto k = program_.values[v.value].slot; k == none) {
      v.whole = false;  // the storage has a later version
    } else if (v.whole) {
      const auto& s = program_.slots[k];
      v.whole = s.offset == v.offset && s.type == tensor_type{v.sizes, v.strides, v.dtype, s.type.device, v.conj, v.neg};
    }
    program_.views.push_back(std::move(v));
    return static_cast<index_t>(program_.views.size() - 1);
  }

  void read(index_t n, index_t value) {
    if (producer_[value] == n) return;
    add_once(program_.nodes[n].inputs, value);
    add_once(readers_[value], n);
  }

  /// Calls of the backward that compute values which the plan assumes to be zero, from values of the forward. They run before the
  /// loss: there, nothing is lost if an assumption is wrong.
  std::vector<bool> assumed_calls() const {
    std::vector<bool> chosen(trace_.calls.size()), needed(trace_.storages.size());
    for (std::size_t i = trace_.calls.size(); i-- > trace_.backward;) {
      const auto& c = trace_.calls[i];
      const bool makes = std::any_of(c.results.begin(), c.results.end(), [&](const auto& r) { return needed[r.view.value]; });
      chosen[i] = makes && !c.assumes_zero;
      if (!chosen[i] && !c.assumes_zero) continue;
      for (const auto& o : c.operands) needed[o.view.value] = true;
    }
    return chosen;
  }

  void add_loss() {
    const auto n = program_.loss = static_cast<index_t>(program_.nodes.size());
    program_.nodes.emplace_back();
    program_.nodes[n].name = "loss";
    program_.nodes[n].once = true;
    for (const auto& v : trace_.outputs) {
      program_.outputs.push_back(view(v));
      read(n, current_[v.value]);
      if (token_[v.value] != none) read(n, token_[v.value]);
    }
    for (const auto& c : trace_.calls) {
      if (!c.assumes_zero) continue;
      program_.assumed_zero.push_back(view(c.operands.front().view));
      read(n, current_[c.operands.front().view.value]);
    }
    for (const auto& g : trace_.output_grads) {
      program_.output_grads.push_back(none);
      if (!g) continue;
      current_[g->value] = add_output(n, trace_.storages[g->value]);
      program_.slots[trace_.storages[g->value].slot].value = current_[g->value];
      program_.output_grads.back() = view(*g);
    }
  }

  void add_call(std::size_t index) {
    const auto& c = trace_.calls[index].replacement ? *trace_.calls[index].replacement : trace_.calls[index];
    std::set<index_t> written, written_outside;
    for (const auto& o : c.operands)
      if (o.written) (writable_in_place(o.view.value) ? written : written_outside).insert(o.view.value);
    const bool makes =
        std::any_of(c.results.begin(), c.results.end(), [&](const auto& r) { return current_[r.view.value] == none; });
    const bool check = only_checks(c);
    if (!makes && !check && written.empty() && written_outside.empty() && !c.draws) return;  // a view or question

    if (facts(c.op).makes != filled::as_called && makes && c.results.size() == 1) {
      add_factory(c);
      return;
    }

    const bool statistics_only =
        has_types_without_statistics(c) && std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
          return !written_outside.count(o.view.value) || is_statistics(c, o.at);
        });
    // Values that the call reads from storages it does not write.
    std::vector<index_t> inputs;
    for (const auto& o : c.operands) {
      if (written.count(o.view.value)) continue;
      add_once(inputs, current_[o.view.value]);
      if (token_[o.view.value] != none) add_once(inputs, token_[o.view.value]);
    }

    const auto n = place(c, inputs, written, written_outside.empty());
    auto& node = program_.nodes[n];
    for (auto s : written) {
      if (producer_[current_[s]] == n) continue;
      const auto old = current_[s];
      read(n, old);
      current_[s] = new_output(n, s, node.name);
      node.overwrites.emplace_back(old, current_[s]);
    }
    for (auto v : inputs) read(n, v);
    if (c.draws) note_draw(n, index);
    node.calls.push_back(lower_call(n, c));

    for (const auto& o : c.operands) {
      const auto s = o.view.value;
      if (!writable_in_place(s) && !written_outside.count(s)) add_once(outside_readers_[s], n);
    }
    if (check || c.op.schema().name() == call_hooks_name) {
      program_.nodes[n].once = true;
      add_token(n);
    }
    if (written_outside.empty()) return;
    if (!statistics_only) node.once = true;
    const auto token = add_token(n);
    for (auto s : written_outside) {
      for (auto reader : outside_readers_[s])
        if (reader != n) program_.nodes[reader].once = true;
      outside_readers_[s].clear();
      token_[s] = token;
    }
  }

  static bool is_statistics(const traced_call& c, int argument) {
    return std::find(c.statistics.begin(), c.statistics.end(), argument) != c.statistics.end();
  }

  /// True if the call has results of the same types without its running statistics, as a recomputation makes it.
  static bool has_types_without_statistics(const traced_call& c) {
    return std::all_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
      return !is_statistics(c, o.at) || std::any_of(c.operands.begin(), c.operands.end(), [&](const auto& x) {
        return !is_statistics(c, x.at) && x.view.dtype == o.view.dtype;
      });
    });
  }

  /// Replaces `empty_like(x)` and similar calls by calls that do not need `x`.
  void add_factory(const traced_call& c) {
    const auto n = static_cast<index_t>(program_.nodes.size());
    auto& node = program_.nodes.emplace_back();
    node.name = c.op.schema().name();
    node.line = c.line;
    const auto& result = c.results[0].view;
    current_[result.value] = new_output(n, result.value, node.name);
    const auto v = view(result);
    const auto device = trace_.storages[result.value].device;
    node.calls.push_back({find_op("aten::empty_strided", ""),
                          {result.sizes, result.strides, static_cast<int64_t>(result.dtype),
                           static_cast<int64_t>(c10::Layout::Strided), device, false},
                          {},
                          {{0, -1, v}},
                          c.grad_mode,
                          {}});
    const auto& known = facts(c.op);
    if (known.makes == filled::with_nothing) return;
    const auto value = known.makes == filled::with_argument ? c.arguments[known.fill_value]
                                                            : c10::IValue(at::Scalar(known.makes == filled::with_ones ? 1 : 0));
    node.calls.push_back({find_op("aten::fill_", "Scalar"), {at::Tensor(), value}, {{0, -1, v}}, {}, c.grad_mode, {}});
  }

  /// Chooses the node of a call. If the call overwrites a value that nothing has read yet, and can run with the producer of that
  /// value, it goes to the producer's node; otherwise to a new node.
  index_t place(const traced_call& c, const std::vector<index_t>& inputs, const std::set<index_t>& written, bool pure) {
    if (pure && written.size() == 1) {
      const auto old = current_[*written.begin()];
      const auto p = producer_[old];
      if (p != none && p != program_.loss && readers_[old].empty() && !is_free_factory(old) &&
          std::all_of(inputs.begin(), inputs.end(), [&](index_t v) { return available(v, p); }) &&
          (!c.draws || (!program_.nodes[p].random && (last_random_ == none || last_random_ < p))))
        return p;
    }
    const auto n = static_cast<index_t>(program_.nodes.size());
    program_.nodes.emplace_back();
    auto& node = program_.nodes[n];
    node.name = c.op.schema().name();
    node.line = c.line;
    for (auto s : written) {
      const auto old = current_[s];
      if (!is_free_factory(old)) continue;
      auto& factory = program_.nodes[producer_[old]];
      node.calls.insert(node.calls.end(), factory.calls.begin(), factory.calls.end());
      node.outputs.push_back(old);
      factory = {};
      producer_[old] = n;
    }
    return n;
  }

  /// True if the value is the only output of a node without inputs that may run later.
  bool is_free_factory(index_t value) const {
    if (producer_[value] == none || producer_[value] == program_.loss || !readers_[value].empty()) return false;
    const auto& node = program_.nodes[producer_[value]];
    return node.inputs.empty() && node.outputs.size() == 1 && !node.random && !node.once;
  }

  bool available(index_t value, index_t n) const { return producer_[value] == none || producer_[value] <= n; }

  void note_draw(index_t n, std::size_t index) {
    const auto& c = trace_.calls[index];
    auto& node = program_.nodes[n];
    node.random = true;
    draws_[index] = n;
    node.starts = origin(*c.draws);
    last_random_ = n;
  }

  generator_origin origin(const draw_origin& d) const {
    const bool of_call = d.from == generator_origin::before || d.from == generator_origin::after;
    return {d.from, of_call ? draws_.at(d.call) : none, d.state};
  }

  call lower_call(index_t n, const traced_call& c) {
    call result{c.op, c.arguments, {}, {}, c.grad_mode, {}};
    for (std::size_t k = 0; k < c.numbers.size(); ++k) result.numbers.emplace_back(c.numbers[k], numbers_ + k);
    std::map<std::size_t, index_t> views;  // by tensor
    for (const auto& o : c.operands) {
      const auto [known, fresh] = views.emplace(o.tensor, none);
      if (fresh) known->second = view(o.view);
      result.operands.push_back({o.at, o.element, known->second});
      if (is_statistics(c, o.at) && !writable_in_place(o.view.value)) result.first_run_only.push_back(o.at);
    }
    for (const auto& r : c.results) {
      const auto s = r.view.value;
      if (current_[s] != none) continue;
      current_[s] = new_output(n, s, c.op.schema().name());
      result.results.push_back({r.at, r.element, view(r.view)});
    }
    return result;
  }

  index_t add_token(index_t n) {
    storage_value v;
    v.name = "done: " + program_.nodes[n].name;
    v.device = trace_.device;
    program_.tokens.push_back(add_output(n, std::move(v)));
    return program_.tokens.back();
  }

  /// Nodes that a target needs. All draws are kept, so that later draws stay the same.
  std::vector<bool> needed_nodes() {
    std::vector<bool> value(program_.values.size(), false), result(program_.nodes.size(), false);
    for (auto t : program_.tokens) value[t] = true;
    for (const auto* list : {&program_.parameter_grads, &program_.input_grads})
      for (auto v : *list)
        if (v != none) value[program_.views[v].value] = true;
    for (std::size_t i = program_.nodes.size(); i-- > 0;) {
      auto& node = program_.nodes[i];
      bool needed =
          i == program_.loss || std::any_of(node.outputs.begin(), node.outputs.end(), [&](index_t v) { return value[v]; });
      if (!needed && node.random) {
        add_token(static_cast<index_t>(i));
        node.once = needed = true;
      }
      result[i] = needed;
      if (needed)
        for (auto v : node.inputs) value[v] = true;
    }
    return result;
  }

  const trace& trace_;
  program program_;
  std::vector<index_t> current_;                       ///< per storage: the value that holds it now
  std::vector<index_t> token_;                         ///< per storage from outside: token of its last writer
  std::vector<std::vector<index_t>> outside_readers_;  ///< per storage from outside: nodes that read its present version
  std::vector<index_t> producer_;                      ///< per value
  std::vector<std::vector<index_t>> readers_;          ///< per value: nodes other than its producer
  std::map<std::size_t, index_t> draws_;               ///< random call -> node
  std::size_t numbers_ = 0;                            ///< count of numbers in the calls so far that may differ
  index_t last_random_ = none;
};

}  // namespace

program lower(const trace& recorded) { return lowering(recorded).run(); }

captured captured_from(const trace& recorded, const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers) {
  auto lowered = lower(recorded);
  if (!recorded.hook_places.empty() && !weights_disguised()) order_hooks(lowered);
  const auto on = device_of_step(lowered);
  lowered = folded(std::move(lowered), on);
  auto step = std::make_shared<const program>(in_place(packed(merged(std::move(lowered)))));
  try {
    verify(*step);
  } catch (const bad_program& why) {
    throw broken_contract(std::string("remat: capture made a program that breaks a rule: ") + why.what());
  }
  auto announced = parameters;
  announced.insert(announced.end(), buffers.begin(), buffers.end());
  return {step, bindings(step, announced, recorded.found), recorded.reached, recorded.asked};
}

}  // namespace remat::pytorch::detail

namespace remat::pytorch {

captured capture(const forward_function& forward, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
                 const std::vector<std::string>& names, const std::vector<output_use>& uses) {
  return detail::captured_from(detail::record(forward, inputs, parameters, buffers, names, uses), parameters, buffers);
}

}  // namespace remat::pytorch
