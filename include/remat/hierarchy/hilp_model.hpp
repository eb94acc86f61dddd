// SPDX-License-Identifier: Apache-2.0
/// @file
/// The hierarchical ILP of HiRemate. Needs Eigen.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/level.hpp>
#include <remat/milp/model.hpp>

namespace remat::hierarchy {

/// A MILP over one level of a hierarchy. It decides which half of which part runs when, and in which option. The nodes of its
/// graph are halves of parts and single operations. The option of a half may differ each time it runs.
///
/// With nodes 0 ... T-1 in a topological order, phase t runs node t for the first time, after some of the nodes 0 ... t-1 in
/// order:
///
///     R[t,k,o]  node k runs in phase t in option o; the forward of a part has one more option, which saves nothing
///     S[t,v]    value v, which leaves its node, is on the device before phase t
///     Sp[t,j,o] the values that option o of part j saves ("phantom") are on the device before phase t
///
///     minimise sum of seconds[k,o] R[t,k,o]   subject to   sum_o R[t,t,o] = 1,   sum_o R[t,k,o] <= 1
///     S[t+1,v]      <= min(1, S[t,v] + sum_o R[t,maker of v,o])               at the end: targets are on the device
///     Sp[t+1,j,o]   <= Sp[t,j,o]  + R[t,forward of j,o],     sum_o of the right side <= 1
///     R[t,k,o]      <= S[t,v]     + sum_o' R[t,maker of v,o']                 for each v that k reads *in option o*
///     R[t,backward of j,o] <= Sp[t,j,o] + R[t,forward of j,o]
///     bytes of the values and phantoms on the device while k runs + sum_o workspace[k,o] R[t,k,o] <= budget   for all k <= t
///
/// A value is on the device while k runs in phase t in two cases. Either it is there before the phase and its maker comes later;
/// or it has been made or was there, and a use follows. For uses u_1 < u_2 < ... in the phase, the rows have levels min(1, S +
/// R) >= g_1 >= g_2 ... >= S[t+1] and R[t,u_i] <= g_(i-1). The published rows delete a value exactly when it becomes useless.
/// Ours have a tighter relaxation and the same integer points, with one exception: a phantom may be dropped before its backward
/// runs.
///
/// A node depends on the values that its option reads, where the published program joins the dependencies of all options. If
/// every part is a single operation, the integer points are the staged schedules of Checkmate.
///
/// Complexity: O(T^2 (values + options)) columns and rows.
///
/// Reference: Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont, "HiRemate: Hierarchical Approach for Efficient
/// Re-materialization of Neural Networks", 2024, section 4.
class hilp_model {
 public:
  /// @param l       the level; must outlive this object
  /// @param options largest number of options of a part, >= 1: the fastest, then the options that differ most in bytes carried
  hilp_model(const level& l, std::size_t options) : l_(l) {
    std::vector<const part_option*> plain;
    for (const auto& part : l.options) plain.push_back(fastest(part.list));
    const condensed_problem base(l.p, l.index, plain);
    if (base.possible()) collect(base, options);
  }

  /// Number of halves of parts and single operations; 0 if the parts have no order.
  std::size_t nodes() const { return nodes_.size(); }
  /// Seconds per unit of the objective.
  double unit() const { return second_; }

  /// The MILP for the budget of the level. Complexity: O(nodes^2 (values + options)).
  milp::model build() {
    scale();
    builder_ = {};
    run_.assign(nodes_.size(), {});
    std::vector<milp::expression> on_device(values_.size());             // S[t,v]
    std::vector<std::vector<milp::expression>> phantoms(parts_.size());  // Sp[t,j,o]
    for (std::size_t v = 0; v < values_.size(); ++v) on_device[v] = constant(values_[v].maker == none ? 1 : 0);
    for (std::size_t j = 0; j < parts_.size(); ++j) phantoms[j].assign(parts_[j].saved.size(), constant(0));
    for (std::size_t t = 0; t < nodes_.size(); ++t) add_phase(t, on_device, phantoms);
    return builder_.build();
  }

  /// The operations that a solution of the MILP runs, in order.
  std::vector<operation_id> order(const Eigen::VectorXd& x) const {
    std::vector<operation_id> all;
    for (const auto& phase : run_)
      for (std::size_t k = 0; k < phase.size(); ++k)
        for (std::size_t o = 0; o < phase[k].size(); ++o) {
          const auto& terms = phase[k][o].terms;
          if (terms.empty() || x[terms[0].first] < 0.5) continue;
          const auto& operations = nodes_[k].options[o].run.operations;
          all.insert(all.end(), operations.begin(), operations.end());
        }
    return prune_order(l_.p, all);
  }

