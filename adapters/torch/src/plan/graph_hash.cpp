// SPDX-License-Identifier: Apache-2.0
// The part of a program that does not depend on sizes, as a hash.
#include <functional>

#include "search.hpp"

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
