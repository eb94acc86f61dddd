// SPDX-License-Identifier: Apache-2.0
/// @file
/// The maximum of a concave, piecewise linear function: the model of a cutting-plane method.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace remat::bound {

/// The maximum, over a polytope, of the minimum of linear functions. Functions may be added between two calls of `maximum`.
///
/// Uses the simplex method on the dual linear program. A function is a column there, so the last optimal basis stays feasible
/// when a function is added. The column of least reduced cost enters. After a hundred pivots, the first column of negative
/// reduced cost enters instead (Bland's rule), which cannot cycle.
///
/// Complexity: O(pivots (functions + dimensions) dimensions + pivots dimensions^3).
/// @code
/// remat::bound::concave_model m({1.0});        // 0 <= x <= 1
/// m.add(0, {2}), m.add(1, {-1});               // 2 x and 1 - x
/// auto [highest, x] = m.maximum();             // 2/3, at x = 1/3
/// @endcode
class concave_model {
 public:
  static constexpr std::size_t max_dimensions = 7;
  using point = std::array<double, max_dimensions>;

  /// @param limits upper limits of x, one per dimension, at most `max_dimensions`: the polytope lies in [0, limits]
  explicit concave_model(const std::vector<double>& limits) : rows_(limits.size() + 1) {
    for (std::size_t i = 0; i < limits.size(); ++i)
      for (const double sign : {1.0, -1.0}) {
        column c{{}, sign > 0 ? limits[i] : 0};
        c.a[i + 1] = sign;
        columns_.push_back(c);
      }
  }
  /// Adds the constraint weights * x <= limit to the polytope.
  void limit(const point& weights, double limit) {
    column c{{}, limit};
    std::copy(weights.begin(), weights.end(), c.a.begin() + 1);
    columns_.push_back(c);
  }
  /// Adds the function constant + slope * x.
  void add(double constant, const point& slope) {
    column c{{1}, constant};
    for (std::size_t i = 0; i + 1 < rows_; ++i) c.a[i + 1] = -slope[i];
    if (!has_basis_) {  // the first function starts the basis
      has_basis_ = true;
      basis_[0] = columns_.size();
      for (std::size_t i = 0; i + 1 < rows_; ++i) basis_[i + 1] = 2 * i + (slope[i] < 0);
    }
    columns_.push_back(c);
  }
  /// @return the maximum, and a point where it is reached; if 500 pivots do not suffice, an upper bound
  /// @pre a function was added
  std::pair<double, point> maximum() {
    for (int pivots = 0;; ++pivots) {
      vector costs{};
      for (std::size_t r = 0; r < rows_; ++r) costs[r] = columns_[basis_[r]].cost;
      const auto y = solve(costs, true);
      std::size_t entering = columns_.size();
      double least = -1e-11;
      for (std::size_t j = 0; j < columns_.size(); ++j) {
        double reduced = columns_[j].cost;
        for (std::size_t r = 0; r < rows_; ++r) reduced -= y[r] * columns_[j].a[r];
        if (reduced >= least) continue;
        least = reduced, entering = j;
        if (pivots > 100) break;
      }
      const auto found = [&] {
        point x{};
        std::copy(y.begin() + 1, y.begin() + static_cast<std::ptrdiff_t>(rows_), x.begin());
        return std::pair(y[0], x);
      };
      if (entering == columns_.size() || pivots > 500) return found();
      const auto before = [&](double a, std::size_t r, double b, std::size_t s) {
        return a < b || (a == b && basis_[r] < basis_[s]);
      };
      const auto x = solve({1}, false), d = solve(columns_[entering].a, false);
      std::size_t leaving = rows_;
      for (std::size_t r = 0; r < rows_; ++r)
        if (d[r] > 1e-12 && (leaving == rows_ || before(x[r] * d[leaving], r, x[leaving] * d[r], leaving))) leaving = r;
      if (leaving == rows_) return found();
      basis_[leaving] = entering;
    }
  }

 private:
  using vector = std::array<double, max_dimensions + 1>;
  struct column {
    vector a;
    double cost;
  };

  /// Solves with the basis, or its transpose, by elimination.
  vector solve(vector b, bool transposed) const {
    std::array<vector, max_dimensions + 1> m;
    for (std::size_t r = 0; r < rows_; ++r)
      for (std::size_t c = 0; c < rows_; ++c) m[r][c] = transposed ? columns_[basis_[r]].a[c] : columns_[basis_[c]].a[r];
    for (std::size_t k = 0; k < rows_; ++k) {
      auto pivot = k;
      for (auto r = k; r < rows_; ++r)
        if (std::abs(m[r][k]) > std::abs(m[pivot][k])) pivot = r;
      std::swap(m[k], m[pivot]);
      std::swap(b[k], b[pivot]);
      for (std::size_t r = 0; r < rows_; ++r) {
        if (r == k || m[k][k] == 0) continue;
        const double factor = m[r][k] / m[k][k];
        for (auto c = k; c < rows_; ++c) m[r][c] -= factor * m[k][c];
        b[r] -= factor * b[k];
      }
    }
    for (std::size_t k = 0; k < rows_; ++k) b[k] = m[k][k] == 0 ? 0 : b[k] / m[k][k];
    return b;
  }

  std::size_t rows_;
  bool has_basis_ = false;
  std::vector<column> columns_;
  std::array<std::size_t, max_dimensions + 1> basis_{};
};

}  // namespace remat::bound
