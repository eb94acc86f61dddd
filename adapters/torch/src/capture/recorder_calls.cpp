// SPDX-License-Identifier: Apache-2.0
// One call of a recording: its operands, whether it runs, and its results.
#include "recorder.hpp"

#include <ATen/ExpandUtils.h>

#include <torch/csrc/autograd/node.h>

#include "../program/operators.hpp"
#include "backward.hpp"
#include "weights_elsewhere.hpp"

namespace remat::pytorch::detail {

traced_call recorder::read_call(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack, const repeated_call& repeated,
                                std::vector<at::Tensor>& tensors) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  traced_call c{op, {}, {}, {}, at::GradMode::is_enabled(), {}, {}};
  tensors.clear();
  for (std::size_t i = 0; i < n; ++i) {
    const auto& argument = stack[stack.size() - n + i];
    if (argument.isGenerator() && argument.toGenerator().defined() && argument.toGenerator() != draws_->generator()) {
      c.ahead = log_ != nullptr && trace_.backward == 0;  // the generator moves at once, as in eager mode
      if (!c.ahead) refuse(schema.name(), "draws from a generator other than the default one of " + device_.str());
    }
    const bool written = is_written(schema.arguments()[i]);
    each_tensor(argument, [&](const at::Tensor& t, int element) {
      check(schema.name(), t);
      if (trained_elsewhere(t)) {
        add_value(t, schema.name());
        trained_storages_.insert(storage_of(t));
      } else if (!index_.count(storage_of(t))) {
        add_unannounced(schema.name(), t);
      }
      if (written && trained_storages_.count(storage_of(t)))
        refuse(schema.name(), "writes a tensor that requires a gradient and was made before the forward");
      if (written && writes_forward(t))
        refuse(schema.name(), "writes a tensor of the forward; the plan needs one more run of this backward");
      const bool needs =
          repeated.original != nullptr ? repeated.original->operands.at(c.operands.size()).requires_grad : t.requires_grad();
      c.operands.push_back({static_cast<int>(i), element, view_of(t), written, id_of(t), needs});
      tensors.push_back(t);
    });
    c.arguments.push_back(without_tensors(argument));
  }
  if (repeated.original != nullptr) {
    c.line = repeated.original->line;
    c.numbers = repeated.original->numbers;
    c.catchable = repeated.original->catchable;
  } else if (line_of_caller != nullptr && trace_.backward == 0) {
    c.line = line_of_caller();
  }
  return c;
}

bool recorder::writes_forward(const at::Tensor& t) const {
  const auto s = index_.at(storage_of(t));
  if (trace_.backward == 0 || s >= trace_.forward.storages || trace_.storages[s].slot != none) return false;
  const auto node = ::torch::autograd::get_current_node();
  return node && is_foreign(*node);
}

void recorder::call_ahead(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors,
                          const repeated_call& repeated) {
  const auto& name = c.op.schema().name();
  at::Generator own;
  for (const auto& a : c.arguments)
    if (a.isGenerator()) own = a.toGenerator();
  const auto before = own.defined() ? own.get_state() : at::Tensor();
  const auto other = "from a generator other than the default one of " + device_.str();
  for (const auto& o : c.operands)
    if (o.written)
      refuse(name, own.defined() ? "draws in place " + other : "writes what depends on values of the step, even its size");
  if (repeated.original != nullptr) {
    replace_from(stack, first, *repeated.results);
  } else {
    const bool there =
        std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return is_outside(t) && is_readable(t); });
    if (!there && !run_ahead(tensors)) refuse(name, std::string("depends on values") + not_ahead);
    run_on_values(c, stack, tensors);
  }
  const bool trained =
      c.grad_mode && std::any_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.requires_grad; });
  const auto results = c.op.schema().returns().size();
  for (std::size_t i = 0; i < results; ++i)
    each_tensor(stack[stack.size() - results + i], [&](const at::Tensor& t, int element) {
      check(name, t);
      if (trained && (t.is_floating_point() || t.is_complex())) {
        if (own.defined()) own.set_state(before);  // the eager call draws again
        refuse(name, own.defined() ? "draws " + other + ", and may need a gradient"
                                   : "gives a tensor whose size depends on values of the step, and which may need a gradient");
      }
      add_value(t, name);
      c.results.push_back({static_cast<int>(i), element, view_of(t), false, id_of(t)});
    });
}

