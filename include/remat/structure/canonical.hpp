// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recognises problems that are equal except for the numbering of their values and operations.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/topological_order.hpp>

namespace remat::structure {

/// A description of a problem that does not depend on its numbering. It covers structure, costs, sizes, and the marks
/// of held values, targets and once-only operations.
struct canonical_form {
  std::vector<operation_id> operations;  ///< operations of the problem, in canonical topological order
  std::vector<std::uint64_t> words;      ///< description; if it is equal for two problems, their k-th operations correspond
  std::size_t hash = 0;                  ///< of `words`

  friend bool operator==(const canonical_form& a, const canonical_form& b) { return a.hash == b.hash && a.words == b.words; }
};

namespace detail {

inline std::uint64_t mixed(std::uint64_t h, std::uint64_t word) {
  h ^= word + 0x9e3779b97f4a7c15u + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdu;
  return h ^ (h >> 32);
}
inline std::uint64_t mixed(std::vector<std::uint64_t> words) {
  std::sort(words.begin(), words.end());
  std::uint64_t h = words.size();
  for (auto w : words) h = mixed(h, w);
  return h;
}

}  // namespace detail

/// The canonical form of `p`. A hash tells operations apart by everything that they depend on and that depends on them. Among
/// operations with equal hashes the order of the problem decides. So equal forms always mean equal problems. Equal problems have
/// equal forms, except for rare symmetries in different orders.
/// @param p the problem; names and kinds are ignored
/// Complexity: O((values + edges) log).
inline canonical_form canonical(const problem& p) {
  const auto& ops = p.operations();
  const auto& values = p.values();
  const auto own_hash = [&](value_id v) {
    return detail::mixed(static_cast<std::uint64_t>(values[v].bytes),
                         std::uint64_t{values[v].held} + 2u * std::uint64_t{p.is_target(v)} + 4u * std::uint64_t{p.is_source(v)});
  };
  std::vector<std::uint64_t> ancestry(ops.size()), whole(ops.size()), past(values.size()), future(values.size());
  for (value_id v = 0; v < values.size(); ++v) past[v] = own_hash(v);
  for (operation_id o = 0; o < ops.size(); ++o) {
    std::vector<std::uint64_t> words;
    for (auto v : ops[o].inputs) words.push_back(past[v]);
    auto h = detail::mixed(std::move(words));
    h = detail::mixed(detail::mixed(h, std::bit_cast<std::uint64_t>(ops[o].seconds)),
                      2u * static_cast<std::uint64_t>(ops[o].workspace) + ops[o].once);
    ancestry[o] = h;
    for (std::size_t k = 0; k < ops[o].outputs.size(); ++k) {
      auto& f = past[ops[o].outputs[k]];
      f = detail::mixed(detail::mixed(f, h), k);
    }
  }
  std::vector<std::vector<std::uint64_t>> readers(values.size());
  for (auto o = operation_id(ops.size()); o-- > 0;) {
    std::uint64_t h = ancestry[o];
    for (auto v : ops[o].outputs)
      h = detail::mixed(h, future[v] = detail::mixed(own_hash(v), detail::mixed(std::move(readers[v]))));
    whole[o] = h;
    for (auto v : ops[o].inputs) readers[v].push_back(h);
  }
  for (value_id v = 0; v < values.size(); ++v)
    if (p.is_source(v)) future[v] = detail::mixed(own_hash(v), detail::mixed(std::move(readers[v])));

  canonical_form form;
  std::vector<std::vector<std::size_t>> makers(ops.size());
  for (operation_id o = 0; o < ops.size(); ++o)
    for (auto v : ops[o].inputs)
      if (!p.is_source(v)) makers[o].push_back(p.producer(v));
  std::vector<std::uint64_t> number(values.size(), none);
  std::uint64_t count = 0;
  const auto describe = [&](value_id v) {
    number[v] = count++;
    for (std::uint64_t w :
         {static_cast<std::uint64_t>(values[v].bytes), std::uint64_t{values[v].held}, std::uint64_t{p.is_target(v)}})
      form.words.push_back(w);
  };
  for (const operation_id o : topological_order(makers, [&](std::size_t at) { return whole[at]; })) {
    form.operations.push_back(o);
    const auto& op = ops[o];
    for (std::uint64_t w : {std::bit_cast<std::uint64_t>(op.seconds), static_cast<std::uint64_t>(op.workspace),
                            std::uint64_t{op.once}, std::uint64_t{op.inputs.size()}, std::uint64_t{op.outputs.size()}})
      form.words.push_back(w);
    auto inputs = op.inputs;
    std::stable_sort(inputs.begin(), inputs.end(),
                     [&](value_id a, value_id b) { return std::tuple(number[a], future[a]) < std::tuple(number[b], future[b]); });
    for (auto v : inputs) {
      const bool known = number[v] != none;
      form.words.push_back(known ? number[v] : none);
      if (!known) describe(v);
    }
    for (auto v : op.outputs) describe(v);
  }
  for (value_id v = 0; v < values.size(); ++v)  // sources that nobody reads
    if (number[v] == none) describe(v);
  std::uint64_t h = form.words.size();
  for (auto w : form.words) h = detail::mixed(h, w);
  form.hash = static_cast<std::size_t>(h);
  return form;
}

}  // namespace remat::structure
