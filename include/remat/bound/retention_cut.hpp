// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a schedule retains across a moment: minimum cuts. Needs Boost.Graph.
/// One network and what is read from its cuts: longer than 400 lines.
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

/// What happens between two moments, begin and end: a step of a schedule that is executed again and again, say.
struct step_span {
  double to_host = 0, to_device = 0;  ///< copies that are made in any case, s
  std::vector<double> first;          ///< by operation: its runs begin at least so long after the begin, s; below 0: or before it
  std::vector<bool> moments;          ///< by operation: it computes where time is counted, and begins after the begin
  std::vector<bool> goes;             ///< by value: its copies to the host begin after the begin
  std::vector<bool> comes;            ///< by value: its copies to the device end before the end
  std::vector<bool> leaves;           ///< by value: where it ends on the host, its copy there ends before the end
};

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
    double before = 0;                  ///< the part of `later` that would otherwise run before `tau`
    double to_host = 0, to_device = 0;  ///< seconds of the copies of the values moved, before `tau` and after it
    double sent = 0, again = 0;         ///< seconds of their copies that not every schedule makes anyway
    /// Of a minimum: how far below it the least may be, as capacities are whole units, s (of `retain_least` 0: bytes are whole).
    double error = 0;
  };

  /// The weights of the terms that `exchange` adds up, each >= 0.
  struct prices {
    double byte = 0;       ///< a byte retained, s
    double to_host = 0;    ///< a second of copies before `tau`, and how much less than 1 one of computations, in [0, 1]
    double to_device = 0;  ///< the same after `tau`, in [0, 1]
    double read = 0;       ///< how much less one of computations before `tau` counts on top, in [0, 1]
    double leave = 0;      ///< how much less one of computations after `tau` counts on top, in [0, 1]
    double in = 0;         ///< a second of the copies in `again`, and how much less one of any computation counts, in [0, 1]
    double out = 0;        ///< the same of `sent`
  };

  /// Seconds of the first runs of operations: those that end before `tau`, of them and of the ones that may run on either side
  /// of it those that begin in time, and those from `tau` on.
  struct seconds_of {
    double before = 0, descendants = 0;
  };

  /// @param p      the problem
  /// @param needed the operations that some target depends on, ascending
  /// @param tau    one of them
  /// @param within null: everything happens between begin and end
  /// @param stop   polled within cuts, which then throw `interrupted`
  /// Complexity: O(values + edges).
  retention_cut(const problem& p, const std::vector<operation_id>& needed, operation_id tau, const step_span* within = nullptr,
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

    if (within) look_before(needed);
    read_before_.assign(nv, false);
    for (value_id v = 0; v < nv; ++v) read_before_[v] = mark[v] && starts_away(v);
    operand_.assign(nv, false);
    room_ = -p.held_bytes() - p.new_bytes(tau);
    for (auto v : ops[tau].inputs) {
      operand_[v] = true;
      if (!p.values()[v].held) room_ -= p.values()[v].bytes;
    }
    needed_later_.assign(nv, false);
    for (auto o : needed)
      if (role_[o] == role::descendant)
        for (auto v : ops[o].inputs) needed_later_[v] = true;
    only_leaves_.assign(nv, false);
    for (auto v : p.targets()) {
      only_leaves_[v] = !needed_later_[v] && p.values()[v].ends != device_tier;
      needed_later_[v] = true;
    }
    for (value_id v = 0; v < nv; ++v) needed_later_[v] = needed_later_[v] && stored(v);
    for (auto o : needed)
      if (role_[o] == role::descendant)
        seconds_.descendants += ops[o].seconds;
      else if (begins(o))
        seconds_.before += ops[o].seconds;
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
  /// From now on, only `retain_all` retains values of more than `largest` bytes that can be made again: they do not fit beside
  /// `tau` where that leaves so much.
  /// @return is there one?
  bool retain_none_above(bytes_t largest) {
    largest_ = largest;
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (stored(v) && is_too_large(v)) return true;
    return false;
  }
  /// The fewest seconds, at any number of bytes. @throws interrupted
  choice fewest_seconds() { return cut({}, unit()); }
  /// The fewest bytes retained, at any cost.
  /// @throws interrupted
  choice retain_least() {
    auto c = cut({.again = 0, .move = {.byte = 1}}, 1);
    c.error = 0;
    return c;
  }
  /// The least of seconds + lambda bytes.
  /// @param lambda s per byte, > 0
  /// @throws interrupted
  /// Complexity: a maximum flow on O(values + operations) vertices.
  choice minimum(double lambda) { return cut({.move = {.byte = lambda}}, unit()); }
  const seconds_of& seconds() const { return seconds_; }
  /// From the begin to the first of the operations that count in `seconds().before`, s; `tau` does not begin before either.
  double head() const { return head_; }
  /// The same for the copies that count in `choice::to_host`.
  double sent_after() const { return sent_after_; }
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
  /// Seconds from `tau` on until what it and its descendants make that ends on the host has been sent before the end: one copy
  /// after the other, none before its value can be there.
  double leave_after() const {
    std::vector<double> made(p_.values().size(), 0);
    std::vector<std::pair<double, double>> copies;  // when, and how long
    for (operation_id o = tau_; o < role_.size(); ++o) {
      if (role_[o] != role::descendant) continue;
      double begin = 0;
      for (auto v : p_.operations()[o].inputs) begin = std::max(begin, made[v]);
      for (auto v : p_.operations()[o].outputs) {
        made[v] = begin + p_.operations()[o].seconds;
        if (p_.values()[v].ends == host && (!within_ || within_->leaves[v]))
          copies.emplace_back(made[v], copy_seconds(v, p_.copies()->to_host));
      }
    }
    std::sort(copies.begin(), copies.end());
    double end = 0;
    for (const auto& [when, seconds] : copies) end = std::max(end, when) + seconds;
    return end;
  }
  /// The choice of least weighted cost, for problems that allow copies. The cost is the sum of
  /// - (1 - to_device - leave - in - out) * seconds of the ancestors of `tau` that run again, and of other operations that run
  ///   after `tau`;
  /// - (1 - to_host - read - in - out) * seconds of other operations that begin in time and run before `tau`;
  /// - byte * bytes retained;
  /// - to_host * `choice::to_host` + to_device * `choice::to_device` + in * `choice::again` + out * `choice::sent`.
  ///
  /// A source that starts on the host is not sent there. A value that only ends on the host does not come back.
  /// @return minimal up to `error`
  /// @throws interrupted
  /// Complexity: that of `minimum`.
  choice exchange(const prices& at) {
    return cut(
        {.again = 1 - at.to_device - at.leave - at.in - at.out, .before = 1 - at.to_host - at.read - at.in - at.out, .move = at},
        unit());
  }
  /// The lambda for which `rich` and `lean` cost the same.
  static double multiplier(const choice& rich, const choice& lean) {
    return (lean.seconds - rich.seconds) / static_cast<double>(rich.bytes - lean.bytes);
  }
  /// The choices between which the minimum changes while lambda grows, most bytes first.
  /// @param most of them, >= 2; where there are more, those that divide the widest ranges of bytes
  /// @return as far as they were found before a cut was interrupted; `retain_all()` at least
  /// Complexity: at most 2 `most` calls of `minimum`.
  std::vector<choice> breakpoints(std::size_t most) {
    std::vector<choice> found = {retain_all()};
    try {
      divide(found, most);
    } catch (const interrupted&) {  // those that were found
    }
    return found;
  }

 private:
  /// Adds the least and then what lies between.
  void divide(std::vector<choice>& found, std::size_t most) {
    found.push_back(retain_least());
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
  }

  enum class role : unsigned char { unneeded, ancestor, descendant, free };
  using network = cut_network;
  /// Of the capacities.
  struct weights {
    double again = 1;                   ///< of a second of operations that run later, those that `tau` needs for one more time
    std::optional<double> before = {};  ///< of a second of the others that do not; none: nothing is moved, and they cost nothing
    prices move = {};                   ///< of bytes and copies
  };
  static constexpr tier_id host = 1;

  /// Units of capacity, s: 1e13 are all costs together, as far as there are such small numbers.
  double unit() const {
    return p_.total_seconds() > 0 ? std::max(p_.total_seconds() / 1e13, std::numeric_limits<double>::denorm_min()) : 1;
  }

  /// Can `v` be on the device before `tau` runs, other than for free?
  bool stored(value_id v) const {
    if (operand_[v]) return false;
    if (p_.is_source(v)) return !p_.values()[v].held;
    const auto r = role_[p_.producer(v)];
    return r == role::ancestor || r == role::free;
  }
  bool is_too_large(value_id v) const {
    return p_.values()[v].bytes > largest_ && !p_.is_source(v) && !p_.operations()[p_.producer(v)].once;
  }
  void retain(value_id v, choice& c) const {
    c.bytes += p_.values()[v].bytes;
    c.retained[v] = p_.is_source(v) || p_.producer(v) < tau_;
  }

  double copy_seconds(value_id v, double rate) const {
    return p_.copies()->latency + static_cast<double>(p_.values()[v].bytes) / rate;
  }
  bool starts_away(value_id v) const { return p_.is_source(v) && p_.values()[v].starts != device_tier; }
  bool begins(operation_id o) const { return !within_ || within_->first[o] >= head_; }
  bool goes(value_id v) const {
    return !within_ || (!p_.is_source(v) && begins(p_.producer(v))) || (sent_after_ == 0 && within_->goes[v]);
  }
  /// How late those ancestors begin with which most time has passed before `tau`.
  void look_before(const std::vector<operation_id>& needed) {
    std::vector<std::pair<double, double>> runs = {{within_->first[tau_], 0}};
    for (auto o : needed)
      if (role_[o] == role::ancestor && within_->first[o] >= 0 && within_->first[o] <= within_->first[tau_])
        runs.emplace_back(within_->first[o], p_.operations()[o].seconds);
    std::sort(runs.rbegin(), runs.rend());
    double sum = 0, most = 0;
    for (const auto& [first, seconds] : runs)
      if (sum += seconds; first + sum >= most * (1 - 1e-9)) head_ = first, most = std::max(most, first + sum);
    sent_after_ = head_;
    bytes_t early = 0;
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (within_->goes[v] && !goes(v)) early += p_.values()[v].bytes;
    if (static_cast<double>(early) / p_.copies()->to_host > head_) sent_after_ = 0;
  }
  void move(value_id v, choice& c) const {
    const double out = copy_seconds(v, p_.copies()->to_host), in = copy_seconds(v, p_.copies()->to_device);
    if (!starts_away(v)) {
      if (goes(v)) c.to_host += out;
      if (p_.values()[v].ends != host) c.sent += out;
    }
    if (only_leaves_[v]) return;
    if (!within_ || within_->comes[v]) c.to_device += in;
    if (!starts_away(v) || read_before_[v]) c.again += in;
  }
  /// What it costs that `v` is needed later and not made again; and whether it is moved then.
  std::pair<double, bool> price(value_id v, const weights& w) const {
    const double keep =
        is_too_large(v) ? std::numeric_limits<double>::infinity() : w.move.byte * static_cast<double>(p_.values()[v].bytes);
    if (!p_.copies() || !p_.values()[v].movable || !w.before) return {keep, false};
    choice c;
    move(v, c);
    const double go = w.move.to_host * c.to_host + w.move.to_device * c.to_device + w.move.in * c.again + w.move.out * c.sent;
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

  /// What it costs per second that an operation that may run on either side of `tau` runs after it; below 0: before it.
  double later(const weights& w, operation_id o) const { return w.before ? w.again - (begins(o) ? *w.before : 0) : 0; }

  /// Capacities are rounded down to units, s, or to larger ones where their sum would exceed what the network takes: the cut
  /// found is minimal up to one of them per edge.
  choice cut(const weights& w, double unit) {
    if (runs_.empty()) build();
    capacities_.clear();
    double sum = 0;
    const auto give = [&](network::edge e, double seconds) {
      capacities_.emplace_back(e, std::max(0.0, seconds));
      sum += capacities_.back().second;
    };
    for (const auto& c : costs_) {
      const auto& op = p_.operations()[c.index];
      const bool ancestor = role_[c.index] == role::ancestor;
      if (ancestor && op.once)
        network_.set_capacity(c.edge, network::infinite);
      else
        give(c.edge, (ancestor ? w.again : later(w, c.index)) * op.seconds);
    }
    for (const auto& g : gains_) give(g.edge, -later(w, g.index) * p_.operations()[g.index].seconds);
    for (const auto& x : values_)
      if (const auto seconds = price(x.index, w).first; std::isinf(seconds))
        network_.set_capacity(x.edge, network::infinite);
      else
        give(x.edge, seconds);
    unit = std::max(unit, sum / static_cast<double>(network::most / 2));
    for (const auto& [e, seconds] : capacities_) {
      const double units = seconds / unit;  // not a number where all together are beyond the range of doubles: `error` is, too
      network_.set_capacity(e, units <= static_cast<double>(network::most) ? static_cast<std::int64_t>(units) : 0);
    }
    network_.cut();
    choice best;
    // Beside the units, each of the sums of doubles that a bound is made of is off by a rounding per term.
    best.error = static_cast<double>(capacities_.size()) * (unit + 4 * std::numeric_limits<double>::epsilon() * sum);
    best.retained.assign(p_.values().size(), false);
    const auto again = [&](operation_id o) { return runs_[o] != 0 && network_.reached(runs_[o]); };
    for (const auto& c : costs_) {
      if (!again(c.index)) continue;
      const double seconds = p_.operations()[c.index].seconds;
      (role_[c.index] == role::ancestor ? best.seconds : best.later) += seconds;
      if (role_[c.index] == role::free && begins(c.index)) best.before += seconds;
    }
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
  const step_span* within_;
  std::vector<role> role_;
  std::vector<bool> operand_, needed_later_, only_leaves_, read_before_;
  double head_ = 0, sent_after_ = 0;
  bytes_t room_ = 0, largest_ = std::numeric_limits<bytes_t>::max();
  network network_;
  seconds_of seconds_;
  std::vector<item> values_, costs_, gains_;
  std::vector<std::pair<network::edge, double>> capacities_;  // of the last cut, s
  std::vector<network::vertex> runs_;
};

}  // namespace remat::bound
