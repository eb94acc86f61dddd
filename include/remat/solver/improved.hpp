// SPDX-License-Identifier: Apache-2.0
/// @file
/// An anytime improver for schedules of any origin: large-neighbourhood search on orders of computations.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/order/local_search.hpp>

namespace remat {

/// Runs Inner, and improves its schedule by local search until a limit is reached, or `search.patience` rounds bring no
/// improvement. So it makes any solver anytime. If Inner finds no schedule, the search looks for one. Does not use copies to the
/// host.
///
/// @tparam Inner the solver whose schedule is improved; its bounds are kept
///
/// Complexity: that of Inner and of `order::local_search`.
/// @code
/// remat::improved<remat::rotor> method;
/// auto r = remat::solve(p, budget, method, {.seconds = 10, .seed = 7}, [](const remat::progress& now) { show(now.best); });
/// @endcode
template <solver Inner>
class improved {
 public:
  struct options {
    order::local_search_options search = {};
    double seconds = 5;                  ///< most time for Inner, s, under every limit, > 0
    std::optional<schedule> start = {};  ///< a known schedule to start from; its copies are ignored
  };

  explicit improved(Inner inner = Inner()) : improved(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  improved(Inner inner, const options& o) : inner_(std::move(inner)), options_(o) {
    o.search.validate();
    if (!(o.seconds > 0)) throw bad_option("improved.seconds must be > 0, got " + std::to_string(o.seconds));
  }

  std::string name() const { return "improved/" + std::string(inner_.name()); }

  improved with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws any exception of Inner
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    const double left = m.remaining();
    monitor first(m, options_.seconds < left && std::isfinite(left) ? options_.seconds / left : 1);
    auto r = inner_.solve(p, budget, first);
    if (r.status == status::infeasible) return r;
    if (!r.found()) r.status = status::not_found, r.reason.clear();  // the search below decides how this ends
    const bool copies = r.found() && has_copies(r.schedule);
    incumbent best(p, budget);
    auto from = needed_operations(p);
    best.offer(from);
    if (options_.start) best.offer(from = compute_order(*options_.start));
    if (r.found() && !copies) best.offer(compute_order(r.schedule));
    order::local_search(p, best.found() ? best.order() : from, best, m, options_.search,
                        std::max(r.bound, bounds_without_search(p).seconds));
    if (copies && best.found() && evaluate(p, r.schedule).seconds <= best.seconds()) return r;
    best.put_into(r);
    return r;
  }

 private:
  Inner inner_;
  options options_;
};

}  // namespace remat
