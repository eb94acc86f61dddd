// SPDX-License-Identifier: Apache-2.0
// The part of a program that does not depend on sizes, as a hash.
#include "../base/digest.hpp"
#include "search.hpp"

namespace remat::pytorch {

std::size_t graph_hash(const program& step) {
  digest h;
  const auto add_name = [&](const std::string& name) { h.add(name.data(), name.size()); };
  h << step.values.size() << step.nodes.size() << step.loss;
  for (const auto& s : step.slots) h << static_cast<std::uint64_t>(s.from) << s.position << s.value;
  for (const auto& n : step.nodes) {
    add_name(n.name);
    h << n.calls.size() << n.random << n.once;
    for (const auto& c : n.calls) {
      add_name(c.op.schema().name());
      h << c.operands.size() << c.results.size();
    }
    for (const auto* list : {&n.inputs, &n.outputs}) {
      h << list->size();
      for (auto v : *list) h << v;
    }
    for (const auto& [old, fresh] : n.overwrites) h << old << fresh;
  }
  return h.value();
}

}  // namespace remat::pytorch
