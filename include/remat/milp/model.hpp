// SPDX-License-Identifier: Apache-2.0
/// @file
/// Mixed-integer linear programs, as solvers hand them to a MILP backend. Needs Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <Eigen/SparseCore>

#include <remat/core/error.hpp>

namespace remat::milp {

/// Stands for a bound that is absent.
inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// The unit of time for an objective: `seconds` / `parts`, but so large that no quotient overflows.
/// @param seconds the largest cost, s
/// @return s; 1 if `seconds` is 0
inline double unit_of(double seconds, double parts) {
  return seconds > 0 ? std::max(seconds / parts, std::numeric_limits<double>::min()) : 1;
}

/// `seconds` in units of `unit`, as a coefficient of a row. Times that a backend cannot tell from 0 beside others become 0, and
/// times that are too long for it become shorter. Both keep a lower bound valid.
inline double in_units(double seconds, double unit) {
  const double units = seconds / unit;
  return units < 1e-9 ? 0 : std::min(units, 1e12);
}

/// minimise offset + cost' x  subject to  row_lower <= matrix x <= row_upper, lower <= x <= upper, x_j integer where asked.
struct model {
  Eigen::SparseMatrix<double> matrix;  ///< rows x columns, column-major, compressed
  Eigen::VectorXd cost;                ///< per column
  Eigen::VectorXd lower, upper;        ///< per column; +-infinity for none
  Eigen::VectorXd row_lower, row_upper;
  std::vector<bool> integer;  ///< per column
  double offset = 0;          ///< constant of the objective

  Eigen::Index columns() const { return cost.size(); }
  Eigen::Index rows() const { return row_lower.size(); }
  double objective(const Eigen::VectorXd& x) const { return offset + cost.dot(x); }
  /// True if backends can compute with the sizes of all numbers. HiGHS takes larger numbers for infinite. GLPK scales rows by
  /// their geometric mean; with much larger or smaller coefficients it "proves" that there is no solution. Complexity: O(columns
  /// + rows + nonzeros).
  bool tractable() const {
    const auto number = [](double x) { return !std::isfinite(x) || std::abs(x) < 1e20; };
    const auto coefficient = [](double x) { return x == 0 || (std::abs(x) > 1e-15 && std::abs(x) <= 1e15); };
    const auto numbers = [&](const Eigen::VectorXd& v) { return std::all_of(v.data(), v.data() + v.size(), number); };
    return number(offset) && numbers(cost) && numbers(lower) && numbers(upper) && numbers(row_lower) && numbers(row_upper) &&
           std::all_of(matrix.valuePtr(), matrix.valuePtr() + matrix.nonZeros(), coefficient);
  }

