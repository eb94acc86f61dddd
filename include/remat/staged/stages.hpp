// SPDX-License-Identifier: Apache-2.0
/// @file
/// The stages of a problem, and the data that every MILP over them needs. Needs Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/model.hpp>
#include <remat/staged/staging.hpp>

namespace remat::staged {

/// The operations that targets depend on, cut into blocks. A block is a single operation, unless R2 or R3 merges several. Stage s
/// first recomputes any operations of earlier blocks, ascending, each at most once. Then it computes its block. This restricts
/// only the order; a schedule may keep any values.
///
/// A source that is not held is a value that cannot be recomputed. Held values only lower the budget. Sizes are divided by their
/// greatest common divisor, so rounding is exact.
struct stages {
  const problem* p;                                         ///< must outlive this
  staging rules;                                            ///< restrictions and extensions of the class of schedules
  std::vector<operation_id> needed;                         ///< operations that targets depend on; other members use places in it
  std::vector<bool> repeatable;                             ///< per needed operation: may run again
  std::vector<std::pair<std::size_t, std::size_t>> blocks;  ///< per stage: its block, needed operations [first, last)
  std::vector<std::size_t> producer;                ///< per value: its producer among the needed operations, or `no_position`
  std::vector<std::vector<std::size_t>> uses;       ///< per value: its readers among the needed operations
  std::vector<bool> modelled;                       ///< per value: is on the device only part of the time
  std::vector<bool> kept_throughout;                ///< per value: is not dropped before its last possible use
  double base_seconds = 0;                          ///< of one run of all needed operations
  double seconds_per_unit = 1, bytes_per_unit = 1;  ///< units of the objective, s, and of memory rows, bytes

  static constexpr auto no_position = static_cast<std::size_t>(-1);

  /// @param problem must outlive this
  /// @param budget  bytes; the smallest budget that a model will have
  /// @param r       the restrictions
  /// @throws bad_option if `r.backward_start` is no operation, `r.small_values` is out of range, or `r.order` is no topological
  ///         order of the needed operations
  /// Complexity: O(values + edges).
  stages(const problem& problem, bytes_t budget, const staging& r) : p(&problem), rules(r), needed(needed_operations(problem)) {
    if (rules.backward_start && *rules.backward_start >= p->operations().size())
      throw bad_option("staging.backward_start must be an operation, got " + std::to_string(*rules.backward_start));
    if (!(rules.small_values >= 0 && rules.small_values < 1))
      throw bad_option("staging.small_values must be in [0, 1), got " + std::to_string(rules.small_values));
    if (!rules.order.empty()) use_given_order();
    index_values();
    choose_values_kept_throughout(budget);
    cut_stages();
    choose_units(budget);
  }

  std::size_t size() const { return blocks.size(); }
  /// The needed operation `i`.
  const operation& at(std::size_t i) const { return p->operations()[needed[i]]; }
  /// The bytes of `v`, in units of the memory rows.
  double size(value_id v) const { return static_cast<double>(p->values()[v].bytes) / bytes_per_unit; }
  /// The budget without the bytes that are always on the device, in units of the memory rows, rounded down.
  double room(bytes_t budget) const {
    const bytes_t multiples = (budget - always_on_device_) / divisor_;
    return static_cast<double>(multiples) / divisors_per_unit_;
  }
  /// Does the block of stage `s` read `v`?
  bool used_in_block(std::size_t s, value_id v) const {
    const auto user = std::lower_bound(uses[v].begin(), uses[v].end(), blocks[s].first);
    return user != uses[v].end() && *user < blocks[s].second;
  }

 private:
  void index_values() {
    producer.assign(p->values().size(), no_position);
    uses.resize(p->values().size());
    modelled.assign(p->values().size(), false);
    for (std::size_t i = 0; i < needed.size(); ++i) {
      for (auto v : at(i).outputs) producer[v] = i, modelled[v] = true;
      for (auto v : at(i).inputs) uses[v].push_back(i);
      base_seconds += at(i).seconds;
    }
    for (value_id v = 0; v < p->values().size(); ++v)
      if (p->is_source(v) && !p->values()[v].held) {
        if (p->is_target(v))
          always_on_device_ += p->values()[v].bytes;
        else
          modelled[v] = !uses[v].empty();
      }
    always_on_device_ += p->held_bytes();
  }

