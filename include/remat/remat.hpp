// SPDX-License-Identifier: Apache-2.0
/// @file
/// The core in one include: standard library only, with the solvers that need no more. Boost graphs (`graph/boost.hpp`),
/// documents (`io/json.hpp`), MILPs (`milp/`) and the other solvers are included on their own.
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
#include <remat/solver/chen.hpp>
#include <remat/solver/recompute_all_blocks.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/solver/twremat.hpp>
