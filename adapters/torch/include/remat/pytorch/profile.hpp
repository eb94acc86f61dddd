// SPDX-License-Identifier: Apache-2.0
/// @file
/// What each node of a program costs: seconds, workspace, and the allocations it makes.
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

/// An allocation that a node makes, in the order in which it makes them.
struct scripted_block {
  bytes_t bytes = 0;
  int born = 0;    ///< position among the births and deaths of the node
  int freed = -1;  ///< the same, or -1: still there at the end
  int deaths = 0;  ///< deaths before its birth
  index_t result =
      none;  ///< it is the storage of this output: position in `node::outputs`; none: temporary, or kept by the operator
};

/// The allocations of one run of a node.
struct allocation_script {
  std::vector<scripted_block> blocks;
  int events = 0;      ///< births and deaths
  bool stable = true;  ///< two runs made the same
};

/// Costs of a node.
struct node_profile {
  double seconds = 0;       ///< shortest of some runs
  bytes_t workspace = 0;    ///< peak of what the calls allocate on their thread, less the outputs
  bytes_t elsewhere = 0;    ///< peak of what other threads allocate for them: outside the scripts
  allocation_script first;  ///< of the first run
  allocation_script again;  ///< of a recomputation, which leaves out `call::first_run_only`
  bool undisturbed = true;  ///< the machine had time for it: worth to be kept in a file
};

/// How to profile.
struct profile_options {
  /// File that keeps what was measured; empty: none. A file that cannot be read or written is not an error.
  std::filesystem::path cache = default_cache();
  double seconds = 5;  ///< for repetitions, in total, s; each node runs seven times in any case

  /// `$XDG_CACHE_HOME/remat/torch-profile.json`, else `~/.cache/remat/torch-profile.json`, else none.
  static std::filesystem::path default_cache();
};

/// What `profile` found.
struct program_profile {
  std::vector<std::shared_ptr<const node_profile>> nodes;  ///< per node; equal nodes share
  std::size_t distinct = 0;                                ///< different nodes
  std::size_t measured = 0;                                ///< of these, measured now; the others were known
  double elapsed = 0;                                      ///< s

  std::vector<double> seconds() const;
  std::vector<bytes_t> workspace() const;
};

/// A program whose costs are known.
struct profiled_program {
  const program* step;
  const program_profile* costs;
};

/// Measures the nodes of a program on scratch operands.
///
/// Nodes of equal operators, attributes, types, shapes, strides and aliasing are measured once in a process and kept in a file
/// per version of PyTorch, processor and number of threads. The state of the generator is as before. Views cost nothing, as they
/// are no calls.
///
/// @param step the program
/// @param o    cache and time
/// @param like nodes that are like one of these, but for sizes and numbers, are not measured: times are those of the one that is
///             next in size, scaled by the bytes that a node touches, and allocations are those of two runs
/// @return costs per node
/// @throws c10::Error if an operator refuses scratch operands (zeros for integers, numbers in [0, 1) for others)
/// Complexity: at least seven runs per distinct node, at most two per one that is like another.
program_profile profile(const program& step, const profile_options& o = {}, const std::vector<profiled_program>& like = {});

/// A device that need not be there, by the type that it computes in.
using device_rates = std::function<roofline(at::ScalarType)>;

/// Costs of a program from a roofline instead of measurements, for a device that is not there, or tensors that have no memory.
///
/// A call takes what `roofline::seconds` says of the bytes of its tensors and its arithmetic: two operations per multiplication
/// in products of matrices, convolutions and attention, one per element elsewhere. Operators are taken to need no workspace, and
/// there are no allocation scripts: plans tell what a step would take, and no executor may run them.
///
/// @param step   the program
/// @param device its peaks
/// @return costs per node
/// @throws bad_option for peaks out of range
/// Complexity: linear in the size of the program.
/// Reference: see `roofline`.
///
/// @code
/// auto costs = remat::pytorch::estimate(*step, [](at::ScalarType t) {
///   return remat::roofline{.flops_per_second = t == at::kFloat ? 67e12 : 990e12, .bytes_per_second = 3.3e12};
/// });
/// @endcode
program_profile estimate(const program& step, const device_rates& device);

/// Forgets what this process has measured, and where results of operators lie, which captures remember. Files stay.
void forget_profiles();

}  // namespace remat::pytorch