 private:
  /// A way to run a node, and the phantom that it makes or reads: an index into `part_state::saved`, or none.
  struct variant {
    condensed_run run;
    index_t phantom;
  };
  struct node {
    bool backward;
    bool once;
    std::vector<variant> options;
    std::size_t values;  ///< number of values that leave the node
  };
  struct value_state {
    value_id value;
    index_t maker;                        ///< the node, or none for a source
    std::vector<std::size_t> users = {};  ///< nodes that read the value in some option, ascending
  };
  struct part_state {
    std::size_t forward = 0, backward = 0;  ///< nodes; equal if the part has one half only
    std::vector<bytes_t> saved = {};        ///< bytes of each phantom
  };

  static const part_option* fastest(const std::vector<part_option>& list) {
    return &*std::min_element(list.begin(), list.end(), [](const auto& a, const auto& b) {
      return std::pair(a.seconds, a.carried) < std::pair(b.seconds, b.carried);
    });
  }
  static milp::expression constant(double value) { return {{}, value}; }

  /// At most `limit` options: the fastest, then the farthest from the others in bytes carried. Options that another option
  /// dominates are left out.
  static std::vector<const part_option*> choose(const std::vector<part_option>& list, std::size_t limit) {
    std::vector<const part_option*> rest, chosen = {fastest(list)};
    const auto beats = [](const part_option& a, const part_option& b) {
      const auto key = [](const part_option& x) {
        return std::array{x.seconds, static_cast<double>(x.carried), static_cast<double>(x.saved),
                          static_cast<double>(x.forward_workspace), static_cast<double>(x.backward_workspace)};
      };
      const auto ka = key(a), kb = key(b);
      for (std::size_t i = 0; i < ka.size(); ++i)
        if (ka[i] > kb[i]) return false;
      return ka != kb || &a < &b;
    };
    for (const auto& o : list)
      if (&o != chosen[0] && std::none_of(list.begin(), list.end(), [&](const auto& x) { return &x != &o && beats(x, o); }))
        rest.push_back(&o);
    while (chosen.size() < limit && !rest.empty()) {
      const auto distance = [&](const part_option* o) {
        bytes_t least = max_bytes;
        for (const auto* c : chosen) least = std::min(least, std::abs(c->carried - o->carried));
        return least;
      };
      const auto farthest =
          std::max_element(rest.begin(), rest.end(), [&](const auto* a, const auto* b) { return distance(a) < distance(b); });
      chosen.push_back(*farthest);
      rest.erase(farthest);
    }
    return chosen;
  }

  /// Collects nodes with their options, and values with their uses. Leaves out options that contradict the order of the nodes.
  void collect(const condensed_problem& base, std::size_t options) {
    const auto& p = l_.p;
    std::vector<index_t> part_of(l_.parts.size(), none);
    place_.assign(p.values().size(), none);
    const auto add_value = [&](value_id v, index_t maker) {
      if (place_[v] != none) return;
      place_[v] = static_cast<index_t>(values_.size());
      values_.push_back({v, maker});
    };
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.is_source(v) && !p.values()[v].held) add_value(v, none);
    for (const auto& run : base.runs()) {
      const auto k = nodes_.size();
      nodes_.push_back({run.backward, run.once, {{run, none}}, run.makes.size()});
      for (auto v : run.makes) add_value(v, static_cast<index_t>(k));
      if (run.part == none) continue;
      auto& j = part_of[run.part];
      if (j == none) {
        j = static_cast<index_t>(parts_.size());
        parts_.push_back({k, k});
      }
      parts_[j].backward = k;
      nodes_[k].options.clear();
    }
    for (part_id i = 0; i < l_.parts.size(); ++i)
      if (part_of[i] != none) add_options(base, i, parts_[part_of[i]], choose(l_.options[i].list, options));
    for (std::size_t k = 0; k < nodes_.size(); ++k)
      for (const auto& o : nodes_[k].options)
        for (auto v : o.run.reads)
          if (place_[v] != none) {
            auto& users = values_[place_[v]].users;
            if (users.empty() || users.back() != k) users.push_back(k);
          }
  }

