// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule within a budget that may copy values to the host and back. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include <remat/bound/concave_model.hpp>
#include <remat/bound/retention_cut.hpp>
#include <remat/bound/sample_cuts.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::bound {

/// How hard `copy_bound` tries.
struct copy_bound_options {
  std::size_t moments = 400;  ///< number of operations `tau` tried, from all over the step, with one or two cuts each, >= 1
  std::size_t refined = 25;   ///< number of these, and of neighbours of the best, whose prices are optimised, >= 1
  std::size_t cuts = 40;      ///< cuts for each of the latter, on average, >= 1
};

namespace detail {

/// The Lagrangian dual of one moment, maximised over `retention_cut::prices` by cutting planes. Without a span there are three
/// prices: of a byte, of copies to the host before the moment, and of copies to the device after it. In a span there are four
/// more: of copies of values that start or end on the host, before and after the moment, and of all copies in each direction.
class copy_dual {
 public:
  /// @param cut    the cut of the moment
  /// @param budget bytes
  /// @param within the span that `cut` was made with; null for a plain problem
  copy_dual(const problem& p, std::unique_ptr<retention_cut> cut, bytes_t budget, const time_span* within)
      : cut_(std::move(cut)),
        fetch_before_(cut_->fetch_before()),
        offload_after_(within ? cut_->offload_after() : 0),
        room_(static_cast<double>(budget + cut_->room())),
        scale_(1 / p.copies()->to_host + 1 / p.copies()->to_device),
        total_(p.total_seconds()),
        model_(within ? std::vector<double>{2, 1, 1, 1, 1, 1, 1} : std::vector<double>{2, 1, 1}) {
    if (within) {
      model_.limit({0, 1, 0, 1, 1, 1, 0}, 1);
      model_.limit({0, 0, 1, 0, 1, 1, 1}, 1);
      to_host_ = within->to_host, to_device_ = within->to_device;
    }
    add(cut_->retain_all());
    add(cut_->move_all());
    maximise_model();
  }

  operation_id tau() const { return cut_->tau(); }
  /// The best bound so far, s.
  double value() const { return value_; }
  /// The prices that prove `value()`.
  const retention_cut::prices& prices() const { return prices_; }
  /// An upper bound on the maximum of the dual, s.
  double maximum() const { return maximum_; }
  /// Makes a cut at the most promising prices.
  /// @param known a proven bound, s
  /// @return false if the dual cannot exceed `known`, or its maximum is found
  bool improve(double known) {
    if (maximum_ <= std::max(known, value_) * (1 + 1e-5)) return false;
    const auto before = value_, promised = maximum_;
    const auto value = cut_at(prices_at(next_point_));
    if (value <= before && promised <= value * (1 + 1e-5)) maximum_ = value_;
    return true;
  }
  /// Makes a cut at given prices.
  /// @return the bound that it proves, s
  double cut_at(const retention_cut::prices& at) {
    const auto c = cut_->minimum_with_copies(at);
    const auto [before, after] = computations(c);
    const double rest = 1 - at.extra_to_device - at.extra_to_host;
    const double value = (rest - at.to_host - at.fetch) * before + (rest - at.to_device - at.offload) * after +
                         at.to_host * (cut_->sent_after() + c.to_host) + at.to_device * c.to_device + at.fetch * fetch_before_ +
                         at.offload * offload_after_ + at.extra_to_device * (to_device_ + c.extra_to_device) +
                         at.extra_to_host * (to_host_ + c.extra_to_host) + at.byte * (static_cast<double>(c.bytes) - room_) -
                         c.error;
    if (value > value_) value_ = value, prices_ = at;
    add(c);
    maximise_model();
    return value;
  }

 private:
  /// The prices at the point `x` of the model, clamped against rounding.
  retention_cut::prices prices_at(const concave_model::point& x) const {
    retention_cut::prices at;
    at.byte = std::clamp(x[0], 0.0, 2.0) * scale_;
    double rest = 1;
    for (auto [price, found] : {std::pair(&at.extra_to_device, x[4]), std::pair(&at.extra_to_host, x[5])})
      rest -= * price = std::clamp(found, 0.0, rest);
    at.to_device = std::clamp(x[2], 0.0, rest);
    at.to_host = std::clamp(x[1], 0.0, rest);
    at.fetch = std::clamp(x[3], 0.0, rest - at.to_host);
    at.offload = std::clamp(x[6], 0.0, rest - at.to_device);
    return at;
  }
  /// Seconds of the computations before and after the moment.
  std::pair<double, double> computations(const retention_cut::choice& c) const {
    const auto& s = cut_->seconds();
    return {cut_->head() + (s.before - c.deferred_in_before), s.descendants + c.deferred + c.seconds};
  }
  void add(const retention_cut::choice& c) {
    const auto [before, after] = computations(c);
    const auto all = before + after;
    concave_model::point slope = {(static_cast<double>(c.bytes) - room_) * scale_,
                                  cut_->sent_after() + c.to_host - before,
                                  c.to_device - after,
                                  fetch_before_ - before,
                                  to_device_ + c.extra_to_device - all,
                                  to_host_ + c.extra_to_host - all,
                                  offload_after_ - after};
    for (auto& s : slope) s /= total_;
    model_.add(all / total_, slope);
  }
  void maximise_model() {
    std::tie(maximum_, next_point_) = model_.maximum();
    maximum_ *= total_;
  }

