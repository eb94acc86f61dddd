// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exceptions of the library. Misuse throws one of them, with a message that names the culprit. The outcome of a search
/// (infeasible, time limit) is a `remat::status`, never an exception.
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

/// A document is truncated, or has a wrong format, version or type; `what()` names the member.
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

/// A problem is too large for a method; `what()` names the method, the operations and the limit. The method throws before it
/// allocates memory.
struct too_large : error {
  using error::error;
};

/// A requested component is missing, such as a MILP library; `what()` says what to install.
struct not_available : error {
  using error::error;
};

/// A component broke its contract, such as a solver that returned a schedule over the budget. A bug, not misuse.
struct broken_contract : error {
  using error::error;
};

}  // namespace remat
