// SPDX-License-Identifier: Apache-2.0
#include "in_place.hpp"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "../base/gradient_hooks.hpp"
#include "edit.hpp"
#include "effects.hpp"
#include "operators.hpp"

namespace remat::pytorch {
namespace {

/// Moves a call to the node that makes the operand which the call overwrites.
class overwriting {
 public:
  explicit overwriting(program step)
      : p_(std::move(step)),
        producer_(p_.values.size(), none),
        readers_(p_.values.size(), 0),
        wanted_(p_.nodes.size(), true),
        merged_into_(p_.values.size()),
        results_of_step_(handed_out(p_)) {
    std::iota(merged_into_.begin(), merged_into_.end(), 0);
    for (index_t i = 0; i < p_.nodes.size(); ++i) {
      for (auto v : p_.nodes[i].outputs) producer_[v] = i;
      for (auto v : p_.nodes[i].inputs) ++readers_[v];
    }
  }

  program run() {
    for (auto& n : p_.nodes)
      if (n.name == call_hooks_name) call_hooks_in_place(n);
    for (index_t i = 0; i < p_.nodes.size(); ++i)
      if (const auto o = overwritten(i)) join(i, *o);
    for (auto& v : p_.views) v.value = value(v.value);
    for (auto& n : p_.nodes) {
      for (auto& v : n.inputs) v = value(v);
      for (auto& [old, fresh] : n.overwrites) old = value(old);
    }
    return with_only(std::move(p_), wanted_);
  }

 private:
  /// The value that a merged value is part of now.
  index_t value(index_t v) const {
    while (merged_into_[v] != v) v = merged_into_[v];
    return v;
  }

  bool fills_its_value(const byte_view& v) const {
    return v.offset == 0 && !v.conj && !v.neg &&
           c10::multiply_integers(v.sizes) * static_cast<bytes_t>(c10::elementSize(v.dtype)) == p_.values[v.value].bytes;
  }

  /// Lets hooks write over the gradients that they get, if nothing else reads these.
  void call_hooks_in_place(node& n) {
    auto& c = n.calls[0];
    std::map<index_t, index_t> fresh;  // old version: new version
    for (const auto& r : c.results) {
      const auto o =
          std::find_if(c.operands.begin(), c.operands.end(), [&](const auto& x) { return x.at == 0 && x.element == r.element; });
      const auto &from = p_.views[o->view], &to = p_.views[r.view];
      const auto maker = producer_[from.value];
      if (maker == none || maker == p_.loss || readers_[from.value] != 1 || results_of_step_.count(from.value) ||
          from.offset != 0 || from.conj || from.neg || from.strides != to.strides ||
          p_.values[from.value].bytes != p_.values[to.value].bytes || !fresh.emplace(from.value, to.value).second)
        return;
    }
    for (auto& o : c.operands) {
      auto view = p_.views[o.view];
      if (const auto found = fresh.find(view.value); found != fresh.end()) view.value = found->second;
      p_.views.push_back(std::move(view));
      o.view = static_cast<index_t>(p_.views.size() - 1);
    }
    n.overwrites.assign(fresh.begin(), fresh.end());
    c.results.clear();
    c.op = c10::Dispatcher::singleton().findSchemaOrThrow(call_hooks_in_place_name, "");
  }

  /// The operand that the call of node `i` may overwrite; among several, the operand that is made last.
  std::optional<operand> overwritten(index_t i) const {
    const auto& n = p_.nodes[i];
    if (n.calls.size() != 1 || n.outputs.size() != 1 || !n.overwrites.empty() || has_effects(p_, n)) return std::nullopt;
    const auto& c = n.calls[0];
    if (c.results.size() != 1 || c.results[0].at != 0 || c.results[0].element >= 0) return std::nullopt;
    const auto& result = p_.views[c.results[0].view];
    if (!fills_its_value(result) || p_.values[result.value].bytes == 0) return std::nullopt;
    std::optional<operand> last;
    for (const auto& o : c.operands) {
      const auto& v = p_.views[o.view];
      const auto maker = producer_[value(v.value)];
      if (o.element >= 0 || maker == none || maker == p_.loss || p_.nodes[maker].once) continue;
      if (readers_[v.value] != 1 || results_of_step_.count(v.value) ||
          std::count_if(c.operands.begin(), c.operands.end(), [&](const auto& x) { return p_.views[x.view].value == v.value; }) !=
              1)
        continue;
      if (v.sizes != result.sizes || v.strides != result.strides || v.dtype != result.dtype || !fills_its_value(v) ||
          p_.values[v.value].device != p_.values[result.value].device)
        continue;
      const bool there = std::all_of(n.inputs.begin(), n.inputs.end(), [&](index_t x) {
        const auto other = producer_[value(x)];
        const auto& gone = p_.nodes[maker].overwrites;  // no longer exist after the maker's last call
        return (other == none || other <= maker) &&
               std::none_of(gone.begin(), gone.end(), [&](const auto& versions) { return value(versions.first) == value(x); });
      });
      if (there && in_place_variant(c.op, o.at, v.dtype)) last = o;
    }
    return last;
  }

  void join(index_t i, const operand& o) {
    auto& from = p_.nodes[i];
    auto c = std::move(from.calls[0]);
    const auto result = p_.views[c.results[0].view].value, old = value(p_.views[o.view].value), maker = producer_[old];
    auto& to = p_.nodes[maker];
    const auto variant = *in_place_variant(c.op, o.at, p_.views[o.view].dtype);
    if (variant.schema().arguments().size() > c.arguments.size()) {  // the `out` argument is the last one
      c.operands.push_back({static_cast<int>(c.arguments.size()), -1, o.view});
      c.arguments.emplace_back(at::Tensor());
    }
    to.name += "+" + c.op.schema().name();
    c.op = variant;
    c.results.clear();
    to.calls.push_back(std::move(c));
    for (auto v : from.inputs)
      if (producer_[value(v)] != maker &&
          std::none_of(to.inputs.begin(), to.inputs.end(), [&](index_t x) { return value(x) == value(v); }))
        to.inputs.push_back(v);
    merged_into_[result] = old;
    readers_[old] = readers_[result];
    if (results_of_step_.count(result)) results_of_step_.insert(old);
    from.outputs.clear();
    wanted_[i] = false;
  }

  program p_;
  std::vector<index_t> producer_;      ///< per value
  std::vector<std::size_t> readers_;   ///< per value: number of readers
  std::vector<bool> wanted_;           ///< per node
  std::vector<index_t> merged_into_;   ///< per value: itself, or the value that it was merged into
  std::set<index_t> results_of_step_;  ///< results of the step, which must stay
};

}  // namespace

program in_place(program step) { return overwriting(std::move(step)).run(); }

}  // namespace remat::pytorch
