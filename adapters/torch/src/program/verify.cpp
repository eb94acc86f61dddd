// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <map>
#include <optional>
#include <remat/pytorch/program.hpp>
#include <set>

#include "operators.hpp"
#include "types.hpp"

namespace remat::pytorch {
namespace {

/// Bytes from the first to the last element; nothing if sizes and strides are invalid or too large.
std::optional<bytes_t> span_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType dtype) {
  if (sizes.size() != strides.size()) return std::nullopt;
  bytes_t last = 0, elements = 1;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0 || strides[d] < 0 || sizes[d] > max_bytes || strides[d] > max_bytes) return std::nullopt;
    bytes_t step = 0;
    if (__builtin_mul_overflow(elements, sizes[d], &elements) || elements > max_bytes) return std::nullopt;
    if (sizes[d] > 0 && (__builtin_mul_overflow(sizes[d] - 1, strides[d], &step) || (last += step) > max_bytes))
      return std::nullopt;
  }
  if (elements == 0) return 0;
  bytes_t bytes = 0;
  if (__builtin_mul_overflow(last + 1, static_cast<bytes_t>(c10::elementSize(dtype)), &bytes) || bytes > max_bytes)
    return std::nullopt;
  return bytes;
}

bool is_dense_type(at::ScalarType t) { return at::isFloatingType(t) || at::isComplexType(t) || at::isIntegralType(t, true); }

class checker {
 public:
  explicit checker(const program& step) : p_(step), producer_(step.values.size(), none) {}

  void run() {
    check_values();
    check_slots();
    for (std::size_t i = 0; i < p_.views.size(); ++i) check_view(i);
    if (p_.loss >= p_.nodes.size()) fail("loss", "there is no such node");
    for (node_ = 0; node_ < p_.nodes.size(); ++node_) check_node(p_.nodes[node_]);
    node_ = none;
    for (index_t v = 0; v < p_.values.size(); ++v)
      if (producer_[v] == none && !p_.is_given(v)) fail(at("values", v), "nothing writes it");
    check_results();
  }

 private:
  [[noreturn]] void fail(const std::string& field, const std::string& why) const { throw bad_program(node_, field, why); }
  static std::string at(const std::string& list, std::size_t i) { return list + "[" + std::to_string(i) + "]"; }

  void check_values() const {
    for (std::size_t i = 0; i < p_.values.size(); ++i) {
      const auto& v = p_.values[i];
      if (v.bytes < 0 || v.bytes > max_bytes) fail(at("values", i) + ".bytes", "out of range");
      if (v.slot != none && (v.slot >= p_.slots.size() || p_.slots[v.slot].value != i))
        fail(at("values", i) + ".slot", "there is no such slot, or it lies in another value");
    }
  }

  void check_slots() const {
    std::set<std::pair<int, std::size_t>> taken;
    std::map<index_t, std::size_t> sharing;
    for (std::size_t k = 0; k < p_.slots.size(); ++k) {
      const auto& s = p_.slots[k];
      const auto here = at("slots", k);
      if (s.from <= role::internal || s.from > role::output_grad) fail(here + ".from", "is not from outside");
      const bool announced = s.from == role::parameter || s.from == role::buffer;
      if (!taken.insert({static_cast<int>(announced ? role::buffer : s.from), s.position}).second)
        fail(here + ".position", "another slot has it");
      if (s.value >= p_.values.size() || p_.values[s.value].slot == none) fail(here + ".value", "is no value from outside");
      const auto& v = p_.values[s.value];
      if (v.device != s.type.device) fail(here + ".type.device", "is not that of the value");
      if (++sharing[s.value] > 1 && !(may_share(s.from) && may_share(p_.slots[v.slot].from)))
        fail(here + ".value", "shares its memory with what is neither of the module nor an input");
      check_range(here, s.type.sizes, s.type.strides, s.type.dtype, s.type.conj, s.offset, v.bytes);
      if (s.number && !s.type.sizes.empty()) fail(here + ".number", "has dimensions");
      if (s.from == role::constant &&
          (s.position >= p_.constants.size() || static_cast<bytes_t>(p_.constants[s.position].size()) != v.bytes))
        fail(here + ".position", "is no constant of as many bytes as the value");
    }
  }
  static bool of_module(role r) { return r == role::parameter || r == role::buffer || r == role::found; }
  static bool may_share(role r) { return of_module(r) || r == role::input; }

