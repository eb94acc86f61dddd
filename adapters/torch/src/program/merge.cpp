// SPDX-License-Identifier: Apache-2.0
#include "merge.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "edit.hpp"
#include "effects.hpp"
#include "signature.hpp"

namespace remat::pytorch {
namespace {

/// Value numbering: values with equal numbers have equal bytes.
class numbering {
 public:
  /// @param distinct values that may equal no other value
  numbering(const program& step, const std::set<index_t>& distinct)
      : step_(step),
        distinct_(distinct),
        representative(step.values.size()),
        twin(step.nodes.size(), none),
        before(step.nodes.size()) {
    std::iota(representative.begin(), representative.end(), index_t{0});
    std::map<content, std::vector<index_t>> constants;
    for (index_t v = 0; v < step.values.size(); ++v) {
      if (step.from(v) != role::constant) continue;
      auto& equal = constants[step.constants[slot_of(v).position]];
      equal.push_back(v);
      representative[v] = *std::find_if(equal.begin(), equal.end(), [&](index_t w) {
        const auto &a = slot_of(w), &b = slot_of(v);
        return a.type == b.type && a.offset == b.offset && a.number == b.number;
      });
    }
    state current = {generator_origin::forward, none};
    for (index_t i = 0; i < step.nodes.size(); ++i) {
      if (i == step.loss) current = {generator_origin::backward, none};
      const auto& n = step.nodes[i];
      if (n.random) before[i] = current = state_before(i, current);
      number_results(i);
      if (n.random) current = {generator_origin::after, twin[i] == none ? i : twin[i]};
    }
  }

  /// A state of the generator.
  using state = std::pair<generator_origin::kind, index_t>;

 private:
  const slot& slot_of(index_t v) const { return step_.slots[step_.values[v].slot]; }

  state state_before(index_t i, const state& current) const {
    const auto& o = step_.nodes[i].starts;
    switch (o.from) {
      case generator_origin::next:
        return current;
      case generator_origin::before:
        return before[o.node];
      case generator_origin::after:
        return {generator_origin::after, twin[o.node] == none ? o.node : twin[o.node]};
      case generator_origin::fixed:
        return {generator_origin::before, i};
      default:
        return {o.from, none};
    }
  }

  void number_results(index_t i) {
    const auto& n = step_.nodes[i];
    if (i == step_.loss || n.once) return;
    if (std::any_of(n.calls.begin(), n.calls.end(), [](const auto& c) { return !c.numbers.empty(); })) return;
    for (const auto& c : n.calls)
      for (const auto& a : c.arguments)
        if (a.isGenerator() || a.isCapsule()) return;
    std::vector<index_t> order;
    auto key = signature(step_, n, &order);
    const std::set<index_t> own(n.outputs.begin(), n.outputs.end());
    for (auto v : order) key += own.count(v) ? "." : " " + std::to_string(representative[v]);
    for (const auto& [old, fresh] : n.overwrites) key += " w" + std::to_string(representative[old]);
    if (n.random) key += " d" + std::to_string(before[i].first) + "," + std::to_string(before[i].second);
    const auto [first, fresh] = seen_.emplace(std::move(key), named{i, order});
    if (fresh || i < step_.loss) return;
    const auto& [j, theirs] = first->second;
    std::vector<std::pair<index_t, index_t>> equal;  // pairs of equal results; tokens are not compared
    for (std::size_t k = 0; k < order.size(); ++k)
      if (own.count(order[k])) equal.emplace_back(order[k], theirs[k]);
    if (std::any_of(equal.begin(), equal.end(),
                    [&](const auto& e) { return distinct_.count(e.first) || distinct_.count(e.second); }))
      return;
    for (const auto& [v, w] : equal) representative[v] = w;
    twin[i] = j;
  }

  const program& step_;
  const std::set<index_t>& distinct_;
  using named = std::pair<index_t, std::vector<index_t>>;  ///< a node, and the values in its calls
  std::map<std::string, named> seen_;

