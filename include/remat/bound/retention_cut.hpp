// SPDX-License-Identifier: Apache-2.0
/// @file
/// Minimum cuts that tell which values a schedule retains across a moment. Needs Boost.Graph.
/// One class, because all members read the cuts of one network: longer than 400 lines.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <remat/bound/cut_network.hpp>
#include <remat/core/problem.hpp>

namespace remat::bound {

/// A span of time with a begin and an end, in which a bound counts seconds: for example one step of a schedule that repeats.
struct time_span {
  double to_host = 0, to_device = 0;       ///< copies that every schedule makes, s
  std::vector<double> earliest;            ///< by operation: least seconds from the begin to its runs; below 0: maybe before it
  std::vector<bool> may_be_tau;            ///< by operation: it runs on the device and not before the begin
  std::vector<bool> offloads_within;       ///< by value: its copies to the host begin after the begin
  std::vector<bool> prefetches_within;     ///< by value: its copies to the device end before the end
  std::vector<bool> final_offload_within;  ///< by value: if it ends on the host, its copy to the host ends before the end
};

/// The values that a schedule keeps, and the operations that it runs again, at the moment before operation `tau` first runs.
///
/// The ancestors of `tau` have run. Its descendants have not. Other needed operations are *free*: they may have run or not. Each
/// target, and each value that `tau` or a descendant reads, is on the device (*retained*) or is made later. Let r_o = 1 if o runs
/// later, and x_v = 1 if v is needed later. The least sum of seconds(o) r_o over the ancestors, plus lambda bytes(v) x_v
/// (1 - r_producer(v)) over the values, is a minimum cut. With copies it is a minimum cut, too: a value may also be absent, if it
/// was copied to the host before and is copied back later, at a price.
class retention_cut {
 public:
  /// One choice of r and x, and its sums.
  struct choice {
    double seconds = 0;          ///< of the ancestors that run again
    bytes_t bytes = 0;           ///< of the retained values, without operands of `tau`
    std::vector<bool> retained;  ///< per value: retained, and made before `tau` in the order of the problem
    // From here to `extra_to_device`: set by `minimum_with_copies` only.
    double deferred = 0;                            ///< seconds of the free operations that run later
    double deferred_in_before = 0;                  ///< the part of `deferred` that counts in `seconds().before`
    double to_host = 0, to_device = 0;              ///< seconds of the copies of the moved values, before `tau` and after it
    double extra_to_host = 0, extra_to_device = 0;  ///< seconds of these copies that not every schedule makes
    /// Rounding of a minimum, s: the true minimum may be lower by this. 0 for `retain_least`, whose bytes are whole units.
    double error = 0;
  };

  /// The weights of the rows that `minimum_with_copies` adds up, each >= 0.
  struct prices {
    double byte = 0;             ///< per retained byte, s
    double to_host = 0;          ///< per second of copies before `tau`; lowers the weight of computations before `tau`; in [0, 1]
    double to_device = 0;        ///< per second of copies after `tau`; lowers the weight of computations after `tau`; in [0, 1]
    double fetch = 0;            ///< per second of `fetch_before()`; lowers the weight of computations before `tau`; in [0, 1]
    double offload = 0;          ///< per second of `offload_after()`; lowers the weight of computations after `tau`; in [0, 1]
    double extra_to_device = 0;  ///< per second of `choice::extra_to_device`; lowers the weight of all computations; in [0, 1]
    double extra_to_host = 0;    ///< per second of `choice::extra_to_host`; lowers the weight of all computations; in [0, 1]
  };

  /// Seconds of the first runs of operations. `before`: ancestors and free operations that cannot begin before `head()`.
  /// `descendants`: `tau` and its descendants.
  struct seconds_of {
    double before = 0, descendants = 0;
  };

