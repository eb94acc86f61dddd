// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tiers of memory, and the links between them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/types.hpp>

namespace remat {

/// A place for values, such as the memory of the device, the memory of the host, or a disk.
struct tier {
  std::string name;
  std::optional<bytes_t> budget = {};  ///< bytes; nothing: no limit. The budget of the device is an argument of `solve`
};

using tier_id = id<tier, std::uint8_t>;       ///< a tier of a problem
inline constexpr tier_id device_tier = 0;     ///< the first tier, on which operations run by default
inline constexpr tier_id any_tier = 0xff;     ///< any tier, or no tier
inline constexpr std::size_t max_tiers = 64;  ///< largest number of tiers of a problem

/// A set of tiers.
class tier_set {
 public:
  tier_set() = default;
  /// The set of one tier; of all tiers for `any_tier`.
  explicit tier_set(tier_id t) : bits_(t == any_tier ? ~std::uint64_t{0} : bit(t)) {}

  void add(tier_id t) { bits_ |= bit(t); }
  void remove(tier_id t) { bits_ &= ~bit(t); }
  bool has(tier_id t) const { return t < max_tiers && (bits_ & bit(t)) != 0; }
  friend bool operator==(tier_set, tier_set) = default;

 private:
  static constexpr std::uint64_t bit(tier_id t) { return std::uint64_t{1} << t; }

  std::uint64_t bits_ = 0;
};

/// A channel for copies from one tier to another. Links with the same stream share one queue.
struct copy_link {
  tier_id from, to;
  double rate = 0;          ///< bytes / s
  double latency = 0;       ///< s per copy
  std::string stream = {};  ///< name of the queue; empty: a queue of its own, named after both tiers
};

/// The tiers of a problem, the device first, and the links between them.
/// Complexity: `find` is linear in the tiers or in the links, `validate` is quadratic.
struct memory_system {
  std::vector<tier> tiers = {};  ///< empty: a device and a host, without limit
  std::vector<copy_link> links = {};

  /// The tier called `name`, or `any_tier` if there is none.
  tier_id find(const std::string& name) const {
    const auto at = std::find_if(tiers.begin(), tiers.end(), [&](const tier& t) { return t.name == name; });
    return at == tiers.end() ? any_tier : tier_id(at - tiers.begin());
  }
  /// The link from `from` to `to`, or a null pointer if there is none.
  const copy_link* find(tier_id from, tier_id to) const {
    const auto at = std::find_if(links.begin(), links.end(), [&](const copy_link& l) { return l.from == from && l.to == to; });
    return at == links.end() ? nullptr : &*at;
  }

  /// Validates tiers and links, and fills in defaults.
  /// @throws bad_problem naming the tier or link: two tiers of one name, two links between the same tiers, a link from a
  ///         tier to itself, a name that is empty or "any", a number out of range, a budget of the device, more than `max_tiers`
  void validate() {
    if (tiers.empty()) tiers = {{"device"}, {"host"}};
    if (tiers.size() > max_tiers) throw bad_problem("tiers: more than " + std::to_string(max_tiers));
    for (std::size_t i = 0; i < tiers.size(); ++i) {
      const auto fail = [&](const std::string& why) { throw bad_problem("tiers[" + std::to_string(i) + "]" + why); };
      const auto& [name, budget] = tiers[i];
      if (name.empty() || name == "any") fail(".name: \"" + name + "\" is no name of a tier");
      if (find(name) != i) fail(".name: tier " + std::to_string(find(name)) + " is called \"" + name + "\" already");
      if (!budget) continue;
      if (i == device_tier) fail(".budget: that of the device is not a part of the problem");
      if (*budget < 0) fail(".budget is negative: " + std::to_string(*budget));
    }
    for (std::size_t i = 0; i < links.size(); ++i) {
      auto& l = links[i];
      const auto fail = [&](const std::string& why) { throw bad_problem("links[" + std::to_string(i) + "]" + why); };
      if (l.from >= tiers.size()) fail(".from: no tier " + std::to_string(l.from));
      if (l.to >= tiers.size()) fail(".to: no tier " + std::to_string(l.to));
      if (l.from == l.to) fail(": from the " + tiers[l.from].name + " to itself");
      if (find(l.from, l.to) != &l)
        fail(": from the " + tiers[l.from].name + " to the " + tiers[l.to].name + " there is one already");
      if (!std::isfinite(l.rate) || l.rate <= 0) fail(".rate is not a finite number > 0");
      if (!std::isfinite(l.latency) || l.latency < 0) fail(".latency is not a finite number >= 0");
      if (l.stream.empty()) l.stream = tiers[l.from].name + ">" + tiers[l.to].name;
    }
  }
};

/// An output that is written over an input, in place.
struct overwrite {
  value_id output, input;
  friend bool operator==(const overwrite&, const overwrite&) = default;
};

/// A target that becomes a source of the next step.
struct carry {
  value_id target, source;
  friend bool operator==(const carry&, const carry&) = default;
};

}  // namespace remat