std::optional<c10::OperatorHandle> recorder::with_positions(traced_call& c, ::torch::jit::Stack& stack,
                                                            const std::vector<at::Tensor>& tensors,
                                                            const repeated_call& repeated) {
  const auto argument = takes_masks(c.op);
  const bool forward = trace_.backward == 0;
  if (argument < 0 || (forward && (log_ == nullptr || !needs_positions(c, tensors)))) return std::nullopt;
  std::vector<at::Tensor> masks;
  c.masks_known = true;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (c.operands[i].at != argument || !is_mask(tensors[i])) continue;
    masks.push_back(tensors[i]);
    c.masks_known = c.masks_known && has_real_values(tensors[i]);
  }
  if (masks.empty()) return std::nullopt;
  const auto first = stack.size() - c.arguments.size();
  auto arguments = values_from(stack, first);
  const bool flat = arguments[static_cast<std::size_t>(argument)].isTensor();
  const auto sizes = flat ? arguments[0].toTensor().sizes().vec() : std::vector<int64_t>();
  if (flat && at::infer_size(sizes, masks[0].sizes()) != sizes) return std::nullopt;
  const auto known = [&](const at::Tensor& m) {
    return std::find_if(positions_.begin(), positions_.end(), [&](const auto& p) { return p.of(m, sizes); });
  };
  if (!forward) {
    if (std::any_of(masks.begin(), masks.end(), [&](const auto& m) { return known(m) == positions_.end(); })) return std::nullopt;
  } else {
    std::size_t given = 0;
    if (repeated.original == nullptr && !c.masks_known && !run_ahead(masks))
      refuse(c.op.schema().name(), std::string("takes a mask") + not_ahead);
    for (const auto& m : masks) {
      std::erase_if(positions_, [&](const auto& p) { return p.of(m, sizes); });
      positions_.push_back({m, sizes, {}});
      auto& lists = positions_.back().lists;
      if (repeated.original == nullptr) {
        lent_memory shown;
        shown.fill(m);
        lists = positions_in(m, c.op, arguments);
      }
      for (auto j = flat ? 1 : m.dim(); j > 0 && repeated.original != nullptr; --j)
        lists.push_back(repeated.positions->at(given++));
      for (const auto& list : lists) c.positions.push_back(add_value(list, c.op.schema().name()));
    }
  }
  const auto op = put_positions(c.op, arguments, [&](const at::Tensor& m) -> const std::vector<at::Tensor>* {
    const auto p = is_mask(m) ? known(m) : positions_.end();
    return p == positions_.end() ? nullptr : &p->lists;
  });
  if (!op) return std::nullopt;
  replace_from(stack, first, arguments);
  return op;
}

bool recorder::needs_positions(const traced_call& c, const std::vector<at::Tensor>& tensors) {
  const auto places = std::count_if(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.at == 1; });
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (c.operands[i].at != 2) continue;
    const bool one_mask = c.op.schema().arguments()[1].type()->kind() == c10::TypeKind::TensorType;
    const bool trained = c.grad_mode && c.operands[i].requires_grad;
    return trained || (!one_mask && (tensors[i].numel() > 1 || places > 1));
  }
  return true;
}

void recorder::mark_hidden_writes(traced_call& c) const {
  const auto& arguments = c.op.schema().arguments();
  auto position = [&](const std::string& name) {
    for (std::size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return static_cast<int>(i);
    return -1;
  };
  const auto& known = facts(c.op);
  if (!known.writes_if.empty() && !c.arguments[static_cast<std::size_t>(position(known.writes_if))].toBool()) return;
  for (const auto& name : known.writes)
    for (auto& o : c.operands)
      if (o.at == position(name)) {
        o.written = true;
        if (known.statistics) c.statistics.push_back(o.at);
      }
}

void recorder::run_on_values(const traced_call& c, ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors) const {
  const lent_weights lent(stack);
  c.op.callBoxed(&stack);
  log_->hide_made(tensors);
}

void recorder::run_on_made_up(const traced_call& c, ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors) {
  const auto arguments = c.arguments.size();
  if (is_native(c.op) || may_draw(c.op)) return run_hollow(c.op, stack, arguments, tensors);
  const auto before = draws_->state();
  const noted_draws inner;
  run_hollow(c.op, stack, arguments, tensors);
  if (!inner.any()) return;
  draws_->set_state(before);
  refuse(c.op.schema().name(), "draws random numbers, and has no tag `nondeterministic_seeded` that says so");
}

void recorder::try_on_values(const traced_call& c, const ::torch::jit::Stack& stack, const std::vector<at::Tensor>& tensors) {
  if (is_native(c.op) || may_draw(c.op) || log_ == nullptr || trace_.backward > 0) return;
  if (c.op.hasKernelForDispatchKey(c10::DispatchKey::Meta) || distrusts_results(c.op)) return;
  if (std::any_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.written; })) return;
  if (std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return has_memory(t); })) return;
  if (!tried_operators_.insert(c.op.operator_name()).second) return;
  auto made_up = values_from(stack, stack.size() - c.arguments.size());
  auto real = made_up;
  run_on_made_up(c, made_up, tensors);
  if (!run_ahead(tensors)) return;
  run_on_values(c, real, tensors);
  const auto in = [](const ::torch::jit::Stack& results) {
    std::vector<at::Tensor> list;
    each_tensor(results, [&](const at::Tensor& t, int) { list.push_back(t); });
    return list;
  };
  const auto a = in(made_up), b = in(real);
  if (!std::equal(a.begin(), a.end(), b.begin(), b.end(), same_places)) require_kernel_geometry(c.op);
}

