// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solvers of the command-line program, in one table.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>

#include <remat/core/solve.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/rockmate.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/solver/store_all.hpp>

#include "backend.hpp"

namespace cli {

/// What a solver is run on.
struct request {
  const remat::problem& problem;
  remat::bytes_t budget;
  remat::limits limits;
  std::string backend;  ///< highs, glpk or auto
  std::function<remat::control(const remat::progress&)> observer;

  template <remat::solver S>
  remat::result solve_with(const S& s) const {
    return remat::solve(problem, budget, s, limits, observer);
  }
};

/// A solver by name.
struct method {
  std::string_view name;
  std::string_view summary;
  remat::result (*run)(const request&);
};

using checkmate = remat::checkmate<any_backend>;

inline constexpr std::array<method, 7> methods = {{
    {"rockmate", "networks cut into a chain of blocks; blocks by checkmate-fast, or by min_cut where there is no MILP library",
     [](const request& r) {
       if (r.backend == "auto" && !any_available()) return r.solve_with(remat::rockmate<>());
       return r.solve_with(remat::rockmate<checkmate>(checkmate(checkmate::options::fast(), make_backend(r.backend))));
     }},
    {"min_cut", "any graph, by minimum cuts and evictions, with a lower bound",
     [](const request& r) { return r.solve_with(remat::min_cut()); }},
    {"checkmate", "optimal staged schedules by a MILP",
     [](const request& r) { return r.solve_with(checkmate({}, make_backend(r.backend))); }},
    {"checkmate-fast", "the same with the forward in one stage and the backward computed once",
     [](const request& r) { return r.solve_with(checkmate(checkmate::options::fast(), make_backend(r.backend))); }},
    {"rotor", "the fastest persistent schedule of a chain of blocks",
     [](const request& r) { return r.solve_with(remat::rotor()); }},
    {"chen", "segments; values inside them are computed again", [](const request& r) { return r.solve_with(remat::chen()); }},
    {"store_all", "everything computed once", [](const request& r) { return r.solve_with(remat::store_all()); }},
}};

/// @throws remat::bad_option naming what is there
inline const method& find_method(std::string_view name) {
  std::string known;
  for (const auto& m : methods) {
    if (m.name == name) return m;
    known += (known.empty() ? "" : ", ") + std::string(m.name);
  }
  throw remat::bad_option("--solver: no solver \"" + std::string(name) + "\"; there are " + known);
}

}  // namespace cli