  /// Puts the needed operations into the order that `rules` asks for.
  void use_given_order() {
    std::vector<bool> is_needed(p->operations().size(), false), done(p->operations().size(), false);
    for (auto o : needed) is_needed[o] = true;
    std::vector<operation_id> order;
    for (auto o : rules.order) {
      if (o >= is_needed.size() || done[o])
        throw bad_option("staging.order must be operations, each once, got " + std::to_string(o));
      for (auto v : p->operations()[o].inputs)
        if (!p->is_source(v) && !done[p->producer(v)])
          throw bad_option("staging.order must be topological: operation " + std::to_string(o) + " reads what operation " +
                           std::to_string(p->producer(v)) + " yields");
      done[o] = true;
      if (is_needed[o]) order.push_back(o);
    }
    if (order.size() != needed.size()) throw bad_option("staging.order lacks operations that the targets depend on");
    needed = std::move(order);
  }

  /// Chooses the values that stay: values without bytes, which restricts nothing, and the values that R4 adds.
  void choose_values_kept_throughout(bytes_t budget) {
    kept_throughout.assign(p->values().size(), false);
    std::vector<value_id> smallest;
    for (value_id v = 0; v < kept_throughout.size(); ++v)
      if (modelled[v]) smallest.push_back(v);
    std::stable_sort(smallest.begin(), smallest.end(),
                     [&](auto a, auto b) { return p->values()[a].bytes < p->values()[b].bytes; });
    auto remaining = static_cast<bytes_t>(rules.small_values * static_cast<double>(budget - always_on_device_));
    for (auto v : smallest) {
      remaining -= p->values()[v].bytes;
      if (remaining < 0) break;
      kept_throughout[v] = true;
    }
  }

  void cut_stages() {
    operation_id backward = 0;
    if (const auto given = rules.backward_start ? rules.backward_start : p->backward_start())
      backward = *given;
    else if ((rules.backward_once || rules.forward_in_one_stage) && !needed.empty())
      backward = needed[heaviest_position(*p, needed)];
    const auto split = static_cast<std::size_t>(
        std::find_if(needed.begin(), needed.end(), [&](auto o) { return o >= backward; }) - needed.begin());
    for (std::size_t i = 0; i < needed.size(); ++i) repeatable.push_back(!at(i).once && !(rules.backward_once && i >= split));
    for (std::size_t i = 0; i < needed.size(); ++i) {
      if (!blocks.empty() && ((rules.forward_in_one_stage && i < split) || joins_previous_block(i))) {
        blocks.back().second = i + 1;
        continue;
      }
      if (!blocks.empty())
        for (unsigned e = 0; e < rules.extra_stages; ++e) blocks.emplace_back(i, i);
      blocks.emplace_back(i, i + 1);
    }
    if (rules.last_stage && !blocks.empty()) blocks.emplace_back(needed.size(), needed.size());
  }

  /// May operation `i` join the block before it? Under R3, nothing is recomputed in its stage if it reads nothing repeatable,
  /// except outputs of the operation before it.
  bool joins_previous_block(std::size_t i) const {
    const auto& inputs = at(i).inputs;
    return rules.recompute_where_used && std::none_of(inputs.begin(), inputs.end(), [&](auto v) {
             return producer[v] != no_position && producer[v] + 1 != i && repeatable[producer[v]] && !kept_throughout[v];
           });
  }

  void choose_units(bytes_t budget) {
    divisor_ = 0;
    double largest = 0;
    for (std::size_t i = 0; i < needed.size(); ++i) {
      divisor_ = std::gcd(divisor_, at(i).workspace);
      for (auto v : at(i).outputs) divisor_ = std::gcd(divisor_, p->values()[v].bytes);
      for (auto v : at(i).inputs)
        if (modelled[v]) divisor_ = std::gcd(divisor_, p->values()[v].bytes);
      largest = std::max(largest, at(i).seconds);
    }
    divisor_ = std::max<bytes_t>(divisor_, 1);
    if (const auto all = room(budget); all > largest_room)
      divisors_per_unit_ = std::exp2(std::floor(std::log2(all / largest_room)));
    bytes_per_unit = static_cast<double>(divisor_) * divisors_per_unit_;
    seconds_per_unit = milp::unit_of(largest, 1000);
  }

  static constexpr double largest_room = 1 << 20;  ///< so that one unit of memory is well above the tolerances of a backend

  bytes_t always_on_device_ = 0, divisor_ = 1;
  double divisors_per_unit_ = 1;
};

}  // namespace remat::staged