  /// @param p      the problem; must outlive this
  /// @param needed the operations that some target depends on, ascending
  /// @param tau    a needed operation
  /// @param within the span in which time counts; must outlive this. Null: the whole schedule lies within the span
  /// @param stop   polled within cuts, which then throw `interrupted`
  /// Complexity: O(values + edges).
  retention_cut(const problem& p, const std::vector<operation_id>& needed, operation_id tau, const time_span* within = nullptr,
                std::function<bool()> stop = {})
      : p_(p), tau_(tau), within_(within), network_(std::move(stop)) {
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

    if (within) find_head(needed);
    fetched_before_.assign(nv, false);
    for (value_id v = 0; v < nv; ++v) fetched_before_[v] = mark[v] && starts_on_host(v);
    is_operand_.assign(nv, false);
    room_ = -p.held_bytes() - p.new_bytes(tau);
    for (auto v : ops[tau].inputs) {
      is_operand_[v] = true;
      if (!p.values()[v].held) room_ -= p.values()[v].bytes;
    }
    needed_later_.assign(nv, false);
    for (auto o : needed)
      if (role_[o] == role::descendant)
        for (auto v : ops[o].inputs) needed_later_[v] = true;
    only_ends_on_host_.assign(nv, false);
    for (auto v : p.targets()) {
      only_ends_on_host_[v] = !needed_later_[v] && p.values()[v].ends != device_tier;
      needed_later_[v] = true;
    }
    for (value_id v = 0; v < nv; ++v) needed_later_[v] = needed_later_[v] && stored(v);
    for (auto o : needed)
      if (role_[o] == role::descendant)
        seconds_.descendants += ops[o].seconds;
      else if (counts_in_before(o))
        seconds_.before += ops[o].seconds;
  }

  operation_id tau() const { return tau_; }
  /// Bytes on the device while `tau` runs if nothing is recomputed. Includes values that may also be made later.
  bytes_t demand() const { return retain_all().bytes - room_; }
  /// Room for retained values under a budget of 0, bytes: minus held values, and operands, outputs and workspace of `tau`.
  bytes_t room() const { return room_; }

  /// The choice that computes nothing again.
  choice retain_all() const {
    choice c;
    c.retained.assign(p_.values().size(), false);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (needed_later_[v]) retain(v, c);
    return c;
  }
  /// From now on, a value of more than `largest` bytes is retained only if it cannot be made again (except by `retain_all`).
  /// For budgets that leave `largest` bytes beside `tau`: a larger value does not fit.
  /// @param largest bytes
  /// @return true if there is a larger value that can be made again
  bool forbid_retaining_above(bytes_t largest) {
    max_retained_bytes_ = largest;
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (stored(v) && is_too_large(v)) return true;
    return false;
  }
  /// The choice of the fewest seconds, whatever its bytes.
  /// @throws interrupted
  choice fewest_seconds() { return cut({}, unit()); }
  /// The choice of the fewest retained bytes, whatever its seconds.
  /// @throws interrupted
  choice retain_least() {
    auto c = cut({.after_tau = 0, .moves = {.byte = 1}}, 1);
    c.error = 0;
    return c;
  }
  /// The choice that minimises seconds + lambda bytes.
  /// @param lambda s per byte, > 0
  /// @return minimal up to `choice::error`
  /// @throws interrupted
  /// Complexity: a maximum flow on O(values + operations) vertices.
  choice minimum(double lambda) { return cut({.moves = {.byte = lambda}}, unit()); }
  const seconds_of& seconds() const { return seconds_; }
  /// The least seconds from the begin to the operations that count in `seconds().before`. `tau` does not begin earlier, either.
  double head() const { return head_; }
  /// The least seconds from the begin to the copies that count in `choice::to_host`.
  double sent_after() const { return sent_after_; }
  /// Seconds to copy, once each, the sources that start on the host and that `tau` or its ancestors read.
  double fetch_before() const {
    double sum = 0;
    for (value_id v = 0; v < fetched_before_.size(); ++v)
      if (fetched_before_[v]) sum += copy_seconds(v, p_.copies()->to_device);
    return sum;
  }
  /// The choice that moves every value that is needed later.
  choice move_all() const {
    choice c;
    c.retained.assign(p_.values().size(), false);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (needed_later_[v]) move(v, c);
    return c;
  }
  /// The least seconds from the begin of `tau` until the values that `tau` and its descendants make have been sent. Only values
  /// that end on the host and leave before the end count. One copy follows another. No copy begins before its value can exist.
  double offload_after() const {
    std::vector<double> earliest(p_.values().size(), 0);
    std::vector<std::pair<double, double>> copies;  // earliest begin, duration
    for (operation_id o = tau_; o < role_.size(); ++o) {
      if (role_[o] != role::descendant) continue;
      double begin = 0;
      for (auto v : p_.operations()[o].inputs) begin = std::max(begin, earliest[v]);
      for (auto v : p_.operations()[o].outputs) {
        earliest[v] = begin + p_.operations()[o].seconds;
        if (p_.values()[v].ends == host && (!within_ || within_->final_offload_within[v]))
          copies.emplace_back(earliest[v], copy_seconds(v, p_.copies()->to_host));
      }
    }
    std::sort(copies.begin(), copies.end());
    double end = 0;
    for (const auto& [when, seconds] : copies) end = std::max(end, when) + seconds;
    return end;
  }
  /// The choice of least weighted cost, for problems that allow copies. The cost is the sum of
  /// - (1 - to_device - offload - extra_to_device - extra_to_host) * seconds of the ancestors of `tau` that run again, and of the
  ///   free operations that run after `tau`;
  /// - (1 - to_host - fetch - extra_to_device - extra_to_host) * seconds of the free operations of `seconds().before` that run
  ///   before `tau`;
  /// - byte * bytes retained;
  /// - to_host * `choice::to_host` + to_device * `choice::to_device`, and the same for `extra_to_host` and `extra_to_device`.
  ///
  /// A source that starts on the host is not sent there. A value that only ends on the host does not come back.
  /// @return minimal up to `choice::error`
  /// @throws interrupted
  /// Complexity: that of `minimum`.
  choice minimum_with_copies(const prices& at) {
    return cut({.after_tau = 1 - at.to_device - at.offload - at.extra_to_device - at.extra_to_host,
                .before_tau = 1 - at.to_host - at.fetch - at.extra_to_device - at.extra_to_host,
                .moves = at},
               unit());
  }
  /// The lambda at which `rich` and `lean` cost the same, s per byte.
  static double multiplier(const choice& rich, const choice& lean) {
    return (lean.seconds - rich.seconds) / static_cast<double>(rich.bytes - lean.bytes);
  }
  /// The choices that are minimal for some lambda, most bytes first.
  /// @param limit the largest number of choices, >= 2; if there are more, the widest ranges of bytes are divided first
  /// @return at least `retain_all()`; if a cut is interrupted, the choices found before it
  /// Complexity: at most 2 `limit` calls of `minimum`.
  std::vector<choice> breakpoints(std::size_t limit) {
    std::vector<choice> choices = {retain_all()};
    try {
      divide(choices, limit);
    } catch (const interrupted&) {  // keeps the choices found so far
    }
    return choices;
  }

