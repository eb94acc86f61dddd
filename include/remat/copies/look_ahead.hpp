// SPDX-License-Identifier: Apache-2.0
/// @file
/// The next uses of values along an order of computations, and the memory of the device if no value leaves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <remat/copies/placement.hpp>
#include <remat/core/problem.hpp>

namespace remat::copies::detail {

/// State of a value while `schedule_copies` walks along an order.
struct value_state {
  /// What may happen to a live value. Values of zero bytes, held values, immovable values and values in flight are in no list
  /// (`none`).
  enum list : unsigned char {
    evictable,     ///< on the device with a copy on the host: may be evicted
    offloadable,   ///< on the device alone: may be offloaded
    offload_last,  ///< on the device alone: is offloaded only if nothing else makes room
    absent,        ///< on the host alone
    none
  };
  static constexpr std::size_t never = std::numeric_limits<std::size_t>::max();
  /// Position of the next use on the device before it is computed again. The length of the order: needed there at the end. The
  /// length + 1: needed only on the host, or anywhere at the end.
  std::size_t next_use = never;
  double longest_pause = 0;  ///< the longest time between two uses from `next_use` on, before it is computed again, s
  double on_host_at = -1;    ///< end of its copy to the host, or of the operation there that makes it, s; -1: not on the host
  double on_device_at = 0;   ///< end of its last copy to the device, s
  bool on_device = false;
  list in_list = none;
};

/// The next use of a value, and the longest pause from then on, as in `value_state`.
struct value_use {
  std::size_t next_use;
  double longest_pause;
};

/// What `schedule_copies` finds out about an order before it walks along it.
/// Complexity: O(values + computations + uses of values).
class look_ahead {
 public:
  /// @param where  where values start and end, for a problem that is not plain
  /// @param values result: the first use of each source and of each value that the host makes
  /// @throws bad_option if the order reads a value before it is made
  look_ahead(const problem& p, std::span<const operation_id> order, const placement* where, std::vector<value_state>& values)
      : begins(order.size() + 2, std::numeric_limits<double>::infinity()),
        memory(order.size() + 1),
        p_(p),
        where_(where),
        values_(values),
        end_(order.size()) {
    walk(order);
  }

  std::vector<double> begins;   ///< begin of each computation if the device never waits, s; infinity after the end
  std::vector<value_use> uses;  ///< after each computation on the device: of its inputs, then of its outputs
  /// Bytes on the device at each position if no value leaves. A value that starts or is made on the host counts from its next use
  /// on.
  std::vector<bytes_t> memory;
  bytes_t start_bytes = 0, end_bytes = 0;  ///< bytes that must be on the device at the start and at the end

 private:
  static constexpr auto never = value_state::never;

  void walk(std::span<const operation_id> order) {
    begins[0] = 0;
    for (std::size_t i = 0; i < end_; ++i) begins[i + 1] = begins[i] + device_seconds(order[i]);
    std::vector<bytes_t> absent_bytes(where_ ? end_ + 3 : 0);  // bytes in `memory` that are elsewhere, as differences
    bytes_t live = 0;
    for (value_id v = 0; v < values_.size(); ++v) {
      if (held(v)) live += bytes(v);
      if (p_.is_source(v) && (!where_ || where_->homes[v] == device_tier)) start_bytes += bytes(v);
    }
    end_bytes = live;
    for (value_id v = 0; v < values_.size(); ++v) {
      values_[v].next_use = use_at_end(v);
      if (values_[v].next_use == never || held(v)) continue;
      live += bytes(v);
      if (values_[v].next_use == end_) end_bytes += bytes(v);
    }
    memory[end_] = live;
    const auto absent_until_use = [&](value_id v, std::size_t made) {  // on the device from its next use on
      if (values_[v].next_use == never) return;
      absent_bytes[made] += bytes(v);
      absent_bytes[values_[v].next_use] -= bytes(v);
    };
    for (std::size_t i = end_; i-- > 0;) {
      const auto& op = p_.operations()[order[i]];
      if (op.on != device_tier) {
        for (auto v : op.outputs) {
          absent_until_use(v, i + 1);
          if (values_[v].next_use != never) live -= bytes(v);
        }
        for (auto v : op.inputs)
          if (values_[v].next_use == never && !held(v) && where_->starts_on_device(p_, v)) {
            values_[v].next_use = end_ + 1;
            live += bytes(v);
            absent_bytes[i + 1] -= bytes(v);  // on the device until `schedule_copies` evicts it
          }
        memory[i] = live;
        continue;
      }
      auto step_bytes = op.workspace;
      const auto record_use = [&](value_id v, value_use before) {
        auto& x = values_[v];
        uses.push_back({x.next_use, x.longest_pause});
        x.next_use = before.next_use, x.longest_pause = before.longest_pause;
      };
      for (auto v = op.outputs.rbegin(); v != op.outputs.rend(); ++v) {
        step_bytes += bytes(*v);
        if (values_[*v].next_use != never) live -= bytes(*v);
        record_use(*v, {never, 0});
      }
      for (auto v = op.inputs.rbegin(); v != op.inputs.rend(); ++v) {
        const auto& x = values_[*v];
        if (x.next_use == never && !held(*v)) live += bytes(*v);
        record_use(*v, {i, x.next_use == never ? 0 : std::max(x.longest_pause, begins[x.next_use] - begins[i + 1])});
      }
      for (const auto& x : op.overwrites) step_bytes -= bytes(x.output);
      memory[i] = live + step_bytes;
    }
    std::reverse(uses.begin(), uses.end());
    for (value_id v = 0; v < values_.size(); ++v) {
      const bool elsewhere = where_ && !where_->starts_on_device(p_, v);
      if (elsewhere && p_.is_source(v)) absent_until_use(v, 0);
      if (!p_.is_source(v) && !elsewhere && values_[v].next_use != never)
        throw bad_option("schedule_copies: the order reads value " + std::to_string(v) + " before it is made");
    }
    for (std::size_t i = 0; i < absent_bytes.size() && i <= end_; ++i) {
      memory[i] -= absent_bytes[i];
      absent_bytes[i + 1] += absent_bytes[i];
    }
  }
  /// `value_state::next_use` of a value after the last computation.
  std::size_t use_at_end(value_id v) const {
    if (!where_) return p_.is_target(v) ? end_ : never;
    const auto end = where_->ends[v];
    if (end == placement::place::device) return end_;
    return end != placement::place::nowhere && where_->starts_on_device(p_, v) ? end_ + 1 : never;
  }

  double device_seconds(operation_id o) const {
    const auto& op = p_.operations()[o];
    return op.on == device_tier ? op.seconds : 0;
  }
  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }
  bool held(value_id v) const { return p_.values()[v].held && (!where_ || where_->homes[v] == device_tier); }

  const problem& p_;
  const placement* where_;
  std::vector<value_state>& values_;
  std::size_t end_;
};

}  // namespace remat::copies::detail
