// SPDX-License-Identifier: Apache-2.0
/// @file
/// A report as one HTML page without external resources. Needs nlohmann/json.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/trace.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/curve.hpp>
#include <remat/io/timeline.hpp>
#include <remat/report/device_spans.hpp>
#include <remat/report/modules.hpp>
#include <remat/report/report.hpp>
#include <remat/report/style.hpp>

namespace remat {

namespace detail {

/// Writes the page of one report.
class report_page {
 public:
  explicit report_page(const plan_report& r)
      : r_(r), p_(r.problem), s_(r.plan.schedule), fates_(remat::fates(p_, s_)), modules_(module_paths(p_, r.labels)) {}

  std::string write() {
    const auto title = p_.name().empty() ? std::string("plan") : p_.name();
    out_ =
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>remat: " +
        escaped(title) + "</title>\n<style>" + std::string(report_style) + "</style>\n</head>\n<body>\n<header>\n";
    write_element("h1", title);
    write_summary();
    out_ += "</header>\n<main>\n";
    write_curve();
    write_memory();
    write_modules();
    write_largest_values();
    out_ += "</main>\n<footer>";
    write_element(
        "p", count(p_.operations().size(), "operation") + ", " + count(p_.values().size(), "value") + ", " +
                 count(s_.steps.size(), "step") + " in the plan" + (r_.plan.solver.empty() ? "" : "; solver " + r_.plan.solver) +
                 ". Times are those of the problem's cost model. Memory and times are computed by executing the plan on paper.");
    return std::move(out_) + "</footer>\n</body>\n</html>\n";
  }

 private:
  static constexpr std::size_t rows_shown = 30;

  static std::string count(std::size_t n, const std::string& noun) {
    return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
  }
  void write_element(const std::string& name, const std::string& text) {
    out_ += "<" + name + ">" + escaped(text) + "</" + name + ">\n";
  }
  std::string extra_time(double seconds) const {
    if (r_.store_all.seconds <= 0) return "no extra time";
    const auto more = std::clamp(seconds / r_.store_all.seconds - 1, 0.0, 1e300);
    return more < 5e-5 ? "no extra time" : printed("%.3g %% extra time", 100 * more);
  }
  void write_fact(const std::string& name, const std::string& number, const std::string& more) {
    out_ += "<div><dt>" + escaped(name) + "</dt><dd>" + escaped(number) + "<small>" + escaped(more) + "</small></dd></div>\n";
  }
  bytes_t copied_bytes() const {
    bytes_t bytes = 0;
    for (const auto& given : s_.steps)
      if (const auto x = with_tiers(p_, given); x.what == action::copy) bytes += p_.values()[x.value()].bytes;
    return bytes;
  }

  void write_summary() {
    const auto& plan = r_.plan;
    const bool fits = plan.peak <= plan.budget;
    write_element("p", "This plan runs the step in " + format_bytes(plan.peak) + " with " + extra_time(plan.seconds) +
                           ". Without a budget the step needs " + format_bytes(r_.store_all.peak) + " and takes " +
                           format_seconds(r_.store_all.seconds) + "." +
                           (fits ? "" : " The plan does not fit its budget of " + format_bytes(plan.budget) + "."));
    out_ += "<dl>\n";
    write_fact("Peak memory", format_bytes(plan.peak), "budget " + format_bytes(plan.budget));
    write_fact("Time of the step", format_seconds(plan.seconds), extra_time(plan.seconds));
    write_fact("Recomputed", std::to_string(plan.recomputed), "of " + count(p_.operations().size(), "operation"));
    if (copied_bytes() > 0) write_fact("Moved", format_bytes(copied_bytes()), "to other memory and back");
    const double bound = std::min(best_bound(), plan.seconds);
    write_fact("Proven gap", plan.seconds > 0 ? printed("%.2g %%", 100 * (1 - bound / plan.seconds)) : "0 %",
               "no plan within this budget takes less than " + format_seconds(bound));
    out_ += "</dl>\n";
  }
  /// The largest bound on the time that the plan or the curve proves for the budget of the plan, s.
  double best_bound() const {
    auto bound = r_.plan.bound;
    for (const auto& x : r_.curve)
      if (x.budget >= r_.plan.budget) bound = std::max(bound, x.bound);
    return bound;
  }

