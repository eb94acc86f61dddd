// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is left of a MILP when most of its columns are fixed.
#pragma once

#include <cstddef>
#include <vector>

#include <remat/milp/model.hpp>

namespace remat::milp {

/// A MILP over some columns of another, the rest of which are fixed.
struct part {
  milp::model model;
  std::vector<Eigen::Index> columns;  ///< of the whole, per column of `model`

  /// The values in `x` of the columns that are left.
  Eigen::VectorXd of(const Eigen::VectorXd& x) const {
    Eigen::VectorXd y(static_cast<Eigen::Index>(columns.size()));
    for (Eigen::Index j = 0; j < y.size(); ++j) y[j] = x[columns[static_cast<std::size_t>(j)]];
    return y;
  }
  /// Writes the values `y` of the columns that are left into `x`.
  void put(const Eigen::VectorXd& y, Eigen::VectorXd& x) const {
    for (Eigen::Index j = 0; j < y.size(); ++j) x[columns[static_cast<std::size_t>(j)]] = y[j];
  }
};

/// Fixes columns of `m`. Rows that the bounds of the other columns imply are left out.
/// @param m    the whole
/// @param x    a solution of `m`
/// @param free per column: not fixed to its value in `x`
/// @return the part; `part.of(x)` satisfies it, and its solutions, put into `x`, satisfy `m`
/// Complexity: O(columns + rows + nonzeros).
inline part fix_columns(const model& m, const Eigen::VectorXd& x, const std::vector<bool>& free) {
  part p;
  Eigen::VectorXd fixed = Eigen::VectorXd::Zero(m.rows());  // what the fixed columns add to each row
  Eigen::VectorXd least = fixed, most = fixed;              // .. and the others
  std::vector<bool> constant(static_cast<std::size_t>(m.rows()), true);
  p.model.offset = m.offset;
  for (Eigen::Index j = 0; j < m.columns(); ++j) {
    const bool is_free = free[static_cast<std::size_t>(j)];
    if (is_free)
      p.columns.push_back(j);
    else
      p.model.offset += m.cost[j] * x[j];
    for (Eigen::SparseMatrix<double>::InnerIterator e(m.matrix, j); e; ++e) {
      if (!is_free) {
        fixed[e.row()] += e.value() * x[j];
        continue;
      }
      constant[static_cast<std::size_t>(e.row())] = false;
      least[e.row()] += e.value() * (e.value() > 0 ? m.lower[j] : m.upper[j]);
      most[e.row()] += e.value() * (e.value() > 0 ? m.upper[j] : m.lower[j]);
    }
  }
  std::vector<int> row(static_cast<std::size_t>(m.rows()), -1);  // in the part
  std::vector<double> low, up;
  for (Eigen::Index i = 0; i < m.rows(); ++i) {
    const double from = m.row_lower[i] - fixed[i], to = m.row_upper[i] - fixed[i];
    if (constant[static_cast<std::size_t>(i)] || (least[i] >= from && most[i] <= to)) continue;
    row[static_cast<std::size_t>(i)] = static_cast<int>(low.size());
    low.push_back(from), up.push_back(to);
  }
  std::vector<Eigen::Triplet<double>> entries;
  for (std::size_t k = 0; k < p.columns.size(); ++k) {
    for (Eigen::SparseMatrix<double>::InnerIterator e(m.matrix, p.columns[k]); e; ++e)
      if (const auto i = row[static_cast<std::size_t>(e.row())]; i >= 0) entries.emplace_back(i, static_cast<int>(k), e.value());
    p.model.integer.push_back(m.integer[static_cast<std::size_t>(p.columns[k])]);
  }
  const auto rows = static_cast<Eigen::Index>(low.size()), columns = static_cast<Eigen::Index>(p.columns.size());
  p.model.matrix.resize(rows, columns);
  p.model.matrix.setFromTriplets(entries.begin(), entries.end());
  p.model.matrix.makeCompressed();
  p.model.row_lower = Eigen::Map<const Eigen::VectorXd>(low.data(), rows);
  p.model.row_upper = Eigen::Map<const Eigen::VectorXd>(up.data(), rows);
  p.model.cost = p.of(m.cost), p.model.lower = p.of(m.lower), p.model.upper = p.of(m.upper);
  return p;
}

}  // namespace remat::milp
