// SPDX-License-Identifier: Apache-2.0
/// @file
/// The frozen, validated form of a rematerialization problem that every solver takes.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/tiers.hpp>
#include <remat/core/types.hpp>

namespace remat {

/// A tensor, or another object that occupies memory.
struct value {
  std::string name;
  bytes_t bytes = 0;
  bool held = false;             ///< source that is never dropped from its start tier (parameter, input that the caller keeps)
  bool movable = true;           ///< may be copied to other tiers, if the problem allows copies
  tier_id starts = device_tier;  ///< start tier of a source; `any_tier`: the schedule chooses
  tier_id ends = device_tier;    ///< final tier of a target; `any_tier`: any will do
};

/// A computation that reads values and writes values.
struct operation {
  std::string name;
  std::vector<value_id> inputs;            ///< values read; no duplicates after validation
  std::vector<value_id> outputs;           ///< values written; each execution writes all of them
  double seconds = 0;                      ///< time of one execution, s
  bytes_t workspace = 0;                   ///< bytes needed while it runs, besides inputs and outputs
  bool once = false;                       ///< may be computed once only
  std::string kind = {};                   ///< free text, such as the ATen operator
  tier_id on = device_tier;                ///< tier on which it runs, with its inputs, outputs and workspace
  std::vector<overwrite> overwrites = {};  ///< outputs written over inputs, which are lost; the operation may run once only
};

/// Rates of the copies between device and host.
struct copy_rates {
  double to_host = 0;    ///< bytes / s
  double to_device = 0;  ///< bytes / s
  double latency = 0;    ///< s per copy
  friend bool operator==(const copy_rates&, const copy_rates&) = default;
};

/// The members of a problem, for problems that differ from a given one in a few members.
/// @code
/// auto members = p.members();
/// members.system.tiers[1].budget = 1 << 30;
/// const remat::problem smaller(std::move(members));
/// @endcode
struct problem_members {
  std::string name = {};
  std::vector<value> values = {};
  std::vector<operation> operations = {};  ///< in topological order
  std::vector<value_id> targets = {};
  std::optional<copy_rates> copies = {};
  std::optional<operation_id> backward_start = {};
  memory_system system = {};  ///< tiers, and links other than those of `copies`
  std::vector<carry> next = {};
};

/// A validated directed acyclic problem: values, operations in a topological order, targets.
///
/// The order of the operations, each executed once, is the *store-all* schedule. Immutable after construction, so it can be
/// shared between threads.
class problem {
 public:
  problem() : problem("", {}, {}, {}) {}

  /// @param name       label, copied into schedules
  /// @param values     V values
  /// @param operations E operations in topological order; duplicate inputs are merged
  /// @param targets    values that must be on their final tier at the end; duplicates are merged
  /// @param copies     rates of the copies between device and host; nothing: no such copies
  /// @param backward   first operation of the backward, if the problem is a training step and the caller knows the operation
  /// @param system     tiers, and links other than those of `copies`; `copies` links the device and the tier named "host"
  /// @param next       targets that become sources of the next step; if there are any, schedules are cyclic
  /// @throws bad_problem for an index out of range, two producers of one value, an order that is not topological, a negative
  ///         or non-finite number, a size above `max_bytes` (single or in total), a held value with a producer, and other
  ///         members that contradict each other; the message names the member
  /// Complexity: O(V + edges log edges), to sort the inputs of each operation.
  problem(std::string name, std::vector<value> values, std::vector<operation> operations, std::vector<value_id> targets,
          std::optional<copy_rates> copies = std::nullopt, std::optional<operation_id> backward = std::nullopt,
          memory_system system = {}, std::vector<carry> next = {})
      : name_(std::move(name)),
        values_(std::move(values)),
        operations_(std::move(operations)),
        targets_(std::move(targets)),
        copies_(copies),
        backward_start_(backward),
        system_(std::move(system)),
        next_(std::move(next)) {
    validate();
    index();
    validate_system();
  }

  /// @throws bad_problem as above
  /// Complexity: as above.
  explicit problem(problem_members x)
      : problem(std::move(x.name), std::move(x.values), std::move(x.operations), std::move(x.targets), x.copies, x.backward_start,
                std::move(x.system), std::move(x.next)) {}

  /// Copies of the members of this problem. Complexity: O(V + edges).
  problem_members members() const {
    const auto beyond = links().subspan(copies_ ? 2 : 0);
    return {name_, values_, operations_, targets_, copies_, backward_start_, {system_.tiers, {beyond.begin(), beyond.end()}},
            next_};
  }

