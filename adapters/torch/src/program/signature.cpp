// SPDX-License-Identifier: Apache-2.0
#include "signature.hpp"

#include <algorithm>
#include <functional>
#include <sstream>

#include "../base/views.hpp"

namespace remat::pytorch {
namespace {

class hash_of {
 public:
  template <class T>
  hash_of& operator<<(const T& x) {
    value_ = value_ * 0x9e3779b97f4a7c15u + std::hash<T>{}(x) + (value_ >> 29);
    return *this;
  }
  std::size_t value() const { return value_; }

 private:
  std::size_t value_ = 0;
};

}  // namespace

std::string signature(const program& step, const node& n, std::vector<index_t>* order) {
  std::ostringstream out;
  out.precision(17);
  std::vector<index_t> own;
  auto& values = order != nullptr ? *order : own;
  auto number = [&](index_t value) {
    const auto found = std::find(values.begin(), values.end(), value);
    const auto position = found - values.begin();
    if (found == values.end()) values.push_back(value);
    return position;
  };
  auto tensor = [&](index_t v) {
    const auto& view = step.views[v];
    out << number(view.value) << ":" << step.values[view.value].bytes << ":" << c10::toString(view.dtype) << view.offset
        << (view.conj ? "c" : "") << (view.neg ? "n" : "");
    for (auto s : view.sizes) out << "," << s;
    out << ";";
    for (auto s : view.strides) out << "," << s;
    if (is_number(step, v)) out << "!";
  };
  for (auto v : n.outputs) out << step.values[v].bytes << "/";
  for (const auto& c : n.calls) {
    out << c.op.operator_name() << (c.grad_mode ? "+" : "") << "(";
    for (const auto& a : c.arguments)
      if (a.isTensor())
        out << "T ";
      else if (a.isGenerator() || a.isCapsule())
        out << a.tagKind() << " ";
      else if (a.isTensorList() || a.isOptionalTensorList())
        out << "L" << a.toListRef().size() << " ";
      else
        out << a << " ";
    for (const auto& o : c.operands) {
      out << "|" << o.at << "." << o.element << "=";
      tensor(o.view);
    }
    for (const auto& r : c.results) {
      out << ">" << r.at << "." << r.element << "=";
      tensor(r.view);
    }
    for (auto a : c.first_run_only) out << "?" << a;
    out << ")";
  }
  for (const auto& [old, fresh] : n.overwrites) out << "w" << number(fresh);
  return out.str();
}

std::size_t graph_hash(const program& step) {
  hash_of h;
  h << step.values.size() << step.nodes.size() << step.loss;
  for (const auto& s : step.slots) h << static_cast<int>(s.from) << s.position << s.value;
  for (const auto& n : step.nodes) {
    h << n.name << n.calls.size() << n.random << n.once;
    for (const auto& c : n.calls) h << c.op.schema().name() << c.operands.size() << c.results.size();
    for (const auto* list : {&n.inputs, &n.outputs}) {
      h << list->size();
      for (auto v : *list) h << v;
    }
    for (const auto& [old, fresh] : n.overwrites) h << old << fresh;
  }
  return h.value();
}

}  // namespace remat::pytorch
