// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"

#include <ATen/core/List.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "archive.hpp"
#include "schema_types.hpp"
#include "user_line.hpp"

namespace remat::pytorch::exported {
namespace {

constexpr int deepest = 32;  ///< largest nesting of regions
constexpr std::string_view operators = "torch.ops.", regions = "torch.ops.higher_order.";

class compiler {
 public:
  compiler(std::optional<at::Device> device, std::vector<std::string>& unsupported, std::vector<std::string>& in_eval_mode)
      : device_(device), unsupported_(unsupported), in_eval_mode_(in_eval_mode) {}

  graph compile(const field& f, int depth) {
    if (depth > deepest) f.fail("regions nested deeper than " + std::to_string(deepest));
    scope s{{}, {}, depth};
    for (const auto& x : f.at("inputs").elements()) {
      const auto [choice, v] = x.choice();
      const auto name = slot_name(choice, v);
      s.g.inputs.push_back(name ? define(s, *name, choice, v) : -1);
      s.g.input_names.push_back(name.value_or(""));
    }
    for (const auto& x : f.at("nodes").elements()) s.g.nodes.push_back(one_node(s, x));
    for (const auto& x : f.at("outputs").elements()) s.g.outputs.push_back(argument(s, x, nullptr, "output"));
    note_last_uses(s.g);
    return std::move(s.g);
  }

 private:
  struct scope {
    graph g;
    std::unordered_map<std::string, int> slots;
    int depth;
  };

  /// Name of the graph's value in an argument; nothing for other arguments.
  static std::optional<std::string> slot_name(const std::string& choice, const field& v) {
    if (choice == "as_tensor") return v.at("name").text();
    if (choice == "as_sym_int" || choice == "as_sym_float" || choice == "as_sym_bool")
      if (const auto name = v.find("as_name")) return name->text();
    return std::nullopt;
  }

  static int define(scope& s, const std::string& name, const std::string& choice, const field& f) {
    const auto slot = static_cast<int>(s.g.slots.size());
    if (!s.slots.emplace(name, slot).second) f.fail("'" + name + "' is there already");
    s.g.slots.push_back(choice == "as_sym_int"     ? slot_kind::integer
                        : choice == "as_sym_float" ? slot_kind::real
                        : choice == "as_sym_bool"  ? slot_kind::boolean
                                                   : slot_kind::tensor);
    return slot;
  }

  void refuse(const std::string& what) {
    const auto line = what + ", from " + source_;
    if (std::find(unsupported_.begin(), unsupported_.end(), line) == unsupported_.end()) unsupported_.push_back(line);
  }

  // --- arguments ---------------------------------------------------------------------------------------------------------------

  static operand plain(at::IValue v) { return {.literal = std::move(v)}; }

  static operand from_slot(const scope& s, const field& name, const at::TypePtr& type) {
    const auto found = s.slots.find(name.text());
    if (found == s.slots.end()) name.fail("no value '" + name.text() + "' before its use");
    const auto how = passed(s.g.slots[static_cast<std::size_t>(found->second)], type);
    if (!how) name.fail("'" + name.text() + "' is not of type " + type->str());
    return {.literal = {}, .slot = found->second, .how = *how};
  }

  static operand from_literal(const literal_value& l, const field& f, const at::TypePtr& type) {
    auto v = converted(l, type);
    if (!v) f.fail("not of type " + type->str());
    return plain(*std::move(v));
  }

  /// A number, or a value of the graph.
  static operand symbol(const scope& s, const field& f, const at::TypePtr& type) {
    const auto [choice, v] = f.choice();
    if (choice == "as_name") return from_slot(s, v, type);
    if (choice == "as_int") return from_literal({v.integer()}, v, type);
    if (choice == "as_bool") return from_literal({v.boolean()}, v, type);
    if (choice == "as_float") return from_literal({v.number()}, v, type);
    f.fail("'" + choice + "' is no number");
  }

  /// A tensor, or none.
  static operand perhaps_tensor(const scope& s, const field& f, const at::TypePtr& type, bool optional) {
    const auto [choice, v] = f.choice();
    if (choice == "as_tensor") return from_slot(s, v.at("name"), type);
    if (choice != "as_none") f.fail("'" + choice + "' is no tensor");
    if (!optional) f.fail("a tensor is needed here");
    return {};
  }

