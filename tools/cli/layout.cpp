// SPDX-License-Identifier: Apache-2.0
// The command `layout`: gives every allocation an offset.
#include <iostream>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/io/allocation_csv.hpp>
#include <remat/layout/layout.hpp>

#include "output.hpp"

namespace cli {

int layout(const arguments& a) {
  const auto table = remat::read_allocations(a.allocations);
  const auto capacity = remat::parse_bytes(a.capacity);
  a.limits.validate();
  require_outputs(a);
  const remat::monitor m(a.limits);
  const remat::layout_options options{
      .alignment = 1, .tries = remat::layout_options::unlimited, .work = remat::layout_options::unlimited, .seed = a.limits.seed};
  const auto r = remat::fit_within(table.list, capacity, options, m);
  const auto refuse = [&](const std::string& proof) {
    std::cout << a.allocations << " does not fit in " << capacity << " bytes: " << proof << "\n";
    return infeasible;
  };
  switch (r.status) {
    case remat::fit_status::overload:
      return refuse("at instant " + std::to_string(r.load.when) + ", " + std::to_string(r.load.bytes) + " bytes are alive, " +
                    std::to_string(r.load.bytes - capacity) + " too many");
    case remat::fit_status::exhausted:
      return refuse("the search has tried all layouts (search exhausted)");
    case remat::fit_status::unknown:
      std::cout << "no layout found in " << remat::format_seconds(m.elapsed())
                << ", and no proof that there is none; the best needs " << r.best.arena << " of " << capacity << " bytes\n";
      return none_found;
    default:
      break;
  }
  if (!a.output.empty())
    remat::write_file(a.output, [&](std::ostream& out) { remat::write_allocations(out, table, r.best.offsets); });
  std::cout << "fits: " << table.list.size() << " allocations in " << r.best.arena << " of " << capacity << " bytes, load "
            << r.load.bytes << " bytes, " << remat::format_seconds(m.elapsed()) << "\n";
  return success;
}

}  // namespace cli
