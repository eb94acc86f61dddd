// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/offmate.hpp>
#include <remat/solver/proving.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_offmate(const std::string& backend, option_reader& read) {
  offmate<>::options o;
  read("scan", o.scan, 1, 10'000, "virtual budgets that recomputation is planned for");
  read("starts", o.starts, 1, 10'000, "orders that are worked on");
  read("effort", o.effort, 0, most_rounds, "effort of the search around an order");
  read("idle", o.idle, 0, 10'000, "searches without an improvement that end a thread's work");
  read("rate_share", o.rate_share, 0.01, 1, "share of its rate that each link is planned with");
  const offmate<> method({}, o);
  if (without_milp(backend)) return method;
  return proving<offmate<>, milp::any_backend>(method, make_backend(backend));
}

}  // namespace remat::registry