  std::unique_ptr<retention_cut> cut_;
  double fetch_before_, offload_after_, room_, scale_, total_;
  double to_host_ = 0, to_device_ = 0;
  concave_model model_;
  double value_ = 0, maximum_ = 0;
  retention_cut::prices prices_;
  concave_model::point next_point_{};
};

}  // namespace detail

/// `copy_bound` within a span of a schedule. Values may also start and end on the host.
/// @param p           a problem that allows copies
/// @param budget      bytes
/// @param within      the span in which time counts; null: the whole schedule of a plain problem
/// @param known_bound a proven bound, returned if there is no better one, s
/// @param o           how hard to try
/// @param stop        polled between and within cuts; true returns the bound that is proven by then
/// @return no schedule within the budget is faster, s
/// Complexity: that of `copy_bound`.
inline double copy_bound_in_span(const problem& p, bytes_t budget, const time_span* within, double known_bound,
                                 const copy_bound_options& o, const std::function<bool()>& stop) {
  double best = std::max(known_bound, bounds_without_search(p).seconds);
  if (!(best > 0)) return best;
  const auto needed = needed_operations(p);
  std::vector<std::unique_ptr<detail::copy_dual>> duals;
  const auto has_dual = [&](operation_id tau) {
    return std::any_of(duals.begin(), duals.end(), [&](const auto& d) { return d->tau() == tau; });
  };
  const detail::copy_dual* leader = nullptr;  // proves most; its prices are good elsewhere, too
  const auto record = [&](const detail::copy_dual& d) {
    best = std::max(best, d.value());
    if (d.value() > (leader ? leader->value() : 0)) leader = &d;
  };
  const auto try_leader = [&](detail::copy_dual& d) {  // tries the prices of the leader
    if (leader && d.maximum() > best * (1 + 1e-5) && !(stop && stop())) d.cut_at(leader->prices());
    record(d);
  };
  const auto refine = [&](detail::copy_dual& d) {
    try_leader(d);
    for (std::size_t i = 0; i < o.cuts && !(stop && stop()) && d.improve(best); ++i) continue;
    record(d);
  };
  try {
    for (auto& cut : sample_cuts(p, budget, o.moments, within, stop))
      if (within || cut->demand() > budget)
        duals.push_back(std::make_unique<detail::copy_dual>(p, std::move(cut), budget, within));
    if (!duals.empty()) refine(*duals[0]);  // the moment of greatest demand
    for (auto& d : duals) try_leader(*d);
    for (auto left = o.refined * o.cuts; left > 0 && !duals.empty() && !(stop && stop()); --left) {
      auto& next =
          *std::max_element(duals.begin(), duals.end(), [](const auto& a, const auto& b) { return a->maximum() < b->maximum(); });
      if (!next->improve(best)) break;
      record(*next);
    }
    for (bool better = leader != nullptr; better && !(stop && stop());) {  // tries the neighbours of the leader
      const auto before = best;
      const auto leader_position = std::lower_bound(needed.begin(), needed.end(), leader->tau()) - needed.begin();
      for (const int step : {-4, -2, -1, 1, 2, 4}) {
        const auto k = leader_position + step;
        if (k < 0 || k >= static_cast<std::ptrdiff_t>(needed.size())) continue;
        const auto tau = needed[static_cast<std::size_t>(k)];
        if (has_dual(tau) || (within && !within->may_be_tau[tau])) continue;
        duals.push_back(std::make_unique<detail::copy_dual>(p, std::make_unique<retention_cut>(p, needed, tau, within, stop),
                                                            budget, within));
        refine(*duals.back());
      }
      better = best > before;
    }
  } catch (const interrupted&) {  // keeps the bound proven so far
  }
  return best;
}

/// A lower bound on the time of *every* schedule within a budget, with any recomputation and any copies to the host and back.
///
/// Look at the moment just before an operation `tau` first runs. A value that is needed later is on the device, is made again, or
/// has been sent to the host and is brought back. This gives five inequalities. Computations before the moment fit into the time
/// before it, and so do copies to the host. Computations after the moment fit into the time after it, and so do copies to the
/// device. The bytes fit into the budget. For given values of three prices, a minimum cut minimises the weighted sum of the
/// inequalities. Cutting planes find the best prices.
///
/// @param p      a problem that allows copies
/// @param budget bytes
/// @param o      how hard to try
/// @param stop   polled between and within cuts; true returns the bound that is proven by then
/// @return no schedule within the budget is faster, s
/// @throws bad_option if a member of `o` is 0, or the problem allows no copies
/// Complexity: O(moments + 3 refined cuts) maximum flows on O(values + operations) vertices.
/// @code
/// std::cout << "no schedule takes less than " << remat::bound::copy_bound(p, budget) << " s\n";
/// @endcode
inline double copy_bound(const problem& p, bytes_t budget, const copy_bound_options& o = {},
                         const std::function<bool()>& stop = {}) {
  if (o.moments < 1) throw bad_option("copy_bound_options.moments must be >= 1, got 0");
  if (o.refined < 1) throw bad_option("copy_bound_options.refined must be >= 1, got 0");
  if (o.cuts < 1) throw bad_option("copy_bound_options.cuts must be >= 1, got 0");
  if (!p.copies()) throw bad_option("copy_bound: the problem allows no copies");
  return copy_bound_in_span(p, budget, nullptr, 0, o, stop);
}

}  // namespace remat::bound
