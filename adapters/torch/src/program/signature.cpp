// SPDX-License-Identifier: Apache-2.0
#include "signature.hpp"

#include <algorithm>
#include <sstream>

#include "../base/views.hpp"

namespace remat::pytorch {

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
    for (std::size_t k = 0; k < c.operands.size(); ++k) {
      const auto& o = c.operands[k];
      out << "|" << o.at << "." << o.element << "=";
      tensor(o.view);
      if (const auto first = first_with_view(c, k); first < k) out << "@" << first;
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

}  // namespace remat::pytorch