  /// The same problem with other costs, such as new measurements.
  /// @param seconds   of each operation, s; E numbers
  /// @param workspace of each operation, bytes; E numbers, or none to keep the present workspace
  /// @throws bad_option for another number of costs; bad_problem for a cost out of range
  /// Complexity: O(V + edges).
  problem with_costs(std::span<const double> seconds, std::span<const bytes_t> workspace = {}) const {
    const auto demand = [&](std::size_t n, const char* what) {
      if (n != operations_.size())
        throw bad_option(std::string("with_costs: ") + std::to_string(n) + " " + what + " for " +
                         std::to_string(operations_.size()) + " operations");
    };
    demand(seconds.size(), "seconds");
    if (!workspace.empty()) demand(workspace.size(), "workspaces");
    auto x = members();
    for (std::size_t o = 0; o < x.operations.size(); ++o) {
      x.operations[o].seconds = seconds[o];
      if (!workspace.empty()) x.operations[o].workspace = workspace[o];
    }
    return problem(std::move(x));
  }

  /// The same problem with other rates of copies between the device and the host, or without these copies.
  /// @param copies rates, or nothing for no such copies; other links stay
  /// @throws bad_problem for a rate out of range, and for rates if another link joins device and host or there is no host
  /// Complexity: O(V + edges).
  /// @code
  /// const auto slower = p.with_copies(remat::copy_rates{.to_host = 10e9, .to_device = 10e9});
  /// @endcode
  problem with_copies(const std::optional<copy_rates>& copies) const {
    auto x = members();
    x.copies = copies;
    return problem(std::move(x));
  }

  const std::string& name() const { return name_; }
  const std::vector<value>& values() const { return values_; }
  const std::vector<operation>& operations() const { return operations_; }
  const std::vector<value_id>& targets() const { return targets_; }  ///< sorted, without duplicates
  const std::optional<copy_rates>& copies() const { return copies_; }
  /// The first operation of the backward. The operations before it are the forward and the loss. Nothing if unknown; solvers that
  /// need this position then guess.
  std::optional<operation_id> backward_start() const { return backward_start_; }

  /// All tiers, the device first.
  const std::vector<tier>& tiers() const { return system_.tiers; }
  /// The host of offloads and prefetches: the tier named "host", or `any_tier` if there is none.
  tier_id host() const { return host_; }
  /// All links. The two links of `copies`, if any, come first; their streams are "up" (to the host) and "down".
  std::span<const copy_link> links() const { return system_.links; }
  /// The link from `from` to `to`, or a null pointer if there is none.
  const copy_link* link(tier_id from, tier_id to) const { return system_.find(from, to); }
  /// Bytes that a schedule can use on tier `t`, which is not the device: its budget, at most `max_peak`.
  bytes_t capacity(tier_id t) const { return clamp_budget(tiers()[t].budget.value_or(max_peak)); }
  /// The targets that become sources of the next step, as given.
  const std::vector<carry>& next() const { return next_; }
  /// True if version 1 of the exchange format has this problem, as most solvers require: a device and a host without limit,
  /// copies between these two only, everything starts, runs and ends on the device, no output overwrites an input, no `next`.
  bool plain() const { return beyond_plain_.empty(); }
  /// The first member that makes the problem not plain, such as "operations[3].on"; empty if the problem is plain.
  const std::string& beyond_plain() const { return beyond_plain_; }

  /// The operation that yields `v`, or `none` if `v` is a source.
  operation_id producer(value_id v) const { return producer_[v]; }
  /// The operations that read `v`, ascending.
  std::span<const operation_id> consumers(value_id v) const { return {consumers_.data() + first_[v], first_[v + 1] - first_[v]}; }
  bool is_source(value_id v) const { return producer_[v] == none; }
  bool is_target(value_id v) const { return target_[v]; }

  /// Bytes that `o` needs beside its inputs while it runs: its workspace, and its outputs that overwrite no input.
  bytes_t new_bytes(operation_id o) const {
    const auto& op = operations_[o];
    auto sum = op.workspace;
    for (auto v : op.outputs) sum += values_[v].bytes;
    for (const auto& x : op.overwrites) sum -= values_[x.output].bytes;
    return sum;
  }

  /// Bytes of all sources that start on the device. Sources that may start on any tier are not included.
  bytes_t source_bytes() const { return source_bytes_; }
  /// Bytes of the held sources that start on the device. They are there at every step of every schedule.
  bytes_t held_bytes() const { return held_bytes_; }
  /// Sum of the costs of all operations, s: the time of the store-all schedule.
  double total_seconds() const { return total_seconds_; }

 private:
  [[noreturn]] static void fail(const std::string& what) { throw bad_problem(what); }
  static std::string at(const char* list, std::size_t i, const char* member) {
    return std::string(list) + "[" + std::to_string(i) + "]" + (*member ? "." : "") + member;
  }
  static void check_bytes(bytes_t b, const char* list, std::size_t i, const char* member, bytes_t& sum) {
    if (b < 0) fail(at(list, i, member) + " is negative: " + std::to_string(b));
    if (b > max_bytes || sum > max_bytes - b) fail(at(list, i, member) + " makes sizes exceed 2^53 bytes: " + std::to_string(b));
    sum += b;
  }

