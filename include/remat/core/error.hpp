// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exceptions of the library. Misuse throws one of these and names the culprit; outcomes of a search (infeasible,
/// time limit) are never exceptions but a `remat::status`.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace remat {

/// Base of every exception thrown on misuse.
struct error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A graph, cost model or document does not describe a valid problem. `what()` names the member and the index.
struct bad_problem : error {
  using error::error;
};

/// The graph has a cycle; `what()` lists its vertices in order.
struct not_a_dag : bad_problem {
  using bad_problem::bad_problem;
};

/// A document is not what it should be (truncated, wrong format or version, wrong type); `what()` names the member.
struct bad_document : error {
  using error::error;
};

/// A schedule breaks a rule of the execution model at `step`.
struct bad_schedule : error {
  bad_schedule(std::size_t at, const std::string& why) : error(why), step(at) {}
  std::size_t step;  ///< index of the first wrong step; the number of steps if the end state is wrong
};

/// An option (budget, limit, solver parameter) is out of its range; `what()` names it.
struct bad_option : error {
  using error::error;
};

/// A problem is too large for a method; `what()` names the method, the operations and the limit. Thrown before memory is taken.
struct too_large : error {
  using error::error;
};

/// A component that was asked for is not there (no MILP library, say); `what()` says what to install.
struct not_available : error {
  using error::error;
};

/// A component broke its contract, such as a solver that returned a schedule over the budget. A bug, not misuse.
struct broken_contract : error {
  using error::error;
};

}  // namespace remat
