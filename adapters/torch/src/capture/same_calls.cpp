// SPDX-License-Identifier: Apache-2.0
#include "same_calls.hpp"

#include <algorithm>
#include <cstring>

#include "follower.hpp"

namespace remat::pytorch::detail {
namespace {

bool same_tensor(const trace& x, const traced_tensor& a, const trace& y, const traced_tensor& b) {
  const auto &v = a.view, &w = b.view;
  return a.at == b.at && a.element == b.element && a.tensor == b.tensor && a.requires_grad == b.requires_grad &&
         v.value == w.value && v.sizes == w.sizes && v.strides == w.strides && v.dtype == w.dtype && v.conj == w.conj &&
         v.neg == w.neg && v.offset - slot_offset(x, v.value) == w.offset - slot_offset(y, w.value);
}

}  // namespace

bool same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor()) return b.isTensor();
  if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
  if (a.isNone()) return b.isNone();
  if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
  if (a.isDouble()) {
    if (!b.isDouble()) return false;
    const double x = a.toDouble(), y = b.toDouble();  // bit by bit, because NaN does not equal itself
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.isComplexDouble()) return b.isComplexDouble() && a.toComplexDouble() == b.toComplexDouble();
  if (a.isList()) {
    if (!b.isList()) return false;
    const auto x = a.toListRef(), y = b.toListRef();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), same);
  }
  if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
  if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
  return a.isGenerator() && b.isGenerator() && a.toGenerator() == b.toGenerator();
}

bool may_differ(const traced_call& c, std::size_t argument) {
  return std::find(c.numbers.begin(), c.numbers.end(), static_cast<int>(argument)) != c.numbers.end();
}

std::vector<double> numbers_in(const trace& t) {
  std::vector<double> list;
  for (const auto& c : t.calls)
    for (const auto at : c.numbers) list.push_back(c.arguments[static_cast<std::size_t>(at)].toDouble());
  return list;
}

bytes_t slot_offset(const trace& t, index_t storage) {
  const auto k = t.storages[storage].slot;
  return k == none ? 0 : t.slots[k].offset;
}
bool returns_numbers(const traced_call& c) { return c.results.empty() && !c.op.schema().returns().empty(); }

std::size_t same_calls(const trace& a, const trace& b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto &x = a.calls[i], &y = b.calls[i];
    const auto equal = [&](const auto& p, const auto& q) { return same_tensor(a, p, b, q); };
    const auto same_arguments = [&] {
      std::size_t k = 0;
      return std::equal(x.arguments.begin(), x.arguments.end(), y.arguments.begin(), y.arguments.end(),
                        [&](const auto& p, const auto& q) { return may_differ(x, k++) || same(p, q); });
    };
    if (!(x.op == y.op) || x.grad_mode != y.grad_mode || x.constant != y.constant || x.numbers != y.numbers ||
        !same_arguments() || !std::equal(x.operands.begin(), x.operands.end(), y.operands.begin(), y.operands.end(), equal) ||
        !std::equal(x.results.begin(), x.results.end(), y.results.begin(), y.results.end(), equal) || x.ahead != y.ahead ||
        x.catchable != y.catchable || x.positions != y.positions || x.masks_known != y.masks_known)
      return i;
  }
  return count;
}

bool same_outside(const trace& a, const trace& b) {
  const auto same = [&](index_t k, index_t l) {
    if (k == none || l == none) return k == l;
    const auto &x = a.slots[k], &y = b.slots[l];
    const auto of_module = [](const slot& s) { return s.from == role::parameter || s.from == role::buffer; };
    if (of_module(x) && of_module(y)) return k == l;  // training depends on the use of the outputs
    if (x.from != y.from) return false;
    if (x.from == role::constant) return a.constants[x.position] == b.constants[y.position];
    if (x.from == role::found) return a.found[x.position].is_same(b.found[y.position]);
    return x.position == y.position;
  };
  for (std::size_t i = 0; i < std::min(a.backward, b.backward); ++i)
    for (std::size_t k = 0; k < a.calls[i].operands.size(); ++k)
      if (!same(a.tensors[a.calls[i].operands[k].tensor], b.tensors[b.calls[i].operands[k].tensor])) return false;
  return true;
}

}  // namespace remat::pytorch::detail
