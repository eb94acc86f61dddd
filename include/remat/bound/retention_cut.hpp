// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a schedule retains across a moment: minimum cuts. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <remat/bound/cut_network.hpp>
#include <remat/core/problem.hpp>

namespace remat::bound {

/// What a schedule has to keep or to compute again at the moment before an operation `tau` runs for the first time.
///
/// The ancestors of `tau` have run, its descendants have not, the other needed operations may have. Every value that `tau` or a
/// descendant reads, or that is a target, is on the device then (*retained*) or made later. With r_o = 1 if o runs later, and
/// x_v = 1 if v is needed later, the least sum of seconds(o) r_o over the ancestors plus lambda bytes(v) x_v (1 - r_producer(v))
/// over the values is a minimum cut.
class retention_cut {
 public:
  /// A choice of r and x.
  struct choice {
    double seconds = 0;          ///< of the ancestors that run again
    bytes_t bytes = 0;           ///< of the values retained, operands of `tau` excepted
    std::vector<bool> retained;  ///< per value: of those retained, the ones that the order of the problem makes before `tau`
  };

  /// @param p      the problem
  /// @param needed the operations that some target depends on, ascending
  /// @param tau    one of them
  /// Complexity: O(values + edges).
  retention_cut(const problem& p, const std::vector<operation_id>& needed, operation_id tau) : p_(p), tau_(tau) {
    const auto& ops = p.operations();
    const auto nv = p.values().size();
    role_.assign(ops.size(), role::unneeded);
    for (auto o : needed) role_[o] = role::free;
    role_[tau] = role::descendant;
    std::vector<bool> mark(nv, false);
    for (auto v : ops[tau].outputs) mark[v] = true;
    for (auto o = tau + 1; o < ops.size(); ++o) {
      if (role_[o] != role::free) continue;
      if (std::none_of(ops[o].inputs.begin(), ops[o].inputs.end(), [&](value_id v) { return mark[v]; })) continue;
      role_[o] = role::descendant;
      for (auto v : ops[o].outputs) mark[v] = true;
    }
    mark.assign(nv, false);
    for (auto v : ops[tau].inputs) mark[v] = true;
    for (auto o = tau; o-- > 0;) {
      if (std::none_of(ops[o].outputs.begin(), ops[o].outputs.end(), [&](value_id v) { return mark[v]; })) continue;
      role_[o] = role::ancestor;
      for (auto v : ops[o].inputs) mark[v] = true;
    }

    operand_.assign(nv, false);
    room_ = -p.held_bytes() - ops[tau].workspace;
    for (auto v : ops[tau].outputs) room_ -= p.values()[v].bytes;
    for (auto v : ops[tau].inputs) {
      operand_[v] = true;
      if (!p.values()[v].held) room_ -= p.values()[v].bytes;
    }
    needed_later_.assign(nv, false);
    for (auto v : p.targets()) needed_later_[v] = true;
    for (auto o : needed)
      if (role_[o] == role::descendant)
        for (auto v : ops[o].inputs) needed_later_[v] = true;
    for (value_id v = 0; v < nv; ++v) needed_later_[v] = needed_later_[v] && stored(v);
  }

  operation_id tau() const { return tau_; }
  /// Bytes that a schedule without recomputation has on the device while `tau` runs, values that may be made later included.
  bytes_t demand() const { return retain_all().bytes - room_; }
  /// Bytes for retained values under a budget of 0: minus what is on the device anyway while `tau` runs.
  bytes_t room() const { return room_; }

  /// Nothing computed again.
  choice retain_all() const {
    choice c;
    c.retained.assign(p_.values().size(), false);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (needed_later_[v]) retain(v, c);
    return c;
  }
  /// The fewest bytes retained, at any cost.
  choice retain_least() { return cut(1, true); }
  /// The least of seconds + lambda bytes.
  /// @param lambda s per byte, > 0
  /// Complexity: a maximum flow on O(values + operations) vertices.
  choice minimum(double lambda) { return cut(lambda, false); }
  /// The lambda for which `rich` and `lean` cost the same.
  static double multiplier(const choice& rich, const choice& lean) {
    return (lean.seconds - rich.seconds) / static_cast<double>(rich.bytes - lean.bytes);
  }
  /// The choices between which the minimum changes while lambda grows, most bytes first.
  /// @param most of them, >= 2; where there are more, those that divide the widest ranges of bytes
  /// Complexity: at most 2 `most` calls of `minimum`.
  std::vector<choice> breakpoints(std::size_t most) {
    std::vector<choice> found = {retain_all(), retain_least()};
    std::vector<bytes_t> ranges = {found[0].bytes - found[1].bytes};  // between each two; 0 where there is no other
    while (found.size() < most) {
      const auto widest = std::max_element(ranges.begin(), ranges.end());
      const auto at = widest - ranges.begin() + 1;
      if (*widest <= 0) break;
      const auto rich = found.begin() + at - 1, lean = found.begin() + at;
      const double lambda = multiplier(*rich, *lean);
      auto between = lambda > 0 ? minimum(lambda) : *rich;
      if (between.bytes >= rich->bytes || between.bytes <= lean->bytes) {
        *widest = 0;
        continue;
      }
      *widest = rich->bytes - between.bytes;
      ranges.insert(ranges.begin() + at, between.bytes - lean->bytes);
      found.insert(found.begin() + at, std::move(between));
    }
    return found;
  }

