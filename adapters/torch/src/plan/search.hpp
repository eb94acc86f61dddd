// SPDX-License-Identifier: Apache-2.0
/// @file
/// From a captured step and available bytes to a plan. Private to the adapter.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <remat/pytorch/session.hpp>

#include "captured_step.hpp"

namespace remat::pytorch {

/// Options of a search.
struct search_options {
  plan_solver solver;
  std::string solver_name;  ///< see `wrap_options`
  plan_cache cache;
  remat::limits limits;
  plan_observer watch;
  std::function<void(const std::string&)> log;  ///< not empty
  bool copies = true;                           ///< far memory may be used
  double first_seconds = limits.seconds;        ///< first search, s, see `wrap_options`; if shorter, plans may be `unfinished`
};

/// A hash of the parts that do not depend on sizes: nodes, operators, and the values that they read, write and make.
std::size_t graph_hash(const program& step);

/// Lays out a given schedule for `s`.
/// @param room  target in bytes: if steps like `s` are known, the first layout within `room` is taken
/// @param zones for several steps in flight
/// @throws bad_schedule if the schedule is not valid for the problem of `s`
std::shared_ptr<plan> lay_out_plan(const captured_step& s, const schedule& steps, bytes_t room, bool zones = false);

/// The fastest plan whose layout takes at most `available` bytes, from the cache or from the solver. A search that the observer
/// stopped is not cached. A search that `first_seconds` cut short is cached under its own key.
/// @param held bytes held before the step begins, for messages
/// @throws over_budget if no plan is found
std::shared_ptr<const plan> search(const captured_step& s, bytes_t available, bytes_t held, const search_options& o);

/// Reuses the schedules of `other` for `s`.
/// @return the fastest plan that fits, or null
std::shared_ptr<const plan> take_over(const captured_step& s, bytes_t available, const captured_step& other);

/// The same problem without offloads of values that operations make, except those that must end on another tier.
problem without_sends(const problem& p);

/// Store-all with tiers. Each value that starts on another tier is fetched once, before its first use. Each value that ends on
/// another tier is sent there when complete. Copies run beside computations.
schedule fetch_once_schedule(const problem& p);

/// A plan from at most 0.05 s of the solver; null if none is found or it does not fit.
std::shared_ptr<const plan> quick_search(const captured_step& s, bytes_t available, const search_options& o);

/// The plan for the smallest budget that bisection finds. It is kept in `s` and in the cache. So a budget that a message called
/// sufficient stays sufficient, however short a later search is.
std::shared_ptr<const plan> leanest(const captured_step& s, const search_options& o);

/// @param early the search ended before its time limit
/// @throws over_budget always
[[noreturn]] void fail_over_budget(const captured_step& s, const plan& least, bytes_t asked, bytes_t held, bool early = false);

}  // namespace remat::pytorch