  void check_range(const std::string& here, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                   at::ScalarType dtype, bool conj, bytes_t offset, bytes_t bytes) const {
    if (!is_dense_type(dtype)) fail(here + ".dtype", "is no type of plain numbers");
    if (conj && !at::isComplexType(dtype)) fail(here + ".conj", "is not complex");
    const auto span = span_of(sizes, strides, dtype);
    if (!span) fail(here + ".sizes", "and strides are not those of a tensor");
    if (offset < 0 || offset > max_bytes || offset % static_cast<bytes_t>(c10::elementSize(dtype)) != 0)
      fail(here + ".offset", "is not a multiple of the element's size");
    if (*span > 0 && offset + *span > bytes) fail(here + ".offset", "reaches beyond the bytes of the value");
  }

  void check_view(std::size_t i) const {
    const auto& v = p_.views[i];
    const auto here = at("views", i);
    if (v.value >= p_.values.size()) fail(here + ".value", "there is no such value");
    const auto& value = p_.values[v.value];
    check_range(here, v.sizes, v.strides, v.dtype, v.conj, v.offset, value.bytes);
    if (!v.whole) return;
    if (value.slot == none) fail(here + ".whole", "is not from outside");
    const auto& s = p_.slots[value.slot];
    if (s.offset != v.offset || !(s.type == tensor_type{v.sizes, v.strides, v.dtype, s.type.device, v.conj, v.neg}))
      fail(here + ".whole", "is not the tensor in the slot");
  }

  bool there(index_t value) const { return p_.is_given(value) || producer_[value] < node_; }
  index_t view(const std::string& field, index_t v) const {
    if (v >= p_.views.size()) fail(field, "there is no such view");
    return p_.views[v].value;
  }

  void check_node(const node& n) {
    for (std::size_t i = 0; i < n.inputs.size(); ++i) {
      if (n.inputs[i] >= p_.values.size()) fail(at("inputs", i), "there is no such value");
      if (!there(n.inputs[i])) fail(at("inputs", i), "is read before it is made");
    }
    for (std::size_t i = 0; i < n.outputs.size(); ++i) {
      const auto v = n.outputs[i];
      if (v >= p_.values.size()) fail(at("outputs", i), "there is no such value");
      if (producer_[v] != none || p_.is_given(v)) fail(at("outputs", i), "is written already");
      if ((p_.from(v) == role::output_grad) != (node_ == p_.loss))
        fail(at("outputs", i), "gradients of outputs come from the loss");
      producer_[v] = node_;
    }
    const std::set<index_t> inputs(n.inputs.begin(), n.inputs.end()), outputs(n.outputs.begin(), n.outputs.end());
    if (inputs.size() != n.inputs.size()) fail("inputs", "a value is there twice");
    if (node_ == p_.loss && (!n.calls.empty() || n.random || !n.once || !n.overwrites.empty()))
      fail("calls", "the loss node calls nothing, draws nothing and runs once");
    std::set<index_t> made, old;
    for (std::size_t i = 0; i < n.overwrites.size(); ++i) {
      const auto& [from, to] = n.overwrites[i];
      if (!inputs.count(from)) fail(at("overwrites", i), "the old version is no input");
      if (!outputs.count(to)) fail(at("overwrites", i), "the new version is no output");
      if (p_.values[from].bytes != p_.values[to].bytes || p_.values[from].device != p_.values[to].device)
        fail(at("overwrites", i), "the versions differ in size or device");
      if (!made.insert(to).second || !old.insert(from).second) fail(at("overwrites", i), "a version is there twice");
    }
    for (std::size_t i = 0; i < n.calls.size(); ++i) check_call(at("calls", i), n.calls[i], inputs, outputs, old, made);
    for (std::size_t i = 0; i < n.outputs.size(); ++i) {
      const auto v = n.outputs[i];
      const bool token = std::find(p_.tokens.begin(), p_.tokens.end(), v) != p_.tokens.end();
      if (node_ != p_.loss && !token && !made.count(v)) fail(at("outputs", i), "no call makes it");
      if (token && (made.count(v) || p_.values[v].bytes != 0)) fail(at("outputs", i), "is a token, but holds bytes");
    }
    check_origin("starts", n.starts, node_);
    if (!n.random && n.starts.from != generator_origin::next) fail("starts", "the node draws nothing");
  }