  void add_options(const condensed_problem& base, part_id i, part_state& part, const std::vector<const part_option*>& chosen) {
    const auto& runs = base.runs();
    const auto fits = [&](const condensed_run& run, std::size_t k, std::vector<value_id> made) {
      std::sort(made.begin(), made.end());
      auto own = runs[k].makes;
      std::sort(own.begin(), own.end());
      return std::includes(made.begin(), made.end(), own.begin(), own.end()) &&
             std::all_of(run.reads.begin(), run.reads.end(),
                         [&](value_id v) { return l_.p.is_source(v) || (place_[v] != none && values_[place_[v]].maker < k); });
    };
    for (const auto* o : chosen) {
      const bool forward = !o->forward.empty(), backward = !o->backward.empty();
      if (forward != (!nodes_[part.forward].backward) || backward != nodes_[part.backward].backward) continue;
      std::vector<std::pair<std::size_t, condensed_run>> halves;
      if (forward) halves.emplace_back(part.forward, condensed_run(l_.p, l_.index, i, false, o->forward, o));
      if (backward) halves.emplace_back(part.backward, condensed_run(l_.p, l_.index, i, true, o->backward, o));
      if (!std::all_of(halves.begin(), halves.end(), [&](const auto& h) { return fits(h.second, h.first, h.second.makes); }))
        continue;
      index_t phantom = none;
      if (forward && backward && o->saved > 0) {
        phantom = static_cast<index_t>(part.saved.size());
        part.saved.push_back(o->saved);
      }
      for (auto& [k, run] : halves) {
        nodes_[k].once = nodes_[k].once || run.once;
        nodes_[k].options.push_back({std::move(run), phantom});
      }
    }
    const auto& c = l_.options[i].checkpoint;
    if (!nodes_[part.forward].backward) {  // `c.forward` is empty if no other part reads the outputs: it need not run
      condensed_run run(l_.p, l_.index, i, false, c.forward, &c);
      if (fits(run, part.forward, run.makes)) nodes_[part.forward].options.push_back({std::move(run), none});
    }
  }

  void scale() {
    bytes_t divisor = 0;
    double largest = 0;
    for (const auto& v : values_) divisor = std::gcd(divisor, bytes(v));
    for (const auto& part : parts_)
      for (auto s : part.saved) divisor = std::gcd(divisor, s);
    for (const auto& n : nodes_)
      for (const auto& o : n.options) {
        divisor = std::gcd(divisor, o.run.workspace);
        largest = std::max(largest, o.run.seconds);
      }
    divisor = std::max<bytes_t>(divisor, 1);
    const auto room = l_.budget() - l_.p.held_bytes();
    constexpr bytes_t largest_room = 1 << 20;  // rows keep a unit of memory well above the tolerances of a backend
    byte_ = divisor * std::max<bytes_t>(1, room / divisor / largest_room);
    room_ = static_cast<double>(room / byte_);
    second_ = milp::unit_of(largest, 1000);
  }
  bytes_t bytes(const value_state& v) const { return l_.p.values()[v.value].bytes; }
  /// In units of the memory rows, rounded up.
  double units(bytes_t bytes) const { return static_cast<double>((bytes + byte_ - 1) / byte_); }

  /// The rows of a phase under construction.
  struct phase_rows {
    std::size_t t;                         ///< number of the phase
    bool last;                             ///< no phase follows
    std::vector<milp::expression> runs;    ///< per node: how often it runs in the phase, 0 or 1
    std::vector<milp::expression> memory;  ///< per node: bytes on the device while it runs, in units of the memory rows
  };
  /// Adds the columns and rows of phase t. @param on_device, phantoms in: before the phase; out: after it
  void add_phase(std::size_t t, std::vector<milp::expression>& on_device, std::vector<std::vector<milp::expression>>& phantoms) {
    phase_rows phase{t, t + 1 == nodes_.size(), std::vector<milp::expression>(t + 1), std::vector<milp::expression>(t + 1)};
    add_runs(phase);
    for (std::size_t i = 0; i < values_.size(); ++i)
      if (values_[i].maker == none || values_[i].maker <= t) on_device[i] = add_value(phase, values_[i], on_device[i]);
    for (std::size_t j = 0; j < parts_.size(); ++j)
      if (parts_[j].forward <= t && parts_[j].forward != parts_[j].backward) add_phantoms(phase, parts_[j], phantoms[j]);
    for (std::size_t k = 0; k <= t; ++k) builder_.at_most(phase.memory[k], room_);
  }

  /// Adds R[t,k,o] for all nodes k of the phase.
  void add_runs(phase_rows& phase) {
    auto& run = run_[phase.t];
    for (std::size_t k = 0; k <= phase.t; ++k) {
      for (const auto& o : nodes_[k].options) {
        run.resize(k + 1);
        run[k].push_back(k < phase.t && nodes_[k].once ? constant(0) : builder_.binary(o.run.seconds / second_));
        phase.runs[k].add(run[k].back());
        phase.memory[k].add(run[k].back(), units(o.run.workspace));
      }
      if (k == phase.t)
        builder_.equal(phase.runs[k], 1);
      else if (!nodes_[k].once)
        builder_.at_most(phase.runs[k], 1);
    }
  }