 private:
  enum class role : unsigned char { unneeded, ancestor, descendant, free };
  using network = cut_network;
  static constexpr double resolution = 1e13;  // units of capacity that all costs together are cut into

  /// Can `v` be on the device before `tau` runs, other than for free?
  bool stored(value_id v) const {
    if (operand_[v]) return false;
    if (p_.is_source(v)) return !p_.values()[v].held;
    const auto r = role_[p_.producer(v)];
    return r == role::ancestor || r == role::free;
  }
  void retain(value_id v, choice& c) const {
    c.bytes += p_.values()[v].bytes;
    c.retained[v] = p_.is_source(v) || p_.producer(v) < tau_;
  }

  /// x_v is a vertex of its own only where it is not known (needed later in any case: the source) and not that of a single
  /// reader.
  void build() {
    const auto& ops = p_.operations();
    const auto runs = [&](operation_id o) { return role_[o] == role::ancestor || role_[o] == role::free; };
    runs_.assign(ops.size(), 0);  // vertex of r_o
    for (operation_id o = 0; o < ops.size(); ++o)
      if (runs(o)) runs_[o] = network_.add_vertex();
    for (value_id v = 0; v < p_.values().size(); ++v) {
      if (!stored(v)) continue;
      const auto all = p_.consumers(v);
      const auto reader = std::find_if(all.begin(), all.end(), runs);
      if (!needed_later_[v] && reader == all.end()) continue;
      const bool several = !needed_later_[v] && (p_.is_source(v) || std::any_of(reader + 1, all.end(), runs));
      const auto place = needed_later_[v] ? network::source : several ? network_.add_vertex() : runs_[*reader];
      if (several)
        for (auto o : all)
          if (runs(o)) network_.connect(runs_[o], place, network::infinite);
      values_.push_back({v, place, network_.connect(place, p_.is_source(v) ? network::sink : runs_[p_.producer(v)], 0)});
    }
    for (operation_id o = 0; o < ops.size(); ++o)
      if (role_[o] == role::ancestor) costs_.push_back({o, runs_[o], network_.connect(runs_[o], network::sink, 0)});
  }

  choice cut(double lambda, bool ignore_costs) {
    if (runs_.empty()) build();
    // Capacities are rounded down: the cut found is minimal up to one unit per edge.
    const double unit = ignore_costs ? 1 : p_.total_seconds() / resolution;
    const auto scaled = [&](double x) {
      return std::min(network::infinite, static_cast<std::int64_t>(std::min(x / (unit > 0 ? unit : 1), 1e17)));
    };
    for (const auto& c : costs_) {
      const auto& op = p_.operations()[c.index];
      network_.set_capacity(c.edge, op.once ? network::infinite : ignore_costs ? 0 : scaled(op.seconds));
    }
    for (const auto& x : values_) network_.set_capacity(x.edge, scaled(lambda * static_cast<double>(p_.values()[x.index].bytes)));
    network_.cut();
    choice best;
    best.retained.assign(p_.values().size(), false);
    const auto again = [&](operation_id o) { return runs_[o] != 0 && network_.reached(runs_[o]); };
    for (const auto& c : costs_)
      if (again(c.index)) best.seconds += p_.operations()[c.index].seconds;
    for (const auto& x : values_)
      if (network_.reached(x.vertex) && (p_.is_source(x.index) || !again(p_.producer(x.index)))) retain(x.index, best);
    return best;
  }

  struct item {
    index_t index;
    network::vertex vertex;
    network::edge edge;
  };
  const problem& p_;
  operation_id tau_;
  std::vector<role> role_;
  std::vector<bool> operand_, needed_later_;
  bytes_t room_ = 0;
  network network_;
  std::vector<item> values_, costs_;
  std::vector<network::vertex> runs_;
};

}  // namespace remat::bound
