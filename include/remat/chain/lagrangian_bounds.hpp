// SPDX-License-Identifier: Apache-2.0
/// @file
/// Bounds for `fastest_persistent`: the least seconds that a part of a chain takes beyond its fastest options, given its bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain::detail {

/// A chain with times as overheads: the seconds beyond the fastest option of each link.
class overheads : public recurrence {
 public:
  /// A split of links i to j at s, with terms that depend on i and s only.
  struct split {
    std::size_t s;
    double forward;    ///< seconds of the checkpoint forwards of links i to s - 1
    bytes_t need;      ///< bytes that these forwards need
    bytes_t ample;     ///< bytes with which links i to s - 1 have no overhead
    double min_price;  ///< least overhead of links i to s - 1 per byte below `ample`, s
    /// A lower bound on the overhead of links i to s - 1 with m bytes, s.
    double min_overhead(bytes_t m) const { return m >= ample ? 0 : min_price * static_cast<double>(ample - m); }
  };

  explicit overheads(const heterogeneous_chain& c) : recurrence(c), saved_(c.links.size() + 1, 0) {
    const auto ratio = [](double seconds, bytes_t bytes) { return bytes <= 0 ? never : seconds / static_cast<double>(bytes); };
    for (std::size_t i = 0; i < size(); ++i) {
      const auto& l = link(i);
      const auto order = [](const heterogeneous_chain::option& o) { return std::pair(o.forward + o.backward, o.saved); };
      const auto f =
          std::min_element(l.options.begin(), l.options.end(), [&](const auto& x, const auto& y) { return order(x) < order(y); });
      fastest_.push_back(static_cast<std::size_t>(f - l.options.begin()));
      saved_[i + 1] = saved_[i] + f->saved;
      ideal_ += f->forward + f->backward;
      all_forwards_ += l.checkpoint_seconds;
      // The least seconds per byte saved at this link, by another option or by recomputation.
      min_price_.push_back(ratio(l.checkpoint_seconds, f->saved + f->forward_transient));
      for (const auto& k : l.options) {
        const auto transient =
            std::max({bytes_t{0}, f->forward_transient - k.forward_transient, f->backward_transient - k.backward_transient});
        min_price_[i] = std::min(min_price_[i], ratio(overhead(i, k), f->saved - k.saved + transient));
      }
    }
  }

  /// Seconds of the fastest options; seconds of all checkpoint forwards; bytes that the fastest options save.
  double ideal() const { return ideal_; }
  double all_forwards() const { return all_forwards_; }
  bytes_t saved() const { return saved_.back(); }
  std::size_t fastest(std::size_t i) const { return fastest_[i]; }
  double overhead(std::size_t i, const heterogeneous_chain::option& o) const {
    const auto& f = link(i).options[fastest_[i]];
    return (o.forward + o.backward) - (f.forward + f.backward);
  }
  /// Calls `visit(split)` for each split of links i to j, ascending, until it returns false.
  template <class Visit>
  void splits(std::size_t i, std::size_t j, Visit&& visit) const {
    split x{i, 0, 0, 0, never};
    bytes_t forward = 0, backward = std::numeric_limits<bytes_t>::min();
    recurrence::splits(i, j, [&](std::size_t s, double seconds, bytes_t need) {
      const auto& o = link(s - 1).options[fastest_[s - 1]];
      forward = std::max(forward, saved_[s] + o.forward_transient);
      backward = std::max(backward, saved_[s] - kept(0, s - 1) + gradient(s) + o.backward_transient);
      const auto ample = std::max(forward + gradient(s), backward + kept(0, s - 1)) - saved_[i];
      x = {s, seconds, need, ample, std::min(x.min_price, min_price_[s - 1])};
      return visit(x);
    });
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();
  double ideal_ = 0, all_forwards_ = 0;
  std::vector<bytes_t> saved_;  // prefix sums
  std::vector<std::size_t> fastest_;
  std::vector<double> min_price_;
};

/// Lower bounds on overheads by Lagrangian relaxation. Each byte gets a price of lambda seconds. D_lambda(i, j) is the least sum
/// of overhead and priced bytes over all paths from link i to the last link j. So D_lambda(i, j) - lambda m is a lower bound on
/// the overhead of links i to j with m bytes. Recomputed parts enter with `split::min_overhead`. The bounds hold for any prices.
/// Complexity: O(L (L + options)) for each last link j that is asked for, L = j + 1; bounds are cached. `choose` takes three
/// times as long as the last link of the chain.
class lagrangian_bounds {
 public:
  static constexpr std::size_t prices = 32;
  using priced = std::array<double, prices>;

