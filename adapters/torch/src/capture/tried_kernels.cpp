// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs a kernel ahead of the plan for its error only, because the module may handle that error.
#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_set>

#include "../base/views.hpp"
#include "../program/operators.hpp"
#include "call_log.hpp"
#include "hollow.hpp"
#include "weights_elsewhere.hpp"

namespace remat::pytorch::detail {
namespace {

bool in_range(const index_list& x) {
  if (x.indices.numel() == 0) return true;
  lent_memory shown;
  shown.fill(x.indices);
  const auto [least, most] = x.indices.aminmax();
  return least.item<int64_t>() >= 0 && most.item<int64_t>() < x.size;
}

}  // namespace

/// True if the data that a tensor has after the calls so far are in memory.
bool call_log::has_values(const std::vector<traced_call>& calls, const at::Tensor& t) {
  note_storages();
  const auto known = storages_.find(storage_of(t));
  if (known == storages_.end()) return has_memory(t);
  for (auto i = known->second.outside ? 0 : run_ahead_count_; i < calls_.size(); ++i)
    for (const auto& o : calls[calls_[i].call].operands)
      if (o.written && storage_of(tensor_at(calls_[i].arguments, o)) == known->first) return false;
  return known->second.outside ? has_memory(t) : known->second.real && has_data(t);
}

void call_log::hide_made(const std::vector<at::Tensor>& tensors) const {
  for (const auto& t : tensors) {
    const auto known = storages_.find(storage_of(t));
    if (known != storages_.end() && !known->second.outside && !known->second.stays && !is_pinned(storage_of(t)))
      detail::hide(storage_of(t));
  }
}

/// True if the call cannot raise an error, because all its indices are in range. Runs calls so far only if these make the
/// indices.
bool call_log::indices_are_right(const std::vector<traced_call>& calls, const c10::OperatorHandle& op,
                                 const std::vector<c10::IValue>& arguments) {
  const auto indices = indices_in(op, arguments);
  if (indices.empty()) return false;
  std::vector<at::Tensor> wanted;
  for (const auto& x : indices) wanted.push_back(x.indices);
  const auto there = [&](const at::Tensor& t) { return has_values(calls, t); };
  const bool runs = !std::all_of(wanted.begin(), wanted.end(), there);
  if (runs && !run_ahead(calls, wanted)) return false;
  const plain_kernels kernels;
  const bool right = std::all_of(wanted.begin(), wanted.end(), has_data) && std::all_of(indices.begin(), indices.end(), in_range);
  if (runs) hide_made(wanted);
  return right;
}

bool call_log::try_kernel(const std::vector<traced_call>& calls, const c10::OperatorHandle& op,
                          const ::torch::jit::Stack& stack) {
  auto arguments = values_from(stack, stack.size() - op.schema().arguments().size());
  if (indices_are_right(calls, op, arguments)) return true;
  std::vector<at::Tensor> tensors;
  each_tensor(arguments, [&](const at::Tensor& t, int) {
    if (t.has_storage()) tensors.push_back(t);
  });
  if (!run_ahead(calls, tensors)) return false;
  const auto is_made = [&](const at::Tensor& t) {
    const auto known = storages_.find(storage_of(t));
    return known == storages_.end() || known->second.outside || t.nbytes() == 0 || has_memory(t);
  };
  if (!std::all_of(tensors.begin(), tensors.end(), is_made)) return false;
  const auto hidden_again = c10::make_scope_exit([&] { hide_made(tensors); });
  const lent_weights lent(arguments);
  op.callBoxed(&arguments);
  std::unordered_set<const c10::StorageImpl*> live = ahead_data_;
  each_tensor(arguments, [&](const at::Tensor& t, int) {
    if (t.has_storage()) live.insert(storage_of(t));
  });
  std::size_t bytes = 0;
  for (const auto* s : live) bytes += s->nbytes();
  peak_ahead_ = std::max(peak_ahead_, bytes);
  return true;
}

}  // namespace remat::pytorch::detail
