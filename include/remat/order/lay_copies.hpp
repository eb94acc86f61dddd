// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies to the host and back for a fixed order of computations.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/range_peak.hpp>

namespace remat::order {

/// What `lay_copies` sends to the host.
struct copy_options {
  bool frugal = false;  ///< only what memory asks for; otherwise all that the link has time for
  double small = 2e-5;  ///< values below that share of the budget are moved only where nothing else helps, in [0, 1]
};

/// A schedule with copies, and where it waits for them.
struct laid_copies {
  /// The computations are held up until a copy has ended.
  struct wait {
    std::size_t position;  ///< in the order, of the computation that is held up; its length: the end
    double seconds;        ///< s
    double until;          ///< s
    bool arrival;          ///< of a copy to the device; otherwise to the host
  };
  /// A copy.
  struct transfer {
    value_id value;
    std::size_t next;   ///< position in the order where the value is used next
    double begin, end;  ///< s
  };
  remat::schedule schedule;
  double seconds = 0;  ///< at most this, s: copies count that turned out useless and are not in `schedule`
  std::vector<wait> waits;
  std::vector<transfer> to_host, to_device;
};

namespace detail {

/// `lay_copies`, position by position.
class copy_layer {
 public:
  copy_layer(const problem& p, std::span<const operation_id> order, bytes_t budget, const copy_options& o)
      : p_(p),
        order_(order),
        budget_(budget),
        small_(static_cast<bytes_t>(o.small * static_cast<double>(budget))),
        end_(order.size()),
        values_(p.values().size()),
        begins_(order.size() + 1, 0),
        memory_(look_ahead()) {
    if (o.frugal) unsent_memory_.emplace(memory_);
  }

  std::optional<laid_copies> lay() {
    if (p_.source_bytes() > budget_ || memory_.at(end_) > budget_) return std::nullopt;
    for (value_id v = 0; v < values_.size(); ++v)
      if (p_.is_source(v)) {
        values_[v].here = true;
        touch(v, {values_[v].next, values_[v].pause}, 0);
      }
    auto next = uses_.begin();
    for (std::size_t i = 0; i < end_; ++i) {
      const auto& op = p_.operations()[order_[i]];
      if (!make_room(i)) return std::nullopt;
      for (auto v : op.inputs)
        if (!values_[v].here) fetch(v, i);
      bring_back(i);
      write_back(i);
      for (auto v : op.inputs) wait(values_[v].arrives, i, true);
      now_ += op.seconds;
      laid_.schedule.compute(order_[i]);
      settle(i + 1);
      for (auto v : op.inputs) touch(v, *next++, i + 1);
      for (auto v : op.outputs) {
        values_[v].here = true;
        values_[v].arrives = 0;
        touch(v, *next++, i + 1);
      }
    }
    while (!list_of(state::absent).empty()) fetch(list_of(state::absent).begin()->second, end_);
    for (auto v : p_.targets()) wait(values_[v].arrives, end_, true);
    laid_.seconds = now_;
    drop_useless_offloads();
    return std::move(laid_);
  }

 private:
  static constexpr std::size_t never = std::numeric_limits<std::size_t>::max();
  using by_use = std::set<std::pair<std::size_t, value_id>>;

  struct state {
    /// What may happen to a value that lives. Those of no bytes, held, or not movable are in no list, nor are those being copied.
    enum list : unsigned char {
      ready,   ///< on the host: may leave
      unsent,  ///< may be sent
      kept,    ///< is sent only if nothing else makes room
      absent,  ///< on the host alone
      none
    };
    std::size_t next = never;  ///< use before it is computed again; the length of the order: at the end
    double pause = 0;          ///< longest time between two such uses from `next` on, s
    double leaves = -1;        ///< when its copy to the host ends, s; -1: there is none
    double arrives = 0;        ///< when its copy to the device ends, s
    bool here = false;
    list in = none;
  };
  /// What `state` says of it.
  struct use {
    std::size_t next;
    double pause;
  };
  struct copy {
    double end;
    value_id value;
  };

