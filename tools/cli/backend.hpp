// SPDX-License-Identifier: Apache-2.0
/// @file
/// The MILP libraries that this program was built with, chosen at run time.
#pragma once

#include <functional>
#include <string>

#include <remat/core/error.hpp>
#include <remat/milp/backend.hpp>
#ifdef REMAT_WITH_HIGHS
#include <remat/highs/backend.hpp>
#endif
#ifdef REMAT_WITH_GLPK
#include <remat/glpk/backend.hpp>
#endif

namespace cli {

/// Any MILP backend, by value.
class any_backend {
 public:
  template <remat::milp::backend B>
  explicit any_backend(B b)
      : name_(b.name()), solve_([b](const remat::milp::model& m, const remat::milp::options& o) { return b.solve(m, o); }) {
    if constexpr (requires { b.version() + b.library(); }) about_ = b.version() + ", " + b.library();
  }

  std::string name() const { return name_; }
  /// Its version and where it is, if it tells.
  const std::string& about() const { return about_; }
  remat::milp::solution solve(const remat::milp::model& m, const remat::milp::options& o) const { return solve_(m, o); }

 private:
  std::string name_, about_;
  std::function<remat::milp::solution(const remat::milp::model&, const remat::milp::options&)> solve_;
};

/// @param name highs, glpk, or auto for the first of them that is there
/// @throws remat::not_available saying what to install
inline any_backend make_backend(const std::string& name) {
#ifdef REMAT_WITH_HIGHS
  if (name == "highs" || (name == "auto" && remat::highs::backend::available())) return any_backend(remat::highs::backend());
#endif
#ifdef REMAT_WITH_GLPK
  if (name == "glpk" || name == "auto") return any_backend(remat::glpk::backend());
#endif
  throw remat::not_available(
      (name == "auto" ? "no MILP library is" : name + " is not") +
      std::string(" available to this build of remat; for HiGHS: pip install highspy; for GLPK: install libglpk-dev "
                  "and build again"));
}

/// Whether `make_backend("auto")` gives one.
inline bool any_available() {
  try {
    make_backend("auto");
    return true;
  } catch (const remat::not_available&) {
    return false;
  }
}

}  // namespace cli