  lagrangian_bounds(const overheads& c, bytes_t capacity) : chain_(c), capacity_(capacity), bounds_(c.size()) {}

  double price(std::size_t k) const { return price_[k]; }
  /// D(i, j) for all prices, s.
  const priced& at_all_prices(std::size_t i, std::size_t j) {
    auto& d = bounds_[j];  // D(j, j), D(j - 1, j), ...
    while (d.size() <= j - i) {
      const auto a = j - d.size();
      priced least;
      least.fill(std::numeric_limits<double>::infinity());
      const auto lower = [&](double seconds, bytes_t bytes, const priced* rest) {
        for (std::size_t k = 0; k < prices; ++k)
          least[k] = std::min(least[k], seconds + price_[k] * static_cast<double>(bytes) + (rest ? (*rest)[k] : 0));
      };
      for (const auto& o : chain_.link(a).options)
        lower(chain_.overhead(a, o), a == j ? chain_.threshold(a, j, o) : o.saved, a == j ? nullptr : &d.back());
      const auto room = capacity_ - (a > 0 ? chain_.input(a) : 0);
      chain_.splits(a, j, [&](const overheads::split& x) {
        lower(x.forward + x.min_overhead(room - chain_.kept(x.s, chain_.size() - 1)), chain_.input(x.s), &d[j - x.s]);
        return true;
      });
      d.push_back(least);
    }
    return d[j - i];
  }
  /// A lower bound on the overhead of links i to j with m bytes, s.
  double lower_bound(std::size_t i, std::size_t j, bytes_t m) {
    const auto& d = at_all_prices(i, j);
    double best = 0;
    for (std::size_t k = 0; k < prices; ++k) best = std::max(best, d[k] - price_[k] * static_cast<double>(m));
    return best;
  }
  /// Chooses prices around the price at which the bound of the whole chain is highest. Prices are 0 if the chain has no
  /// overheads.
  /// @param stop true ends the choice early, with prices that may give weaker bounds
  void choose(const std::function<bool()>& stop) {
    const auto last = chain_.size() - 1;
    double usual_price = chain_.all_forwards();
    for (std::size_t i = 0; i <= last; ++i)
      for (const auto& o : chain_.link(i).options) usual_price += chain_.overhead(i, o);
    usual_price /= std::max(1.0, static_cast<double>(chain_.saved()));
    if (usual_price <= 0) return;
    double low = usual_price / 1024, high = usual_price * 1024;
    for (int round = 0; round < 3; ++round) {
      for (std::size_t k = 0; k < prices; ++k) price_[k] = low * std::pow(high / low, static_cast<double>(k) / (prices - 1));
      bounds_[last].clear();
      for (auto i = last + 1; i-- > 0;) {
        if (stop()) return;
        at_all_prices(i, last);
      }
      const auto& d = at_all_prices(0, last);
      std::size_t best = 0;
      const auto value = [&](std::size_t k) { return d[k] - price_[k] * static_cast<double>(capacity_); };
      for (std::size_t k = 1; k < prices; ++k)
        if (value(k) > value(best)) best = k;
      low = price_[best > 0 ? best - 1 : 0];
      high = price_[std::min(best + 1, prices - 1)];
    }
    for (std::size_t k = 0; k < prices; ++k)  // dense in the middle of the range
      price_[k] = (low + high) / 2 * std::exp(6 * std::pow(2 * static_cast<double>(k) / (prices - 1) - 1, 3));
    bounds_[last].clear();
  }

 private:
  const overheads& chain_;
  bytes_t capacity_;
  priced price_{};
  std::vector<std::vector<priced>> bounds_;  // per last link
};

}  // namespace remat::chain::detail