  void check_call(const std::string& here, const call& c, const std::set<index_t>& inputs, const std::set<index_t>& outputs,
                  const std::set<index_t>& old, std::set<index_t>& made) const {
    const auto& schema = c.op.schema();
    const auto& said = facts(c.op);
    if (said.resizes || said.reads_files || is_view(c.op)) fail(here + ".op", schema.name() + " is nothing a step calls");
    if (c.arguments.size() != schema.arguments().size())
      fail(here + ".arguments", schema.name() + " takes " + std::to_string(schema.arguments().size()) + ", there are " +
                                    std::to_string(c.arguments.size()));
    std::set<std::pair<int, int>> filled;
    for (std::size_t i = 0; i < c.operands.size(); ++i) {
      const auto& o = c.operands[i];
      const auto field = here + "." + at("operands", i);
      const auto value = view(field + ".view", o.view);
      if (o.at < 0 || static_cast<std::size_t>(o.at) >= c.arguments.size()) fail(field + ".at", "there is no such argument");
      const auto& argument = c.arguments[static_cast<std::size_t>(o.at)];
      const bool fits = o.element < 0 ? o.element == -1 && argument.isTensor()
                                      : argument.isList() && static_cast<std::size_t>(o.element) < argument.toListRef().size() &&
                                            argument.toListRef()[static_cast<std::size_t>(o.element)].isTensor();
      if (!fits) fail(field + ".element", "there is no tensor in this argument");
      if (!filled.insert({o.at, o.element}).second) fail(field + ".at", "another operand goes there");
      if (old.count(value)) fail(field + ".view", "names the version that the node overwrites");
      if (!made.count(value) && !inputs.count(value)) fail(field + ".view", "is no input and not made yet");
    }
    for (std::size_t i = 0; i < c.arguments.size(); ++i) {
      check_argument(here + "." + at("arguments", i), c.arguments[i]);
      const auto& declared = schema.arguments()[i];
      if (!fits(c.arguments[i], *declared.type()))
        fail(here + "." + at("arguments", i), schema.name() + " takes a " + declared.type()->str() + " as " + declared.name() +
                                                  ", not a " + c.arguments[i].tagKind());
    }
    for (std::size_t i = 0; i < c.results.size(); ++i) {
      const auto& r = c.results[i];
      const auto field = here + "." + at("results", i);
      const auto value = view(field + ".view", r.view);
      const auto returns = schema.returns().size();
      if (r.at < 0 || static_cast<std::size_t>(r.at) >= returns) fail(field + ".at", "there is no such result");
      const bool list = schema.returns()[static_cast<std::size_t>(r.at)].type()->kind() == c10::TypeKind::ListType;
      if (r.element < -1 || list != (r.element >= 0)) fail(field + ".element", "is not as the operator returns it");
      if (!outputs.count(value)) fail(field + ".view", "is no output");
      if (!made.insert(value).second) fail(field + ".view", "is made twice");
    }
    for (auto a : c.first_run_only)
      if (std::none_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.at == a; }))
        fail(here + ".first_run_only", "there is no operand in argument " + std::to_string(a));
  }

  void check_argument(const std::string& field, const c10::IValue& v) const {
    if (v.isTensor() && v.toTensor().defined()) fail(field, "holds a tensor");
    if (v.isList())
      for (const auto& x : v.toListRef()) check_argument(field, x);
  }

  /// @param before the nodes below this number have run
  void check_origin(const std::string& field, const generator_origin& o, index_t before) const {
    if (o.from < generator_origin::next || o.from > generator_origin::fixed) fail(field + ".from", "is none of the origins");
    const bool of_node = o.from == generator_origin::before || o.from == generator_origin::after;
    if (of_node != (o.node != none) || (of_node && (o.node >= before || !p_.nodes[o.node].random)))
      fail(field + ".node", "is no earlier node that draws");
    if (o.from == generator_origin::backward && before <= p_.loss) fail(field + ".from", "the backward has not begun");
    if ((o.from == generator_origin::fixed) == o.state.empty()) fail(field + ".state", "is there without need, or missing");
  }

  void check_results() const {
    const auto outputs = p_.outputs.size();
    const auto& loss = p_.nodes[p_.loss];
    const auto length = [&](const char* name, std::size_t n, std::size_t expected) {
      if (n != expected) fail(name, std::to_string(n) + " entries instead of " + std::to_string(expected));
    };
    if (outputs == 0) fail("outputs", "there are none");
    length("output_versions", p_.output_versions.size(), outputs);
    length("differentiable", p_.differentiable.size(), outputs);
    length("output_grads", p_.output_grads.size(), outputs);
    length("parameter_grads", p_.parameter_grads.size(), p_.parameters.size());
    length("parameter_sources", p_.parameter_sources.size(), p_.parameters.size());
    length("input_sources", p_.input_sources.size(), p_.input_grads.size());
    for (const auto& sources : p_.parameter_sources) length("parameter_sources", sources.size(), outputs);
    for (const auto& sources : p_.input_sources)
      if (!sources.empty()) length("input_sources", sources.size(), outputs);
    std::size_t gradients = 0;
    for (std::size_t i = 0; i < outputs; ++i) {
      const auto value = view(at("outputs", i), p_.outputs[i]);
      if (std::find(loss.inputs.begin(), loss.inputs.end(), value) == loss.inputs.end())
        fail(at("outputs", i), "the loss does not read it");
      if (p_.output_versions[i] < 0) fail(at("output_versions", i), "is negative");
      if (p_.output_grads[i] == none) continue;
      ++gradients;
      const auto gradient = view(at("output_grads", i), p_.output_grads[i]);
      if (!p_.differentiable[i]) fail(at("output_grads", i), "the output is not differentiable");
      if (p_.from(gradient) != role::output_grad || p_.slots[p_.values[gradient].slot].position != i)
        fail(at("output_grads", i), "is not from outside");
      const auto &g = p_.views[p_.output_grads[i]], &o = p_.views[p_.outputs[i]];
      if (g.sizes != o.sizes || g.dtype != o.dtype) fail(at("output_grads", i), "is not like the output");
    }
    for (std::size_t i = 0; i < p_.assumed_zero.size(); ++i) {
      const auto value = view(at("assumed_zero", i), p_.assumed_zero[i]);
      if (std::find(loss.inputs.begin(), loss.inputs.end(), value) == loss.inputs.end())
        fail(at("assumed_zero", i), "the loss does not read it");
    }
    length("outputs of the loss", loss.outputs.size(), gradients);
    for (std::size_t i = 0; i < p_.parameters.size(); ++i) {
      const auto k = p_.parameters[i];
      if (k >= p_.slots.size() || p_.slots[k].from != role::parameter) fail(at("parameters", i), "is no slot of a parameter");
      view(at("parameter_grads", i), p_.parameter_grads[i]);
      if (p_.views[p_.parameter_grads[i]].sizes != p_.slots[k].type.sizes)
        fail(at("parameter_grads", i), "has another size than the parameter");
    }
    std::size_t sums = 0;
    for (std::size_t k = 0; k < p_.slots.size(); ++k) {
      const auto& s = p_.slots[k];
      if (s.from != role::gradient) continue;
      ++sums;
      if (s.position >= p_.parameters.size() || p_.views[p_.parameter_grads[s.position]].value != s.value)
        fail(at("slots", k) + ".position", "is not where a gradient is added");
    }
    if (sums > 0) length("slots of gradients", sums, p_.parameters.size());
    for (std::size_t i = 0; i < p_.input_grads.size(); ++i)
      if (p_.input_grads[i] != none) view(at("input_grads", i), p_.input_grads[i]);
    for (std::size_t k = 0; k < p_.slots.size(); ++k)
      if (p_.slots[k].from == role::input && p_.slots[k].position >= p_.input_grads.size())
        fail(at("slots", k) + ".position", "there is no such input");
    for (std::size_t i = 0; i < p_.results.size(); ++i)
      if (p_.results[i] >= outputs) fail(at("results", i), "there is no such output");
    for (std::size_t i = 0; i < p_.written.size(); ++i) {
      const auto& w = p_.written[i];
      if (w.slot >= p_.slots.size() || !may_share(p_.slots[w.slot].from))
        fail(at("written", i) + ".slot", "is nothing that a step can write");
      if (w.forward < 0 || w.backward < 0) fail(at("written", i), "is negative");
    }
    for (std::size_t i = 0; i < p_.tokens.size(); ++i)
      if (p_.tokens[i] >= p_.values.size() || producer_[p_.tokens[i]] == none) fail(at("tokens", i), "no node writes it");
    check_origin("after_forward", p_.after_forward, p_.loss);
    check_origin("after_backward", p_.after_backward, static_cast<index_t>(p_.nodes.size()));
  }

  const program& p_;
  std::vector<index_t> producer_;  ///< per value
  index_t node_ = none;
};

}  // namespace

bool fits(const c10::IValue& v, const c10::Type& type) {
  using kind = c10::TypeKind;
  switch (type.kind()) {
    case kind::OptionalType:
      return v.isNone() || fits(v, *type.castRaw<c10::OptionalType>()->getElementType());
    case kind::TensorType:
      return v.isTensor();
    case kind::IntType:
    case kind::SymIntType:
      return v.isInt();
    case kind::FloatType:
      return v.isDouble();
    case kind::BoolType:
      return v.isBool();
    case kind::ComplexType:
      return v.isComplexDouble();
    case kind::NumberType:
      return v.isScalar();
    case kind::StringType:
      return v.isString();
    case kind::DeviceObjType:
      return v.isDevice();
    case kind::GeneratorType:
      return v.isGenerator();
    case kind::ListType: {
      if (!v.isList()) return false;
      const auto& element = *type.castRaw<c10::ListType>()->getElementType();
      const auto list = v.toListRef();
      return std::all_of(list.begin(), list.end(), [&](const auto& x) { return fits(x, element); });
    }
    default:  // no document holds other types
      return true;
  }
}

void verify(const program& step) { checker(step).run(); }

}  // namespace remat::pytorch
