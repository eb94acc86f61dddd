// SPDX-License-Identifier: Apache-2.0
#include "summands.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <set>
#include <utility>

namespace remat::pytorch::detail {
namespace {

/// Removes sums from a trace.
class splitter {
 public:
  explicit splitter(trace& t) : trace_(t) {}

  /// The summands of a sum, in order; empty if it is no sum, or stays one.
  std::vector<byte_view> split(const summed_gradient& sum) {
    std::vector<std::size_t> sums;  // the last one first
    auto result = sum.tensor;
    for (auto i = trace_.accumulated; i-- > trace_.backward && sums.size() + 1 < sum.summands;) {
      const auto& c = trace_.calls[i];
      if (!makes(c, result)) continue;
      sums.push_back(i);
      result = c.operands[0].tensor;
    }
    if (sums.empty()) return {};
    std::reverse(sums.begin(), sums.end());
    auto first = trace_.calls[sums.front()].operands[0].view;
    const bool copies_first = is_written_after(sums.front(), first.value, sums);
    if (copies_first && is_written_after(sums.front(), trace_.calls[sums.front()].operands[1].view.value, sums)) return {};
    std::vector<byte_view> summands;
    for (auto i : sums) {
      auto& c = trace_.calls[i];
      auto next = c.operands[1].view;
      auto& copied = summands.empty() && copies_first ? first : next;
      const bool copies = &copied == &first || is_written_after(i, next.value, sums);
      take_out(c);
      if (copies) copied = make_copy(c, copied);
      if (summands.empty()) summands.push_back(first);
      summands.push_back(next);
    }
    return summands;
  }
  /// Copies a summand if its memory has been handed out already.
  byte_view alone(const byte_view& v) {
    if (handed_out_.insert(v.value).second) return v;
    return make_copy(trace_.calls.emplace_back(trace_.calls.back()), v);
  }
  /// Removes calls of autograd that read removed sums.
  void finish() {
    for (auto i = trace_.accumulated; i < trace_.calls.size(); ++i)
      for (const auto& o : trace_.calls[i].operands)
        if (gone_.count(o.view.value) > 0) {
          take_out(trace_.calls[i]);
          break;
        }
  }

 private:
  void take_out(traced_call& c) {
    for (const auto& r : c.results)
      if (trace_.storages[r.view.value].slot == none) gone_.insert(r.view.value);
    c.operands.clear();
    c.results.clear();
  }
  /// True if the call adds two tensors of one type and shape, as autograd does with two gradients of a tensor.
  static bool makes(const traced_call& c, std::size_t sum) {
    const auto& name = c.op.schema().name();
    if ((name != "aten::add" && name != "aten::add_") || c.operands.size() != 2 || c.arguments.size() != 3) return false;
    const auto &a = c.operands[0], &b = c.operands[1];
    if (a.view.sizes != b.view.sizes || a.view.dtype != b.view.dtype || !c.arguments[2].toScalar().equal(1)) return false;
    const auto is_it = [&](const traced_tensor& t) { return t.tensor == sum; };
    return a.written ? is_it(a) : std::any_of(c.results.begin(), c.results.end(), is_it);
  }
  bool is_written_after(std::size_t at, index_t storage, const std::vector<std::size_t>& but) const {
    for (auto i = at + 1; i < trace_.calls.size(); ++i)
      if (std::find(but.begin(), but.end(), i) == but.end())
        for (const auto& o : trace_.calls[i].operands)
          if (o.written && o.view.value == storage) return true;
    return false;
  }
  /// Replaces the call by a copy of `v`. @return the copy
  byte_view make_copy(traced_call& c, const byte_view& v) {
    const byte_view copy{static_cast<index_t>(trace_.storages.size()), v.sizes, at::infer_dense_strides(v.sizes, v.strides), 0,
                         v.dtype};
    const auto bytes = at::detail::computeStorageNbytes(copy.sizes, copy.strides, c10::elementSize(copy.dtype));
    trace_.storages.push_back({none, static_cast<bytes_t>(bytes), "aten::clone", trace_.storages[v.value].device});
    c = {c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", ""),
         {at::Tensor(), c10::IValue()},
         {{0, -1, v}},
         {{0, -1, copy, false, trace_.tensors.size()}},
         false,
         {},
         {}};
    trace_.tensors.push_back(none);
    return copy;
  }

  trace& trace_;
  std::set<index_t> handed_out_, gone_;  ///< storages
};

}  // namespace

step_in_summands in_summands(const trace& recorded) {
  step_in_summands result{recorded, {}};
  auto& t = result.recorded;
  splitter s(t);
  for (std::size_t i = 0; i < recorded.parameters.size(); ++i) {
    const auto summands = s.split(recorded.parameter_sums[i]);
    if (summands.empty()) continue;
    t.parameter_grads[i] = summands.front();
    for (auto next = summands.begin() + 1; next != summands.end(); ++next) {
      t.parameters.push_back(t.parameters[i]);
      t.parameter_grads.push_back(*next);
      t.parameter_sources.push_back(t.parameter_sources[i]);
    }
  }
  for (std::size_t i = 0; i < recorded.input_grads.size(); ++i) {
    const auto summands = s.split(recorded.input_sums[i]);
    if (summands.empty()) continue;
    t.input_grads[i] = s.alone(summands.front());
    for (auto next = summands.begin() + 1; next != summands.end(); ++next) {
      t.input_grads.emplace_back(s.alone(*next));
      t.input_sources.push_back(t.input_sources[i]);
      result.inputs.push_back(i);
    }
  }
  s.finish();
  return result;
}

}  // namespace remat::pytorch::detail
