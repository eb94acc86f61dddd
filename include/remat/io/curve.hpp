// SPDX-License-Identifier: Apache-2.0
/// @file
/// Draws time against budget, as text for a terminal and as SVG.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/result.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/picture.hpp>

namespace remat {

/// The curve of one solver.
struct labelled_curve {
  std::string label;
  std::vector<result> points;  ///< results for any budgets, such as those of `pareto_curve`
};

/// Title, base and mark of a picture of curves.
struct curve_style {
  std::string title = {};
  double base = 0;                                      ///< time that counts as 0 % extra, s; usually that of store-all
  std::optional<std::pair<bytes_t, double>> mark = {};  ///< a plan to mark in the SVG: its peak in bytes, and its time in s
};

namespace detail {

/// A step function of the budget: each corner gives the height from its budget up to the next corner.
struct staircase {
  std::vector<std::pair<double, double>> corners;  ///< budget in bytes, ascending; extra time as a fraction of the base

  /// The height at a budget in bytes; NaN before the first corner.
  double at(double budget) const {
    const auto after =
        std::upper_bound(corners.begin(), corners.end(), budget, [](double b, const auto& corner) { return b < corner.first; });
    return after == corners.begin() ? std::numeric_limits<double>::quiet_NaN() : std::prev(after)->second;
  }
};

/// Curves and axes, ready to draw.
struct curve_plane {
  std::vector<staircase> staircases;         ///< per curve, from its smallest peak on
  staircase bound;                           ///< the proven bounds of all curves, joined
  double left_budget = 0, right_budget = 0;  ///< budgets at the left and right sides, bytes
  double top = 0;                            ///< extra time at the top, as a fraction of the base
  double min_budget = 0;                     ///< proven lower bound on every feasible budget, bytes