 private:
  /// Adds `retain_least()` to `choices`, and then choices between neighbours.
  void divide(std::vector<choice>& choices, std::size_t limit) {
    choices.push_back(retain_least());
    std::vector<bytes_t> ranges = {choices[0].bytes -
                                   choices[1].bytes};  // of bytes between neighbours; 0 if no choice lies between
    while (choices.size() < limit) {
      const auto widest = std::max_element(ranges.begin(), ranges.end());
      const auto at = widest - ranges.begin() + 1;
      if (*widest <= 0) break;
      const auto rich = choices.begin() + at - 1, lean = choices.begin() + at;
      const double lambda = multiplier(*rich, *lean);
      auto between = lambda > 0 ? minimum(lambda) : *rich;
      if (between.bytes >= rich->bytes || between.bytes <= lean->bytes) {
        *widest = 0;
        continue;
      }
      *widest = rich->bytes - between.bytes;
      ranges.insert(ranges.begin() + at, between.bytes - lean->bytes);
      choices.insert(choices.begin() + at, std::move(between));
    }
  }

  enum class role : unsigned char { unneeded, ancestor, descendant, free };
  using network = cut_network;
  /// Weights from which the capacities follow.
  struct weights {
    double after_tau = 1;  ///< of a second of ancestors that run again, and of free operations that run after `tau`
    /// Of a second of free operations before `tau`. Nothing: there are no copies, and free operations cost 0.
    std::optional<double> before_tau = {};
    prices moves = {};  ///< of bytes and copies
  };
  static constexpr tier_id host = 1;

  /// The unit of capacities, s: 1e-13 of the costs of all operations, or the smallest positive number if that is larger.
  double unit() const {
    return p_.total_seconds() > 0 ? std::max(p_.total_seconds() / 1e13, std::numeric_limits<double>::denorm_min()) : 1;
  }