  /// A list with elements from `make`.
  template <class Make>
  static operand list(const field& f, const at::TypePtr& type, const Make& make) {
    if (!type || type->kind() != at::TypeKind::ListType)
      f.fail("a list" + (type ? ", not of type " + type->str() : " cannot be used here"));
    const auto element = type->castRaw<at::ListType>()->getElementType();
    const auto [inner, optional] = required(element);
    operand o{.literal = {}, .element = list_element(element)};
    for (const auto& x : f.elements()) o.items.push_back(make(x, inner, optional));
    if (std::any_of(o.items.begin(), o.items.end(), [](const auto& x) { return x.slot >= 0; })) return o;
    c10::impl::GenericList constant(o.element);
    for (auto& x : o.items) constant.push_back(std::move(x.literal));
    return plain(std::move(constant));
  }

  /// @param declared type in the schema; nullptr: any
  operand argument(const scope& s, const field& f, const at::TypePtr& declared, const std::string& name) {
    const auto [type, optional] = required(declared);
    const auto [choice, v] = f.choice();
    const auto literal = [&, &v_ = v, &type_ = type](at::IValue x, at::TypeKind enumeration = at::TypeKind::AnyType) {
      return from_literal({std::move(x), enumeration}, v_, type_);
    };
    if (choice == "as_none") {
      if (declared && !optional) v.fail("None, not of type " + declared->str());
      return {};
    }
    if (choice == "as_tensor") return from_slot(s, v.at("name"), type);
    if (choice == "as_optional_tensor") return perhaps_tensor(s, v, type, optional || !declared);
    if (choice == "as_int") return literal(v.integer());
    if (choice == "as_float") return literal(v.number());
    if (choice == "as_bool") return literal(v.boolean());
    if (choice == "as_string") return literal(v.text());
    if (choice == "as_complex") return literal(c10::complex<double>(v.at("real").number(), v.at("imag").number()));
    if (choice == "as_scalar_type") return literal(static_cast<int64_t>(scalar_type(v)), at::TypeKind::ScalarTypeType);
    if (choice == "as_layout") return literal(static_cast<int64_t>(layout(v)), at::TypeKind::LayoutType);
    if (choice == "as_memory_format") return literal(static_cast<int64_t>(memory_format(v)), at::TypeKind::MemoryFormatType);
    if (choice == "as_device") return literal(device_ ? *device_ : device(v));
    if (choice == "as_sym_int" || choice == "as_sym_float" || choice == "as_sym_bool") return symbol(s, v, type);
    const auto element = [&](const field& x, const at::TypePtr& t, const std::string& kind) {
      if (kind == "as_tensors") return from_slot(s, x.at("name"), t);
      if (kind == "as_ints") return from_literal({x.integer()}, x, t);
      if (kind == "as_floats") return from_literal({x.number()}, x, t);
      if (kind == "as_bools") return from_literal({x.boolean()}, x, t);
      if (kind == "as_strings") return from_literal({x.text()}, x, t);
      return symbol(s, x, t);
    };
    if (choice == "as_optional_tensors")
      return list(v, type, [&](const field& x, const at::TypePtr& t, bool none) { return perhaps_tensor(s, x, t, none); });
    static const std::vector<std::string> lists = {"as_tensors", "as_ints",     "as_floats",     "as_bools",
                                                   "as_strings", "as_sym_ints", "as_sym_floats", "as_sym_bools"};
    if (std::find(lists.begin(), lists.end(), choice) != lists.end())
      return list(v, type, [&, &kind = choice](const field& x, const at::TypePtr& t, bool) { return element(x, t, kind); });
    refuse("argument '" + name + "' of " + target_ + " (" + choice.substr(choice.starts_with("as_") ? 3 : 0) + ")");
    return {};
  }

  // --- nodes -------------------------------------------------------------------------------------------------------------------

  node one_node(scope& s, const field& f) {
    node n;
    n.target = f.at("target").text();
    if (const auto name = f.find("name"); name && name->is_text()) n.name = name->text();
    const auto metadata = f.find("metadata");
    const auto trace = metadata ? metadata->find("stack_trace") : std::nullopt;
    n.source = line_of_user(trace ? trace->text() : "");
    source_ = n.source;
    target_ = n.target;
    if (n.target.starts_with(regions))
      region(s, n, f);
    else if (n.target.starts_with(operators))
      call(s, n, f);
    else
      symbolic(s, n, f);
    return n;
  }

