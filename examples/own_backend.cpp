// SPDX-License-Identifier: Apache-2.0
// Your own MILP backend: branch and bound over a dense simplex method, for models of some dozens of columns. The conformance
// suite of the library checks it; then `checkmate` plans with it.
#include <chrono>
#include <cmath>
#include <iostream>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include <Eigen/Dense>

#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/testing/check_backend.hpp>
#include <remat/testing/generators.hpp>

using remat::milp::infinity;
using remat::milp::status;

/// Two-phase simplex method with Bland's rule: minimises c y, subject to a y <= b and y >= 0.
class simplex {
 public:
  /// The last two columns of the tableau are an artificial variable and `b`. The last two rows are the objectives.
  simplex(const Eigen::MatrixXd& a, const Eigen::VectorXd& b, const Eigen::VectorXd& c) : n(c.size()), m(b.size()) {
    t = Eigen::MatrixXd::Zero(m + 2, n + 2);
    t.topLeftCorner(m, n) = a, t.col(n).head(m).setConstant(-1), t.col(n + 1).head(m) = b;
    t.row(m).head(n) = c.transpose(), t(m + 1, n) = 1;
    for (int j = 0; j <= n; ++j) outside.push_back(j);
    for (int i = 0; i < m; ++i) inside.push_back(static_cast<int>(n) + 1 + i);
  }
  status solve() {
    Eigen::Index row = 0;
    if (m > 0 && t.col(n + 1).head(m).minCoeff(&row) < -tiny) {
      pivot(row, n);
      descend(m + 1);
      if (-t(m + 1, n + 1) > 1e-7) return status::infeasible;
    }
    for (Eigen::Index i = 0; i < m; ++i)  // drive the artificial variable out
      if (inside[static_cast<std::size_t>(i)] == n)
        for (Eigen::Index j = 0; j <= n; ++j)
          if (std::abs(t(i, j)) > tiny) {
            pivot(i, j);
            break;
          }
    return descend(m) ? status::optimal : status::unbounded;
  }
  double value() const { return -t(m, n + 1); }
  Eigen::VectorXd point() const {
    Eigen::VectorXd y = Eigen::VectorXd::Zero(n + 1 + m);
    for (Eigen::Index i = 0; i < m; ++i) y[inside[static_cast<std::size_t>(i)]] = t(i, n + 1);
    return y.head(n);
  }

 private:
  void pivot(Eigen::Index r, Eigen::Index c) {
    const Eigen::VectorXd column = t.col(c);
    t.row(r) /= column[r];
    for (Eigen::Index i = 0; i < t.rows(); ++i)
      if (i != r) t.row(i) -= column[i] * t.row(r);
    t.col(c) = -column / column[r];
    t(r, c) = 1 / column[r];
    std::swap(inside[static_cast<std::size_t>(r)], outside[static_cast<std::size_t>(c)]);
  }
  bool descend(Eigen::Index objective) {
    for (;;) {
      Eigen::Index c = -1, r = -1;
      const auto name = [](const std::vector<int>& names, Eigen::Index i) { return names[static_cast<std::size_t>(i)]; };
      for (Eigen::Index j = 0; j <= n; ++j)
        if (t(objective, j) < -tiny && (objective > m || name(outside, j) != n) && (c < 0 || name(outside, j) < name(outside, c)))
          c = j;
      if (c < 0) return true;
      for (Eigen::Index i = 0; i < m; ++i) {
        if (t(i, c) <= tiny) continue;
        const double apart = r < 0 ? -1 : t(i, n + 1) / t(i, c) - t(r, n + 1) / t(r, c);
        if (apart < 0 || (apart == 0 && name(inside, i) < name(inside, r))) r = i;
      }
      if (r < 0) return false;
      pivot(r, c);
    }
  }

  static constexpr double tiny = 1e-9;
  Eigen::Index n, m;
  Eigen::MatrixXd t;
  std::vector<int> inside, outside;  ///< basic variables (rows), nonbasic variables (columns)
};

class branch_and_bound {
 public:
  std::string name() const { return "branch and bound"; }

