// SPDX-License-Identifier: Apache-2.0
#include <remat/registry/registry.hpp>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/solve.hpp>

#include "make.hpp"

namespace remat::registry {

namespace {

constexpr std::array table = std::to_array<method>({
    {"automatic", "what suits the graph, until the bound is met or time is up", make_automatic},
    {"hiremate", "any graph in parts, and parts of parts, by checkmate-fast, joined by the hierarchical ILP", make_hiremate},
    {"rockmate", "a chain of parts, by checkmate-fast, joined by dynamic programming", make_rockmate},
    {"min_cut", "any graph, by minimum cuts and evictions, with a lower bound", make_min_cut},
    {"offmate", "recomputation and copies to the host together, with a lower bound", make_offmate},
    {"offload_only", "copies to the host and no recomputation, with a lower bound", make_offload_only},
    {"pofo", "recomputation and copies to the host of a chain of blocks, by dynamic programming", make_pofo},
    {"improved", "min_cut, and then a search of neighbourhoods until it finds nothing better or the time is up", make_improved},
    {"moments", "a MILP over several moments at once: a strong bound, and schedules from it", make_moments},
    {"checkmate", "optimal staged schedules by a MILP (ours, with the optimum of the published one)", make_checkmate},
    {"checkmate-fast", "the same with the forward in one stage and the backward computed once", make_checkmate_fast},
    {"checkmate-balanced", "the same with the forward in one stage, started from checkmate-fast", make_checkmate_balanced},
    {"checkmate-rounding", "the linear relaxation of checkmate, rounded in two phases", make_checkmate_rounding},
    {"checkmate-repaired", "several relaxations of a restricted checkmate, rounded and repaired", make_checkmate_repaired},
    {"checkmate-published", "optimal staged schedules by the MILP as published", make_checkmate_published},
    {"poet", "recomputation and copies to the host of a small graph, by a MILP over stages", make_poet},
    {"rotor", "the fastest persistent schedule of a chain of blocks", make_rotor},
    {"revolve", "binomial checkpointing of a chain of blocks", make_revolve},
    {"twremat", "separators of a tree decomposition", make_twremat},
    {"chen", "segments; values inside them are computed again", make_chen},
    {"recompute_all_blocks", "each block of the forward computed again before its backward", make_recompute_all_blocks},
    {"store_all", "everything computed once", make_store_all},
});

/// A solver with the options given in its name.
class with_options {
 public:
  with_options(any_solver inner, std::string options) : inner_(std::move(inner)), options_(std::move(options)) {}
  std::string name() const { return inner_.name() + " (" + options_ + ")"; }
  bool plans_tiers() const { return inner_.plans_tiers(); }
  bool starts_warm() const { return inner_.starts_warm(); }
  result solve(const problem& p, bytes_t budget, monitor& m) const { return inner_.solve(p, budget, m); }
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const {
    return inner_.sweep(p, budgets, m);
  }
  with_options with_start(const schedule& x) const { return {inner_.with_start(x), options_}; }

 private:
  any_solver inner_;
  std::string options_;
};

}  // namespace

any_solver method::make(const std::string& backend, const option_values& given) const {
  option_reader read(name, given);
  auto made = maker(backend, read);
  read.refuse_unknown();
  if (given.empty()) return made;
  return with_options(std::move(made), to_string(given));
}

std::vector<option> method::options() const {
  const option_values none;
  option_reader read(name, none);
  try {
    maker("auto", read);
  } catch (const not_available&) {  // a maker reads its options before it makes a backend
  }
  return read.known();
}

std::string to_string(const option_values& given) {
  std::string text;
  for (const auto& [name, value] : given) text += (text.empty() ? "" : ", ") + name + "=" + value;
  return text;
}

std::span<const method> methods() { return table; }

const method& find(std::string_view name) {
  std::string known;
  for (const auto& m : table) {
    if (m.name == name) return m;
    known += (known.empty() ? "" : ", ") + std::string(m.name);
  }
  throw bad_option("no solver \"" + std::string(name) + "\"; there are " + known);
}

}  // namespace remat::registry