  void call(scope& s, node& n, const field& f) {
    const auto name = n.target.substr(operators.size());  // aten.add.Tensor
    const auto first = name.find('.'), last = name.rfind('.');
    if (first == last) f.at("target").fail("'" + n.target + "' is not of the form torch.ops.library.operator.overload");
    const auto overload = name.substr(last + 1);
    const auto full = name.substr(0, first) + "::" + name.substr(first + 1, last - first - 1);
    const auto op = c10::Dispatcher::singleton().findSchema({full, overload == "default" ? "" : overload});
    if (!op) {
      refuse(n.target + ": not registered in this process; load the library that registers it");
      results(s, n, f.at("outputs"));
      return;
    }
    std::map<std::string, field> given;
    for (const auto& x : f.at("inputs").elements())
      if (!given.emplace(x.at("name").text(), x.at("arg")).second) x.at("name").fail("appears twice");
    for (const auto& a : op->schema().arguments()) {
      const auto found = given.find(a.name());
      if (found != given.end()) {
        n.operands.push_back(argument(s, found->second, a.real_type(), a.name()));
        look_for_eval_mode(n, a.name());
        given.erase(found);
      } else if (a.default_value()) {
        n.operands.push_back(plain(*a.default_value()));
      } else if (a.type()->kind() == at::TypeKind::OptionalType) {
        n.operands.emplace_back();
      } else {
        f.at("inputs").fail("argument '" + a.name() + "' of " + n.target + " is missing");
      }
    }
    if (!given.empty()) given.begin()->second.fail(n.target + " has no argument '" + given.begin()->first + "'");
    results(s, n, f.at("outputs"));
    check_results(s, n, *op, f.at("outputs"));
    n.what = operator_call{*op};
  }

  void look_for_eval_mode(const node& n, const std::string& argument) {
    const auto& v = n.operands.back();
    if ((argument == "train" || argument == "training") && v.slot < 0 && v.literal.isBool() && !v.literal.toBool())
      in_eval_mode_.push_back(n.target + ", from " + n.source);
  }

  static void check_results(const scope& s, const node& n, const c10::OperatorHandle& op, const field& f) {
    const auto& returns = op.schema().returns();
    if (n.results.size() > returns.size()) f.fail(n.target + " gives " + std::to_string(returns.size()) + " results");
    for (std::size_t i = 0; i < n.results.size(); ++i) {
      const auto [type, optional] = required(returns[i].real_type());
      const auto& r = n.results[i];
      const bool tensors = type->kind() == at::TypeKind::ListType &&
                           type->castRaw<at::ListType>()->getElementType()->kind() == at::TypeKind::TensorType;
      bool fits = r.list ? tensors : !tensors;
      if (!r.list)
        for (const auto slot : r.slots)
          fits = fits && (slot < 0 || (s.g.slots[static_cast<std::size_t>(slot)] == slot_kind::tensor) ==
                                          (type->kind() == at::TypeKind::TensorType));
      if (!fits) f.fail("result " + std::to_string(i) + " of " + n.target + " is of type " + type->str());
    }
  }

  void symbolic(scope& s, node& n, const field& f) {
    const auto* const known = find_symbolic(n.target);
    if (known == nullptr) {
      refuse(n.target + ": unknown");
      results(s, n, f.at("outputs"));
      return;
    }
    static const at::TypePtr number = at::NumberType::get();
    for (const auto& x : f.at("inputs").elements()) n.operands.push_back(argument(s, x.at("arg"), number, "number"));
    if (n.operands.size() != known->arguments)
      f.at("inputs").fail(n.target + " takes " + std::to_string(known->arguments) + " arguments");
    for (std::size_t i = 0; i < n.operands.size(); ++i)
      if (n.operands[i].slot < 0 && n.operands[i].literal.isComplexDouble()) f.at("inputs").fail("complex numbers are no sizes");
    results(s, n, f.at("outputs"));
    if (n.results.size() != 1 || n.results[0].list) f.at("outputs").fail(n.target + " gives one number");
    n.what = symbolic_call{known};
  }