  /// @throws bad_problem naming the column or row: sizes that differ, NaN, an infinite cost or coefficient, crossed bounds,
  ///         a lower bound of +infinity or an upper bound of -infinity
  /// Complexity: O(columns + rows + nonzeros).
  void validate() const {
    const auto fail = [](const std::string& what) { throw bad_problem("milp::model: " + what); };
    if (lower.size() != columns() || upper.size() != columns() || static_cast<Eigen::Index>(integer.size()) != columns() ||
        matrix.cols() != columns())
      fail("cost, lower, upper, integer and matrix differ in their number of columns");
    if (row_upper.size() != rows() || matrix.rows() != rows())
      fail("row_lower, row_upper and matrix differ in their number of rows");
    if (!matrix.isCompressed()) fail("matrix is not compressed");
    if (!std::isfinite(offset)) fail("offset is not finite");
    const auto crossed = [](double low, double up) { return !(low <= up) || low == infinity || up == -infinity; };
    for (Eigen::Index j = 0; j < columns(); ++j) {
      if (!std::isfinite(cost[j])) fail("cost[" + std::to_string(j) + "] is not finite");
      if (crossed(lower[j], upper[j])) fail("bounds of column " + std::to_string(j) + " are crossed or not numbers");
    }
    for (Eigen::Index i = 0; i < rows(); ++i)
      if (crossed(row_lower[i], row_upper[i])) fail("bounds of row " + std::to_string(i) + " are crossed or not numbers");
    for (Eigen::Index k = 0; k < matrix.nonZeros(); ++k)
      if (!std::isfinite(matrix.valuePtr()[k])) fail("a coefficient of the matrix is not finite");
  }
};

/// Describes how `x` violates `m`.
/// @param m         the model
/// @param x         a value per column
/// @param tolerance how far a bound may be exceeded, relative to max(1, |bound|); distance to an integer, absolute
/// @return the first violated bound, integrality or row; an empty string if there is none
/// Complexity: O(columns + rows + nonzeros).
inline std::string violation(const model& m, const Eigen::VectorXd& x, double tolerance = 1e-5) {
  if (x.size() != m.columns())
    return "solution has " + std::to_string(x.size()) + " of " + std::to_string(m.columns()) + " values";
  const auto outside = [&](double at, double low, double up) {
    return !(at >= low - tolerance * std::max(1.0, std::abs(low))) || !(at <= up + tolerance * std::max(1.0, std::abs(up)));
  };
  for (Eigen::Index j = 0; j < m.columns(); ++j) {
    const auto where = "column " + std::to_string(j) + " = " + std::to_string(x[j]);
    if (!std::isfinite(x[j]) || outside(x[j], m.lower[j], m.upper[j])) return where + " is out of its bounds";
    if (m.integer[static_cast<std::size_t>(j)] && std::abs(x[j] - std::round(x[j])) > tolerance) return where + " is not integer";
  }
  const Eigen::VectorXd activity = m.matrix * x;
  for (Eigen::Index i = 0; i < m.rows(); ++i)
    if (outside(activity[i], m.row_lower[i], m.row_upper[i]))
      return "row " + std::to_string(i) + " = " + std::to_string(activity[i]) + " is out of its bounds";
  return {};
}

/// A linear expression over the columns of a model under construction.
struct expression {
  std::vector<std::pair<int, double>> terms;  ///< column, coefficient; a column may occur several times
  double constant = 0;

  expression& add(const expression& other, double factor = 1) {
    for (const auto& [column, coefficient] : other.terms) terms.emplace_back(column, factor * coefficient);
    constant += factor * other.constant;
    return *this;
  }
  /// Sums the terms of equal columns, and removes terms that are zero. Complexity: O(terms log(terms)).
  void compact() {
    std::sort(terms.begin(), terms.end());
    std::size_t kept = 0;
    for (std::size_t t = 0; t < terms.size();) {
      auto [column, sum] = terms[t];
      for (++t; t < terms.size() && terms[t].first == column; ++t) sum += terms[t].second;
      if (sum != 0) terms[kept++] = {column, sum};
    }
    terms.resize(kept);
  }
  bool is_constant() const { return terms.empty(); }
  /// For an expression in {0, 1}: is it the constant 0 (`is_zero`) or 1 (`is_one`)?
  bool is_zero() const { return is_constant() && constant < 0.5; }
  bool is_one() const { return is_constant() && constant > 0.5; }
  /// The value for the solution `x`.
  double at(const Eigen::VectorXd& x) const {
    double sum = constant;
    for (const auto& [column, factor] : terms) sum += factor * x[column];
    return sum;
  }
  friend expression operator+(expression a, const expression& b) { return std::move(a.add(b)); }
  friend expression operator-(expression a, const expression& b) { return std::move(a.add(b, -1)); }
  friend expression operator*(double factor, const expression& a) { return std::move(expression{}.add(a, factor)); }
};

/// Builds a model column by column and row by row.
/// @code
/// remat::milp::builder b;
/// auto x = b.binary(-3), y = b.column(-1, 0, 4);
/// b.at_most(2.0 * x + y, 5);
/// auto m = b.build();
/// @endcode
class builder {
 public:
  /// Adds a column. @return the expression that stands for it
  expression column(double cost, double lower, double upper, bool integer = false) {
    cost_.push_back(cost), lower_.push_back(lower), upper_.push_back(upper), integer_.push_back(integer);
    return {{{static_cast<int>(cost_.size()) - 1, 1.0}}, 0};
  }
  /// Adds a column in {0, 1}.
  expression binary(double cost) { return column(cost, 0, 1, true); }
  /// Adds the row `lower <= e <= upper`.
  void row(double lower, const expression& e, double upper) {
    const auto i = static_cast<int>(row_lower_.size());
    for (const auto& [j, coefficient] : e.terms) entries_.emplace_back(i, j, coefficient);
    row_lower_.push_back(lower - e.constant);
    row_upper_.push_back(upper - e.constant);
  }
  void at_most(const expression& e, double upper) { row(-infinity, e, upper); }
  /// Adds the row `left <= right`, unless the bounds of the columns imply it.
  void at_most(const expression& left, const expression& right) {
    auto e = left - right;
    e.compact();
    if (upper_bound(e) > 1e-9) at_most(e, 0);
  }
  void at_least(const expression& e, double lower) { row(lower, e, infinity); }
  void equal(const expression& e, double value) { row(value, e, value); }

