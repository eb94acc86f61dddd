// SPDX-License-Identifier: Apache-2.0
/// @file
/// MILP backend on GLPK 5. GLPK is under the GPL, version 3, and so is a program that links it; see NOTICE.md.
#pragma once

#include <glpk.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csetjmp>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <remat/milp/backend.hpp>
#include <remat/milp/supervised.hpp>

namespace remat::glpk {

/// Solves MILPs with GLPK: dual simplex at the root, then branch and cut. Runs on one thread; `threads` and `seed` are not used.
class backend {
 public:
  std::string name() const { return "glpk"; }

  /// Solves `m`. Each call runs on a thread of its own, with a GLPK environment of its own that is freed at the end. So GLPK
  /// objects of the caller are not touched, and an internal error of GLPK gives `milp::status::failed` instead of `abort`. Some
  /// steps of GLPK check no limit for seconds: see `milp::supervised`.
  /// @param m a valid model
  /// @param o limits, cutoff, start
  /// @return status, solution and bound; `milp::status::failed` if the system has no thread left
  /// @throws any exception of `o.poll`
  milp::solution solve(const milp::model& m, const milp::options& o) const {
    return milp::supervise(std::make_shared<job>(m, o));
  }

 private:
  /// One call. Everything with a destructor is a member, because an error of GLPK jumps out of `search` (`longjmp`).
  class job : public milp::supervised {
   public:
    job(const milp::model& m, const milp::options& o) : supervised(m, o), index(m.rows() + 1), value(m.rows() + 1) {
      if (!o.start) return;
      point.assign(1, 0);  // GLPK counts from 1
      point.insert(point.end(), o.start->data(), o.start->data() + o.start->size());
    }

    milp::solution work() {
      if (setjmp(on_error) == 0) {
        glp_error_hook([](void* at) { std::longjmp(static_cast<job*>(at)->on_error, 1); }, this);
        search();
      } else {
        answer = {};
      }
      glp_free_env();
      return std::move(answer);
    }

   private:
    std::vector<int> index;            // rows of a column, from index 1 on
    std::vector<double> value, point;  // coefficients of the column; the start; both from index 1 on
    std::jmp_buf on_error;
    milp::solution answer = {};
    glp_prob* problem = nullptr;
    clock::time_point began = clock::now();
    double bound = -milp::infinity;
    bool cut_off = false;

    double seconds_left() const { return options_.seconds - std::chrono::duration<double>(clock::now() - began).count(); }
    int milliseconds_left() const {
      return static_cast<int>(std::clamp(1000 * seconds_left(), 0.0, static_cast<double>(std::numeric_limits<int>::max())));
    }
    static int bounds_type(double low, double up) {
      if (low == up) return GLP_FX;
      if (low == -milp::infinity) return up == milp::infinity ? GLP_FR : GLP_UP;
      return up == milp::infinity ? GLP_LO : GLP_DB;
    }

    /// Hands the model to GLPK.
    /// @return false if an integer column has no integer within its bounds
    bool load() {
      problem = glp_create_prob();
      glp_set_obj_dir(problem, GLP_MIN);
      glp_set_obj_coef(problem, 0, model_.offset);
      glp_add_cols(problem, static_cast<int>(model_.columns()));
      for (int j = 0; j < model_.columns(); ++j) {
        double low = model_.lower[j], up = model_.upper[j];
        if (model_.integer[static_cast<std::size_t>(j)]) {
          low = std::ceil(low - 1e-9), up = std::floor(up + 1e-9);
          if (low > up) return false;
          glp_set_col_kind(problem, j + 1, GLP_IV);
        }
        glp_set_col_bnds(problem, j + 1, bounds_type(low, up), low, up);
        glp_set_obj_coef(problem, j + 1, model_.cost[j]);
      }
      if (model_.rows() > 0) glp_add_rows(problem, static_cast<int>(model_.rows()));
      for (int i = 0; i < model_.rows(); ++i)
        glp_set_row_bnds(problem, i + 1, bounds_type(model_.row_lower[i], model_.row_upper[i]), model_.row_lower[i],
                         model_.row_upper[i]);
      for (int j = 0; j < model_.columns(); ++j) {
        int count = 0;
        for (Eigen::SparseMatrix<double>::InnerIterator a(model_.matrix, j); a; ++a)
          if (a.value() != 0) index[++count] = static_cast<int>(a.row()) + 1, value[count] = a.value();
        glp_set_mat_col(problem, j + 1, count, index.data(), value.data());
      }
      return true;
    }

