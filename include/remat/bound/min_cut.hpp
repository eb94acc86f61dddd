// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule within a budget, from minimum cuts. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/cut_network.hpp>
#include <remat/bound/last_runs.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/order.hpp>

namespace remat {

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
    std::vector<bool> retained;  ///< per value
    std::vector<bool> later;     ///< per operation: runs (again) later
  };

  /// @param p      the problem
  /// @param needed the operations that some target depends on, ascending
  /// @param tau    one of them
  /// Complexity: O(values + edges).
  retention_cut(const problem& p, const std::vector<index_t>& needed, index_t tau) : p_(p), tau_(tau) {
    const auto& ops = p.operations();
    const auto nv = p.values().size();
    role_.assign(ops.size(), role::unneeded);
    for (auto o : needed) role_[o] = role::free;
    role_[tau] = role::descendant;
    std::vector<bool> mark(nv, false);
    for (auto v : ops[tau].outputs) mark[v] = true;
    for (auto o = tau + 1; o < ops.size(); ++o) {
      if (role_[o] != role::free) continue;
      if (std::none_of(ops[o].inputs.begin(), ops[o].inputs.end(), [&](index_t v) { return mark[v]; })) continue;
      role_[o] = role::descendant;
      for (auto v : ops[o].outputs) mark[v] = true;
    }
    mark.assign(nv, false);
    for (auto v : ops[tau].inputs) mark[v] = true;
    for (auto o = tau; o-- > 0;) {
      if (std::none_of(ops[o].outputs.begin(), ops[o].outputs.end(), [&](index_t v) { return mark[v]; })) continue;
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
    for (index_t v = 0; v < nv; ++v) needed_later_[v] = needed_later_[v] && stored(v);
  }

  index_t tau() const { return tau_; }
  /// Bytes that a schedule without recomputation has on the device while `tau` runs, values that may be made later included.
  bytes_t demand() const { return retain_all().bytes - room_; }
  /// Bytes for retained values under a budget of 0: minus what is on the device anyway while `tau` runs.
  bytes_t room() const { return room_; }

  /// Nothing computed again.
  choice retain_all() const {
    choice c = empty();
    for (index_t v = 0; v < p_.values().size(); ++v)
      if (needed_later_[v]) c.retained[v] = true, c.bytes += p_.values()[v].bytes;
    return c;
  }
  /// The fewest bytes retained, at any cost.
  choice retain_least() { return cut(1, true); }
  /// The least of seconds + lambda bytes.
  /// @param lambda s per byte, > 0
  /// Complexity: a maximum flow on O(values + operations) vertices.
  choice minimum(double lambda) { return cut(lambda, false); }

 private:
  enum class role : unsigned char { unneeded, ancestor, descendant, free };
  using network = detail::cut_network;
  static constexpr double resolution = 1e13;  // units of capacity that all costs together are cut into

  /// Can `v` be on the device before `tau` runs, other than for free?
  bool stored(index_t v) const {
    if (operand_[v]) return false;
    if (p_.is_source(v)) return !p_.values()[v].held;
    const auto r = role_[p_.producer(v)];
    return r == role::ancestor || r == role::free;
  }
  choice empty() const {
    choice c;
    c.retained.assign(p_.values().size(), false);
    c.later.assign(p_.operations().size(), false);
    return c;
  }

  void build() {
    const auto& ops = p_.operations();
    std::vector<network::vertex> place(p_.values().size(), 0);  // vertex of x_v
    runs_.assign(ops.size(), 0);                                // vertex of r_o
    for (index_t v = 0; v < place.size(); ++v)
      if (stored(v)) place[v] = network_.add_vertex();
    for (index_t o = 0; o < ops.size(); ++o)
      if (role_[o] == role::ancestor || role_[o] == role::free) runs_[o] = network_.add_vertex();
    for (index_t v = 0; v < place.size(); ++v) {
      if (place[v] == 0) continue;
      values_.push_back({v, place[v], network_.connect(place[v], p_.is_source(v) ? network::sink : runs_[p_.producer(v)], 0)});
      if (needed_later_[v]) network_.connect(network::source, place[v], network::infinite);
    }
    for (index_t o = 0; o < ops.size(); ++o) {
      if (runs_[o] == 0) continue;
      if (role_[o] == role::ancestor) costs_.push_back({o, runs_[o], network_.connect(runs_[o], network::sink, 0)});
      for (auto v : ops[o].inputs)
        if (place[v] != 0) network_.connect(runs_[o], place[v], network::infinite);
    }
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
    choice best = empty();
    for (std::size_t o = 0; o < runs_.size(); ++o) best.later[o] = runs_[o] != 0 && network_.reached(runs_[o]);
    for (const auto& c : costs_)
      if (best.later[c.index]) best.seconds += p_.operations()[c.index].seconds;
    for (const auto& x : values_)
      if (network_.reached(x.vertex) && (p_.is_source(x.index) || !best.later[p_.producer(x.index)])) {
        best.retained[x.index] = true;
        best.bytes += p_.values()[x.index].bytes;
      }
    return best;
  }

  struct item {
    index_t index;
    network::vertex vertex;
    network::edge edge;
  };
  const problem& p_;
  index_t tau_;
  std::vector<role> role_;
  std::vector<bool> operand_, needed_later_;
  bytes_t room_ = 0;
  network network_;
  std::vector<item> values_, costs_;
  std::vector<network::vertex> runs_;
};