  void validate() {
    const auto nv = values_.size();
    if (nv >= none || operations_.size() >= none) fail("more than 2^32 - 2 values or operations");
    bytes_t sum = 0, workspace = 0;
    for (std::size_t i = 0; i < nv; ++i) check_bytes(values_[i].bytes, "values", i, "bytes", sum);
    producer_.assign(nv, none);
    for (std::size_t o = 0; o < operations_.size(); ++o)
      for (auto v : operations_[o].outputs) {
        if (v >= nv) fail(at("operations", o, "outputs") + ": no value " + std::to_string(v));
        if (producer_[v] != none)
          fail(at("operations", o, "outputs") + ": value " + std::to_string(v) + " is produced by operation " +
               std::to_string(producer_[v]) + " already");
        if (values_[v].held)
          fail(at("values", v, "held") + ": a held value must be a source, but operation " + std::to_string(o) + " produces it");
        producer_[v] = static_cast<index_t>(o);
      }
    for (std::size_t o = 0; o < operations_.size(); ++o) {
      auto& op = operations_[o];
      if (!std::isfinite(op.seconds) || op.seconds < 0)
        fail(at("operations", o, "seconds") + " is not a finite number >= 0: " + std::to_string(op.seconds));
      check_bytes(op.workspace, "operations", o, "workspace", workspace);
      workspace = 0;
      std::sort(op.inputs.begin(), op.inputs.end());
      op.inputs.erase(std::unique(op.inputs.begin(), op.inputs.end()), op.inputs.end());
      for (auto v : op.inputs) {
        if (v >= nv) fail(at("operations", o, "inputs") + ": no value " + std::to_string(v));
        if (producer_[v] != none && producer_[v] >= o)
          fail(at("operations", o, "inputs") + ": value " + std::to_string(v) + " is produced by operation " +
               std::to_string(producer_[v]) + ", which does not come before it; the order must be topological");
      }
    }
    std::sort(targets_.begin(), targets_.end());
    targets_.erase(std::unique(targets_.begin(), targets_.end()), targets_.end());
    if (!targets_.empty() && targets_.back() >= nv) fail("targets: no value " + std::to_string(targets_.back()));
    if (backward_start_ && *backward_start_ >= operations_.size())
      fail("backward_start: no operation " + std::to_string(*backward_start_));
    if (copies_) {
      auto positive = [](double x) { return std::isfinite(x) && x > 0; };
      if (!positive(copies_->to_host)) fail("offload.to_host is not a finite number > 0");
      if (!positive(copies_->to_device)) fail("offload.to_device is not a finite number > 0");
      if (!std::isfinite(copies_->latency) || copies_->latency < 0) fail("offload.latency is not a finite number >= 0");
    }
  }

  void index() {
    first_.assign(values_.size() + 1, 0);
    for (std::size_t o = 0; o < operations_.size(); ++o) {
      total_seconds_ += operations_[o].seconds;
      if (!std::isfinite(total_seconds_)) fail(at("operations", o, "seconds") + " makes the sum of seconds exceed all numbers");
      for (auto v : operations_[o].inputs) ++first_[v + 1];
    }
    for (std::size_t v = 0; v < values_.size(); ++v) first_[v + 1] += first_[v];
    consumers_.resize(first_.back());
    auto next = first_;
    for (std::size_t o = 0; o < operations_.size(); ++o)
      for (auto v : operations_[o].inputs) consumers_[next[v]++] = static_cast<index_t>(o);
    target_.assign(values_.size(), false);
    for (auto v : targets_) target_[v] = true;
    for (std::size_t v = 0; v < values_.size(); ++v)
      if (producer_[v] == none && values_[v].starts == device_tier) {
        source_bytes_ += values_[v].bytes;
        if (values_[v].held) held_bytes_ += values_[v].bytes;
      }
  }

  /// Validates the members that version 1 of the exchange format does not have.
  void validate_system() {
    system_.validate();
    const auto& tiers = system_.tiers;
    if (tiers.size() != 2 || tiers[0].name != "device" || tiers[1].name != "host" || tiers[1].budget) beyond("tiers");
    if (!system_.links.empty()) beyond("links");
    if (!next_.empty()) beyond("next");
    if (const auto found = system_.find("host"); found != device_tier) host_ = found;
    if (copies_) {
      if (host_ == any_tier) fail("offload: no tier beyond the device is called \"host\"");
      auto& links = system_.links;
      for (std::size_t i = 0; i < links.size(); ++i)
        if (std::minmax(links[i].from, links[i].to) == std::minmax(device_tier, host_))
          fail(at("links", i, "") + ": offload links the device and the host already");
      links.insert(links.begin(), {{device_tier, host_, copies_->to_host, copies_->latency, "up"},
                                   {host_, device_tier, copies_->to_device, copies_->latency, "down"}});
    }
    for (value_id v = 0; v < values_.size(); ++v) check_places(v);
    for (operation_id o = 0; o < operations_.size(); ++o) check_memory(o);
    check_next();
  }