bool recorder::classify_dynamic(traced_call& c, const std::vector<at::Tensor>& tensors) const {
  const auto& name = c.op.schema().name();
  if (facts(c.op).resizes) refuse(name, "resizes or replaces the storage of a tensor");
  if (c.ahead) return false;
  const bool dynamic = is_dynamic(c.op, [&](int argument) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (c.operands[i].at == argument && is_mask(tensors[i])) return true;
    return false;
  });
  if (!dynamic && !gives_sizes_by_values(c, tensors)) return false;
  const auto& returns = c.op.schema().returns();
  const bool numbers = std::all_of(returns.begin(), returns.end(), gives_number);
  bool ask = false;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    ask = ask || contents_[c.operands[i].view.value] != contents::constant || !has_memory(tensors[i]);
  if (ask && asks_for_zeros(c)) {
    c.assumes_zero = true;
    return false;
  }
  const bool forward = trace_.backward == 0;
  const bool asks_again = log_ == nullptr || forward;  // planned backwards of a training step repeat no questions
  const bool real_values = std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return has_real_values(t); });
  c.ahead = ask && log_ != nullptr && forward && (!numbers || !real_values);
  if (ask && !c.ahead && (!numbers || !real_values || !asks_again))
    refuse(name, "depends on the values of an activation, an input, a parameter or a buffer; a plan needs a fixed graph");
  return ask && !c.ahead;
}

bool recorder::asks_for_zeros(const traced_call& c) const {
  const auto& name = c.op.schema().name();
  if (!may_assume_zero_ || trace_.backward == 0 || (name != "aten::_local_scalar_dense" && name != "aten::nonzero")) return false;
  const auto node = ::torch::autograd::get_current_node();
  if (!node || is_foreign(*node)) return false;  // other code may do anything with a wrong number
  const auto& view = c.operands.front().view;
  return at::isIntegralType(view.dtype, true) && of_forward_[view.value];
}

void recorder::execute(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const std::vector<at::Tensor>& tensors,
                       bool real_values, bool constant) {
  if (only_checks(c) && !constant) return stack.resize(first);  // a check of made-up numbers is void
  if (c.assumes_zero) return run_on_zeros(c.op, stack);
  const bool no_values = !real_values && !constant && std::none_of(c.operands.begin(), c.operands.end(), [&](const auto& o) {
    const bool statistics = std::find(c.statistics.begin(), c.statistics.end(), o.at) != c.statistics.end();
    return o.written && !statistics && contents_[o.view.value] != contents::hollow;
  });
  const auto key = no_values ? geometry_key(c, tensors) : std::nullopt;
  const bool seeded = may_draw(c.op);
  if (seeded && !device_.is_cpu() && draws_on_host(c, tensors))
    refuse(c.op.schema().name(),
           "draws from the generator of the host in a step on " + device_.str() +
               "; a planned step would repeat the same number for ever. Draw on the device, or pass the number as an argument");
  const auto before = seeded ? draws_->state() : at::Tensor();
  const bool by_values = facts(c.op).draws_by_values;  // made-up numbers may draw less, or nothing
  const auto drawn = [&] {
    const auto call = trace_.calls.size();
    const bool made_up = key || by_values;
    c.draws = draws_->note(call, before, made_up ? draws_->pass(before, key ? *key : std::to_string(call)) : draws_->state());
  };
  const auto looked_at = [&](const known_results& r) {
    return r.any_made([&](auto type, auto bytes) { return keeps_values(type, bytes, real_values); });
  };
  auto known = key ? find_known(*key) : nullptr;
  if (key && !known)
    if (auto results = deduced(c, tensors); results && !looked_at(*results)) known = remember(*key, std::move(*results));
  if (known) {
    replace_from(stack, first, known->made_for(tensors));
    if (known->draws) drawn();
    return;
  }
  if (is_native(c.op) && (is_view(c.op) || c.op.schema().name() == "aten::_unsafe_view"))  // only shares memory
    c.op.callBoxed(&stack);
  else
    run_on_made_up(c, stack, tensors);
  if (seeded && (by_values || !same_bytes(before, draws_->state()))) drawn();
  if (!key || geometry_key(c, tensors) != key) return;
  known_results results(tensors, values_from(stack, first));
  results.draws = c.draws.has_value();
  if (results.complete() && !looked_at(results)) remember(*key, std::move(results));
}

void recorder::repeat(traced_call& c, ::torch::jit::Stack& stack, std::size_t first, const repeated_call& repeated) {
  replace_from(stack, first, *repeated.results);
  if (!repeated.original->draws) return;
  const auto before = draws_->state();
  const auto call = trace_.calls.size();
  c.draws = draws_->note(call, before, draws_->pass(before, std::to_string(call)));
}

}  // namespace remat::pytorch::detail