  double seconds(std::size_t i) const { return p_.operations()[order_[i]].seconds; }
  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }
  bool movable(value_id v) const { return bytes(v) > 0 && !p_.values()[v].held && p_.values()[v].movable; }
  double to_host(value_id v) const { return p_.copies()->latency + static_cast<double>(bytes(v)) / p_.copies()->to_host; }
  double to_device(value_id v) const { return p_.copies()->latency + static_cast<double>(bytes(v)) / p_.copies()->to_device; }
  by_use& list_of(state::list l) { return lists_[l]; }

  /// Finds the next use after each use, and the first of each source. @return bytes at each position if nothing moves
  std::vector<bytes_t> look_ahead() {
    for (std::size_t i = 0; i < end_; ++i) begins_[i + 1] = begins_[i] + seconds(i);
    std::vector<bytes_t> memory(end_ + 1);
    liveness after(p_);
    memory[end_] = p_.held_bytes();
    for (auto v : p_.targets()) {
      values_[v].next = end_;
      if (!p_.values()[v].held) memory[end_] += bytes(v);
    }
    for (std::size_t i = end_; i-- > 0;) {
      const auto& op = p_.operations()[order_[i]];
      memory[i] = after.step_back(order_[i]);
      const auto note = [&](value_id v, use before) {
        auto& x = values_[v];
        uses_.push_back({x.next, x.pause});
        x.next = before.next, x.pause = before.pause;
      };
      for (auto v = op.outputs.rbegin(); v != op.outputs.rend(); ++v) note(*v, {never, 0});
      for (auto v = op.inputs.rbegin(); v != op.inputs.rend(); ++v) {
        const auto& x = values_[*v];
        note(*v, {i, x.next == never ? 0 : std::max(x.pause, begins_[x.next] - begins_[i + 1])});
      }
    }
    std::reverse(uses_.begin(), uses_.end());
    for (value_id v = 0; v < values_.size(); ++v)
      if (!p_.is_source(v) && values_[v].next != never)
        throw bad_option("lay_copies: the order reads value " + std::to_string(v) + " before it is made");
    return memory;
  }

  void move_to(value_id v, state::list l) {
    auto& x = values_[v];
    if (x.in != state::none) list_of(x.in).erase({x.next, v});
    x.in = l;
    if (l != state::none) list_of(l).insert({x.next, v});
  }
  /// The longest time from position i on in which nobody uses it, before it is computed again, s.
  double pause(value_id v, std::size_t i) const { return std::max(values_[v].pause, begins_[values_[v].next] - begins_[i]); }
  /// Puts a value that is on the device into its list.
  void file(value_id v, std::size_t i) {
    const auto& x = values_[v];
    if (x.arrives > now_ || x.leaves > now_) return move_to(v, state::none);
    if (x.leaves >= 0) return move_to(v, state::ready);
    move_to(v, pause(v, i) > to_host(v) + to_device(v) && bytes(v) >= small_ ? state::unsent : state::kept);
  }
  /// A value was made or used just before position i; it is dropped if that was the last time.
  void touch(value_id v, use later, std::size_t i) {
    move_to(v, state::none);
    auto& x = values_[v];
    x.next = later.next, x.pause = later.pause;
    if (p_.values()[v].held) return;
    if (x.next == never) return drop(v, i);
    if (!movable(v)) return;
    if (x.leaves >= 0 && unsent_memory_) unsent_memory_->add(i, x.next, -bytes(v));
    file(v, i);
  }
  /// Files the values whose copies have ended.
  void settle(std::size_t i) {
    for (auto* copies : {&leaving_, &arriving_})
      while (!copies->empty() && copies->front().end <= now_) {
        const auto v = copies->front().value;
        copies->pop_front();
        if (values_[v].here && values_[v].next != never && values_[v].next >= i) file(v, i);
      }
  }
  void wait(double until, std::size_t i, bool arrival) {
    if (until <= now_) return;
    laid_.waits.push_back({i, until - now_, until, arrival});
    now_ = until;
    settle(i);
  }
  void drop(value_id v, std::size_t i) {
    auto& x = values_[v];
    wait(x.leaves, i, false);
    wait(x.arrives, i, true);
    x.here = false;
    x.arrives = 0;
    laid_.schedule.drop(v);
  }
  void evict(value_id v, std::size_t i) {
    drop(v, i);
    move_to(v, state::absent);
    memory_.add(i, values_[v].next, -bytes(v));
  }
  void send(value_id v, std::size_t i) {
    auto& x = values_[v];
    const double begin = std::max({now_, host_free_, x.arrives});
    x.leaves = host_free_ = begin + to_host(v);
    move_to(v, state::none);
    leaving_.push_back({x.leaves, v});
    laid_.schedule.offload(v);
    laid_.to_host.push_back({v, x.next, begin, x.leaves});
    if (unsent_memory_) unsent_memory_->add(i, x.next, -bytes(v));
  }
  void fetch(value_id v, std::size_t i) {
    auto& x = values_[v];
    const double begin = std::max(now_, device_free_);
    x.arrives = device_free_ = begin + to_device(v);
    move_to(v, state::none);
    x.here = true;
    arriving_.push_back({x.arrives, v});
    laid_.schedule.prefetch(v);
    laid_.to_device.push_back({v, x.next, begin, x.arrives});
    memory_.add(i, x.next, bytes(v));
  }

