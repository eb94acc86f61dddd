// SPDX-License-Identifier: Apache-2.0
#include "pack.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "../kernels/masks.hpp"
#include "edit.hpp"

namespace remat::pytorch {
namespace {

constexpr bytes_t min_mask_bytes = 128;  ///< bytes of the smallest mask that gains from packing

bool is_call_of(const call& c, const char* name, const char* overload) {
  return c.op.schema().name() == name && c.op.schema().overload_name() == overload;
}

call new_call(const char* name, std::vector<c10::IValue> arguments, std::vector<operand> operands, std::vector<operand> results) {
  return {c10::Dispatcher::singleton().findSchemaOrThrow(name, ""),
          std::move(arguments),
          std::move(operands),
          std::move(results),
          false,
          {}};
}

class packing {
 public:
  explicit packing(program step)
      : p_(std::move(step)), readers_(p_.values.size()), added_(p_.nodes.size()), unchanged_(handed_out(p_)) {
    for (index_t i = 0; i < p_.nodes.size(); ++i) {
      for (auto v : p_.nodes[i].inputs) readers_[v].push_back(i);
      for (const auto& [old, fresh] : p_.nodes[i].overwrites) unchanged_.insert(old);
    }
  }

  program run() {
    bool any = false;
    for (index_t i = 0; i < p_.nodes.size(); ++i)
      if (draws_mask(p_.nodes[i]) && draws_masks_alike()) {
        pack(i);
        any = true;
      }
    if (!any) return std::move(p_);
    insert_behind(p_, std::move(added_));
    const std::vector<bool> all(p_.nodes.size(), true);
    return with_only(std::move(p_), all);
  }

 private:
  bool draws_mask(const node& n) const {
    if (!n.random || n.once || !n.inputs.empty() || n.outputs.size() != 1 || unchanged_.count(n.outputs[0])) return false;
    const auto calls = n.calls.size();
    if (calls < 2 || calls > 3 || !is_call_of(n.calls[0], "aten::empty_strided", "") ||
        !is_call_of(n.calls[1], "aten::bernoulli_", "float") || !n.calls[1].arguments[2].isNone() ||
        (calls == 3 && !is_call_of(n.calls[2], "aten::div_", "Scalar")))
      return false;
    const auto& mask = p_.views[n.calls[0].results[0].view];
    const auto bytes = p_.values[mask.value].bytes;
    if (p_.values[mask.value].device != c10::kCPU || bytes < min_mask_bytes) return false;
    if (!c10::isFloatingType(mask.dtype) || c10::elementSize(mask.dtype) < 2) return false;
    // Dense: the elements fill the memory from the first to the last element.
    const auto element = static_cast<bytes_t>(c10::elementSize(mask.dtype));
    return mask.offset == 0 && elements(mask) * element == bytes &&
           static_cast<bytes_t>(at::detail::computeStorageNbytes(mask.sizes, mask.strides, c10::elementSize(mask.dtype))) ==
               bytes &&
           std::all_of(n.calls.begin() + 1, n.calls.end(),
                       [&](const auto& c) { return alike(p_.views[c.operands[0].view], mask); });
  }
  static bytes_t elements(const byte_view& v) { return c10::multiply_integers(v.sizes); }
  /// True if the elements lie in the same order and have the same type.
  static bool alike(const byte_view& a, const byte_view& b) {
    return a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype && a.conj == b.conj && a.neg == b.neg;
  }

  void pack(index_t i) {
    auto& n = p_.nodes[i];
    const auto made = std::move(n.calls);
    const auto shape = made[0].results[0];
    const auto mask = p_.views[shape.view];
    auto one = at::ones({1}, at::device(at::kCPU).dtype(mask.dtype));
    if (made.size() == 3) one.div_(made[2].arguments[1].toScalar());
    const at::Scalar value = one.to(at::kDouble).item();

    const auto bits = static_cast<index_t>(p_.values.size()), view = static_cast<index_t>(p_.views.size());
    const auto bytes = (elements(mask) + 7) / 8;
    p_.values.push_back({none, bytes, "mask", c10::kCPU});
    p_.views.push_back({bits, {bytes}, {1}, 0, at::kByte});
    n.name = "remat::draw";
    n.calls = {new_call("remat::draw", {elements(mask), made[1].arguments[1]}, {}, {{0, -1, view}})};
    n.outputs = {bits};

    auto first = none;  // first reader of the mask itself
    for (auto reader : readers_[mask.value]) {
      auto& r = p_.nodes[reader];
      const auto found = std::count_if(r.calls.begin(), r.calls.end(), [&](auto& c) { return read_bits(c, mask, view, value); });
      if (found > 0) r.inputs.push_back(bits);
      if (found > 0 && r.calls.size() == 1) r.name = r.calls[0].op.schema().name();
      if (std::none_of(r.calls.begin(), r.calls.end(), [&](const auto& c) { return reads(c, mask.value) > 0; }))
        std::erase(r.inputs, mask.value);
      else
        first = std::min(first, reader);
    }
    if (first == none) return;
    auto& u = added_[first - 1].emplace_back();
    u.name = "remat::unpack_";
    u.calls = {made[0],
               new_call("remat::unpack_", {at::Tensor(), at::Tensor(), value}, {{0, -1, shape.view}, {1, -1, view}}, {})};
    u.inputs = {bits};
    u.outputs = {mask.value};
  }

  std::ptrdiff_t reads(const call& c, index_t value) const {
    return std::count_if(c.operands.begin(), c.operands.end(), [&](const auto& o) { return p_.views[o.view].value == value; });
  }

  /// If the call is a product with the mask, lets it read the bits.
  /// @return true if it is
  bool read_bits(call& c, const byte_view& mask, index_t bits, const at::Scalar& value) const {
    const bool in_place = is_call_of(c, "aten::mul_", "Tensor");
    if ((!in_place && !is_call_of(c, "aten::mul", "Tensor")) || c.operands.size() != 2 || reads(c, mask.value) != 1) return false;
    const std::size_t at = p_.views[c.operands[0].view].value == mask.value ? 0 : 1;
    const auto factor = c.operands[1 - at];
    if (in_place && factor.at != 0) return false;
    const auto& x = p_.views[factor.view];
    if (!alike(p_.views[c.operands[at].view], mask) || p_.views[c.operands[at].view].offset != 0 || !alike(x, mask)) return false;
    if (!in_place && (c.results.size() != 1 || !alike(p_.views[c.results[0].view], mask))) return false;
    const bool grad_mode = c.grad_mode;
    c = new_call(in_place ? "remat::masked_" : "remat::masked", {at::Tensor(), at::Tensor(), value},
                 {{0, -1, factor.view}, {1, -1, bits}}, c.results);
    c.grad_mode = grad_mode;
    return true;
  }

  program p_;
  std::vector<std::vector<index_t>> readers_;  ///< per value
  std::vector<std::vector<node>> added_;       ///< nodes to insert behind each node
  std::set<index_t> unchanged_;                ///< values that must keep their bytes
};

}  // namespace

program packed(program step) { return packing(std::move(step)).run(); }

}  // namespace remat::pytorch