  void write_curve() {
    write_element("h2", "Time against budget");
    write_element("p", gain_of_more_memory());
    auto points = r_.curve;
    points.push_back(r_.plan);
    const curve_style style{.title = {}, .base = r_.store_all.seconds, .mark = std::pair{r_.plan.peak, r_.plan.seconds}};
    write_picture("curve", "Extra time for each budget, with this plan marked", curve_svg({{"plans found", points}}, style));
    out_ +=
        "<details><summary>The same as a table</summary>\n<div class=\"wide\" tabindex=\"0\"><table>\n<tr><th>Budget</th>"
        "<th>Peak</th><th>Time</th><th>Extra</th><th>Proven at least</th></tr>\n";
    for (const auto& x : r_.curve)
      write_row({format_bytes(x.budget), x.found() ? format_bytes(x.peak) : "no plan", x.found() ? format_seconds(x.seconds) : "",
                 x.found() ? extra_time(x.seconds) : "", format_seconds(x.bound)});
    out_ += "</table></div></details>\n";
  }
  std::string gain_of_more_memory() const {
    if (!r_.more) return "More memory would not make this step faster: the plan takes no extra time.";
    const auto more = format_bytes(r_.more_bytes);
    const double saved = r_.plan.seconds - r_.more->seconds;
    if (!r_.more->found() || saved <= 1e-4 * r_.plan.seconds)
      return more + " more memory would not make this step noticeably faster.";
    return more + " more memory would save " + format_seconds(saved) + " per step: " + extra_time(r_.more->seconds) +
           " instead of " + printed("%.3g %%", 100 * (r_.plan.seconds / r_.store_all.seconds - 1)) + ".";
  }
  void write_picture(const std::string& id, const std::string& label, const std::string& svg) {
    out_ += "<figure><div class=\"wide\" id=\"" + id + "\" tabindex=\"0\" role=\"img\" aria-label=\"" + label + "\">\n" + svg +
            "</div></figure>\n";
  }
  /// Writes a row of cells. The text of the first cell may break.
  void write_row(const std::vector<std::string>& cells) {
    out_ += "<tr>";
    for (const auto& cell : cells) out_ += (&cell == cells.data() ? "<td class=\"name\">" : "<td>") + escaped(cell) + "</td>";
    out_ += "</tr>\n";
  }

  void write_memory() {
    write_element("h2", "Memory over time");
    write_element(
        "p",
        "Orange parts recompute values. Below, each lane shows when a device computes and when a link copies. Point at the "
        "picture, or focus it and press the arrow keys, to see what runs.");
    auto [timeline, lanes, tiers] = trace(p_, s_);
    timeline_style style{
        .title = {}, .budget = r_.plan.budget, .overlays = {}, .lanes = std::move(lanes), .tiers = std::move(tiers)};
    if (p_.plain()) style.overlays = {as_series(trace(p_, store_all_schedule(p_)).memory, "without a budget")};
    const auto span =
        std::max(with_duration(timeline).seconds,
                 style.overlays.empty() || style.overlays[0].points.empty() ? 0 : style.overlays[0].points.back().first);
    write_picture("memory", "Memory of the device over the time of one step", timeline_svg(timeline, style));
    out_ += "<output id=\"readout\"></output>\n";
    write_pieces(timeline, span);
    out_ += "<script>" + std::string(report_script) + "</script>\n";
  }
  /// Writes the pieces of the timeline as data for the script. A long timeline is reduced to at most 2000 groups, each shown
  /// by its piece with the most memory.
  void write_pieces(const memory_timeline& given, double span) {
    constexpr std::size_t max_groups = 2000;
    const auto timeline = with_duration(given);
    json all = json::array(), times = json::array();
    const auto group_size = timeline.pieces.size() / max_groups + 1;
    for (std::size_t first = 0; first < timeline.pieces.size(); first += group_size) {
      const auto last = std::min(first + group_size, timeline.pieces.size());
      const auto& x = *std::max_element(timeline.pieces.begin() + static_cast<std::ptrdiff_t>(first),
                                        timeline.pieces.begin() + static_cast<std::ptrdiff_t>(last),
                                        [](const auto& one, const auto& other) { return one.bytes < other.bytes; });
      const auto &a = timeline.pieces[first], &b = timeline.pieces[last - 1];
      all.push_back({a.begin, b.end, format_bytes(x.bytes), what_runs(x)});
      times.push_back(has_duration(given) ? format_seconds(a.begin) : "operation " + std::to_string(first));
    }
    using plot = svg_plot;
    const json data = {{"left", plot::left}, {"right", plot::right}, {"top", plot::top}, {"bottom", plot::bottom},
                       {"width", 960},       {"seconds", span},      {"pieces", all},    {"times", times}};
    auto text = data.dump(-1, ' ', true, json::error_handler_t::replace);
    for (std::size_t at = 0; (at = text.find('<', at)) != text.npos;) text.replace(at, 1, "\\u003c");  // no name ends the script
    out_ += "<script type=\"application/json\" id=\"pieces\">" + text + "</script>\n";
  }

