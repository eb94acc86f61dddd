// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a schedule retains across a moment: minimum cuts. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <remat/bound/cut_network.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::bound {

/// What a schedule has to keep or to compute again at the moment before an operation `tau` runs for the first time.
///
/// The ancestors of `tau` have run, its descendants have not, the other needed operations may have. Every value that `tau` or a
/// descendant reads, or that is a target, is on the device then (*retained*) or made later. With r_o = 1 if o runs later, and
/// x_v = 1 if v is needed later, the least sum of seconds(o) r_o over the ancestors plus lambda bytes(v) x_v (1 - r_producer(v))
/// over the values is a minimum cut. So it is where a value may also be absent, having been copied to the host before, and be
/// copied back later, at a price.
class retention_cut {
 public:
  /// A choice of r and x.
  struct choice {
    double seconds = 0;          ///< of the ancestors that run again
    bytes_t bytes = 0;           ///< of the values retained, operands of `tau` excepted
    std::vector<bool> retained;  ///< per value: of those retained, the ones that the order of the problem makes before `tau`
    // Of `exchange` only:
    double later = 0;                   ///< seconds of the operations that are neither ancestors nor descendants and run later
    double to_host = 0, to_device = 0;  ///< seconds of the copies of the values moved
    double again = 0;                   ///< of `to_device`, what is not the first copy of a source that starts on the host
  };

  /// What counts how much in `exchange`, each >= 0.
  struct prices {
    double byte = 0;       ///< a byte retained, s
    double to_host = 0;    ///< a second of copies before `tau`, and how much less than 1 one of computations, in [0, 1]
    double to_device = 0;  ///< the same after `tau`, in [0, 1]
    double read = 0;       ///< how much less one of computations before `tau` counts on top, in [0, 1]
    double in = 0;         ///< a second of the copies in `again`, and how much less one of any computation counts, in [0, 1]
    double out = 0;        ///< the same of copies to the host
  };

  /// Seconds of operations: all those needed.
  struct seconds_of {
    double ancestors = 0, descendants = 0, others = 0;
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

    read_before_.assign(nv, false);
    for (value_id v = 0; v < nv; ++v) read_before_[v] = mark[v] && starts_away(v);
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
    for (auto o : needed)
      (role_[o] == role::ancestor     ? seconds_.ancestors
       : role_[o] == role::descendant ? seconds_.descendants
                                      : seconds_.others) += ops[o].seconds;
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
  choice retain_least() { return cut({.ancestors = 0, .byte = 1}, 1); }
  /// The least of seconds + lambda bytes.
  /// @param lambda s per byte, > 0
  /// Complexity: a maximum flow on O(values + operations) vertices.
  choice minimum(double lambda) { return cut({.byte = lambda}, unit()); }
  const seconds_of& seconds() const { return seconds_; }
  /// Seconds of the copies of the sources that start on the host and that `tau` or its ancestors read.
  double read_before() const {
    double sum = 0;
    for (value_id v = 0; v < read_before_.size(); ++v)
      if (read_before_[v]) sum += copy_seconds(v, p_.copies()->to_device);
    return sum;
  }
  /// Every value that is needed later moved.
  choice move_all() const {
    choice c;
    c.retained.assign(p_.values().size(), false);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (needed_later_[v]) move(v, c);
    return c;
  }
  /// The least of (1 - to_device - in - out) * seconds of the ancestors that run again, the same of the others that run later,
  /// (1 - to_host - read - in - out) of the others that do not, byte * bytes retained, and to_host + out, to_device and in * the
  /// copies of the values moved, in either direction and `again`; for problems that allow copies. Sources that start on the host
  /// need not be sent. Minimal up to `error`.
  /// Complexity: that of `minimum`.
  choice exchange(const prices& at) {
    return cut({.ancestors = 1 - at.to_device - at.in - at.out,
                .others = at.to_host + at.read - at.to_device,
                .byte = at.byte,
                .to_host = at.to_host + at.out,
                .to_device = at.to_device,
                .again = at.in},
               unit());
  }
  /// How much less than what `exchange` or `minimum` finds the least may be, s.
  double error() const { return unit() * static_cast<double>(p_.values().size() + 2 * p_.operations().size()); }
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
  /// Of the capacities.
  struct weights {
    double ancestors = 1, others = 0;  ///< of a second of operations that run later; below 0: of those that do not
    double byte = 0;                   ///< of a byte retained, s
    double to_host = std::numeric_limits<double>::infinity(), to_device = to_host, again = 0;  ///< of a second of copies
  };

