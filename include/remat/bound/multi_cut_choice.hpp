// SPDX-License-Identifier: Apache-2.0
/// @file
/// Selects the moments of a `multi_cut_model`. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <remat/bound/multi_cut_model.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/replay.hpp>

namespace remat::bound {

/// The order behind a solution of `multi_cut_model`. At each moment it retains the values of which the solution has more than
/// `threshold`. It may need more than the budget.
/// @return nothing if a once-only operation would have to run again
/// Complexity: that of `replay`.
inline std::optional<std::vector<operation_id>> order_of(const problem& p, const multi_cut_model& form, const Eigen::VectorXd& x,
                                                         double threshold = 0.5) {
  std::vector<std::vector<bool>> retained(form.moments().size(), std::vector<bool>(p.values().size(), false));
  std::vector<bool> negligible(p.values().size());
  for (value_id v = 0; v < negligible.size(); ++v) {
    negligible[v] = form.negligible(v);
    for (std::size_t j = 0; j < retained.size() && !negligible[v]; ++j) retained[j][v] = form.retained(x, j, v) > threshold;
  }
  return order::replay(p, form.moments(), retained, negligible);
}

/// Moments for `multi_cut_model`. The first few lie on the path on which store-all has most on the device. Later ones lie on this
/// path where solutions are over the budget, or are operations beside the path that may run before or after other moments.
class multi_cut_choice {
 public:
  /// An operation that may become a moment.
  struct candidate {
    double gain;  ///< excess of a solution over the budget at `o`: bytes in `excess_of_order`, else relative
    operation_id o;
    std::size_t from, to;  ///< possible places among the moments: behind the first `from`, .., behind the first `to`

    /// Is there only one place?
    bool decided() const { return from == to; }
    /// `moments` with this operation behind the first `place` of them.
    std::vector<operation_id> inserted_at(std::vector<operation_id> moments, std::size_t place) const {
      moments.insert(moments.begin() + static_cast<std::ptrdiff_t>(place), o);
      return moments;
    }
  };

  /// @param p      the problem, with at least one needed operation; must outlive this
  /// @param budget bytes
  /// Complexity: O(values + edges).
  multi_cut_choice(const problem& p, bytes_t budget) : p_(p), budget_(budget) {
    const auto needed = needed_operations(p);
    const auto memory = measure_order(p, needed).memory;
    const auto peak = static_cast<double>(*std::max_element(memory.begin(), memory.end()));
    std::vector<double> load(p.operations().size(), 0), sum = load;  // of an operation; of the heaviest path that ends with it
    std::vector<operation_id> before(p.operations().size(), none);
    operation_id end = needed.front();
    for (std::size_t i = 0; i < needed.size(); ++i) {
      const auto o = needed[i];
      for (auto u : p.operations()[o].inputs)
        if (!p.is_source(u) && sum[p.producer(u)] > sum[o]) sum[o] = sum[p.producer(u)], before[o] = p.producer(u);
      load[o] = peak > 0 ? static_cast<double>(memory[i]) / peak : 0;
      sum[o] += 1e-3 + load[o] * load[o];
      if (sum[o] > sum[end]) end = o;
    }
    for (; end != none; end = before[end]) path_.push_back(end);
    std::reverse(path_.begin(), path_.end());
    std::set_difference(needed.begin(), needed.end(), path_.begin(), path_.end(), std::back_inserter(beside_));
    first_ = {*std::max_element(path_.begin(), path_.end(), [&](auto a, auto b) { return load[a] < load[b]; })};
    for (const std::size_t sixth : {5U, 3U, 1U}) first_ = with_if_decided(std::move(first_), path_[sixth * path_.size() / 6]);
  }

  /// The first moments, in their order: the operation with most on the device, and three others.
  const std::vector<operation_id>& first() const { return first_; }

  /// Places on the path where the solution `x` seems to be over the budget: the worst between each two moments, worst first.
  std::vector<candidate> excess_on_path(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    std::vector<std::pair<double, operation_id>> excess;
    for (auto o : path_) excess.emplace_back(form.excess(x, o) - 1e-4, o);
    return worst_between_moments(std::move(excess), form.moments());
  }
  /// Up to `count` places, spread evenly along the path.
  std::vector<candidate> evenly_along_path(const std::vector<operation_id>& moments, std::size_t count) const {
    std::vector<candidate> places;
    for (std::size_t i = 0; i < count; ++i)
      if (const auto o = path_[(2 * i + 1) * path_.size() / (2 * count)]; !contains(moments, o))
        places.push_back(place(0, o, moments));
    return places;
  }
  /// Operations beside the path, each with several places, that seem to exceed the budget in the solution `x` if they run as
  /// early as they can: the worst between each two moments, worst first.
  std::vector<candidate> excess_beside_path(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    std::vector<std::pair<double, operation_id>> excess;
    for (auto o : beside_)
      if (const double over = form.excess(x, o, true); over > 0) excess.emplace_back(over, o);
    auto worst = worst_between_moments(std::move(excess), form.moments());
    std::erase_if(worst, [](const auto& c) { return c.decided(); });
    return worst;
  }
  /// Places on the path where the order behind `x` is over the budget: the worst between each two moments, worst first.
  std::vector<candidate> excess_of_order(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    const auto order = order_of(p_, form, x);
    if (!order) return {};
    const auto memory = measure_order(p_, *order).memory;
    std::vector<std::pair<double, operation_id>> excess;
    auto next = path_.begin();
    bytes_t peak = 0;  // since the last operation of the path
    for (std::size_t k = 0; k < order->size() && next != path_.end(); ++k) {
      peak = std::max(peak, memory[k]);
      if ((*order)[k] != *next) continue;
      if (peak > budget_) excess.emplace_back(static_cast<double>(peak - budget_), *next);
      peak = 0;
      ++next;
    }
    return worst_between_moments(std::move(excess), form.moments());
  }

  /// `moments` with `o` added if it has only one place; otherwise `moments`.
  std::vector<operation_id> with_if_decided(std::vector<operation_id> moments, operation_id o) const {
    if (contains(moments, o)) return moments;
    const auto c = place(0, o, moments);
    return c.decided() ? c.inserted_at(std::move(moments), c.from) : moments;
  }

 private:
  static bool contains(const std::vector<operation_id>& moments, operation_id o) {
    return std::find(moments.begin(), moments.end(), o) != moments.end();
  }
  /// The places that the first run of `o` may have among those of `moments`.
  /// Complexity: O(values + edges).
  candidate place(double gain, operation_id o, const std::vector<operation_id>& moments) const {
    const auto [below, above] = relatives_of(p_, o);
    candidate c{gain, o, 0, moments.size()};
    for (std::size_t j = moments.size(); j-- > 0;) {
      if (above[moments[j]]) c.from = std::max(c.from, j + 1);
      if (below[moments[j]]) c.to = j;
    }
    return c;
  }
  /// The worst of `excess` between each two moments, worst first. An operation with several places counts at the first of them.
  std::vector<candidate> worst_between_moments(std::vector<std::pair<double, operation_id>> excess,
                                               const std::vector<operation_id>& moments) const {
    std::stable_sort(excess.begin(), excess.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<candidate> worst;
    std::vector<bool> taken(moments.size() + 1, false);
    for (const auto& [gain, o] : excess) {
      if (contains(moments, o)) continue;
      const auto c = place(gain, o, moments);
      if (!taken[c.from]) worst.push_back(c);
      taken[c.from] = true;
    }
    return worst;
  }

  const problem& p_;
  bytes_t budget_;
  std::vector<operation_id> path_, beside_, first_;
};

}  // namespace remat::bound