  void beyond(std::string member) {
    if (beyond_plain_.empty()) beyond_plain_ = std::move(member);
  }

  void check_places(value_id v) {
    const auto starts = values_[v].starts, ends = values_[v].ends;
    if (starts == device_tier && ends == device_tier) return;
    beyond(at("values", v, starts == device_tier ? "ends" : "starts"));
    const auto known = [&](tier_id t) { return t < system_.tiers.size() || t == any_tier; };
    if (!known(starts)) fail(at("values", v, "starts") + ": no tier " + std::to_string(starts));
    if (!known(ends)) fail(at("values", v, "ends") + ": no tier " + std::to_string(ends));
    if (starts != device_tier && !is_source(v))
      fail(at("values", v, "starts") + ": only sources start somewhere, but operation " + std::to_string(producer_[v]) +
           " produces it");
    if (ends != device_tier && !target_[v]) fail(at("values", v, "ends") + ": only targets end somewhere, and it is none");
  }

  void check_memory(operation_id o) {
    const auto& op = operations_[o];
    if (op.on == device_tier && op.overwrites.empty()) return;
    beyond(at("operations", o, op.on == device_tier ? "overwrites" : "on"));
    if (op.on >= system_.tiers.size()) fail(at("operations", o, "on") + ": no tier " + std::to_string(op.on));
    const auto where = at("operations", o, "overwrites");
    std::vector<value_id> outputs, inputs;
    for (const auto& [output, input] : op.overwrites) {
      if (output >= values_.size() || producer_[output] != o) fail(where + ": value " + std::to_string(output) + " is no output");
      if (!std::binary_search(op.inputs.begin(), op.inputs.end(), input))
        fail(where + ": value " + std::to_string(input) + " is no input");
      if (values_[input].held) fail(where + ": value " + std::to_string(input) + " is held");
      if (values_[output].bytes != values_[input].bytes)
        fail(where + ": values " + std::to_string(output) + " and " + std::to_string(input) + " differ in bytes");
      outputs.push_back(output);
      inputs.push_back(input);
    }
    const auto once = [&](std::vector<value_id>& list, const char* wrong) {
      std::sort(list.begin(), list.end());
      const auto twice = std::adjacent_find(list.begin(), list.end());
      if (twice != list.end()) fail(where + ": value " + std::to_string(*twice) + wrong);
    };
    once(outputs, " takes two places");
    once(inputs, " is overwritten twice");
  }

  void check_next() {
    std::vector<bool> carried(next_.empty() ? 0 : values_.size(), false), replaced = carried;
    for (std::size_t i = 0; i < next_.size(); ++i) {
      const auto [target, source] = next_[i];
      const auto wrong = [&](value_id v, const std::string& why) {
        fail(at("next", i, "") + ": value " + std::to_string(v) + why);
      };
      for (auto v : {target, source})
        if (v >= values_.size()) fail(at("next", i, "") + ": no value " + std::to_string(v));
      const auto &from = values_[target], &to = values_[source];
      if (!target_[target] || is_source(target)) wrong(target, " is no target that an operation produces");
      if (!is_source(source)) wrong(source, " is no source");
      if (to.held) wrong(source, " is held");
      if (from.bytes != to.bytes) wrong(target, " and value " + std::to_string(source) + " differ in bytes");
      if (from.ends != to.starts && from.ends != any_tier && to.starts != any_tier)
        wrong(target, " ends on another tier than value " + std::to_string(source) + " starts on");
      if (carried[target]) wrong(target, " is two sources of the next step");
      if (replaced[source]) wrong(source, " is two targets of the step before");
      carried[target] = replaced[source] = true;
    }
  }

  std::string name_;
  std::vector<value> values_;
  std::vector<operation> operations_;
  std::vector<value_id> targets_;
  std::optional<copy_rates> copies_;
  std::optional<operation_id> backward_start_;
  memory_system system_;
  std::vector<carry> next_;
  std::vector<operation_id> producer_, consumers_;
  std::vector<std::size_t> first_ = {0};
  std::vector<bool> target_;
  tier_id host_ = any_tier;
  std::string beyond_plain_;
  bytes_t source_bytes_ = 0, held_bytes_ = 0;
  double total_seconds_ = 0;
};

}  // namespace remat