  void region(scope& s, node& n, const field& f) {
    const auto kind = n.target.substr(regions.size());
    const bool grad = kind == "wrap_with_set_grad_enabled", autocast = kind == "wrap_with_autocast";
    const std::size_t before = grad ? 1 : 4;  // number of arguments before the graph
    if (!grad && !autocast) {
      refuse(n.target + ": a higher-order operator");
      results(s, n, f.at("outputs"));
      return;
    }
    std::vector<field> given;
    for (const auto& x : f.at("inputs").elements()) given.push_back(x.at("arg"));
    if (given.size() <= before) f.at("inputs").fail(n.target + " needs a graph");
    const auto option = [&](std::size_t i, const char* choice) -> std::optional<field> {
      const auto [has, v] = given[i].choice();
      if (has == "as_none") return std::nullopt;
      if (has != choice) given[i].fail("not " + std::string(choice));
      return v;
    };
    const auto needed = [&](std::size_t i, const char* choice) {
      auto v = option(i, choice);
      if (!v) given[i].fail("not " + std::string(choice));
      return *std::move(v);
    };
    for (std::size_t i = before + 1; i < given.size(); ++i) n.operands.push_back(argument(s, given[i], nullptr, "argument"));
    auto body = std::make_unique<graph>(compile(needed(before, "as_graph").at("graph"), s.depth + 1));
    source_ = n.source;
    target_ = n.target;
    if (body->inputs.size() != n.operands.size())
      f.at("inputs").fail("the graph takes " + std::to_string(body->inputs.size()) + " arguments");
    for (std::size_t i = 0; i < n.operands.size(); ++i)
      if (body->inputs[i] >= 0 && s.g.kind(n.operands[i]) != body->slots[static_cast<std::size_t>(body->inputs[i])])
        given[i + before + 1].fail("not of the kind that the graph takes");
    results(s, n, f.at("outputs"));
    flatten(n.results);
    if (n.results.size() != body->outputs.size())
      f.at("outputs").fail("the graph gives " + std::to_string(body->outputs.size()) + " results");
    for (std::size_t i = 0; i < n.results.size(); ++i)
      for (const auto slot : n.results[i].slots)
        if (slot >= 0 && body->kind(body->outputs[i]) != s.g.slots[static_cast<std::size_t>(slot)])
          f.at("outputs").fail("result " + std::to_string(i) + " is not of the kind that the graph gives");
    if (grad) {
      n.what = grad_region{needed(0, "as_bool").boolean(), std::move(body)};
      return;
    }
    const auto name = needed(0, "as_string");
    const auto type = option(1, "as_scalar_type");
    const auto cache = option(3, "as_bool");
    n.what = autocast_region{device_ ? device_->type() : autocast_device(name),
                             type ? std::optional(scalar_type(*type)) : std::nullopt, needed(2, "as_bool").boolean(),
                             cache ? std::optional(cache->boolean()) : std::nullopt, std::move(body)};
  }

  static c10::DeviceType autocast_device(const field& f) {
    try {
      return at::Device(f.text()).type();
    } catch (const c10::Error&) {
      f.fail("'" + f.text() + "' is no device");
    }
  }

  /// Replaces each list of tensors by its elements.
  static void flatten(std::vector<result_slots>& results) {
    std::vector<result_slots> flat;
    for (const auto& r : results) {
      if (!r.list)
        flat.push_back(r);
      else
        for (const auto slot : r.slots) flat.push_back({false, {slot}});
    }
    results = std::move(flat);
  }

  void results(scope& s, node& n, const field& f) {
    for (const auto& x : f.elements()) {
      const auto [choice, v] = x.choice();
      result_slots r;
      if (const auto name = slot_name(choice, v)) {
        r.slots.push_back(define(s, *name, choice, v));
      } else if (choice == "as_tensors") {
        r.list = true;
        for (const auto& t : v.elements()) r.slots.push_back(define(s, t.at("name").text(), "as_tensor", t));
      } else if (choice == "as_none") {
        r.slots.push_back(-1);
      } else {
        refuse("a result of " + n.target + " (" + choice + ")");
      }
      n.results.push_back(std::move(r));
    }
  }

  static void note_last_uses(graph& g) {
    std::vector<int> last(g.slots.size(), -1);  // node after which a slot is free; -1: never used
    const auto visit = [&](const operand& o, int at, const auto& self) -> void {
      if (o.slot >= 0) last[static_cast<std::size_t>(o.slot)] = at;
      for (const auto& x : o.items) self(x, at, self);
    };
    for (int i = 0; i < static_cast<int>(g.nodes.size()); ++i) {
      const auto& n = g.nodes[static_cast<std::size_t>(i)];
      for (const auto& o : n.operands) visit(o, i, visit);
      for (const auto& r : n.results)
        for (const auto slot : r.slots)
          if (slot >= 0) last[static_cast<std::size_t>(slot)] = i;
    }
    const auto end = static_cast<int>(g.nodes.size());
    for (const auto& o : g.outputs) visit(o, end, visit);
    for (std::size_t slot = 0; slot < last.size(); ++slot)
      if (last[slot] >= 0 && last[slot] < end)
        g.nodes[static_cast<std::size_t>(last[slot])].last_used.push_back(static_cast<int>(slot));
  }

  std::optional<at::Device> device_;
  std::vector<std::string>& unsupported_;
  std::vector<std::string>& in_eval_mode_;
  std::string source_ = "the signature", target_;
};

}  // namespace

graph compile(const field& f, std::optional<at::Device> device, std::vector<std::string>& unsupported,
              std::vector<std::string>& in_eval_mode) {
  return compiler(device, unsupported, in_eval_mode).compile(f, 0);
}

}  // namespace remat::pytorch::exported
