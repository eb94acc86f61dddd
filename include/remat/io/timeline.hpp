// SPDX-License-Identifier: Apache-2.0
/// @file
/// Draws memory and activity over time of a schedule, as text for a terminal and as SVG.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/trace.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/picture.hpp>

namespace remat {

/// A line to draw over a timeline, such as the measured memory.
struct memory_series {
  std::string label;
  std::vector<std::pair<double, bytes_t>> points;  ///< time in s, ascending, and bytes from then on
};

/// Converts a timeline to a line that can be drawn over another timeline.
inline memory_series as_series(const memory_timeline& t, std::string label) {
  memory_series s{std::move(label), {}};
  for (const auto& x : t.pieces) s.points.emplace_back(x.begin, x.bytes);
  if (!t.pieces.empty()) s.points.emplace_back(t.seconds, t.pieces.back().bytes);
  return s;
}

/// Parts of a picture besides the timeline itself.
struct timeline_style {
  std::string title = {};
  std::optional<bytes_t> budget = {};        ///< bytes, drawn as a line
  std::vector<memory_series> overlays = {};  ///< lines over the memory area, SVG only
  std::vector<lane> lanes = {};              ///< rows below the memory area, see `trace`
  std::vector<tier_memory> tiers = {};       ///< rows below the lanes, see `trace`
};

namespace detail {

/// A column of a timeline that is cut into columns of equal duration.
struct column {
  bytes_t bytes = 0;      ///< largest memory in the column
  double recomputed = 0;  ///< fraction of the time spent on recomputation
};

inline std::vector<column> cut(const memory_timeline& t, std::size_t count, double span) {
  std::vector<column> columns(count);
  const double width = span / static_cast<double>(count);
  for (const auto& x : t.pieces) {
    const auto first = std::min(static_cast<std::size_t>(x.begin / width), count - 1);
    for (auto c = first; c < count; ++c) {
      const double begin = static_cast<double>(c) * width;
      if (c > first && begin >= x.end) break;
      columns[c].bytes = std::max(columns[c].bytes, x.bytes);
      if (x.recomputed) columns[c].recomputed += std::max(0.0, std::min(x.end, begin + width) - std::max(x.begin, begin)) / width;
    }
  }
  return columns;
}

/// The main work of a lane in each of `count` columns. A column is empty if the lane works for less than a fifth of it.
inline std::vector<std::optional<lane::work>> cut(const lane& l, std::size_t count, double span) {
  constexpr std::size_t works = 4;
  std::vector<std::array<double, works>> shares(count, std::array<double, works>{});
  const double width = span / static_cast<double>(count);
  for (const auto& x : l.spans) {
    if (x.begin >= span) continue;  // a copy that no step waits for
    for (auto c = std::min(static_cast<std::size_t>(x.begin / width), count - 1); c < count; ++c) {
      const double begin = static_cast<double>(c) * width;
      if (begin >= x.end) break;
      shares[c][static_cast<std::size_t>(x.what)] += std::min(x.end, begin + width) - std::max(x.begin, begin);
    }
  }
  std::vector<std::optional<lane::work>> columns(count);
  for (std::size_t c = 0; c < count; ++c) {
    const auto largest = std::max_element(shares[c].begin(), shares[c].end());
    if (5 * std::accumulate(shares[c].begin(), shares[c].end(), 0.0) >= width)
      columns[c] = static_cast<lane::work>(largest - shares[c].begin());
  }
  return columns;
}

/// Largest memory of a tier in each of `count` columns, bytes.
inline std::vector<bytes_t> cut(const tier_memory& t, std::size_t count, double span) {
  std::vector<bytes_t> columns(count, 0);
  for (std::size_t i = 0; i < t.points.size(); ++i) {
    const auto column = [&](double at) {
      return std::min(static_cast<std::size_t>(at / span * static_cast<double>(count)), count - 1);
    };
    const auto last = column(i + 1 < t.points.size() ? t.points[i + 1].first : span);
    for (auto c = column(t.points[i].first); c <= last; ++c) columns[c] = std::max(columns[c], t.points[i].second);
  }
  return columns;
}

inline std::string label_of(const tier_memory& t) {
  return t.label + ": " + format_bytes(t.peak) + (t.budget ? " of " + format_bytes(*t.budget) : "");
}

/// True if the duration is large enough to be divided into columns.
inline bool has_duration(const memory_timeline& t) { return t.seconds >= std::numeric_limits<double>::min() * 1e6; }

/// Gives a timeline without duration a time axis: each piece takes one second.
inline memory_timeline with_duration(memory_timeline t) {
  if (has_duration(t)) return t;
  for (std::size_t i = 0; i < t.pieces.size(); ++i) {
    t.pieces[i].begin = static_cast<double>(i);
    t.pieces[i].end = static_cast<double>(i + 1);
  }
  t.seconds = std::max<double>(1, static_cast<double>(t.pieces.size()));
  return t;
}

}  // namespace detail

/// Draws a timeline with block characters (UTF-8). The row below the axis shows the fraction of recomputation by shades. Each
/// lane has a row (`█` computes, `▓` recomputes, `━` copies, `·` waits). The memory of each other tier has a row, too.
/// @param timeline memory over time
/// @param style    title, budget, lanes and tiers
/// @param width    characters per line, >= 40
/// @param height   rows of the memory axis, >= 4
/// @return lines of at most `width` characters, each ended by a newline; names of lanes are cut to ten bytes
/// @throws bad_option if `width` or `height` is out of range
/// Complexity: O(pieces + width height).
/// @code
/// std::cout << remat::timeline_text(remat::trace(p, r.schedule).memory, {.title = p.name(), .budget = r.budget});
/// @endcode
inline std::string timeline_text(const memory_timeline& timeline, const timeline_style& style, int width = 80, int height = 12) {
  if (width < 40) throw bad_option("timeline width must be >= 40, got " + std::to_string(width));
  if (height < 4) throw bad_option("timeline height must be >= 4, got " + std::to_string(height));
  static constexpr const char* eighths[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const auto t = detail::with_duration(timeline);
  const auto columns = detail::cut(t, static_cast<std::size_t>(width - 12), t.seconds);
  const double top = std::max(1.0, static_cast<double>(std::max(t.peak, style.budget.value_or(0))));
  const auto row_of = [&](double bytes) { return std::min(height - 1, static_cast<int>(bytes / top * height)); };

  std::string out;
  if (!style.title.empty()) out += detail::shortened(style.title, static_cast<std::size_t>(width)) + "\n";
  for (int row = height - 1; row >= 0; --row) {
    const bool budget_row = style.budget && row == row_of(static_cast<double>(*style.budget));
    std::string label;
    if (budget_row)
      label = format_bytes(*style.budget);
    else if (row == height - 1 || row % 4 == 0)
      label = row == 0 ? "0" : format_bytes(static_cast<bytes_t>(top * (row + 0.5) / height));
    out += detail::padded(label) + (label.empty() ? " │" : " ┤");
    for (const auto& c : columns) {
      const double filled = static_cast<double>(c.bytes) / top * height - row;
      const int level = filled >= 1 ? 8 : filled <= 0 ? 0 : std::max(1, static_cast<int>(filled * 8));
      out += level == 0 && budget_row ? "┄" : eighths[level];
    }
    out += "\n";
  }
  const auto unit = detail::seconds_scale(t.seconds);
  const auto end = detail::has_duration(timeline) ? detail::printed("%.3g ", t.seconds / unit.factor) + unit.unit
                                                  : std::to_string(t.pieces.size()) + " operations";
  out += detail::padded("") + " └";
  for (std::size_t c = 0; c < columns.size(); ++c) out += "─";
  out += "\n";
  if (std::any_of(columns.begin(), columns.end(), [](const auto& c) { return c.recomputed > 0; })) {
    out += detail::padded("recomputed") + "  ";
    for (const auto& c : columns)
      out += c.recomputed <= 0 ? " " : c.recomputed < 1.0 / 3 ? "░" : c.recomputed < 2.0 / 3 ? "▒" : "▓";
    out += "\n";
  }
  for (const auto& l : style.lanes) {
    static constexpr const char* marks[] = {"█", "▓", "━", "·"};
    out += detail::padded(detail::shortened(l.label, 10)) + "  ";
    for (const auto& w : detail::cut(l, columns.size(), t.seconds)) out += w ? marks[static_cast<std::size_t>(*w)] : " ";
    out += "\n";
  }
  for (const auto& x : style.tiers) {
    out += detail::padded(detail::shortened(x.label, 10)) + "  ";
    const auto highest = static_cast<double>(std::max({x.peak, x.budget.value_or(0), bytes_t{1}}));
    for (auto bytes : detail::cut(x, columns.size(), t.seconds))
      out += eighths[bytes == 0 ? 0 : std::clamp(static_cast<int>(static_cast<double>(bytes) / highest * 8), 1, 8)];
    out += "\n";
  }
  return out + detail::axis_ends("0", end, columns.size());
}

/// Draws a timeline as a self-contained SVG picture: memory as an area, recomputation in another colour, held sources, the
/// budget, the peak, and overlays as lines.
/// @param timeline memory over time
/// @param style    title, budget, overlays, lanes and tiers
/// @return the SVG document
/// Complexity: O(pieces + points of the overlays). Each line has at most about 1600 points.
inline std::string timeline_svg(const memory_timeline& timeline, const timeline_style& style) {
  using plot = detail::svg_plot;
  const auto t = detail::with_duration(timeline);
  double top_bytes = static_cast<double>(std::max({t.peak, style.budget.value_or(0), bytes_t{1}})), span = t.seconds;
  for (const auto& s : style.overlays)
    for (const auto& [at, bytes] : s.points) {
      top_bytes = std::max(top_bytes, static_cast<double>(bytes));
      span = std::max(span, at);
    }
  top_bytes *= 1.06;
  constexpr double lane_height = 22, tier_height = 46;
  plot out(style.title, 0, span, top_bytes,
           lane_height * static_cast<double>(style.lanes.size()) + tier_height * static_cast<double>(style.tiers.size()));
  const auto height_of = [&](bytes_t bytes) { return out.y_of(static_cast<double>(bytes)); };
  const auto y_of = [&](bytes_t bytes) { return plot::number(height_of(bytes)); };
  out.vertical(detail::bytes_scale(top_bytes));
  const auto time = detail::has_duration(timeline) ? detail::seconds_scale(span) : detail::scale{"", 1};
  out.horizontal(time, detail::has_duration(timeline) ? std::string("time [") + time.unit + "]" : "operations");

  // The area of each colour: runs of columns of equal height.
  const auto columns = detail::cut(t, 1600, span);
  const auto filled = static_cast<std::size_t>(std::ceil(t.seconds / span * 1600 - 1e-9));
  const auto column_x = [&](std::size_t c) {
    return plot::number(out.x_of(std::min(t.seconds, static_cast<double>(c) / 1600 * span)));
  };
  bool any_recomputed = false;
  for (const bool recomputed : {false, true}) {
    std::string path;
    for (std::size_t c = 0; c < filled;) {
      auto last = c;
      const auto same = [&](std::size_t other) { return (columns[other].recomputed > 0.5) == recomputed; };
      if (!same(c)) {
        ++c;
        continue;
      }
      path += "M" + column_x(c) + " " + plot::number(plot::bottom);
      while (last < filled && same(last)) {
        const auto height = columns[last].bytes;
        path += "V" + y_of(height);
        while (last < filled && same(last) && columns[last].bytes == height) ++last;
        path += "H" + column_x(last);
      }
      path += "V" + plot::number(plot::bottom) + "Z";
      c = last;
    }
    any_recomputed = any_recomputed || (recomputed && !path.empty());
    out.path(std::string("fill=\"") + (recomputed ? "#f28e2b" : "#4e79a7") + "\"", path);
  }
  if (t.held > 0)
    out.box(plot::left, height_of(t.held), out.x_of(t.seconds) - plot::left, plot::bottom - height_of(t.held), "#1f3a5f");
  out.frame();

  const auto stroke = [](std::size_t s) { return std::string("stroke=\"") + detail::line_colour(s) + "\""; };
  for (std::size_t s = 0; s < style.overlays.size(); ++s) {
    std::string path;
    const auto& points = style.overlays[s].points;
    for (std::size_t k = 0; k < points.size();) {  // one stroke up and down per half pixel
      const auto pixel = [&](std::size_t i) { return std::round(out.x_of(points[i].first) * 2) / 2; };
      const double x = pixel(k);
      const auto entered = points[k].second;
      auto highest = entered;
      for (; k < points.size() && pixel(k) == x; ++k) highest = std::max(highest, points[k].second);
      path += (path.empty() ? "M" + plot::number(x) + " " + y_of(entered) : "H" + plot::number(x)) + "V" + y_of(highest) + "V" +
              y_of(points[k - 1].second);
    }
    out.path("fill=\"none\" stroke-width=\"1.3\" " + stroke(s), path);
  }
  if (style.budget)
    out.line(plot::left, height_of(*style.budget), plot::right, height_of(*style.budget),
             "stroke=\"#d62728\" stroke-width=\"1.5\" stroke-dasharray=\"7 4\"");

  static constexpr const char* colours[] = {"#4e79a7", "#f28e2b", "#59a14f", "#d62728"};  // by work
  double y = plot::under - 8;
  for (const auto& l : style.lanes) {
    out.text(plot::left - 8, y + 12, "text-anchor=\"end\"", detail::shortened(l.label, 12));
    const auto works = detail::cut(l, 1600, span);
    for (std::size_t work = 0; work < 4; ++work) {
      std::string path;
      for (std::size_t c = 0; c < works.size();) {
        const auto first = c;
        while (c < works.size() && works[c] == works[first]) ++c;
        if (works[first] && static_cast<std::size_t>(*works[first]) == work)
          path += "M" + column_x(first) + " " + plot::number(y) + "H" + column_x(c) + "v16H" + column_x(first) + "Z";
      }
      out.path(std::string("fill=\"") + colours[work] + "\"", path);
    }
    y += lane_height;
  }
  for (const auto& x : style.tiers) {
    constexpr double height = tier_height - 10;
    const auto limit = static_cast<double>(std::max({x.peak, x.budget.value_or(0), bytes_t{1}}));
    out.text(plot::left - 8, y + height - 2, "text-anchor=\"end\"", detail::shortened(x.label, 12));
    const auto levels = detail::cut(x, 1600, span);
    auto path = "M" + column_x(0) + " " + plot::number(y + height);
    for (std::size_t c = 0; c < levels.size();) {
      path += "V" + plot::number(y + height - static_cast<double>(levels[c]) / limit * height);
      const auto level = levels[c];
      while (c < levels.size() && levels[c] == level) ++c;
      path += "H" + column_x(c);
    }
    out.path("fill=\"#b6c7dc\"", path + "V" + plot::number(y + height) + "Z");
    if (x.budget) {
      const auto at = y + height - static_cast<double>(*x.budget) / limit * height;
      out.line(plot::left, at, plot::right, at, "stroke=\"#d62728\" stroke-dasharray=\"7 4\"");
    }
    out.text(plot::left + 4, y + 12, "", detail::label_of(x));
    y += tier_height;
  }

  out.legend_box("#4e79a7", "memory, peak " + format_bytes(t.peak));
  if (any_recomputed) out.legend_box("#f28e2b", "while recomputing");
  if (t.held > 0) out.legend_box("#1f3a5f", "held " + format_bytes(t.held));
  if (style.budget) out.legend_line("stroke=\"#d62728\" stroke-dasharray=\"5 3\"", "budget " + format_bytes(*style.budget));
  const auto does = [&](lane::work w) {
    return std::any_of(style.lanes.begin(), style.lanes.end(), [&](const lane& l) {
      return std::any_of(l.spans.begin(), l.spans.end(), [&](const auto& x) { return x.what == w; });
    });
  };
  if (does(lane::work::copied)) out.legend_box(colours[2], "copies");
  if (does(lane::work::waited)) out.legend_box(colours[3], "waits");
  for (std::size_t s = 0; s < style.overlays.size(); ++s) out.legend_line(stroke(s), style.overlays[s].label);
  return out.document();
}

}  // namespace remat
