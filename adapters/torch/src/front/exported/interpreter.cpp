// SPDX-License-Identifier: Apache-2.0
#include "interpreter.hpp"

#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>

#include <utility>

#include <remat/pytorch/exported_program.hpp>

namespace remat::pytorch::exported {
namespace {

/// Has the effect of the context manager `torch.autocast`.
class autocast_guard {
 public:
  explicit autocast_guard(const autocast_region& r)
      : device_(r.device),
        enabled_(at::autocast::is_autocast_enabled(device_)),
        cache_(at::autocast::is_autocast_cache_enabled()),
        type_(at::autocast::get_autocast_dtype(device_)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(device_, r.enabled);
    if (r.type) at::autocast::set_autocast_dtype(device_, *r.type);
    if (r.cache) at::autocast::set_autocast_cache_enabled(*r.cache);
  }
  ~autocast_guard() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, type_);
    at::autocast::set_autocast_cache_enabled(cache_);
  }
  autocast_guard(const autocast_guard&) = delete;
  autocast_guard& operator=(const autocast_guard&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_, cache_;
  at::ScalarType type_;
};

using values = std::vector<at::IValue>;

at::IValue value(const operand& o, const values& slots) {
  if (o.slot < 0) {
    if (!o.element) return o.literal;
    c10::impl::GenericList list(o.element);
    list.reserve(o.items.size());
    for (const auto& x : o.items) list.push_back(value(x, slots));
    return list;
  }
  const auto& v = slots[static_cast<std::size_t>(o.slot)];
  switch (o.how) {
    case passing::as_double:
      return v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble();
    case passing::as_number_tensor: {
      auto t = at::scalar_to_tensor(v.toScalar());
      t.unsafeGetTensorImpl()->set_wrapped_number(true);
      return t;
    }
    case passing::as_is:
      break;
  }
  return v;
}

values arguments(const node& n, const values& slots) {
  values all;
  all.reserve(n.operands.size());
  for (const auto& o : n.operands) all.push_back(value(o, slots));
  return all;
}

void store(slot_kind kind, const node& n, at::IValue v, at::IValue& slot) {
  const bool fits = kind == slot_kind::tensor    ? v.isTensor()
                    : kind == slot_kind::integer ? v.isInt()
                    : kind == slot_kind::real    ? v.isDouble()
                                                 : v.isBool();
  if (!fits) throw bad_document(n.name + " (" + n.target + "): gave a " + v.tagKind() + ", which is not what the archive says");
  slot = std::move(v);
}

void store(const graph& g, const node& n, values results, values& slots) {
  const auto put = [&](int slot, at::IValue v) {
    if (slot >= 0) store(g.slots[static_cast<std::size_t>(slot)], n, std::move(v), slots[static_cast<std::size_t>(slot)]);
  };
  for (std::size_t i = 0; i < n.results.size(); ++i) {
    const auto& to = n.results[i];
    if (!to.list) {
      for (const auto slot : to.slots) put(slot, std::move(results.at(i)));
      continue;
    }
    const auto list = results.at(i).toTensorVector();
    if (list.size() != to.slots.size())
      throw bad_input(n.name + " (" + n.target + "): gave " + std::to_string(list.size()) + " tensors where the export had " +
                      std::to_string(to.slots.size()));
    for (std::size_t k = 0; k < list.size(); ++k) put(to.slots[k], list[k]);
  }
}

struct runner_of_node {
  const node& n;
  const values& slots;

  values operator()(std::monostate) const { throw broken_contract(n.target + " cannot be run"); }
  values operator()(const operator_call& c) const {
    auto stack = arguments(n, slots);
    c.op.callBoxed(&stack);
    return stack;
  }
  values operator()(const symbolic_call& c) const { return {c.function->run(arguments(n, slots))}; }
  values operator()(const grad_region& r) const {
    const c10::AutoGradMode mode(r.enabled);
    return run(*r.body, arguments(n, slots));
  }
  values operator()(const autocast_region& r) const {
    const autocast_guard guard(r);
    return run(*r.body, arguments(n, slots));
  }
};

}  // namespace

values run(const graph& g, values inputs) {
  values slots(g.slots.size());
  for (std::size_t i = 0; i < g.inputs.size(); ++i)
    if (g.inputs[i] >= 0) slots[static_cast<std::size_t>(g.inputs[i])] = std::move(inputs.at(i));
  inputs.clear();
  for (const auto& n : g.nodes) {
    try {
      store(g, n, std::visit(runner_of_node{n, slots}, n.what), slots);
    } catch (c10::Error& why) {
      why.add_context("in node " + n.name + " (" + n.target + ") of an exported program, from " + n.source);
      throw;
    }
    for (const auto slot : n.last_used) slots[static_cast<std::size_t>(slot)] = {};
  }
  values outputs;
  for (const auto& o : g.outputs) outputs.push_back(value(o, slots));
  return outputs;
}

}  // namespace remat::pytorch::exported
