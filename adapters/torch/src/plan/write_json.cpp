// SPDX-License-Identifier: Apache-2.0

#include <boost/algorithm/hex.hpp>
#include <cmath>
#include <remat/pytorch/io.hpp>
#include <sstream>

#include "../profile/json.hpp"
#include "../program/types.hpp"
#include "json_names.hpp"

namespace remat::pytorch {
namespace {

using json = remat::detail::json;

json hex(const content& bytes) {
  std::string text;
  boost::algorithm::hex_lower(reinterpret_cast<const char*>(bytes.data()),
                              reinterpret_cast<const char*>(bytes.data()) + bytes.size(), std::back_inserter(text));
  return text;
}

json real(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

json optional_index(index_t i) { return i == none ? json() : json(i); }

class writer {
 public:
  writer(const program& step, const program_parts& parts) : p_(step), parts_(parts) {}

  json run() {
    json d = {{"format", "remat-program"}, {"version", 1}};
    auto& slots = d["slots"] = json::array();
    for (const auto& s : p_.slots) {
      json x = {{"from", role_names[static_cast<std::size_t>(s.from)]}, {"position", s.position}};
      if (parts_.names) x["name"] = s.name;
      geometry(x, s.type.sizes, s.type.strides, s.offset, s.type.dtype, s.type.conj, s.type.neg);
      x["device"] = s.type.device.str();
      if (s.number) x["number"] = true;
      if (s.on_host) x["on_host"] = true;
      x["value"] = s.value;
      slots.push_back(std::move(x));
    }
    auto& constants = d["constants"] = json::array();
    for (const auto& c : p_.constants) constants.push_back(parts_.contents ? hex(c) : json(c.size()));
    auto& values = d["values"] = json::array();
    for (const auto& v : p_.values) {
      json x = {{"bytes", v.bytes}};
      if (v.slot != none) x["slot"] = v.slot;
      if (parts_.names) x["name"] = v.name;
      x["device"] = v.device.str();
      values.push_back(std::move(x));
    }
    auto& views = d["views"] = json::array();
    for (const auto& v : p_.views) {
      json x = {{"value", v.value}};
      geometry(x, v.sizes, v.strides, v.offset, v.dtype, v.conj, v.neg);
      if (v.whole) x["whole"] = true;
      views.push_back(std::move(x));
    }
    auto& nodes = d["nodes"] = json::array();
    for (std::size_t i = 0; i < p_.nodes.size(); ++i) nodes.push_back(node_of(i));
    d["loss"] = p_.loss;
    d["parameters"] = p_.parameters;
    d["parameter_grads"] = p_.parameter_grads;
    d["outputs"] = p_.outputs;
    d["output_versions"] = p_.output_versions;
    d["differentiable"] = p_.differentiable;
    for (const auto& [name, list] : {std::pair("output_grads", &p_.output_grads), std::pair("input_grads", &p_.input_grads)}) {
      auto& indices = d[name] = json::array();
      for (auto v : *list) indices.push_back(optional_index(v));
    }
    d["results"] = p_.results;
    d["parameter_sources"] = p_.parameter_sources;
    d["input_sources"] = p_.input_sources;
    d["after_forward"] = origin(p_.after_forward);
    d["after_backward"] = origin(p_.after_backward);
    auto& written = d["written"] = json::array();
    for (const auto& w : p_.written) written.push_back({w.slot, w.forward, w.backward});
    if (!p_.assumed_zero.empty()) d["assumed_zero"] = p_.assumed_zero;
    d["tokens"] = p_.tokens;
    return d;
  }

 private:
  static void geometry(json& x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, bytes_t offset,
                       at::ScalarType dtype, bool conj, bool neg) {
    x["type"] = c10::toString(dtype);
    x["sizes"] = sizes;
    x["strides"] = strides;
    if (offset != 0) x["offset"] = offset;
    if (conj) x["conj"] = true;
    if (neg) x["neg"] = true;
  }

  json origin(const generator_origin& o) const {
    json x = {{"from", origin_names[o.from]}};
    if (o.node != none) x["node"] = o.node;
    if (o.from == generator_origin::fixed && parts_.contents) x["state"] = hex(o.state);
    return x;
  }

  json node_of(std::size_t i) {
    const auto& n = p_.nodes[i];
    json x = json::object();
    if (parts_.names) x["name"] = n.name;
    auto& calls = x["calls"] = json::array();
    for (const auto& c : n.calls) {
      json y = {{"op", c.op.schema().name()}, {"overload", c.op.schema().overload_name()}};
      auto& arguments = y["arguments"] = json::array();
      for (std::size_t k = 0; k < c.arguments.size(); ++k) {
        where_ = "node " + std::to_string(i) + " (" + c.op.schema().name() + "), argument " + std::to_string(k);
        arguments.push_back(argument(c.arguments[k]));
      }
      for (const auto& [name, list] : {std::pair("operands", &c.operands), std::pair("results", &c.results)}) {
        auto& z = y[name] = json::array();
        for (const auto& o : *list) z.push_back({o.at, o.element, o.view});
      }
      if (c.grad_mode) y["grad_mode"] = true;
      if (!c.first_run_only.empty()) y["first_run_only"] = c.first_run_only;
      calls.push_back(std::move(y));
    }
    x["inputs"] = n.inputs;
    x["outputs"] = n.outputs;
    if (!n.overwrites.empty()) x["overwrites"] = n.overwrites;
    if (n.random) x["random"] = origin(n.starts);
    if (n.once) x["once"] = true;
    return x;
  }

  json argument(const c10::IValue& v) const {
    if (v.isNone()) return {"none"};
    if (v.isTensor() && !v.toTensor().defined()) return {"tensor"};
    if (v.isInt()) return {"int", v.toInt()};
    if (v.isBool()) return {"bool", v.toBool()};
    if (v.isDouble()) return {"float", real(v.toDouble())};
    if (v.isComplexDouble()) return {"complex", real(v.toComplexDouble().real()), real(v.toComplexDouble().imag())};
    if (v.isString()) return {"string", v.toStringRef()};
    if (v.isDevice()) return {"device", v.toDevice().str()};
    if (v.isGenerator()) return {"generator", v.toGenerator().defined() ? v.toGenerator().device().str() : ""};
    if (v.isList()) {
      const auto list = v.toList();
      for (const auto& [name, type] : element_types()) {
        if (!(*list.elementType() == *type)) continue;
        json elements = json::array();
        for (const auto& x : v.toListRef()) elements.push_back(argument(x));
        return {"list", name, std::move(elements)};
      }
      throw cannot_write(where_ + ": no document holds a list of " + list.elementType()->str());
    }
    throw cannot_write(where_ + ": no document holds a " + v.tagKind());
  }

  const program& p_;
  program_parts parts_;
  std::string where_;
};

}  // namespace

void write_program(std::ostream& out, const program& step, const program_parts& parts) {
  out << remat::detail::dump(writer(step, parts).run());
}

void write_planned_program(std::ostream& out, const planned_program& plan) {
  json d = {{"format", "remat-plan"}, {"version", 1}, {"program", writer(*plan.step, {}).run()}, {"costs", json::array()}};
  for (const auto& n : plan.profiles.nodes) d["costs"].push_back(json(to_json(*n)));
  std::stringstream schedule;
  write_schedule(schedule, plan.result, "step");
  d["schedule"] = json::parse(schedule);
  out << remat::detail::dump(d);
}

}  // namespace remat::pytorch