  /// Adds a column for the value of `sum`, which must not be negative. @return its expression
  expression running_sum(const expression& sum) {
    auto total = column(0, 0, std::max(0.0, upper_bound(sum)));
    equal(sum - total, 0);
    return total;
  }
  /// The same sum in at most `longest` terms: partial sums become columns. Its columns and factors must not be negative.
  expression split(expression e, std::size_t longest) {
    while (e.terms.size() > longest) {
      expression shorter{{}, e.constant};
      for (std::size_t t = 0; t < e.terms.size(); t += longest) {
        const auto first = e.terms.begin() + static_cast<std::ptrdiff_t>(t);
        const auto last = first + static_cast<std::ptrdiff_t>(std::min(longest, e.terms.size() - t));
        shorter.add(running_sum({{first, last}, 0}));
      }
      e = std::move(shorter);
    }
    return e;
  }

  int columns() const { return static_cast<int>(cost_.size()); }
  int rows() const { return static_cast<int>(row_lower_.size()); }
  /// An upper bound on `e`, from the bounds of the columns.
  double upper_bound(const expression& e) const {
    double sum = e.constant;
    for (const auto& [column, factor] : e.terms) {
      const auto j = static_cast<std::size_t>(column);
      if (factor != 0) sum += factor * (factor > 0 ? upper_[j] : lower_[j]);
    }
    return sum;
  }

  /// @param offset constant of the objective
  /// @return the model; coefficients of one column in one row are summed
  /// @throws bad_problem as `model::validate`
  /// Complexity: O(columns + rows + nonzeros).
  model build(double offset = 0) const {
    const auto vector = [](const std::vector<double>& v) {
      return Eigen::VectorXd(Eigen::Map<const Eigen::VectorXd>(v.data(), static_cast<Eigen::Index>(v.size())));
    };
    model m;
    m.matrix.resize(static_cast<Eigen::Index>(row_lower_.size()), static_cast<Eigen::Index>(cost_.size()));
    m.matrix.setFromTriplets(entries_.begin(), entries_.end());
    m.matrix.prune([](Eigen::Index, Eigen::Index, double x) { return x != 0; });
    m.cost = vector(cost_), m.lower = vector(lower_), m.upper = vector(upper_);
    m.row_lower = vector(row_lower_), m.row_upper = vector(row_upper_);
    m.integer = integer_;
    m.offset = offset;
    m.validate();
    return m;
  }

 private:
  std::vector<Eigen::Triplet<double>> entries_;
  std::vector<double> cost_, lower_, upper_, row_lower_, row_upper_;
  std::vector<bool> integer_;
};

}  // namespace remat::milp
