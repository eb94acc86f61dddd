// SPDX-License-Identifier: Apache-2.0
// The command `report`: writes a page about a plan.
#include <optional>

#include <remat/io/plan_document.hpp>
#include <remat/registry/registry.hpp>
#include <remat/report/html.hpp>
#include <remat/report/report.hpp>

#include "output.hpp"
#include "watcher.hpp"

namespace cli {

int report(const arguments& a) {
  std::optional<remat::problem_document> p;
  if (!a.problem.empty()) p = remat::read_problem_document(a.problem);
  const auto d = remat::read_plan(a.schedule, p);
  const auto solver = remat::registry::find(a.solver).make(a.backend);
  require_outputs(a);
  std::string page;
  try {
    watcher w;
    page = remat::html_report(remat::compare_plan(d, solver, a.limits, a.points, w.observer()));
  } catch (const remat::bad_schedule& why) {
    throw remat::bad_schedule(why.step, a.schedule + ": " + why.what());
  }
  remat::write_file(a.output, page);
  return success;
}

}  // namespace cli