  /// Can `v` be retained, so that it takes bytes beside the operands of `tau`?
  bool stored(value_id v) const {
    if (is_operand_[v]) return false;
    if (p_.is_source(v)) return !p_.values()[v].held;
    const auto r = role_[p_.producer(v)];
    return r == role::ancestor || r == role::free;
  }
  bool is_too_large(value_id v) const {
    return p_.values()[v].bytes > max_retained_bytes_ && !p_.is_source(v) && !p_.operations()[p_.producer(v)].once;
  }
  void retain(value_id v, choice& c) const {
    c.bytes += p_.values()[v].bytes;
    c.retained[v] = p_.is_source(v) || p_.producer(v) < tau_;
  }

  double copy_seconds(value_id v, double rate) const {
    return p_.copies()->latency + static_cast<double>(p_.values()[v].bytes) / rate;
  }
  bool starts_on_host(value_id v) const { return p_.is_source(v) && p_.values()[v].starts != device_tier; }
  bool counts_in_before(operation_id o) const { return !within_ || within_->earliest[o] >= head_; }
  bool offload_counts(value_id v) const {
    return !within_ || (!p_.is_source(v) && counts_in_before(p_.producer(v))) ||
           (sent_after_ == 0 && within_->offloads_within[v]);
  }
  /// Sets `head_` to the h with most time before `tau`: h + seconds of the ancestors that cannot begin before h. Sets
  /// `sent_after_` to `head_`, or to 0 if the copies that may be made before `head_` take longer than `head_`.
  void find_head(const std::vector<operation_id>& needed) {
    std::vector<std::pair<double, double>> runs = {{within_->earliest[tau_], 0}};
    for (auto o : needed)
      if (role_[o] == role::ancestor && within_->earliest[o] >= 0 && within_->earliest[o] <= within_->earliest[tau_])
        runs.emplace_back(within_->earliest[o], p_.operations()[o].seconds);
    std::sort(runs.rbegin(), runs.rend());
    double sum = 0, latest = 0;
    for (const auto& [first, seconds] : runs)
      if (sum += seconds; first + sum >= latest * (1 - 1e-9)) head_ = first, latest = std::max(latest, first + sum);
    sent_after_ = head_;
    bytes_t early = 0;
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (within_->offloads_within[v] && !offload_counts(v)) early += p_.values()[v].bytes;
    if (static_cast<double>(early) / p_.copies()->to_host > head_) sent_after_ = 0;
  }
  void move(value_id v, choice& c) const {
    const double out = copy_seconds(v, p_.copies()->to_host), in = copy_seconds(v, p_.copies()->to_device);
    if (!starts_on_host(v)) {
      if (offload_counts(v)) c.to_host += out;
      if (p_.values()[v].ends != host) c.extra_to_host += out;
    }
    if (only_ends_on_host_[v]) return;
    if (!within_ || within_->prefetches_within[v]) c.to_device += in;
    if (!starts_on_host(v) || fetched_before_[v]) c.extra_to_device += in;
  }
  /// The cost of needing `v` later without making it again; and whether the cheapest way is to move it.
  std::pair<double, bool> price(value_id v, const weights& w) const {
    const double keep =
        is_too_large(v) ? std::numeric_limits<double>::infinity() : w.moves.byte * static_cast<double>(p_.values()[v].bytes);
    if (!p_.copies() || !p_.values()[v].movable || !w.before_tau) return {keep, false};
    choice c;
    move(v, c);
    const double moved = w.moves.to_host * c.to_host + w.moves.to_device * c.to_device +
                         w.moves.extra_to_device * c.extra_to_device + w.moves.extra_to_host * c.extra_to_host;
    return {std::min(keep, moved), moved < keep};
  }

