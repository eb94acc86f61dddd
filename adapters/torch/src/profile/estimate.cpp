// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <remat/pytorch/profile.hpp>

#include "../program/operators.hpp"

namespace remat::pytorch {
namespace {

double elements(const byte_view& v) {
  double n = 1;
  for (auto s : v.sizes) n *= static_cast<double>(s);
  return n;
}

/// The tensors of a call.
class call_tensors {
 public:
  call_tensors(const program& step, const call& c) : step_(step), call_(c) {}

  const byte_view* operand(int at) const { return found(call_.operands, at); }
  const byte_view* result(int at) const { return found(call_.results, at); }

  /// Bytes that the call reads plus bytes that it writes. On each side a tensor counts once.
  double bytes() const {
    std::set<index_t> read, written;
    for (const auto& o : call_.operands) {
      const bool writes = is_written(call_.op.schema().arguments()[static_cast<std::size_t>(o.at)]);
      if (writes) written.insert(o.view);
      if (!writes || !overwrites(call_.op)) read.insert(o.view);
    }
    for (const auto& r : call_.results) written.insert(r.view);
    double sum = 0;
    for (const auto* views : {&read, &written})
      for (auto v : *views) {
        const auto& view = step_.views[v];
        const auto whole = static_cast<double>(step_.values[view.value].bytes);  // fewer than its elements take if expanded
        sum += std::min(whole, elements(view) * static_cast<double>(c10::elementSize(view.dtype)));
      }
    return sum;
  }
  double most_elements() const {
    double most = 0;
    for (const auto* list : {&call_.operands, &call_.results})
      for (const auto& o : *list) most = std::max(most, elements(step_.views[o.view]));
    return most;
  }
  /// The type in which the call computes.
  at::ScalarType type() const {
    for (const auto* list : {&call_.operands, &call_.results})
      for (const auto& o : *list)
        if (const auto t = step_.views[o.view].dtype; at::isFloatingType(t) || at::isComplexType(t)) return t;
    return at::kFloat;
  }

 private:
  const byte_view* found(const std::vector<pytorch::operand>& list, int at) const {
    const auto o = std::find_if(list.begin(), list.end(), [&](const auto& x) { return x.at == at; });
    return o == list.end() ? nullptr : &step_.views[o->view];
  }
  const program& step_;
  const call& call_;
};

/// Arithmetic operations of the product of `a` and `b`, where `b` has the last dimension of the result.
double product(const byte_view* a, const byte_view* b) {
  return a == nullptr || b == nullptr || b->sizes.empty() ? 0 : 2 * elements(*a) * static_cast<double>(b->sizes.back());
}

/// Arithmetic operations of one convolution. A backward has two: one per gradient.
double convolution(const byte_view* in, const byte_view* weight, const byte_view* out, bool transposed) {
  const auto* fed = transposed ? in : out;
  if (fed == nullptr || weight == nullptr || weight->sizes.empty() || weight->sizes[0] == 0) return 0;
  return 2 * elements(*fed) * elements(*weight) / static_cast<double>(weight->sizes[0]);
}

double operations(const call& c, const call_tensors& t) {
  const auto& name = c.op.schema().name();
  if (name == "aten::mm" || name == "aten::bmm") return product(t.operand(0), t.operand(1));
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(t.operand(1), t.operand(2));
  if (name == "aten::convolution") return convolution(t.operand(0), t.operand(1), t.result(0), c.arguments[6].toBool());
  if (name == "aten::mkldnn_convolution") return convolution(t.operand(0), t.operand(1), t.result(0), false);
  if (name == "aten::convolution_backward") {
    const double gradients = (t.result(0) != nullptr ? 1 : 0) + (t.result(1) != nullptr ? 1 : 0);
    return gradients * convolution(t.operand(1), t.operand(2), t.operand(0), c.arguments[7].toBool());
  }
  if (name.starts_with("aten::_scaled_dot_product")) {  // two products forward, five backward
    const bool backward = name.ends_with("_backward");
    const auto *query = t.operand(backward ? 1 : 0), *key = t.operand(backward ? 2 : 1);
    if (query != nullptr && key != nullptr && key->sizes.size() >= 2)
      return (backward ? 10 : 4) * elements(*query) * static_cast<double>(key->sizes[key->sizes.size() - 2]);
  }
  return t.most_elements();
}

}  // namespace

program_profile estimate(const program& step, const device_rates& device) {
  program_profile result;
  for (const auto& n : step.nodes) {
    auto costs = std::make_shared<node_profile>();
    for (const auto& c : n.calls) {
      if (c.op.schema().name().starts_with("aten::empty")) continue;
      const call_tensors t(step, c);
      const auto rates = device(t.type());
      rates.validate();
      costs->seconds += rates.seconds(operations(c, t), t.bytes());
    }
    result.nodes.push_back(std::move(costs));
  }
  result.distinct = step.nodes.size();
  return result;
}

}  // namespace remat::pytorch