  curve_plane(const std::vector<labelled_curve>& curves, double base) {
    const auto extra = [&](double seconds) { return base > 0 ? std::clamp(seconds / base - 1, 0.0, 1e300) : 0; };
    std::vector<std::pair<double, double>> bounds;
    left_budget = std::numeric_limits<double>::infinity();
    for (const auto& c : curves) {
      std::vector<std::pair<double, double>> steps;
      for (const auto& r : c.points) {
        min_budget = std::max(min_budget, static_cast<double>(r.budget_bound));
        left_budget = std::min(left_budget, static_cast<double>(r.budget));
        right_budget = std::max(right_budget, static_cast<double>(r.budget));
        bounds.emplace_back(r.budget, extra(r.bound));
        if (!r.found()) continue;
        left_budget = std::min(left_budget, static_cast<double>(r.peak));
        top = std::max(top, extra(r.seconds));
        steps.emplace_back(r.peak, extra(r.seconds));
      }
      std::sort(steps.begin(), steps.end());
      staircases.emplace_back();
      for (const auto& [peak, time] : steps)
        if (staircases.back().corners.empty() || time < staircases.back().corners.back().second)
          staircases.back().corners.emplace_back(peak, time);
    }
    // A bound holds for its budget and every smaller one. So the bound at a budget is the largest one at this budget or above.
    std::sort(bounds.begin(), bounds.end());
    for (std::size_t i = bounds.size(); i-- > 1;) bounds[i - 1].second = std::max(bounds[i - 1].second, bounds[i].second);
    double from = min_budget;
    for (const auto& [budget, time] : bounds) {
      top = std::max(top, time);
      if (budget >= from && budget >= min_budget)
        bound.corners.emplace_back(from, time), from = std::nextafter(budget, budget + 1);
    }
    if (min_budget > 0) left_budget = std::min(left_budget, min_budget);
    if (!(left_budget <= right_budget)) left_budget = right_budget;
    const double margin = std::max(0.04 * (right_budget - left_budget), std::max(1.0, 1e-3 * right_budget));
    left_budget = std::max(0.0, left_budget - margin), right_budget += margin;
    top = std::max(1.06 * top, 0.01);
  }
};

inline std::string percent_text(double share) { return printed("%.3g %%", 100 * share); }

}  // namespace detail

/// Draws curves with characters (UTF-8): extra time upwards, budgets to the right, one sign per curve, dots for the proven
/// bound.
/// @param curves the curves
/// @param style  title and base
/// @param width  characters per line, >= 40
/// @param height rows, >= 4
/// @return lines of at most `width` characters, except for the legend, each ended by a newline
/// @throws bad_option if `width` or `height` is out of range
/// Complexity: O(points log points + width height).
/// @code
/// std::cout << remat::curve_text({{"min_cut", curve}}, {.title = p.name(), .base = p.total_seconds()});
/// @endcode
inline std::string curve_text(const std::vector<labelled_curve>& curves, const curve_style& style, int width = 80,
                              int height = 16) {
  if (width < 40) throw bad_option("curve width must be >= 40, got " + std::to_string(width));
  if (height < 4) throw bad_option("curve height must be >= 4, got " + std::to_string(height));
  static constexpr std::array<const char*, 6> signs = {"●", "○", "◆", "◇", "▲", "△"};
  const detail::curve_plane plane(curves, style.base);
  const auto columns = static_cast<std::size_t>(width - 12), rows = static_cast<std::size_t>(height);
  std::vector<std::vector<const char*>> cells(rows, std::vector<const char*>(columns, " "));
  const auto draw = [&](const detail::staircase& line, const char* sign) {
    for (std::size_t c = 0; c < columns; ++c) {
      const double budget = plane.left_budget + (plane.right_budget - plane.left_budget) * (static_cast<double>(c) + 0.5) /
                                                    static_cast<double>(columns);
      const double at = line.at(budget);
      if (!std::isnan(at)) cells[std::min(rows - 1, static_cast<std::size_t>(at / plane.top * height))][c] = sign;
    }
  };
  draw(plane.bound, "·");
  for (std::size_t i = curves.size(); i-- > 0;) draw(plane.staircases[i], signs[i % signs.size()]);

  std::string out;
  if (!style.title.empty()) out += detail::shortened(style.title, static_cast<std::size_t>(width)) + "\n";
  for (std::size_t row = rows; row-- > 0;) {
    const bool labelled = row % 4 == 0 || row + 1 == rows;
    const double middle = plane.top * (static_cast<double>(row) + 0.5) / height;
    out += detail::padded(!labelled ? "" : row == 0 ? "0 %" : "+" + detail::percent_text(middle)) + (labelled ? " ┤" : " │");
    for (const auto* cell : cells[row]) out += cell;
    out += "\n";
  }
  out += detail::padded("") + " └";
  for (std::size_t c = 0; c < columns; ++c) out += "─";
  out += "\n" + detail::axis_ends(format_bytes(static_cast<bytes_t>(plane.left_budget)),
                                  format_bytes(static_cast<bytes_t>(plane.right_budget)), columns);
  out += detail::padded("") + " ";
  for (std::size_t i = 0; i < curves.size(); ++i) out += std::string(" ") + signs[i % signs.size()] + " " + curves[i].label + " ";
  return out + " · bound\n";
}

/// Draws curves as a self-contained SVG picture: extra time upwards, budgets to the right, the proven bound, and the range of
/// budgets that are proven to be too small.
/// @param curves the curves
/// @param style  title, base and mark
/// @return the SVG document
/// Complexity: O(points log points).
inline std::string curve_svg(const std::vector<labelled_curve>& curves, const curve_style& style) {
  using plot = detail::svg_plot;
  const detail::curve_plane plane(curves, style.base);
  plot out(style.title, plane.left_budget, plane.right_budget, plane.top);
  if (plane.min_budget > plane.left_budget) {
    const double wall = out.x_of(std::min(plane.min_budget, plane.right_budget));
    out.box(plot::left, plot::top, wall - plot::left, plot::bottom - plot::top, "#eeeeee");
    out.legend_box("#eeeeee", "no schedule, proven");
  }
  out.vertical({"%", 0.01});
  const auto unit = detail::bytes_scale(plane.right_budget);
  out.horizontal(unit, std::string("budget [") + unit.unit + "]; extra time upwards");
  out.frame();
  const auto draw = [&](const detail::staircase& line, const std::string& attributes) {
    std::string path;
    for (const auto& [budget, time] : line.corners) {
      const auto x = plot::number(out.x_of(budget)), y = plot::number(out.y_of(time));
      path += path.empty() ? "M" + x + " " + y : "H" + x + "V" + y;
    }
    out.path("fill=\"none\" " + attributes, path.empty() ? path : path + "H" + plot::number(plot::right));
  };
  const std::string dashed = "stroke=\"#d62728\" stroke-dasharray=\"4 3\"";
  draw(plane.bound, dashed + " stroke-width=\"1.3\"");
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const auto stroke = std::string("stroke=\"") + detail::line_colour(i) + "\"";
    draw(plane.staircases[i], stroke + " stroke-width=\"1.6\"");
    out.legend_line(stroke, curves[i].label);
  }
  out.legend_line(dashed, "proven bound");
  if (style.mark && style.base > 0) {
    const double x = std::clamp(out.x_of(static_cast<double>(style.mark->first)), plot::left, plot::right);
    const double y = std::max(plot::top, out.y_of(std::max(0.0, style.mark->second / style.base - 1)));
    out.dot(x, y, "#d1495b");
    out.legend_box("#d1495b", "this plan");
  }
  return out.document();
}

}  // namespace remat