/// A proven lower bound.
struct time_bound {
  double seconds = 0;  ///< no schedule within the budget is faster, s; infinity if none fits the budget
  bytes_t budget = 0;  ///< no schedule fits a smaller budget, bytes
};

/// How hard `min_cut_bound` tries.
struct min_cut_options {
  std::size_t moments = 32;  ///< operations `tau` tried with a single cut each, >= 1
  std::size_t refined = 16;  ///< the best of them, whose multiplier is optimised, >= 1
  bytes_t needed = 0;        ///< proven before: no schedule fits a smaller budget, bytes
};

/// Operations before which a schedule has to hold much: candidates for `retention_cut`, those first that order most of the
/// others. Complexity: O(operations + count * edges).
inline std::vector<std::unique_ptr<retention_cut>> retention_cuts(const problem& p, bytes_t budget, std::size_t count) {
  const auto needed = needed_operations(p);
  if (needed.empty()) return {};
  const auto memory = measure_order(p, needed).memory;
  std::vector<std::size_t> over;  // positions where store-all exceeds the budget, or its peak
  for (std::size_t k = 0; k < needed.size(); ++k)
    if (memory[k] > budget) over.push_back(k);
  const auto peak = static_cast<std::size_t>(std::max_element(memory.begin(), memory.end()) - memory.begin());
  if (over.empty()) over.push_back(peak);
  std::vector<std::size_t> sample = {peak};
  const auto tries = std::min(over.size(), 3 * count);
  for (std::size_t i = 0; i < tries; ++i) sample.push_back(over[i * over.size() / tries]);
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  std::vector<std::unique_ptr<retention_cut>> cuts;
  for (auto k : sample) cuts.push_back(std::make_unique<retention_cut>(p, needed, needed[k]));
  std::stable_sort(cuts.begin(), cuts.end(), [](const auto& a, const auto& b) { return a->demand() > b->demand(); });
  while (cuts.size() > count) cuts.pop_back();
  return cuts;
}