  /// Builds the network. If `v` is needed later in any case, x_v is the source of the network. If `v` has a producer and a single
  /// reader o, x_v is the vertex of r_o. Otherwise x_v has a vertex of its own.
  void build() {
    const auto& ops = p_.operations();
    const auto runs = [&](operation_id o) { return role_[o] == role::ancestor || role_[o] == role::free; };
    run_vertex_.assign(ops.size(), 0);  // vertex of r_o
    for (operation_id o = 0; o < ops.size(); ++o)
      if (runs(o)) run_vertex_[o] = network_.add_vertex();
    for (value_id v = 0; v < p_.values().size(); ++v) {
      if (!stored(v)) continue;
      const auto all = p_.consumers(v);
      const auto reader = std::find_if(all.begin(), all.end(), runs);
      if (!needed_later_[v] && reader == all.end()) continue;
      const bool several = !needed_later_[v] && (p_.is_source(v) || std::any_of(reader + 1, all.end(), runs));
      const auto vertex = needed_later_[v] ? network::source : several ? network_.add_vertex() : run_vertex_[*reader];
      if (several)
        for (auto o : all)
          if (runs(o)) network_.add_edge(run_vertex_[o], vertex, network::infinite);
      values_.push_back({v, vertex, network_.add_edge(vertex, p_.is_source(v) ? network::sink : run_vertex_[p_.producer(v)], 0)});
    }
    for (operation_id o = 0; o < ops.size(); ++o) {
      if (role_[o] == role::ancestor || (p_.copies() && role_[o] == role::free))
        costs_.push_back({o, run_vertex_[o], network_.add_edge(run_vertex_[o], network::sink, 0)});
      if (p_.copies() && role_[o] == role::free)
        gains_.push_back({o, run_vertex_[o], network_.add_edge(network::source, run_vertex_[o], 0)});
    }
  }

  /// The cost per second of running the free operation `o` after `tau` instead of before it; negative if after is cheaper.
  double deferral_price(const weights& w, operation_id o) const {
    return w.before_tau ? w.after_tau - (counts_in_before(o) ? *w.before_tau : 0) : 0;
  }

  /// Cuts the network. Capacities are rounded down to whole units. Units are larger than `unit` if the sum of capacities would
  /// exceed the limit of the network. The cut is minimal up to one unit per edge.
  /// @param unit s
  choice cut(const weights& w, double unit) {
    if (run_vertex_.empty()) build();
    capacities_.clear();
    double sum = 0;
    const auto set_cost = [&](network::edge e, double seconds) {
      capacities_.emplace_back(e, std::max(0.0, seconds));
      sum += capacities_.back().second;
    };
    for (const auto& c : costs_) {
      const auto& op = p_.operations()[c.index];
      const bool ancestor = role_[c.index] == role::ancestor;
      if (ancestor && op.once)
        network_.set_capacity(c.edge, network::infinite);
      else
        set_cost(c.edge, (ancestor ? w.after_tau : deferral_price(w, c.index)) * op.seconds);
    }
    for (const auto& g : gains_) set_cost(g.edge, -deferral_price(w, g.index) * p_.operations()[g.index].seconds);
    for (const auto& x : values_)
      if (const auto seconds = price(x.index, w).first; std::isinf(seconds))
        network_.set_capacity(x.edge, network::infinite);
      else
        set_cost(x.edge, seconds);
    unit = std::max(unit, sum / static_cast<double>(network::max_total / 2));
    for (const auto& [e, seconds] : capacities_) {
      const double units = seconds / unit;  // NaN if the sum exceeds the range of doubles; then `error` is not finite, either
      network_.set_capacity(e, units <= static_cast<double>(network::max_total) ? static_cast<std::int64_t>(units) : 0);
    }
    network_.cut();
    choice best;
    // Each sum of doubles in a bound is off by one rounding per term, in addition to the units.
    best.error = static_cast<double>(capacities_.size()) * (unit + 4 * std::numeric_limits<double>::epsilon() * sum);
    best.retained.assign(p_.values().size(), false);
    const auto runs_again = [&](operation_id o) { return run_vertex_[o] != 0 && network_.on_source_side(run_vertex_[o]); };
    for (const auto& c : costs_) {
      if (!runs_again(c.index)) continue;
      const double seconds = p_.operations()[c.index].seconds;
      (role_[c.index] == role::ancestor ? best.seconds : best.deferred) += seconds;
      if (role_[c.index] == role::free && counts_in_before(c.index)) best.deferred_in_before += seconds;
    }
    for (const auto& x : values_)
      if (network_.on_source_side(x.vertex) && (p_.is_source(x.index) || !runs_again(p_.producer(x.index))))
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
  const time_span* within_;
  std::vector<role> role_;
  std::vector<bool> is_operand_, needed_later_, only_ends_on_host_, fetched_before_;
  double head_ = 0, sent_after_ = 0;
  bytes_t room_ = 0, max_retained_bytes_ = std::numeric_limits<bytes_t>::max();
  network network_;
  seconds_of seconds_;
  std::vector<item> values_, costs_, gains_;
  std::vector<std::pair<network::edge, double>> capacities_;  // of the last cut, s
  std::vector<network::vertex> run_vertex_;
};

}  // namespace remat::bound