  /// Units of capacity, s: 1e13 are all costs together.
  double unit() const { return p_.total_seconds() > 0 ? p_.total_seconds() / 1e13 : 1; }

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

  double copy_seconds(value_id v, double rate) const {
    return p_.copies()->latency + static_cast<double>(p_.values()[v].bytes) / rate;
  }
  bool starts_away(value_id v) const { return p_.is_source(v) && p_.values()[v].starts != device_tier; }
  void move(value_id v, choice& c) const {
    const double in = copy_seconds(v, p_.copies()->to_device);
    if (!starts_away(v)) c.to_host += copy_seconds(v, p_.copies()->to_host);
    c.to_device += in;
    if (!starts_away(v) || read_before_[v]) c.again += in;
  }
  /// What it costs that `v` is needed later and not made again; and whether it is moved then.
  std::pair<double, bool> price(value_id v, const weights& w) const {
    const double keep = w.byte * static_cast<double>(p_.values()[v].bytes);
    if (!p_.copies() || !p_.values()[v].movable || std::isinf(w.to_host)) return {keep, false};
    choice c;
    move(v, c);
    const double go = w.to_host * c.to_host + w.to_device * c.to_device + w.again * c.again;
    return {std::min(keep, go), go < keep};
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
    for (operation_id o = 0; o < ops.size(); ++o) {
      if (role_[o] == role::ancestor || (p_.copies() && role_[o] == role::free))
        costs_.push_back({o, runs_[o], network_.connect(runs_[o], network::sink, 0)});
      if (p_.copies() && role_[o] == role::free) gains_.push_back({o, runs_[o], network_.connect(network::source, runs_[o], 0)});
    }
  }

  /// Capacities are rounded down to units, s: the cut found is minimal up to one of them per edge.
  choice cut(const weights& w, double unit) {
    if (runs_.empty()) build();
    const auto scaled = [&](double x) {
      return std::min(network::infinite, static_cast<std::int64_t>(std::min(std::max(0.0, x / unit), 1e17)));
    };
    for (const auto& c : costs_) {
      const auto& op = p_.operations()[c.index];
      const bool ancestor = role_[c.index] == role::ancestor;
      network_.set_capacity(c.edge,
                            ancestor && op.once ? network::infinite : scaled((ancestor ? w.ancestors : w.others) * op.seconds));
    }
    for (const auto& g : gains_) network_.set_capacity(g.edge, scaled(-w.others * p_.operations()[g.index].seconds));
    for (const auto& x : values_) network_.set_capacity(x.edge, scaled(price(x.index, w).first));
    network_.cut();
    choice best;
    best.retained.assign(p_.values().size(), false);
    const auto again = [&](operation_id o) { return runs_[o] != 0 && network_.reached(runs_[o]); };
    for (const auto& c : costs_)
      if (again(c.index)) (role_[c.index] == role::ancestor ? best.seconds : best.later) += p_.operations()[c.index].seconds;
    for (const auto& x : values_)
      if (network_.reached(x.vertex) && (p_.is_source(x.index) || !again(p_.producer(x.index))))
        price(x.index, w).second ? move(x.index, best) : retain(x.index, best);
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
  std::vector<bool> operand_, needed_later_, read_before_;
  bytes_t room_ = 0;
  network network_;
  seconds_of seconds_;
  std::vector<item> values_, costs_, gains_;
  std::vector<network::vertex> runs_;
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
  const auto at = [&](std::size_t i) { return over.begin() + static_cast<std::ptrdiff_t>(i); };
  for (std::size_t i = 0; i < tries; ++i)  // where each part of them needs most
    sample.push_back(*std::max_element(at(i * over.size() / tries), at((i + 1) * over.size() / tries),
                                       [&](auto a, auto b) { return memory[a] < memory[b]; }));
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  std::vector<std::unique_ptr<retention_cut>> cuts;
  for (auto k : sample) cuts.push_back(std::make_unique<retention_cut>(p, needed, needed[k]));
  std::stable_sort(cuts.begin(), cuts.end(), [](const auto& a, const auto& b) { return a->demand() > b->demand(); });
  while (cuts.size() > count) cuts.pop_back();
  return cuts;
}

}  // namespace remat::bound