/// A lower bound on the time of *every* schedule within a budget: staged or not, whatever it computes again. Copies to the host
/// void it: they free memory at no cost in computations, so that only `bounds_without_search` is left.
///
/// For each of some operations `tau`, the Lagrangian dual in lambda of `retention_cut` under the bytes that are left before `tau`
/// runs for the first time; concave and piecewise linear, so a few cuts find its maximum.
///
/// @param p      the problem
/// @param budget bytes
/// @param o      how hard to try
/// @param stop   polled between cuts; true returns what is proven by then
/// @return the bounds on time and budget
/// @throws bad_option if `moments` or `refined` is 0
/// Complexity: O(2 moments + 10 refined) maximum flows on O(values + operations) vertices, and those of `last_large_run_bound`; a
/// fraction of a second for thousands.
/// @code
/// auto b = remat::min_cut_bound(p, budget);
/// std::cout << "no schedule takes less than " << b.seconds << " s\n";
/// @endcode
inline time_bound min_cut_bound(const problem& p, bytes_t budget, const min_cut_options& o = {},
                                const std::function<bool()>& stop = {}) {
  if (o.moments < 1) throw bad_option("min_cut_options.moments must be >= 1, got 0");
  if (o.refined < 1) throw bad_option("min_cut_options.refined must be >= 1, got 0");
  const auto least = bounds_without_search(p);
  time_bound best{least.seconds, std::max(least.budget, o.needed)};
  const double never = std::numeric_limits<double>::infinity();
  if (p.copies()) {
    if (budget < best.budget) best.seconds = never;
    return best;
  }
  best.budget = std::max(best.budget, last_runs_bound(p));
  struct dual {
    retention_cut* cut;
    retention_cut::choice all, few;  // the lines seconds + lambda (bytes - room) of the smallest and the largest lambda so far
    bytes_t room;
    double value;
  };
  std::vector<dual> duals;
  auto cuts = retention_cuts(p, budget, o.moments);
  // Moves to where the two lines meet; true once that is the maximum.
  const auto improve = [&](dual& d) {
    const auto slope_all = static_cast<double>(d.all.bytes - d.room), slope_few = static_cast<double>(d.few.bytes - d.room);
    const double lambda = (d.few.seconds - d.all.seconds) / (slope_all - slope_few);
    if (!(lambda > 0) || !std::isfinite(lambda)) return true;
    auto c = d.cut->minimum(lambda);
    const double value = c.seconds + lambda * static_cast<double>(c.bytes - d.room);
    const double crossing = d.all.seconds + lambda * slope_all;
    d.value = std::max(d.value, value);
    if (value >= crossing * (1 - 1e-6) || c.bytes >= d.all.bytes || c.bytes <= d.few.bytes) return true;
    (c.bytes > d.room ? d.all : d.few) = std::move(c);
    return false;
  };
  for (auto& cut : cuts) {
    if (stop && stop()) break;
    dual d{cut.get(), cut->retain_all(), {}, budget + cut->room(), 0};
    d.few = cut->retain_least();
    best.budget = std::max(best.budget, d.few.bytes - cut->room());
    if (d.all.bytes <= d.room || d.few.bytes > d.room) continue;
    improve(d);
    duals.push_back(std::move(d));
  }
  std::stable_sort(duals.begin(), duals.end(), [](const dual& a, const dual& b) { return a.value > b.value; });
  double extra = 0;
  for (std::size_t i = 0; i < duals.size(); ++i) {
    if (i < o.refined)
      for (int round = 0; round < 50 && !(stop && stop()) && !improve(duals[i]); ++round) continue;
    extra = std::max(extra, duals[i].value);
  }
  best.seconds += extra * (1 - 1e-9);  // floored capacities: the cuts are minimal up to 1e-13 of all costs per edge
  best.budget = last_large_run_bound(p, best.budget, stop);
  if (budget < best.budget) best.seconds = never;
  return best;
}

/// Adds the bounds of `min_cut_bound` to those of a result: `bound`, `budget_bound`, and `infeasible` where that is proven and no
/// schedule is known.
inline void prove_bound(const problem& p, bytes_t budget, result& r, const std::function<bool()>& stop = {}) {
  const auto b = min_cut_bound(p, budget, {.needed = r.budget_bound}, stop);
  r.budget_bound = std::max(r.budget_bound, b.budget);
  if (std::isfinite(b.seconds))
    r.bound = std::max(r.bound, b.seconds);
  else if (!r.found())
    r.status = status::infeasible;
}

}  // namespace remat