  /// Adds the levels g_1 >= g_2 >= ... of a value along its uses in the phase, and counts its bytes.
  /// @param before S[t,v]
  /// @return S[t+1,v]
  milp::expression add_value(phase_rows& phase, const value_state& v, const milp::expression& before) {
    const auto t = phase.t;
    const auto size = units(bytes(v));
    const bool target = l_.p.is_target(v.value);
    // True if the value is of use after this phase. A once-only node counts only if its run is still to come.
    const bool useful = target || std::any_of(v.users.begin(), v.users.end(),
                                              [&](std::size_t u) { return u > t || (!phase.last && !nodes_[u].once); });
    auto after = phase.last ? constant(target ? 1 : 0) : useful ? builder_.binary(0) : constant(0);
    auto level = v.maker == none ? before : add_maker(phase, v, before, size);
    auto from = v.maker == none ? 0 : static_cast<std::size_t>(v.maker) + 1;  // the first row that `level` counts in
    for (std::size_t n = 0; n < v.users.size() && v.users[n] <= t; ++n) {
      const auto u = v.users[n];
      builder_.at_most(reading(t, u, v.value) - level, 0);
      for (; from <= u; ++from) phase.memory[from].add(level, size);
      const bool final = n + 1 == v.users.size() || v.users[n + 1] > t;
      const auto next = final ? after : builder_.column(0, 0, 1);
      builder_.at_most(next - level, 0);
      level = next;
    }
    if (v.users.empty() || v.users[0] > t) builder_.at_most(after - level, 0);
    for (; from <= t; ++from) phase.memory[from].add(after, size);
    return after;
  }

  /// Counts the bytes of a value up to the place of its maker.
  /// @param before S[t,v]
  /// @return the level of the value right after this place
  milp::expression add_maker(phase_rows& phase, const value_state& v, const milp::expression& before, double size) {
    auto level = before;
    if (v.maker == phase.t || nodes_[v.maker].values == 1) {
      level.add(phase.runs[v.maker]);
      if (v.maker < phase.t) builder_.at_most(level, 1);
    } else {  // several outputs: the node may run again for a missing output; an output not needed is dropped at once
      const auto either = builder_.column(0, 0, 1);
      builder_.at_most(either - level - phase.runs[v.maker], 0);
      builder_.at_most(level - either, 0);
      builder_.at_most(phase.runs[v.maker] - either, 0);
      level = either;
    }
    for (std::size_t k = 0; k < v.maker; ++k) phase.memory[k].add(before, size);
    phase.memory[v.maker].add(level, size);
    if (v.maker < phase.t && nodes_[v.maker].values > 1) {
      const auto wanted = builder_.column(0, 0, 1);
      builder_.at_most(wanted - level, 0);
      level = wanted;
    }
    return level;
  }

  /// Whether node u runs in phase t in an option that reads `v`.
  milp::expression reading(std::size_t t, std::size_t u, value_id v) const {
    milp::expression sum;
    for (std::size_t o = 0; o < run_[t][u].size(); ++o)
      if (const auto& reads = nodes_[u].options[o].run.reads; std::binary_search(reads.begin(), reads.end(), v))
        sum.add(run_[t][u][o]);
    return sum;
  }

  /// Adds Sp[t+1,j,o] for the options o of a part j whose forward may run in the phase, and counts their bytes.
  /// @param phantoms in: Sp[t,j,.]; out: Sp[t+1,j,.]
  void add_phantoms(phase_rows& phase, const part_state& part, std::vector<milp::expression>& phantoms) {
    const auto t = phase.t;
    const auto& run = run_[t];
    milp::expression all;
    for (index_t s = 0; s < part.saved.size(); ++s) {
      const auto before = phantoms[s];
      auto level = before;
      for (std::size_t o = 0; o < run[part.forward].size(); ++o)
        if (nodes_[part.forward].options[o].phantom == s) level.add(run[part.forward][o]);
      all.add(level);
      if (part.backward <= t)
        for (std::size_t o = 0; o < run[part.backward].size(); ++o)
          if (nodes_[part.backward].options[o].phantom == s) builder_.at_most(run[part.backward][o] - level, 0);
      const bool useful = !phase.last && (part.backward > t || !nodes_[part.backward].once);
      const auto after = useful ? builder_.binary(0) : constant(0);
      builder_.at_most(after - level, 0);
      const auto size = units(part.saved[s]);
      for (std::size_t k = 0; k < part.forward; ++k) phase.memory[k].add(before, size);
      for (auto k = part.forward; k <= std::min(t, part.backward); ++k) phase.memory[k].add(level, size);
      for (auto k = part.backward + 1; k <= t; ++k) phase.memory[k].add(after, size);
      phantoms[s] = after;
    }
    if (!all.terms.empty()) builder_.at_most(all, 1);
  }

  const level& l_;
  std::vector<node> nodes_;
  std::vector<value_state> values_;
  std::vector<part_state> parts_;
  std::vector<index_t> place_;  // per value: its place in `values_`, or none
  bytes_t byte_ = 1;
  double second_ = 1, room_ = 0;
  milp::builder builder_;
  std::vector<std::vector<std::vector<milp::expression>>> run_;  // R[t,k,o]
};

}  // namespace remat::hierarchy
