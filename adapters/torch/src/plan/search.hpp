// SPDX-License-Identifier: Apache-2.0
/// @file
/// From a captured step and a number of bytes to a plan. Private to the adapter.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <remat/pytorch/session.hpp>

#include "planned.hpp"

namespace remat::pytorch {

/// How to search.
struct search_options {
  plan_solver solver;
  std::string solver_name;  ///< see `wrap_options`
  plan_cache cache;
  remat::limits limits;
  plan_observer watch;
  std::function<void(const std::string&)> log;  ///< not empty
  bool copies = true;                           ///< may go to far memory
  double first_seconds = limits.seconds;        ///< see `wrap_options`; less than the limit: a plan may be `unfinished`
};

/// A hash of what two programs share that differ in sizes only: nodes, operators, and which values these read, write and make.
std::size_t graph_hash(const program& step);

/// A given schedule, laid out for `s`.
/// @param room  bytes that it should need at most: the first layout that does will do where steps like `s` are known
/// @param zones for several steps in flight
/// @throws bad_schedule if it is none of its problem
std::shared_ptr<plan> lay_out_plan(const setup& s, const schedule& steps, bytes_t room, bool zones = false);

/// The fastest schedule that the solver finds among those whose layout takes at most `available` bytes, or found in an earlier
/// process. What was cut off by the observer is not kept for later ones; what `first_seconds` cut off is kept as that.
/// @param held bytes that are there before the step begins, for messages
/// @throws over_budget if it finds none
std::shared_ptr<const plan> search(const setup& s, bytes_t available, bytes_t held, const search_options& o);

/// The decisions of `other`, taken over for `s`: one of its plans, or none if none fits.
std::shared_ptr<const plan> take_over(const setup& s, bytes_t available, const setup& other);

/// The same problem, of which nothing that operations make is copied.
problem without_sends(const problem& p);

/// Store-all, of which each value that starts elsewhere is fetched once, before its first use, and each that ends elsewhere is
/// sent there once it is complete. Copies run beside computations.
schedule fetch_once_schedule(const problem& p);

/// What the solver finds in no more than 0.05 s, or none if that does not fit.
std::shared_ptr<const plan> glance(const setup& s, bytes_t available, const search_options& o);

/// The plan of the smallest budget that bisection finds. It is kept, here and in the cache: a budget that was once called known
/// to do does, however much time a later search has.
std::shared_ptr<const plan> leanest(const setup& s, const search_options& o);

/// @param early the search has not used all of its time
/// @throws over_budget always
[[noreturn]] void fail_over_budget(const setup& s, const plan& least, bytes_t asked, bytes_t held, bool early = false);

}  // namespace remat::pytorch
