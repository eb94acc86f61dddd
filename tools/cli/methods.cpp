// SPDX-License-Identifier: Apache-2.0
#include "methods.hpp"

#include <array>

#include <remat/solver/automatic.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/checkmate_rounding.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/hiremate.hpp>
#include <remat/solver/improved.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/moments.hpp>
#include <remat/staged/published_form.hpp>
#include <remat/solver/recompute_all_blocks.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/rockmate.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/solver/twremat.hpp>

#include "backend.hpp"

namespace cli {

namespace {

using checkmate = remat::checkmate<any_backend>;

checkmate fast_checkmate(const std::string& backend) { return checkmate(checkmate::options::fast(), make_backend(backend)); }

/// Only what was asked for by name must be there.
bool no_milp(const std::string& backend) { return backend == "auto" && !any_available(); }

using name = const std::string&;
constexpr std::array table = std::to_array<method>({
    {"automatic", "what suits the graph, until the bound is met or time is up",
     [](name b) { return no_milp(b) ? any_solver(remat::automatic<>()) : remat::automatic<any_backend>({}, make_backend(b)); }},
    {"hiremate", "any graph in parts, and parts of parts; by checkmate-fast, or by min_cut where there is no MILP library",
     [](name b) { return no_milp(b) ? any_solver(remat::hiremate<>()) : remat::hiremate<checkmate>(fast_checkmate(b)); }},
    {"rockmate", "the same for networks that are chains of blocks, joined by dynamic programming",
     [](name b) { return no_milp(b) ? any_solver(remat::rockmate<>()) : remat::rockmate<checkmate>(fast_checkmate(b)); }},
    {"min_cut", "any graph, by minimum cuts and evictions, with a lower bound",
     [](name) -> any_solver { return remat::min_cut(); }},
    {"improved", "min_cut, and then a search of neighbourhoods until the time is up",
     [](name) -> any_solver { return remat::improved<remat::min_cut>(); }},
    {"moments", "a MILP over several moments at once: a strong bound, and schedules from it",
     [](name b) -> any_solver { return remat::moments<any_backend>({}, make_backend(b)); }},
    {"checkmate", "optimal staged schedules by a MILP", [](name b) -> any_solver { return checkmate({}, make_backend(b)); }},
    {"checkmate-fast", "the same with the forward in one stage and the backward computed once",
     [](name b) -> any_solver { return fast_checkmate(b); }},
    {"checkmate-balanced", "the same with the forward in one stage, started from checkmate-fast",
     [](name b) -> any_solver { return checkmate(checkmate::options::balanced(), make_backend(b)); }},
    {"checkmate-rounding", "the linear relaxation of checkmate, rounded and repaired",
     [](name b) -> any_solver { return remat::checkmate_rounding<any_backend>({}, make_backend(b)); }},
    {"checkmate-published", "checkmate in the published form, for comparison",
     [](name b) -> any_solver { return remat::checkmate<any_backend, remat::published_form>({}, make_backend(b)); }},
    {"rotor", "the fastest persistent schedule of a chain of blocks", [](name) -> any_solver { return remat::rotor(); }},
    {"revolve", "binomial checkpointing of a chain of blocks", [](name) -> any_solver { return remat::revolve(); }},
    {"twremat", "separators of a tree decomposition", [](name) -> any_solver { return remat::twremat(); }},
    {"chen", "segments; values inside them are computed again", [](name) -> any_solver { return remat::chen(); }},
    {"recompute_all_blocks", "each block of the forward computed again before its backward",
     [](name) -> any_solver { return remat::recompute_all_blocks(); }},
    {"store_all", "everything computed once", [](name) -> any_solver { return remat::store_all(); }},
});

}  // namespace

std::span<const method> methods() { return table; }

const method& find_method(std::string_view name) {
  std::string known;
  for (const auto& m : table) {
    if (m.name == name) return m;
    known += (known.empty() ? "" : ", ") + std::string(m.name);
  }
  throw remat::bad_option("--solver: no solver \"" + std::string(name) + "\"; there are " + known);
}

std::vector<backend_state> backends() {
  std::vector<backend_state> all;
  for (const char* name : {"highs", "glpk"}) try {
      all.push_back({name, true, make_backend(name).about()});
    } catch (const remat::not_available& why) {
      const std::string what = why.what();
      all.push_back({name, false, what.substr(0, what.find('\n'))});
    }
  return all;
}

}  // namespace cli
