// SPDX-License-Identifier: Apache-2.0
/// @file
/// Repeats, for the inputs of another step, the calls by which a forward asked for numbers (`item`, `equal`). Private to the
/// adapter.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../base/views.hpp"
#include "same_calls.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

/// A call that gave the forward a number.
struct question {
  std::size_t call;                 ///< position in the trace
  std::vector<c10::IValue> answer;  ///< its results
};

/// The part of a trace that its questions depend on.
class recorded_questions final : public questions {
 public:
  /// @param recorded   all calls; operands that a question depends on are known before the step
  /// @param calculable positions of the calls whose operands are known before the step, ascending, questions included
  /// @param asked      the questions, ascending, at least one
  recorded_questions(const trace& recorded, const std::vector<std::size_t>& calculable, const std::vector<question>& asked) {
    std::set<index_t> needed;
    auto next = asked.rbegin();
    for (auto at = calculable.rbegin(); at != calculable.rend() && (next != asked.rend() || !needed.empty()); ++at) {
      const auto& c = recorded.calls[*at];
      const bool ask = next != asked.rend() && next->call == *at;
      const auto operand_of = [&](index_t s) {
        return std::any_of(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.view.value == s; });
      };
      bool makes = ask;
      for (const auto& o : c.operands) makes |= o.written && needed.count(o.view.value);
      for (const auto& r : c.results) makes |= needed.count(r.view.value) && !operand_of(r.view.value);
      if (!makes) continue;
      steps_.push_back({c, ask ? std::optional(next->answer) : std::nullopt});
      if (ask) ++next;
      for (const auto& o : c.operands) needed.insert(o.view.value);
    }
    std::reverse(steps_.begin(), steps_.end());
    storages_ = recorded.storages.size();
    for (auto s : needed)
      if (const auto k = recorded.storages[s].slot; k != none) sources_.push_back({s, k});
    last_ = recorded.calls[asked.back().call].op.schema().name();
  }

  bool guards_hold(const bindings& tensors, const std::vector<at::Tensor>& inputs) const override {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    struct source {
      at::Tensor tensor;
      bytes_t shift = 0;
    };
    std::vector<c10::Storage> storages(storages_);
    std::vector<source> outside(storages_);
    for (const auto& [s, k] : sources_) {
      const auto& slot = tensors.step().slots[k];
      const auto& t = outside[s].tensor = slot.from == role::input ? inputs[slot.position] : tensors[k];
      outside[s].shift = byte_offset(t) - slot.offset;
      storages[s] = t.storage();
    }
    for (const auto& step : steps_) {
      auto stack = step.what.arguments;
      own_lists(stack);
      for (const auto& o : step.what.operands) {
        const auto s = o.view.value;
        const auto& from = outside[s];
        put_tensor(stack, o, from.tensor.defined() && o.view.whole ? from.tensor : tensor_of(o.view, storages[s], from.shift));
      }
      step.what.op.callBoxed(stack);
      for (const auto& r : step.what.results)
        if (!storages[r.view.value]) storages[r.view.value] = tensor_at(stack, r).storage();
      if (step.answer && !std::equal(step.answer->begin(), step.answer->end(), stack.begin(), stack.end(), same)) return false;
    }
    return true;
  }
  std::string last() const override { return last_; }

 private:
  struct entry {
    traced_call what;
    std::optional<std::vector<c10::IValue>> answer;
  };

  std::vector<entry> steps_;
  std::size_t storages_ = 0;
  std::vector<std::pair<index_t, index_t>> sources_;  ///< storage and its slot
  std::string last_;
};

}  // namespace remat::pytorch::detail
