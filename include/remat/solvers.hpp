// SPDX-License-Identifier: Apache-2.0
/// @file
/// Every solver as a class, to be composed and given options. Needs Boost.Graph and Eigen, and takes a compiler several seconds.
/// `remat.hpp` has the same solvers by name, compiled once.
#pragma once

#include <remat/solver/automatic.hpp>
#include <remat/solver/automatic_milp.hpp>
#include <remat/solver/cheap_orders.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/checkmate_rounding.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/hiremate.hpp>
#include <remat/solver/improved.hpp>
#include <remat/solver/lower_peak.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/moments.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/solver/order_in_phases.hpp>
#include <remat/solver/poet.hpp>
#include <remat/solver/pofo.hpp>
#include <remat/solver/prove_bound.hpp>
#include <remat/solver/proving.hpp>
#include <remat/solver/recompute_all_blocks.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/rockmate.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/solver/twremat.hpp>