  /// Makes position i fit: the value used last leaves; where none may, that whose copy ends first; where none is copied, the one
  /// used last is sent.
  bool make_room(std::size_t i) {
    const auto last = [&](state::list l) {
      const auto& values = list_of(l);
      return values.empty() || values.rbegin()->first <= i ? value_id(none) : values.rbegin()->second;
    };
    const auto first_copied = [&](const std::deque<copy>& copies) {
      const auto found = std::find_if(copies.begin(), copies.end(), [&](const copy& c) {
        const auto& x = values_[c.value];
        return x.here && x.next != never && x.next > i && c.end == std::max(x.leaves, x.arrives);
      });
      return found == copies.end() ? std::numeric_limits<double>::infinity() : found->end;
    };
    while (memory_.at(i) > budget_) {
      if (const auto v = last(state::ready); v != none) {
        evict(v, i);
        continue;
      }
      const double leaves = first_copied(leaving_), arrives = first_copied(arriving_);
      if (std::min(leaves, arrives) < std::numeric_limits<double>::infinity()) {
        wait(std::min(leaves, arrives), i, arrives < leaves);
        continue;
      }
      auto v = last(state::unsent);
      if (v == none) v = last(state::kept);
      if (v == none) return false;
      send(v, i);
    }
    return true;
  }

