// SPDX-License-Identifier: Apache-2.0
// The commands that describe: check, info, list.
#include <algorithm>
#include <iostream>
#include <optional>
#include <string>

#include <remat/core/solve.hpp>
#include <remat/io/json.hpp>
#include <remat/registry/registry.hpp>

#include "output.hpp"
#include "printable.hpp"

namespace cli {

int check(const arguments& a) {
  const auto document = remat::read_problem_document(a.problem);
  const auto& p = document.problem;
  require_outputs(a);
  auto report = [&](const json& out, const std::string& text) {
    std::cout << (a.as_json ? out.dump(2) : text) << "\n";
    return out["valid"] == true && out.value("within_budget", true) ? success : not_valid;
  };
  remat::schedule s;
  remat::evaluation e;
  try {
    s = remat::read_schedule(a.schedule, p).result.schedule;
    e = remat::evaluate(p, s);
  } catch (const remat::bad_schedule& why) {
    std::cerr << "remat: invalid: " << printable(why.what()) << "\n";
    return report({{"valid", false}, {"step", why.step}, {"error", why.what()}}, "invalid");
  }
  json out = {{"valid", true}, {"peak", e.peak}, {"seconds", e.seconds}, {"recomputed", e.recomputed}};
  std::string text = "valid: peak " + exact(e.peak) + ", " + remat::format_seconds(e.seconds) + ", " +
                     std::to_string(e.recomputed) + " recomputed";
  if (!p.plain() || !s.plain())
    for (remat::tier_id t = 0; t < e.peaks.size(); ++t) {
      const auto& tier = p.tiers()[t];
      out["peaks"][tier.name] = e.peaks[t];
      text += "\n  " + tier.name + ": peak " + exact(e.peaks[t]) + (tier.budget ? " of " + exact(*tier.budget) : "");
    }
  std::optional<remat::bytes_t> budget;
  if (!a.budget.empty()) {
    budget = remat::parse_budget(a.budget, p);
    out["budget"] = *budget;
    out["within_budget"] = e.peak <= *budget;
    if (e.peak > *budget) {
      const auto first = std::find_if(e.memory.begin(), e.memory.end(), [&](auto bytes) { return bytes > *budget; });
      const bool at_start = p.source_bytes() > *budget || first == e.memory.end();
      if (!at_start) out["step"] = first - e.memory.begin();
      std::cerr << "remat: over budget by " << e.peak - *budget << " bytes, first "
                << (at_start ? "before the first step" : "at step " + std::to_string(first - e.memory.begin())) << "\n";
    }
  }
  const int status = report(out, text);
  draw(a, document, s, budget);
  return status;
}

int info(const arguments& a) {
  const auto p = remat::read_problem(a.problem);
  const auto least = remat::bounds_without_search(p);
  const auto store_all = remat::measure_store_all(p);
  std::size_t uses = 0, once = 0, held = 0;
  for (const auto& o : p.operations()) {
    uses += o.inputs.size();
    once += o.once;
  }
  for (const auto& v : p.values()) held += v.held;
  if (a.as_json) {
    json out = {{"name", p.name()},
                {"values", p.values().size()},
                {"held", held},
                {"operations", p.operations().size()},
                {"once", once},
                {"uses", uses},
                {"targets", p.targets().size()},
                {"copies", p.copies().has_value()},
                {"held_bytes", p.held_bytes()},
                {"source_bytes", p.source_bytes()},
                {"budget_bound", least.budget},
                {"bound", least.seconds},
                {"store_all_peak", store_all.peak},
                {"store_all_seconds", store_all.seconds}};
    if (!p.plain()) {
      for (const auto& t : p.tiers()) out["tiers"].push_back(t.name);
      out["links"] = p.links().size();
      out["cyclic"] = !p.next().empty();
    }
    std::cout << out.dump(2) << "\n";
    return success;
  }
  std::cout << p.name() << "\n"
            << "  values      " << p.values().size() << " (" << held << " held, " << p.targets().size() << " targets)\n"
            << "  operations  " << p.operations().size() << " (" << once << " once only, " << uses << " inputs)\n";
  if (p.plain()) {
    std::cout << "  copies      " << (p.copies() ? "allowed" : "not allowed") << "\n";
  } else {
    std::cout << "  tiers      ";
    for (const auto& t : p.tiers()) std::cout << " " << t.name << (t.budget ? " (" + remat::format_bytes(*t.budget) + ")" : "");
    std::cout << ", " << p.links().size() << " links\n";
    if (!p.next().empty()) std::cout << "  next step   " << p.next().size() << " targets are its sources\n";
  }
  std::cout << "  held        " << remat::format_bytes(p.held_bytes()) << "\n";
  std::cout << "  store-all   " << remat::format_bytes(store_all.peak) << ", " << remat::format_seconds(store_all.seconds)
            << "\n";
  std::cout << "  every budget is at least " << remat::format_bytes(least.budget) << " (" << least.budget << " bytes)\n";
  return success;
}

int list(const arguments& a) {
  if (a.as_json) {
    json out = {{"solvers", json::array()}, {"backends", json::array()}};
    for (const auto& m : remat::registry::methods()) {
      json options = json::array();
      for (const auto& o : m.options())
        options.push_back({{"name", o.name}, {"default", o.standard}, {"range", o.range}, {"summary", o.summary}});
      out["solvers"].push_back({{"name", m.name}, {"summary", m.summary}, {"options", std::move(options)}});
    }
    for (const auto& b : remat::registry::backends())
      out["backends"].push_back({{"name", b.name}, {"available", b.available}, {b.available ? "version" : "error", b.what}});
    std::cout << out.dump(2) << "\n";
    return success;
  }
  std::cout << "solvers\n";
  for (const auto& m : remat::registry::methods()) {
    std::string name(m.name);
    name.resize(std::max<std::size_t>(name.size(), 22), ' ');
    std::cout << "  " << name << "  " << m.summary << "\n";
    if (a.with_options)
      for (const auto& o : m.options())
        std::cout << "      " << o.name << "=" << o.standard << "  " << o.summary << "; " << o.range << "\n";
  }
  std::cout << "MILP libraries, in the order in which --backend auto tries them\n";
  for (const auto& b : remat::registry::backends())
    std::cout << "  " << b.name << "  " << (b.available ? "" : "not available: ") << b.what << "\n";
  return success;
}

}  // namespace cli
