// SPDX-License-Identifier: Apache-2.0
/// @file
/// The library in one include, with the standard library only: problems, graphs, evaluation, drawing, and every solver by name
/// (`remat::registry::find("rockmate")`). The solvers by name are compiled once; programs that use them link `remat_registry`
/// (`remat::solvers` in CMake, `remat-solvers` in pkg-config and Meson). Each solver is also a class in a header of `solver/`,
/// with nothing to link; `solvers.hpp` includes them all.
/// @code
/// #include <remat/remat.hpp>
///
/// const auto method = remat::registry::find("min_cut").make("auto");
/// const auto r = remat::solve(p, budget, method, {.seconds = 10});
/// @endcode
#pragma once

#include <remat/core/any_solver.hpp>
#include <remat/core/error.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/observers.hpp>
#include <remat/core/pareto_curve.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/graph/cost_model.hpp>
#include <remat/graph/dag.hpp>
#include <remat/graph/freeze.hpp>
#include <remat/graph/roofline.hpp>
#include <remat/graph/solve.hpp>
#include <remat/graph/table.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/curve.hpp>
#include <remat/io/timeline.hpp>
#include <remat/registry/registry.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/version.hpp>
