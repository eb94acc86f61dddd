// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parts as the links of a chain, for the dynamic program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/order/replay.hpp>
#include <remat/structure/partition.hpp>

namespace remat::hierarchy {

/// Nested parts with their options, modelled as a `chain`: part i reads the outputs of part i - 1. A value that is read a few
/// parts away passes through the links between. A value that is read farther away (skip connection, mask) counts as on the
/// device throughout. So the model is exact if the problem is a chain. Otherwise `measure_order` tells the true memory of a
/// schedule.
class part_chain {
 public:
  /// @param p       the problem
  /// @param index   index of the parts
  /// @param parts   nested parts, as from `find_partition`
  /// @param options options of each part; must outlive this object
  /// Complexity: O(values + edges), where the edges include the recomputations in the options.
  part_chain(const problem& p, const part_index& index, const structure::partition& parts,
             const std::vector<part_options>& options)
      : p_(p), options_(options) {
    const auto n = static_cast<part_id>(parts.size());
    unmodelled_bytes_ = p.held_bytes();
    chain_.links.resize(n);
    std::vector<bool> backward(p.operations().size(), false);
    for (const auto& piece : parts)
      for (auto o : piece.backward) backward[o] = true;
    std::vector<bytes_t> passing(n, 0);  // per link: bytes of its input that are also in the input of the next link
    std::vector<bytes_t> handed(n, 0);   // per link: bytes that its forward makes for parts near by
    std::vector<bool> near(p.values().size(), false);
    for (value_id v = 0; v < p.values().size(); ++v) {
      if (p.is_source(v) || !index.leaves(v)) continue;
      const auto o = p.producer(v);
      const auto i = index.part(o);
      const auto bytes = p.values()[v].bytes;
      auto first = i, last = i;
      for (auto r : p.consumers(v)) {
        first = std::min(first, index.part(r));
        last = std::max(last, index.part(r));
      }
      constexpr part_id reach = 3;  // links
      near[v] = last != none && !p.is_target(v) && last - first <= reach && (backward[o] ? last : first) == i;
      if (near[v]) {
        for (auto k = first + 1; k <= last; ++k) (backward[o] ? chain_.links[k].gradient : chain_.links[k].input) += bytes;
        if (!backward[o]) {
          for (auto k = first + 1; k < last; ++k) passing[k] += bytes;
          handed[i] += bytes;
        }
      } else if (i != none && backward[o] && p.is_target(v)) {
        chain_.links[i].kept += bytes;
      } else {
        unmodelled_bytes_ += bytes;
      }
    }
    for (part_id i = 0; i < n; ++i) {
      auto& l = chain_.links[i];
      const auto out = (i + 1 < n ? chain_.links[i + 1].input : 0) - passing[i];
      for (const auto& w : options[i].list) {
        const double forward = seconds(w.forward);
        auto unread = handed[i];  // not read by the backward, although the chain counts it as saved
        for (auto v : w.kept)
          if (near[v]) unread -= p.values()[v].bytes;
        l.options.push_back({w.saved + out, forward, w.seconds - forward, w.forward_workspace,
                             std::max<bytes_t>(0, w.backward_transient - unread)});
      }
      l.checkpoint_seconds = options[i].checkpoint.seconds;
      l.checkpoint_transient = options[i].checkpoint.forward_workspace;
    }
  }

  const chain::heterogeneous_chain& model() const { return chain_; }
  /// Bytes that count as on the device throughout, outside the chain.
  bytes_t unmodelled_bytes() const { return unmodelled_bytes_; }

  /// The operations behind the steps of a schedule of the chain, with the needed operations in no part.
  /// Complexity: O((values + edges executed) log).
  std::vector<operation_id> order(const std::vector<chain::chain_step>& steps) const {
    using kind = chain::chain_step::kind;
    order::order_builder builder(p_);
    for (const auto& s : steps) {
      const auto& o = options_[s.link];
      for (auto x : s.what == kind::checkpoint ? o.checkpoint.forward
                    : s.what == kind::forward  ? o.list[s.option].forward
                                               : o.list[s.option].backward)
        builder.run(x);
    }
    return *builder.finish();  // there is an order, because nothing was dropped
  }

 private:
  double seconds(const std::vector<operation_id>& order) const {
    double sum = 0;
    for (auto o : order) sum += p_.operations()[o].seconds;
    return sum;
  }
  const problem& p_;
  const std::vector<part_options>& options_;
  chain::heterogeneous_chain chain_;
  bytes_t unmodelled_bytes_ = 0;
};

/// The parts of a problem as a chain in which each part is saved as a whole or not at all. Once-only operations stand alone.
class saved_parts {
 public:
  /// @param p     the problem
  /// @param parts nested parts, as from `find_partition`
  /// Complexity: O((values + edges) log).
  saved_parts(const problem& p, structure::partition parts)
      : parts_(structure::without_once(p, std::move(parts))),
        index_(p, parts_),
        options_(save_all(p)),
        chain_(p, index_, parts_, options_) {
    for (auto o : needed_operations(p))
      if (index_.part(o) == none) alone_ += p.operations()[o].seconds;
  }
  saved_parts(const saved_parts&) = delete;
  saved_parts& operator=(const saved_parts&) = delete;

  std::size_t size() const { return parts_.size(); }
  const part_chain& chain() const { return chain_; }
  const part_index& index() const { return index_; }
  /// Sum over the operations in no part, s.
  double alone() const { return alone_; }

 private:
  std::vector<part_options> save_all(const problem& p) const {
    std::vector<part_options> all;
    for (const auto& piece : parts_) {
      const part_problem b(p, index_, piece);
      all.push_back({{b.measure(needed_operations(b.bare()))}, b.checkpoint()});
    }
    return all;
  }

  structure::partition parts_;
  part_index index_;
  std::vector<part_options> options_;
  part_chain chain_;
  double alone_ = 0;
};

}  // namespace remat::hierarchy