  remat::milp::solution solve(const remat::milp::model& m, const remat::milp::options& o) const {
    const auto start = std::chrono::steady_clock::now();
    struct node {
      double bound;
      Eigen::VectorXd lower, upper;
      bool operator<(const node& other) const { return bound > other.bound; }
    };
    std::priority_queue<node> open;
    open.push({-infinity, m.lower, m.upper});
    for (Eigen::Index j = 0; j < m.columns(); ++j)
      if (integer(m, j)) {
        auto root = open.top();
        open.pop();
        root.lower[j] = std::ceil(root.lower[j] - 1e-9), root.upper[j] = std::floor(root.upper[j] + 1e-9);
        open.push(root);
      }
    remat::milp::solution best;
    if (o.start) best.x = *o.start, best.objective = m.objective(*o.start);
    const auto end = [&](status s, double bound) {
      best.status = s, best.bound = bound;
      return best;
    };
    bool cut = false;
    while (!open.empty()) {
      const auto at = open.top();
      const bool any = best.x.size() > 0;
      if (any && best.objective - at.bound <= o.gap * std::abs(best.objective)) return end(status::optimal, at.bound);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      if (elapsed.count() >= o.seconds || (o.poll && o.poll(best.objective, at.bound)))
        return end(any ? status::feasible : status::limit, at.bound);
      open.pop();
      if ((at.lower.array() > at.upper.array()).any()) continue;
      const auto [outcome, x] = relax(m, at.lower, at.upper);
      if (outcome == status::unbounded) return end(outcome, -infinity);
      if (outcome == status::infeasible) continue;
      const double bound = std::max(at.bound, m.objective(x));
      if (bound >= std::min(best.objective, o.cutoff) - 1e-9 * std::max(1.0, std::abs(bound))) {
        cut = cut || bound < best.objective;
        continue;
      }
      Eigen::Index split = -1;
      double most = 1e-7;
      for (Eigen::Index j = 0; j < m.columns(); ++j)
        if (const double off = std::abs(x[j] - std::round(x[j])); integer(m, j) && off > most) split = j, most = off;
      if (split < 0) {
        best.x = x, best.objective = m.objective(x);
        continue;
      }
      node down{bound, at.lower, at.upper}, up = down;
      down.upper[split] = std::floor(x[split]), up.lower[split] = std::ceil(x[split]);
      open.push(down), open.push(up);
    }
    if (best.x.size() > 0) return end(status::optimal, best.objective);
    return end(cut ? status::cutoff : status::infeasible, infinity);
  }

 private:
  static bool integer(const remat::milp::model& m, Eigen::Index j) { return m.integer[static_cast<std::size_t>(j)]; }

  /// Solves the linear relaxation, with x = origin + change y and y >= 0.
  static std::pair<status, Eigen::VectorXd> relax(const remat::milp::model& m, const Eigen::VectorXd& lower,
                                                  const Eigen::VectorXd& upper) {
    const auto n = m.columns();
    Eigen::VectorXd origin = Eigen::VectorXd::Zero(n);
    Eigen::MatrixXd change = Eigen::MatrixXd::Zero(n, 2 * n);  // second half: negative parts of columns without bounds
    for (Eigen::Index j = 0; j < n; ++j) {
      const bool has_lower = lower[j] > -infinity, has_upper = upper[j] < infinity;
      origin[j] = has_lower ? lower[j] : has_upper ? upper[j] : 0;
      change(j, j) = has_lower || !has_upper ? 1 : -1;
      if (!has_lower && !has_upper) change(j, n + j) = -1;
    }
    std::vector<std::pair<Eigen::RowVectorXd, double>> rows;
    const Eigen::MatrixXd a = m.matrix * change;
    const Eigen::VectorXd at_origin = m.matrix * origin;
    const auto at_most = [&](const Eigen::RowVectorXd& row, double most) {
      const double scale = row.size() > 0 ? std::max(1e-12, row.cwiseAbs().maxCoeff()) : 1;
      rows.emplace_back(row / scale, most / scale);
    };
    for (Eigen::Index i = 0; i < m.rows(); ++i) {
      if (m.row_upper[i] < infinity) at_most(a.row(i), m.row_upper[i] - at_origin[i]);
      if (m.row_lower[i] > -infinity) at_most(-a.row(i), at_origin[i] - m.row_lower[i]);
    }
    for (Eigen::Index j = 0; j < n; ++j)
      if (lower[j] > -infinity && upper[j] < infinity) at_most(change.row(j), upper[j] - lower[j]);
    Eigen::MatrixXd left(static_cast<Eigen::Index>(rows.size()), 2 * n);
    Eigen::VectorXd right(left.rows());
    for (Eigen::Index i = 0; i < left.rows(); ++i)
      left.row(i) = rows[static_cast<std::size_t>(i)].first, right[i] = rows[static_cast<std::size_t>(i)].second;
    simplex s(left, right, change.transpose() * m.cost);
    const auto outcome = s.solve();
    return {outcome, origin + change * s.point()};
  }
};

int main() {
  const auto failures = remat::testing::check_backend(branch_and_bound{});
  for (const auto& failure : failures) std::cerr << failure << "\n";

  const auto p = remat::testing::unit_training_chain(5);
  const auto r = remat::solve(p, 5, remat::checkmate<branch_and_bound>{}, {.seconds = 30});
  std::cout << r.solver << ": " << remat::to_string(r.status) << ", " << r.seconds << " s, " << r.recomputed
            << " recomputed, gap among " << r.scope << " " << r.scope_gap() << "\n";
  return failures.empty() && r.found() ? 0 : 1;
}
