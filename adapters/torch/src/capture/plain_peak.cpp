// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "trace.hpp"

namespace remat::pytorch::detail {

bytes_t plain_peak(const trace& t) {
  constexpr auto never = static_cast<std::size_t>(-1);
  std::vector<std::size_t> first(t.storages.size(), never), last(t.storages.size(), 0);
  const auto kept_to_the_end = [&](const std::optional<byte_view>& v) {
    if (v && t.storages[v->value].slot == none) last[v->value] = t.calls.size();
  };
  for (std::size_t i = 0; i < t.calls.size(); ++i)
    for (const auto* list : {&t.calls[i].operands, &t.calls[i].results})
      for (const auto& x : *list) {
        const auto v = x.view.value;
        if (t.storages[v].slot != none) continue;  // held before the step begins
        if (first[v] == never) first[v] = i;
        last[v] = i;
      }
  for (const auto& v : t.outputs) kept_to_the_end(v);
  for (const auto& v : t.parameter_grads) kept_to_the_end(v);
  for (const auto& v : t.input_grads) kept_to_the_end(v);
  std::vector<bytes_t> change(t.calls.size() + 2, 0);
  for (std::size_t v = 0; v < first.size(); ++v) {
    if (first[v] == never) continue;
    change[first[v]] += t.storages[v].bytes;
    change[last[v] + 1] -= t.storages[v].bytes;
  }
  bytes_t live = 0, peak = 0;
  for (const auto x : change) peak = std::max(peak, live += x);
  for (const auto& v : t.output_grads)  // made by the loss
    if (v) peak += t.storages[v->value].bytes;
  return peak;
}

}  // namespace remat::pytorch::detail