  /// Brings absent values back, next use first, while the link would be idle before computation i ends.
  void bring_back(std::size_t i) {
    while (!list_of(state::absent).empty() && device_free_ < now_ + seconds(i)) {
      const auto [next, v] = *list_of(state::absent).begin();
      if (memory_.most(i, next) + bytes(v) > budget_ && !(due(i, v) && swap_out(i, next, bytes(v)))) return;
      fetch(v, i);
    }
  }
  /// Is some absent value late if the first of them, v, waits any longer?
  bool due(std::size_t i, value_id v) {
    double slack = std::numeric_limits<double>::infinity(), transfers = 0;
    int looked = 64;
    for (const auto& [next, x] : list_of(state::absent)) {
      if (looked-- == 0) break;
      transfers += to_device(x);
      slack = std::min(slack, begins_[next] - transfers);
    }
    return slack - begins_[i] <= seconds(i) + 2 * to_device(v);
  }
  /// Makes room at position i for a value used at `next`, by values on the host that are used later; they can make the room that
  /// it takes at the positions in between when these come.
  bool swap_out(std::size_t i, std::size_t next, bytes_t size) {
    auto& ready = list_of(state::ready);
    auto lacking = memory_.most(i, next) + size - budget_;
    for (auto x = ready.rbegin(); lacking > 0 && x != ready.rend() && x->first > next; ++x) lacking -= bytes(x->second);
    if (lacking > 0) return false;
    while (memory_.at(i) + size > budget_) evict(ready.rbegin()->second, i);
    return true;
  }
  /// Sends values, those used last first, while the link would be idle before computation i ends and both copies have time.
  void write_back(std::size_t i) {
    auto& unsent = list_of(state::unsent);
    while (!unsent.empty() && host_free_ < now_ + seconds(i)) {
      const auto [next, v] = *unsent.rbegin();
      const bool late = std::max(now_, host_free_) + to_host(v) + to_device(v) > now_ + pause(v, i);
      if (late || (unsent_memory_ && unsent_memory_->most(i, next) <= budget_))
        move_to(v, state::kept);
      else
        send(v, i);
    }
  }
  /// Takes out the offloads that no prefetch follows.
  void drop_useless_offloads() {
    std::vector<bool> comes_back(values_.size(), false);
    auto& steps = laid_.schedule.steps;
    auto kept = steps.size();
    for (auto k = steps.size(); k-- > 0;) {
      const auto s = steps[k];
      if (s.what == action::prefetch) comes_back[s.value()] = true;
      if (s.what != action::offload || comes_back[s.value()]) steps[--kept] = s;
    }
    steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(kept));
  }

  const problem& p_;
  std::span<const operation_id> order_;
  bytes_t budget_, small_;
  std::size_t end_;
  std::vector<state> values_;
  std::vector<double> begins_;               // when each computation begins if nothing waits
  std::vector<use> uses_;                    // after each position, of its operands and outputs in turn
  range_peak memory_;                        // if all that is here stays and what is absent comes back when it is used
  std::optional<range_peak> unsent_memory_;  // of it, what is not on the host
  std::array<by_use, state::none> lists_;
  std::deque<copy> leaving_, arriving_;  // by their ends
  double now_ = 0, host_free_ = 0, device_free_ = 0;
  laid_copies laid_;
};

}  // namespace detail

/// Adds copies to an order of computations so that it fits a budget.
///
/// Values leave when room is lacking, the one used last first; those that have a copy on the host leave at once, so everything
/// that the link has time for is sent beforehand. They come back in the order of their use, as early as memory allows. Sources
/// that are not held are moved as well; targets are back at the end.
/// @param p      a problem that allows copies
/// @param order  operations in the order of their execution; valid without drops
/// @param budget bytes
/// @param o      what is sent
/// @return a valid schedule within the budget that computes `order`; nothing if there is none, which, if all values are
///         movable, is the case only if the sources, the targets, or one operation with what it reads and writes, each with what
///         is held, exceed the budget
/// @throws bad_option if the problem allows no copies, or the order reads what is not there
/// Complexity: O((uses + copies) log(order)).
/// Reference: Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966, for what leaves.
/// @code
/// const auto laid = remat::order::lay_copies(p, remat::needed_operations(p), budget);
/// if (laid) std::cout << remat::evaluate(p, laid->schedule).seconds << " s with copies alone\n";
/// @endcode
inline std::optional<laid_copies> lay_copies(const problem& p, std::span<const operation_id> order, bytes_t budget,
                                             const copy_options& o = {}) {
  if (!p.copies()) throw bad_option("lay_copies: the problem allows no copies");
  if (!(o.small >= 0 && o.small <= 1)) throw bad_option("copy_options.small must be in [0, 1], got " + std::to_string(o.small));
  return detail::copy_layer(p, order, budget, o).lay();
}

}  // namespace remat::order