    void search() {
      glp_term_out(GLP_OFF);
      if (!load()) {
        answer.status = milp::status::infeasible;
        return;
      }
      const auto root = relax();
      if (root != GLP_OPT) {
        answer.status = root == GLP_NOFEAS  ? (options_.cutoff < milp::infinity ? milp::status::cutoff : milp::status::infeasible)
                        : root == GLP_UNBND ? milp::status::unbounded
                        : root == GLP_UNDEF ? milp::status::limit
                                            : milp::status::failed;
        return;
      }
      bound = glp_get_obj_val(problem);
      if (bound >= options_.cutoff) {
        answer.status = milp::status::cutoff;
        return;
      }
      glp_iocp parameters;
      glp_init_iocp(&parameters);
      parameters.msg_lev = GLP_MSG_OFF;
      parameters.br_tech = GLP_BR_DTH;
      parameters.bt_tech = GLP_BT_BLB;
      parameters.mir_cuts = parameters.cov_cuts = GLP_ON;  // at the root, where knapsack rows make them pay
      parameters.mip_gap = options_.gap;
      parameters.tm_lim = milliseconds_left();
      parameters.cb_func = [](glp_tree* tree, void* at) { static_cast<job*>(at)->watch(tree); };
      parameters.cb_info = this;
      const int code = glp_intopt(problem, &parameters);
      finish(code);
    }

    /// Solves the LP relaxation in slices of time, and checks between them whether to stop.
    /// @return GLP_OPT, GLP_NOFEAS, GLP_UNBND; GLP_UNDEF at a limit; GLP_INFEAS for numerical trouble
    int relax() {
      glp_smcp parameters;
      glp_init_smcp(&parameters);
      parameters.msg_lev = GLP_MSG_OFF;
      parameters.meth = GLP_DUALP;
      if (model_.matrix.nonZeros() < 500'000) {  // neither call checks a limit, and both take long for more
        glp_scale_prob(problem, GLP_SF_AUTO);
        glp_adv_basis(problem, 0);
      }
      for (;;) {
        parameters.tm_lim = std::min(milliseconds_left(), 200);
        if (parameters.tm_lim == 0) return GLP_UNDEF;
        const int code = glp_simplex(problem, &parameters);
        if (stopping()) return GLP_UNDEF;
        if (code == GLP_ETMLIM) continue;
        const int ended = glp_get_status(problem);
        if (code == 0 && (ended == GLP_OPT || ended == GLP_NOFEAS || ended == GLP_UNBND)) return ended;
        if (parameters.meth == GLP_PRIMAL) return GLP_INFEAS;
        parameters.meth = GLP_PRIMAL;  // the dual simplex does not recognise an unbounded model
      }
    }

    void watch(glp_tree* tree) {
      if (const int node = glp_ios_best_node(tree)) bound = std::max(bound, glp_ios_node_bound(tree, node));
      if (glp_ios_reason(tree) == GLP_IHEUR && !point.empty()) {
        glp_ios_heur_sol(tree, point.data());
        point.clear();
      }
      if (glp_mip_status(problem) == GLP_FEAS && improves(glp_mip_obj_val(problem)))
        report_solution(glp_mip_obj_val(problem), found());
      cut_off = bound >= options_.cutoff;
      if (report_bound(bound) || cut_off) glp_ios_terminate(tree);
    }

    Eigen::VectorXd found() const {
      Eigen::VectorXd x(model_.columns());
      for (int j = 0; j < model_.columns(); ++j) x[j] = glp_mip_col_val(problem, j + 1);
      return x;
    }
    void finish(int code) {
      const int ended = glp_mip_status(problem);
      if (ended == GLP_OPT || ended == GLP_FEAS) {
        answer.x = found();
        const bool proven = (code == 0 && ended == GLP_OPT) || code == GLP_EMIPGAP;
        answer.status = proven ? milp::status::optimal : milp::status::feasible;
        answer.bound = code == 0 && ended == GLP_OPT ? glp_mip_obj_val(problem) : bound;
      } else if (cut_off) {
        answer.status = milp::status::cutoff;
      } else if (code == 0 && ended == GLP_NOFEAS) {
        answer.status = options_.cutoff < milp::infinity ? milp::status::cutoff : milp::status::infeasible;
      } else if (code == GLP_ETMLIM || code == GLP_ESTOP) {
        answer.status = milp::status::limit;
        answer.bound = bound;
      }
    }
  };
};

static_assert(milp::backend<backend>);

}  // namespace remat::glpk
