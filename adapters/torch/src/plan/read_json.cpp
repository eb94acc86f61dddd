// SPDX-License-Identifier: Apache-2.0
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>

#include <boost/algorithm/hex.hpp>
#include <cmath>
#include <limits>
#include <remat/pytorch/io.hpp>
#include <sstream>

#include "../profile/json.hpp"
#include "../program/types.hpp"
#include "json_names.hpp"

namespace remat::pytorch {
namespace {

using json = remat::detail::json;
using members = remat::detail::members;
using remat::detail::at_index;

class reader {
 public:
  explicit reader(const json& root) : d_(root, "") {}

  program run() {
    d_.require_format("remat-program");
    each(d_, "slots", [&](const json& j, const std::string& place) {
      const members x(j, place);
      slot s;
      s.from = static_cast<role>(name_of(x, "from", role_names));
      s.position = natural(x.at("position"), x.where("position"));
      s.name = x.text("name", "");
      s.type.sizes = sizes(x, "sizes");
      s.type.strides = sizes(x, "strides");
      s.offset = x.integer("offset", 0);
      s.type.dtype = dtype(x);
      s.type.conj = x.boolean("conj", false);
      s.type.neg = x.boolean("neg", false);
      s.type.device = device(x.at("device"), x.where("device"));
      s.number = x.boolean("number", false);
      s.on_host = x.boolean("on_host", false);
      s.value = index(x.at("value"), x.where("value"));
      p_.slots.push_back(std::move(s));
    });
    each(d_, "constants", [&](const json& j, const std::string& place) { p_.constants.push_back(bytes(j, place)); });
    each(d_, "values", [&](const json& j, const std::string& place) {
      const members x(j, place);
      p_.values.push_back({x.has("slot") ? index(x.at("slot"), x.where("slot")) : none, x.integer("bytes"), x.text("name", ""),
                           device(x.at("device"), x.where("device"))});
    });
    each(d_, "views", [&](const json& j, const std::string& place) {
      const members x(j, place);
      p_.views.push_back({index(x.at("value"), x.where("value")), sizes(x, "sizes"), sizes(x, "strides"), x.integer("offset", 0),
                          dtype(x), x.boolean("conj", false), x.boolean("neg", false), x.boolean("whole", false)});
    });
    each(d_, "nodes", [&](const json& j, const std::string& place) { p_.nodes.push_back(node_at(members(j, place))); });
    p_.loss = index(d_.at("loss"), "loss");
    p_.parameters = indices(d_, "parameters");
    p_.parameter_grads = indices(d_, "parameter_grads");
    p_.outputs = indices(d_, "outputs");
    p_.output_versions = sizes(d_, "output_versions");
    p_.differentiable = booleans(d_.at("differentiable"), "differentiable");
    p_.output_grads = indices(d_, "output_grads", true);
    p_.input_grads = indices(d_, "input_grads", true);
    each(d_, "results", [&](const json& j, const std::string& place) { p_.results.push_back(natural(j, place)); });
    for (const auto& [name, list] :
         {std::pair("parameter_sources", &p_.parameter_sources), std::pair("input_sources", &p_.input_sources)})
      each(d_, name, [&, to = list](const json& j, const std::string& place) { to->push_back(booleans(j, place)); });
    p_.after_forward = origin(members(d_.at("after_forward"), "after_forward"));
    p_.after_backward = origin(members(d_.at("after_backward"), "after_backward"));
    each(d_, "written", [&](const json& j, const std::string& place) {
      if (!j.is_array() || j.size() != 3) fail(place, "not a slot and two counts");
      p_.written.push_back({index(j[0], place), integer(j[1], place), integer(j[2], place)});
    });
    if (d_.has("assumed_zero")) p_.assumed_zero = indices(d_, "assumed_zero");
    p_.tokens = indices(d_, "tokens");
    verify(p_);
    return std::move(p_);
  }

 private:
  [[noreturn]] static void fail(const std::string& place, const std::string& why) { throw bad_document(place + ": " + why); }

  template <class F>
  static void each(const members& x, const char* key, F f) {
    std::size_t i = 0;
    for (const auto& j : x.array(key)) {
      f(j, x.where(at_index(key, i).c_str()));
      ++i;
    }
  }

