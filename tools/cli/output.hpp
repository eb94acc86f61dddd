// SPDX-License-Identifier: Apache-2.0
/// @file
/// Output of the commands.
#pragma once

#include <cstddef>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/result.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/chrome_trace.hpp>
#include <remat/io/file.hpp>
#include <remat/io/problem_document.hpp>
#include <remat/io/timeline.hpp>
#include <remat/report/memory_snapshot.hpp>

#include "commands.hpp"

namespace cli {

using json = nlohmann::ordered_json;

inline std::string percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %%", fraction * 100);
  return text;
}

inline std::string exact(remat::bytes_t b) { return remat::format_bytes(b) + " (" + std::to_string(b) + " bytes)"; }

/// A result as JSON, without its schedule.
inline json summary(const remat::result& r) {
  json out = {{"status", remat::to_string(r.status)}, {"solver", r.solver}, {"budget", r.budget},
              {"budget_bound", r.budget_bound},       {"bound", r.bound},   {"elapsed", r.elapsed}};
  if (!r.reason.empty()) out["reason"] = r.reason;
  if (r.found()) out.update(json{{"peak", r.peak}, {"seconds", r.seconds}, {"recomputed", r.recomputed}, {"gap", r.gap()}});
  if (r.smallest_budget) out["smallest_budget"] = *r.smallest_budget;
  if (!r.scope.empty()) out.update(json{{"scope", r.scope}, {"scope_bound", r.scope_bound}, {"scope_gap", r.scope_gap()}});
  return out;
}

/// A table of text. The first column is left-aligned, all others are right-aligned.
class table {
 public:
  explicit table(std::vector<std::string> heads) { add(std::move(heads)); }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  std::string text() const {
    std::vector<std::size_t> widths(rows_[0].size(), 0);
    for (const auto& row : rows_)
      for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], length(row[c]));
    std::string out;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t c = 0; c < row.size(); ++c) {
        const std::string space(widths[c] - length(row[c]), ' ');
        line += (c > 0 ? "  " : "") + (c > 0 ? space + row[c] : row[c] + space);
      }
      out += line + "\n";
    }
    return out;
  }

 private:
  /// Number of characters of a UTF-8 text.
  static std::size_t length(const std::string& text) {
    std::size_t n = 0;
    for (unsigned char c : text) n += (c & 0xc0) != 0x80;
    return n;
  }
  std::vector<std::vector<std::string>> rows_;
};

/// Throws if an output file of the command line cannot be written. Called before any work begins.
inline void require_outputs(const arguments& a) {
  for (const auto* path : {&a.output, &a.svg, &a.trace, &a.memory})
    if (!path->empty()) remat::require_writable(*path);
}

/// Writes the trace, memory snapshot and pictures of a schedule that the command line asks for.
inline void draw(const arguments& a, const remat::problem_document& document, const remat::schedule& s,
                 std::optional<remat::bytes_t> budget) {
  const auto& p = document.problem;
  if (!a.trace.empty()) remat::write_file(a.trace, remat::chrome_trace(p, s));
  if (!a.memory.empty()) remat::write_file(a.memory, remat::memory_snapshot(p, s, remat::labels_of(document)));
  if (!a.draw && a.svg.empty()) return;
  auto [timeline, lanes, tiers] = remat::trace(p, s);
  remat::timeline_style style{.title = p.name(), .budget = budget};
  if (!p.plain() || remat::has_copies(s)) {
    style.lanes = std::move(lanes);
    style.tiers = std::move(tiers);
  }
  if (a.draw) (a.as_json ? std::cerr : std::cout) << remat::timeline_text(timeline, style);
  if (a.svg.empty()) return;
  if (p.plain()) style.overlays = {remat::as_series(remat::trace(p, remat::store_all_schedule(p)).memory, "store-all")};
  remat::write_file(a.svg, remat::timeline_svg(timeline, style));
}

}  // namespace cli