 public:
  std::vector<index_t> representative;  ///< per value: the first value that equals it
  std::vector<index_t> twin;            ///< per node: an earlier node that computes the same, or none
  std::vector<state> before;            ///< per drawing node: the generator state before it
};

/// Per node, whether it must run: it stays after merging, and it has effects or a target needs it.
std::vector<bool> needed(const program& step, std::vector<bool> stays) {
  std::vector<bool> value(step.values.size(), false);
  for (auto v : handed_out(step)) value[v] = true;
  for (auto v : step.tokens) value[v] = true;
  for (index_t i = step.nodes.size(); i-- > 0;) {
    const auto& n = step.nodes[i];
    stays[i] = stays[i] && (n.once || n.random || i == step.loss ||
                            std::any_of(n.outputs.begin(), n.outputs.end(), [&](index_t v) { return value[v]; }));
    if (stays[i])
      for (auto v : n.inputs) value[v] = true;
  }
  return stays;
}

}  // namespace

program merged(program step) {
  auto distinct = handed_out(step);
  for (;;) {
    const numbering equal(step, distinct);
    std::vector<bool> stays(step.nodes.size());
    for (std::size_t i = 0; i < stays.size(); ++i) stays[i] = equal.twin[i] == none || has_token(step, step.nodes[i]);
    const auto known = distinct.size();
    for (std::size_t i = 0; i < stays.size(); ++i)
      for (const auto& o : step.nodes[i].overwrites) {
        const auto& inputs = step.nodes[i].inputs;  // for example, the equal addend of a sum that overwrites the other addend
        const bool reads = std::any_of(inputs.begin(), inputs.end(),
                                       [&](index_t v) { return v != o.first && equal.representative[v] == o.first; });
        if (stays[i] && (reads || equal.representative[o.first] != o.first || equal.twin[i] != none))
          distinct.insert({o.first, o.second});
      }
    if (distinct.size() != known) continue;
    if (std::all_of(equal.twin.begin(), equal.twin.end(), [](auto j) { return j == none; })) return step;

    // States of draws must refer to nodes that stay.
    auto redirect = [&](generator_origin& o, const numbering::state& state, bool skipped) {
      if (o.node != none ? !stays[o.node] : o.from == generator_origin::next && skipped) o = {state.first, state.second, {}};
    };
    numbering::state current = {generator_origin::forward, none};
    bool skipped = false;         // the last draw was merged
    std::set<index_t> own_views;  // views of values that their node writes
    for (index_t i = 0; i < step.nodes.size(); ++i) {
      auto& n = step.nodes[i];
      if (n.random) {
        if (stays[i]) redirect(n.starts, equal.before[i], skipped);
        skipped = !stays[i];
        current = {generator_origin::after, skipped ? equal.twin[i] : i};
      }
      if (!stays[i]) continue;
      std::set<index_t> inputs;
      for (auto& v : n.inputs) v = equal.representative[v];
      std::erase_if(n.inputs, [&](index_t v) { return !inputs.insert(v).second; });
      for (auto& o : n.overwrites) o.first = equal.representative[o.first];
      for (const auto& c : n.calls)
        for (const auto* list : {&c.operands, &c.results})
          for (const auto& o : *list)
            if (std::find(n.outputs.begin(), n.outputs.end(), step.views[o.view].value) != n.outputs.end())
              own_views.insert(o.view);
    }
    auto& end = step.after_backward;
    redirect(end,
             end.node == none                      ? current
             : end.from == generator_origin::after ? numbering::state{end.from, equal.twin[end.node]}
                                                   : equal.before[end.node],
             skipped);
    for (index_t v = 0; v < step.views.size(); ++v)
      if (!own_views.count(v)) step.views[v].value = equal.representative[step.views[v].value];
    return with_only(std::move(step), needed(step, std::move(stays)));
  }
}

}  // namespace remat::pytorch
