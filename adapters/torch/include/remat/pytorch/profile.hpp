// SPDX-License-Identifier: Apache-2.0
/// @file
/// Costs of the nodes of a program: seconds, workspace and allocations.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <remat/graph/roofline.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// An allocation of a node.
struct scripted_block {
  bytes_t bytes = 0;
  int born = 0;    ///< position of the birth among all births and deaths of the node
  int freed = -1;  ///< position of the death among all births and deaths; -1: alive at the end
  int deaths = 0;  ///< number of deaths before the birth
  index_t result =
      none;  ///< position in `node::outputs` of the output with this storage; none: temporary, or kept by the operator
};

/// The allocations of one run of a node.
struct allocation_script {
  std::vector<scripted_block> blocks;  ///< in the order of their births
  int events = 0;                      ///< number of births and deaths
  bool stable = true;                  ///< two runs made the same allocations
};

/// Costs of a node.
struct node_profile {
  double seconds = 0;               ///< shortest time of several runs, s
  bytes_t workspace = 0;            ///< peak of the allocations on the thread of the calls, less the outputs
  bytes_t other_threads_bytes = 0;  ///< peak of the allocations on other threads, which the scripts leave out
  allocation_script first;          ///< allocations of the first run
  allocation_script again;          ///< allocations of a recomputation, which leaves out `call::first_run_only`
  bool undisturbed = true;          ///< no other load disturbed the measurement: worth keeping in a file
};

/// How to profile.
struct profile_options {
  /// File that keeps the measurements; empty: none. A file that cannot be read or written is not an error.
  std::filesystem::path cache = default_cache();
  double seconds = 5;  ///< time limit for all repetitions, s; each node runs seven times in any case

  /// `$XDG_CACHE_HOME/remat/torch-profile.json`, else `~/.cache/remat/torch-profile.json`, else empty.
  static std::filesystem::path default_cache();
};

/// Result of `profile`.
struct program_profile {
  std::vector<std::shared_ptr<const node_profile>> nodes;  ///< per node; equal nodes share a profile
  std::size_t distinct = 0;                                ///< number of distinct nodes
  std::size_t measured = 0;                                ///< distinct nodes measured now; the others were known
  double elapsed = 0;                                      ///< time taken, s

  std::vector<double> seconds() const;
  std::vector<bytes_t> workspace() const;
};

/// A program and the costs of its nodes.
struct profiled_program {
  const program* step;
  const program_profile* costs;
};

/// Measures the nodes of a program on scratch operands.
///
/// Nodes with equal operators, attributes, types, shapes, strides and aliasing are measured once per process. A file keeps the
/// profiles per version of PyTorch, processor and number of threads. The state of the generator is as before afterwards. Views
/// cost nothing, as they are no calls.
///
/// @param step the program
/// @param o    cache and time
/// @param like programs with known costs. A node that differs from one of their nodes in sizes and numbers only is not measured.
///             Its time is that of the node next in size, scaled by the bytes that a node touches. Its allocations are those of
///             at most two runs
/// @return costs per node
/// @throws c10::Error if an operator refuses scratch operands (zeros for integers, numbers in [0, 1) for others)
/// Complexity: at least seven runs per distinct node; at most two runs per node that is like a known node.
program_profile profile(const program& step, const profile_options& o = {}, const std::vector<profiled_program>& like = {});

/// Roofline of a device per type of the arithmetic. The device need not exist on this machine.
using device_rates = std::function<roofline(at::ScalarType)>;

/// Estimates the costs of a program from a roofline, for a device that is absent, or for tensors without memory.
///
/// The time of a call is `roofline::seconds` of its arithmetic and of the bytes of its tensors. Products of matrices,
/// convolutions and attention count two operations per multiplication, other operators one per element. Operators are assumed to
/// need no workspace, and there are no allocation scripts. Plans with these costs predict a step; no executor may run them.
///
/// @param step   the program
/// @param device peaks of the device
/// @return costs per node
/// @throws bad_option if a peak is out of range
/// Complexity: linear in the size of the program.
/// Reference: see `roofline`.
///
/// @code
/// auto costs = remat::pytorch::estimate(*step, [](at::ScalarType t) {
///   return remat::roofline{.flops_per_second = t == at::kFloat ? 67e12 : 990e12, .bytes_per_second = 3.3e12};
/// });
/// @endcode
program_profile estimate(const program& step, const device_rates& device);

/// Clears the profiles of this process, and the geometry of results that captures keep. Files stay.
void forget_profiles();

}  // namespace remat::pytorch