  static int64_t integer(const json& j, const std::string& place) {
    if (!j.is_number_integer() ||
        (j.is_number_unsigned() && j.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<int64_t>::max())))
      fail(place, "not an integer of 64 bits");
    return j.get<int64_t>();
  }
  static std::size_t natural(const json& j, const std::string& place) {
    const auto i = integer(j, place);
    if (i < 0) fail(place, "negative");
    return static_cast<std::size_t>(i);
  }
  static index_t index(const json& j, const std::string& place) {
    const auto i = natural(j, place);
    if (i >= none) fail(place, "not an index");
    return static_cast<index_t>(i);
  }
  static int small(const json& j, const std::string& place) {
    const auto i = integer(j, place);
    if (i < -1 || i > std::numeric_limits<int>::max()) fail(place, "not a position");
    return static_cast<int>(i);
  }
  static std::vector<index_t> indices(const members& x, const char* key, bool or_null = false) {
    std::vector<index_t> list;
    each(x, key,
         [&](const json& j, const std::string& place) { list.push_back(or_null && j.is_null() ? none : index(j, place)); });
    return list;
  }
  static std::vector<int64_t> sizes(const members& x, const char* key) {
    std::vector<int64_t> list;
    each(x, key, [&](const json& j, const std::string& place) { list.push_back(integer(j, place)); });
    return list;
  }
  static std::vector<bool> booleans(const json& j, const std::string& place) {
    if (!j.is_array()) fail(place, "not an array");
    std::vector<bool> list;
    for (const auto& x : j) {
      if (!x.is_boolean()) fail(place, "not an array of booleans");
      list.push_back(x.get<bool>());
    }
    return list;
  }
  template <std::size_t N>
  static std::size_t name_of(const members& x, const char* key, const std::array<const char*, N>& names) {
    const auto name = x.text(key, "");
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) x.fail(key, "unknown: " + json(name).dump());
    return static_cast<std::size_t>(found - names.begin());
  }
  static at::ScalarType dtype(const members& x) {
    const auto name = x.text("type", "");
    for (int t = 0; t < static_cast<int>(at::ScalarType::NumOptions); ++t)
      if (name == c10::toString(static_cast<at::ScalarType>(t))) return static_cast<at::ScalarType>(t);
    x.fail("type", "unknown: " + json(name).dump());
  }
  static c10::Device device(const json& j, const std::string& place) {
    if (!j.is_string()) fail(place, "not a string");
    try {
      return c10::Device(j.get<std::string>());
    } catch (const c10::Error& why) {
      fail(place, why.what_without_backtrace());
    }
  }
  static content bytes(const json& j, const std::string& place) {
    if (!j.is_string()) fail(place, "not a string of hexadecimal digits");
    std::string raw;
    try {
      boost::algorithm::unhex(j.get_ref<const std::string&>(), std::back_inserter(raw));
    } catch (const boost::algorithm::hex_decode_error&) {
      fail(place, "not a string of hexadecimal digits");
    }
    const auto* data = reinterpret_cast<const std::byte*>(raw.data());
    return content(data, data + raw.size());
  }
  static double real(const json& j, const std::string& place) {
    if (j.is_number()) return j.get<double>();
    if (j == "inf") return std::numeric_limits<double>::infinity();
    if (j == "-inf") return -std::numeric_limits<double>::infinity();
    if (j == "nan") return std::numeric_limits<double>::quiet_NaN();
    fail(place, "not a number");
  }

  static generator_origin origin(const members& x) {
    generator_origin o;
    o.from = static_cast<generator_origin::kind>(name_of(x, "from", origin_names));
    if (x.has("node")) o.node = index(x.at("node"), x.where("node"));
    if (x.has("state")) o.state = bytes(x.at("state"), x.where("state"));
    return o;
  }

  static node node_at(const members& x) {
    node n;
    n.name = x.text("name", "");
    each(x, "calls", [&](const json& j, const std::string& place) { n.calls.push_back(call_at(members(j, place))); });
    n.inputs = indices(x, "inputs");
    n.outputs = indices(x, "outputs");
    if (x.has("overwrites"))
      each(x, "overwrites", [&](const json& j, const std::string& place) {
        if (!j.is_array() || j.size() != 2) fail(place, "not a pair of values");
        n.overwrites.emplace_back(index(j[0], place), index(j[1], place));
      });
    n.random = x.has("random");
    if (n.random) n.starts = origin(members(x.at("random"), x.where("random")));
    n.once = x.boolean("once", false);
    return n;
  }

