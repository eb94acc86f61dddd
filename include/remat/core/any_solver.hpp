// SPDX-License-Identifier: Apache-2.0
/// @file
/// A solver that is chosen at run time.
#pragma once

#include <concepts>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/core/pareto_curve.hpp>
#include <remat/core/solver.hpp>

namespace remat {

/// Type erasure of a solver, with its `sweep`, `with_start`, `starts_warm` and `plans_tiers`. Copies share one solver, which is
/// const. Complexity: that of the solver, and one virtual call.
/// @code
/// std::map<std::string, remat::any_solver> methods = {{"none", remat::store_all()}, {"cuts", remat::min_cut()}};
/// const auto r = remat::solve(p, budget, methods.at(name), {.seconds = 10});
/// @endcode
class any_solver {
 public:
  /// @param s any other solver
  template <class S>
  requires(!std::same_as<std::remove_cvref_t<S>, any_solver> && solver<S>) any_solver(S s)  // NOLINT: every solver is one
      : self_(std::make_shared<const model<S>>(std::move(s))) {}

  std::string name() const { return self_->name(); }
  /// True if the solver plans for problems that are not plain.
  bool plans_tiers() const { return self_->plans_tiers(); }
  /// True if the solver is `warm_startable`.
  bool starts_warm() const { return self_->starts_warm(); }
  /// @throws what the solver throws
  result solve(const problem& p, bytes_t budget, monitor& m) const { return self_->solve(p, budget, m); }
  /// The results of the solver's `sweep`, or nothing if the solver shares no work between budgets.
  /// @throws what the solver throws
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const {
    return self_->sweep(p, budgets, m);
  }
  /// The same solver with `x` as its start; without a start if the solver is not `warm_startable`.
  any_solver with_start(const schedule& x) const {
    auto started = self_->with_start(x);
    return started ? any_solver(std::move(started)) : *this;
  }

 private:
  struct interface {
    interface() = default;
    interface(const interface&) = delete;
    interface& operator=(const interface&) = delete;
    virtual ~interface() = default;
    virtual std::string name() const = 0;
    virtual bool plans_tiers() const = 0;
    virtual bool starts_warm() const = 0;
    virtual result solve(const problem& p, bytes_t budget, monitor& m) const = 0;
    virtual std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const = 0;
    virtual std::shared_ptr<const interface> with_start(const schedule& x) const = 0;
  };
  template <class S>
  struct model final : interface {
    explicit model(S s) : solver(std::move(s)) {}
    std::string name() const override { return solver.name(); }
    bool plans_tiers() const override { return remat::plans_tiers(solver); }
    bool starts_warm() const override { return remat::starts_warm(solver); }
    result solve(const problem& p, bytes_t budget, monitor& m) const override { return solver.solve(p, budget, m); }
    std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const override {
      if constexpr (sweeping_solver<S>)
        return solver.sweep(p, budgets, m);
      else
        return {};
    }
    std::shared_ptr<const interface> with_start([[maybe_unused]] const schedule& x) const override {
      if constexpr (warm_startable<S>)
        return std::make_shared<const model>(solver.with_start(x));
      else
        return nullptr;
    }
    S solver;
  };

  explicit any_solver(std::shared_ptr<const interface> self) : self_(std::move(self)) {}

  std::shared_ptr<const interface> self_;
};

static_assert(sweeping_solver<any_solver> && warm_startable<any_solver>);

}  // namespace remat