  std::string what_runs(const memory_timeline::piece& x) const {
    if (x.operation == none) return "waits for copies";
    const auto& module = modules_[x.operation];
    return (x.recomputed ? "recomputes " : "computes ") + p_.operations()[x.operation].name +
           (module.empty() ? "" : " in " + module);
  }

  /// Values that operations of one module and one source line make in the forward: bytes by fate, and extra time.
  struct share {
    std::array<bytes_t, fate_names.size()> bytes = {};
    double seconds = 0;  ///< of recomputations, s
    std::size_t first = 0;
    bytes_t of(fate f) const { return bytes[static_cast<std::size_t>(f)]; }
    bytes_t total() const { return of(fate::kept) + of(fate::recomputed) + of(fate::moved); }
  };
  using share_row = std::pair<std::pair<std::string, std::string>, share>;  // module (or operator) and source line; share

  bool names_modules() const {
    return std::any_of(modules_.begin(), modules_.end(), [](const auto& m) { return !m.empty(); });
  }
  /// The shares of all modules (or operators) and source lines.
  std::vector<share_row> shares() const {
    const bool named = names_modules();
    std::map<std::pair<std::string, std::string>, share> shares;
    const auto share_of = [&](operation_id o) -> share& {
      const auto& op = p_.operations()[o];
      const auto name = !named ? (op.kind.empty() ? op.name : op.kind) : modules_[o].empty() ? "(whole model)" : modules_[o];
      auto& x = shares[{name, o < r_.labels.sources.size() ? r_.labels.sources[o] : ""}];
      if (x.total() == 0 && x.seconds == 0) x.first = o;
      return x;
    };
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (fates_[v] != fate::held && fates_[v] != fate::temporary && !p_.is_source(v))
        share_of(p_.producer(v)).bytes[static_cast<std::size_t>(fates_[v])] += p_.values()[v].bytes;
    std::set<index_t> run;
    for (const auto& x : s_.steps)
      if (x.what == action::compute && !run.insert(x.which).second)
        share_of(x.operation()).seconds += p_.operations()[x.which].seconds;
    return {shares.begin(), shares.end()};
  }
  /// Writes the table of shares: the largest ones in the order of the forward, then the others.
  void write_modules() {
    auto rows = shares();
    bytes_t largest_share = 1;
    bool sources = false;
    for (const auto& [names, x] : rows)
      largest_share = std::max(largest_share, x.total()), sources = sources || !names.second.empty();
    std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.total() > b.second.total(); });
    std::sort(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(std::min(rows.size(), rows_shown)),
              [](const auto& a, const auto& b) { return a.second.first < b.second.first; });
    write_module_header(sources);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i == rows_shown)
        out_ += "</table></div>\n<details><summary>" + count(rows.size() - i, "smaller row") +
                "</summary><div class=\"wide\" tabindex=\"0\"><table>\n";
      write_module_row(rows[i].first.first, sources ? &rows[i].first.second : nullptr, rows[i].second, largest_share);
    }
    out_ += rows.size() > rows_shown ? "</table></div></details>\n" : "</table></div>\n";
  }
  /// @param sources true: the table has a column for sources
  void write_module_header(bool sources) {
    const bool named = names_modules();
    write_element("h2", named ? "Kept, recomputed and moved, by module" : "Kept, recomputed and moved, by operator");
    write_element("p", "Values that the forward makes and the backward reads, in the order of the forward." +
                           (named ? std::string() : " The problem names no modules."));
    out_ +=
        "<p class=\"note\"><span class=\"key kept\"></span>kept<span class=\"key recomputed\"></span>recomputed"
        "<span class=\"key moved\"></span>moved</p>\n<div class=\"wide\" tabindex=\"0\"><table>\n<tr><th>" +
        std::string(named ? "Module" : "Operator") + "</th>" + (sources ? "<th class=\"text\">Source</th>" : "") +
        "<th></th><th>Kept</th><th>Recomputed</th><th>Moved</th><th>Extra time</th></tr>\n";
  }
  /// @param source null if the table has no column for sources
  void write_module_row(const std::string& name, const std::string* source, const share& x, bytes_t largest_share) {
    out_ += "<tr><td class=\"name\">" + escaped(name) + "</td>";
    if (source != nullptr) out_ += "<td class=\"name text\">" + escaped(*source) + "</td>";
    out_ += "<td><div class=\"bar\" aria-hidden=\"true\">";
    for (auto f : {fate::kept, fate::recomputed, fate::moved})
      out_ += "<i class=\"" + std::string(to_string(f)) +
              "\" style=\"width:" + printed("%.3g", 100 * static_cast<double>(x.of(f)) / static_cast<double>(largest_share)) +
              "%\"></i>";
    out_ += "</div></td>";
    for (auto f : {fate::kept, fate::recomputed, fate::moved})
      out_ += "<td>" + (x.of(f) > 0 ? format_bytes(x.of(f)) : "") + "</td>";
    out_ += "<td>" + (x.seconds > 0 ? format_seconds(x.seconds) : "") + "</td></tr>\n";
  }

  void write_largest_values() {
    std::vector<value_id> values(p_.values().size());
    std::iota(values.begin(), values.end(), value_id{0});
    const auto shown = std::min<std::size_t>(20, values.size());
    std::partial_sort(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(shown), values.end(),
                      [&](value_id a, value_id b) {
                        const auto &x = p_.values()[a], &y = p_.values()[b];
                        return x.bytes != y.bytes ? x.bytes > y.bytes : a < b;
                      });
    write_element("h2", "Largest tensors");
    out_ +=
        "<div class=\"wide\" tabindex=\"0\"><table>\n<tr><th>Tensor</th><th>Size</th><th class=\"text\">What happens</th>"
        "<th class=\"text\">Made by</th></tr>\n";
    for (std::size_t i = 0; i < shown; ++i) {
      const auto v = values[i];
      const auto maker = p_.producer(v);
      const auto what = std::string(to_string(fates_[v]));
      out_ += "<tr><td class=\"name\">" + escaped(p_.values()[v].name) + "</td><td>" + format_bytes(p_.values()[v].bytes) +
              "</td><td class=\"text\"><span class=\"key " + what + "\"></span>" + what + "</td><td class=\"name text\">" +
              escaped(maker == none ? "input or parameter"
                                    : p_.operations()[maker].name + (modules_[maker].empty() ? "" : " in " + modules_[maker])) +
              "</td></tr>\n";
    }
    out_ += "</table></div>\n";
  }

  const plan_report& r_;
  const problem& p_;
  const schedule& s_;
  std::vector<fate> fates_;
  std::vector<std::string> modules_;
  std::string out_;
};

}  // namespace detail

/// Draws a report as one HTML page. The page shows time against budget with this plan marked, memory over time with lanes of
/// computations and copies, the bytes that each module keeps, recomputes and moves, and the largest tensors. The page needs no
/// external resources and follows the light or dark theme of the reader. Names are escaped.
/// @param r a plan and the results to compare it with
/// @return the HTML document
/// @throws bad_schedule if the plan is not valid
/// Complexity: that of `evaluate`, and O(pieces + values log values).
inline std::string html_report(const plan_report& r) { return detail::report_page(r).write(); }

}  // namespace remat