  static call call_at(const members& x) {
    const auto op = c10::Dispatcher::singleton().findSchema({x.text("op", ""), x.text("overload", "")});
    if (!op) x.fail("op", "this PyTorch has no operator " + x.at("op").dump() + " of this overload");
    call c{*op, {}, {}, {}, x.boolean("grad_mode", false), {}};
    each(x, "arguments", [&](const json& j, const std::string& place) { c.arguments.push_back(argument(j, place)); });
    for (const auto& [name, list] : {std::pair("operands", &c.operands), std::pair("results", &c.results)})
      each(x, name, [&, to = list](const json& j, const std::string& place) {
        if (!j.is_array() || j.size() != 3) fail(place, "not an argument, an element and a view");
        to->push_back({small(j[0], place), small(j[1], place), index(j[2], place)});
      });
    if (x.has("first_run_only"))
      each(x, "first_run_only", [&](const json& j, const std::string& place) { c.first_run_only.push_back(small(j, place)); });
    return c;
  }

  static c10::IValue argument(const json& j, const std::string& place, bool in_list = false) {
    if (!j.is_array() || j.empty() || !j[0].is_string()) fail(place, "not a kind with its values");
    const auto& kind = j[0].get_ref<const std::string&>();
    const auto is = [&](const char* name, std::size_t values) { return kind == name && j.size() == values + 1; };
    if (is("none", 0)) return {};
    if (is("tensor", 0)) return at::Tensor();
    if (is("int", 1)) return integer(j[1], place);
    if (is("bool", 1) && j[1].is_boolean()) return j[1].get<bool>();
    if (is("float", 1)) return real(j[1], place);
    if (is("complex", 2)) return c10::complex<double>(real(j[1], place), real(j[2], place));
    if (is("string", 1) && j[1].is_string()) return j[1].get<std::string>();
    if (is("device", 1)) return device(j[1], place);
    if (is("generator", 1)) {
      if (j[1] == "") return at::Generator();
      const auto d = device(j[1], place);
      if (!d.is_cpu() && !at::accelerator::isAccelerator(d.type())) fail(place, "there is no generator of " + d.str());
      return at::globalContext().defaultGenerator(d);
    }
    if (is("list", 2) && !in_list && j[2].is_array()) {
      for (const auto& [name, type] : element_types()) {
        if (j[1] != name) continue;
        c10::impl::GenericList list(type);
        for (const auto& x : j[2]) {
          auto v = argument(x, place, true);
          if (!fits(v, *type)) fail(place, "an element of another kind");
          list.push_back(std::move(v));
        }
        return list;
      }
    }
    fail(place, "unknown: " + j.dump().substr(0, 80));
  }

  members d_;
  program p_;
};

}  // namespace

program read_program(std::istream& in, const document_limits& l) {
  return reader(remat::detail::parse(read_text(in, l.bytes), l)).run();
}

planned_program read_planned_program(std::istream& in, const document_limits& l) {
  const auto root = remat::detail::parse(read_text(in, l.bytes), l);
  const members d(root, "");
  d.require_format("remat-plan");
  planned_program plan;
  plan.step = std::make_shared<const program>(reader(d.at("program")).run());
  const auto& costs = d.array("costs");
  if (costs.size() != plan.step->nodes.size()) d.fail("costs", "not one per node");
  bytes_t sum = 0;
  for (std::size_t i = 0; i < costs.size(); ++i) {
    try {
      auto p = std::make_shared<node_profile>(profile_from(costs[i], plan.step->nodes[i].outputs.size()));
      for (const auto* script : {&p->first, &p->again})
        for (const auto& b : script->blocks)
          if ((sum += b.bytes) > max_bytes) throw bad_document("more bytes than a plan can have");
      plan.profiles.nodes.push_back(std::move(p));
    } catch (const nlohmann::json::exception& why) {
      d.fail(at_index("costs", i).c_str(), why.what());
    }
  }
  std::istringstream schedule(d.at("schedule").dump());
  plan.result = read_schedule(schedule, l).result;
  return plan;
}

}  // namespace remat::pytorch
