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

inline std::vector<column> columns_of(const memory_timeline& t, std::size_t count, double span) {
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
inline std::vector<std::optional<lane::work>> columns_of(const lane& l, std::size_t count, double span) {
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
inline std::vector<bytes_t> columns_of(const tier_memory& t, std::size_t count, double span) {
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
  const auto columns = detail::columns_of(t, static_cast<std::size_t>(width - 12), t.seconds);
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
    for (const auto& w : detail::columns_of(l, columns.size(), t.seconds)) out += w ? marks[static_cast<std::size_t>(*w)] : " ";
    out += "\n";
  }
  for (const auto& x : style.tiers) {
    out += detail::padded(detail::shortened(x.label, 10)) + "  ";
    const auto highest = static_cast<double>(std::max({x.peak, x.budget.value_or(0), bytes_t{1}}));
    for (auto bytes : detail::columns_of(x, columns.size(), t.seconds))
      out += eighths[bytes == 0 ? 0 : std::clamp(static_cast<int>(static_cast<double>(bytes) / highest * 8), 1, 8)];
    out += "\n";
  }
  return out + detail::axis_ends("0", end, columns.size());
}

namespace detail {
/// The picture behind `timeline_svg`. To be used once.
class timeline_picture {
 public:
  timeline_picture(const memory_timeline& timeline, const timeline_style& style)
      : style_(style),
        has_duration_(has_duration(timeline)),
        timeline_(with_duration(timeline)),
        span_(timeline_.seconds),
        top_bytes_(highest_bytes()),
        out_(style.title, 0, span_, top_bytes_,
             lane_height * static_cast<double>(style.lanes.size()) + tier_height * static_cast<double>(style.tiers.size())) {}

  std::string draw() {
    draw_axes();
    draw_memory();
    out_.frame();
    for (std::size_t i = 0; i < style_.overlays.size(); ++i) draw_overlay(i);
    if (style_.budget)
      out_.line(plot::left, height_of(*style_.budget), plot::right, height_of(*style_.budget),
                "stroke=\"#d62728\" stroke-width=\"1.5\" stroke-dasharray=\"7 4\"");
    double y = plot::under - 8;
    for (const auto& l : style_.lanes) {
      draw_lane(l, y);
      y += lane_height;
    }
    for (const auto& t : style_.tiers) {
      draw_tier(t, y);
      y += tier_height;
    }
    draw_legend();
    return out_.document();
  }

 private:
  using plot = svg_plot;
  static constexpr double lane_height = 22, tier_height = 46;
  static constexpr std::size_t columns = 1600;
  static constexpr const char* work_colours[] = {"#4e79a7", "#f28e2b", "#59a14f", "#d62728"};  // by `lane::work`

  /// The bytes at the top of the memory axis. Also extends the time axis to the end of the overlays.
  double highest_bytes() {
    auto highest = static_cast<double>(std::max({timeline_.peak, style_.budget.value_or(0), bytes_t{1}}));
    for (const auto& s : style_.overlays)
      for (const auto& [time, bytes] : s.points) {
        highest = std::max(highest, static_cast<double>(bytes));
        span_ = std::max(span_, time);
      }
    return highest * 1.06;
  }
  double height_of(bytes_t bytes) const { return out_.y_of(static_cast<double>(bytes)); }
  std::string y_of(bytes_t bytes) const { return plot::number(height_of(bytes)); }
  std::string column_x(std::size_t c) const {
    return plot::number(out_.x_of(std::min(timeline_.seconds, static_cast<double>(c) / static_cast<double>(columns) * span_)));
  }
  static std::string stroke(std::size_t i) { return std::string("stroke=\"") + line_colour(i) + "\""; }

  void draw_axes() {
    out_.vertical(bytes_scale(top_bytes_));
    const auto time = has_duration_ ? seconds_scale(span_) : scale{"", 1};
    out_.horizontal(time, has_duration_ ? std::string("time [") + time.unit + "]" : "operations");
  }

  /// The area of each colour, as runs of columns of equal height, and the held sources.
  void draw_memory() {
    const auto cells = columns_of(timeline_, columns, span_);
    const auto filled = static_cast<std::size_t>(std::ceil(timeline_.seconds / span_ * static_cast<double>(columns) - 1e-9));
    for (const bool recomputed : {false, true}) {
      std::string path;
      const auto has_colour = [&](std::size_t c) { return (cells[c].recomputed > 0.5) == recomputed; };
      for (std::size_t c = 0; c < filled;) {
        if (!has_colour(c)) {
          ++c;
          continue;
        }
        path += "M" + column_x(c) + " " + plot::number(plot::bottom);
        while (c < filled && has_colour(c)) {
          const auto bytes = cells[c].bytes;
          path += "V" + y_of(bytes);
          while (c < filled && has_colour(c) && cells[c].bytes == bytes) ++c;
          path += "H" + column_x(c);
        }
        path += "V" + plot::number(plot::bottom) + "Z";
      }
      any_recomputed_ = any_recomputed_ || (recomputed && !path.empty());
      out_.path(std::string("fill=\"") + (recomputed ? "#f28e2b" : "#4e79a7") + "\"", path);
    }
    if (timeline_.held > 0)
      out_.box(plot::left, height_of(timeline_.held), out_.x_of(timeline_.seconds) - plot::left,
               plot::bottom - height_of(timeline_.held), "#1f3a5f");
  }

  /// A line with one stroke up and down per half pixel.
  void draw_overlay(std::size_t i) {
    std::string path;
    const auto& points = style_.overlays[i].points;
    const auto pixel = [&](std::size_t k) { return std::round(out_.x_of(points[k].first) * 2) / 2; };
    for (std::size_t k = 0; k < points.size();) {
      const double x = pixel(k);
      const auto entered = points[k].second;
      auto highest = entered;
      for (; k < points.size() && pixel(k) == x; ++k) highest = std::max(highest, points[k].second);
      path += (path.empty() ? "M" + plot::number(x) + " " + y_of(entered) : "H" + plot::number(x)) + "V" + y_of(highest) + "V" +
              y_of(points[k - 1].second);
    }
    out_.path("fill=\"none\" stroke-width=\"1.3\" " + stroke(i), path);
  }

  void draw_lane(const lane& l, double y) {
    out_.text(plot::left - 8, y + 12, "text-anchor=\"end\"", shortened(l.label, 12));
    const auto works = columns_of(l, columns, span_);
    for (std::size_t work = 0; work < std::size(work_colours); ++work) {
      std::string path;
      for (std::size_t c = 0; c < works.size();) {
        const auto first = c;
        while (c < works.size() && works[c] == works[first]) ++c;
        if (works[first] && static_cast<std::size_t>(*works[first]) == work)
          path += "M" + column_x(first) + " " + plot::number(y) + "H" + column_x(c) + "v16H" + column_x(first) + "Z";
      }
      out_.path(std::string("fill=\"") + work_colours[work] + "\"", path);
    }
  }

  void draw_tier(const tier_memory& t, double y) {
    constexpr double height = tier_height - 10;
    const auto limit = static_cast<double>(std::max({t.peak, t.budget.value_or(0), bytes_t{1}}));
    out_.text(plot::left - 8, y + height - 2, "text-anchor=\"end\"", shortened(t.label, 12));
    const auto levels = columns_of(t, columns, span_);
    auto path = "M" + column_x(0) + " " + plot::number(y + height);
    for (std::size_t c = 0; c < levels.size();) {
      path += "V" + plot::number(y + height - static_cast<double>(levels[c]) / limit * height);
      const auto level = levels[c];
      while (c < levels.size() && levels[c] == level) ++c;
      path += "H" + column_x(c);
    }
    out_.path("fill=\"#b6c7dc\"", path + "V" + plot::number(y + height) + "Z");
    if (t.budget) {
      const auto budget_y = y + height - static_cast<double>(*t.budget) / limit * height;
      out_.line(plot::left, budget_y, plot::right, budget_y, "stroke=\"#d62728\" stroke-dasharray=\"7 4\"");
    }
    out_.text(plot::left + 4, y + 12, "", label_of(t));
  }

  void draw_legend() {
    out_.legend_box("#4e79a7", "memory, peak " + format_bytes(timeline_.peak));
    if (any_recomputed_) out_.legend_box("#f28e2b", "while recomputing");
    if (timeline_.held > 0) out_.legend_box("#1f3a5f", "held " + format_bytes(timeline_.held));
    if (style_.budget) out_.legend_line("stroke=\"#d62728\" stroke-dasharray=\"5 3\"", "budget " + format_bytes(*style_.budget));
    const auto any_lane_does = [&](lane::work work) {
      return std::any_of(style_.lanes.begin(), style_.lanes.end(), [&](const lane& l) {
        return std::any_of(l.spans.begin(), l.spans.end(), [&](const auto& x) { return x.what == work; });
      });
    };
    if (any_lane_does(lane::work::copied)) out_.legend_box(work_colours[2], "copies");
    if (any_lane_does(lane::work::waited)) out_.legend_box(work_colours[3], "waits");
    for (std::size_t i = 0; i < style_.overlays.size(); ++i) out_.legend_line(stroke(i), style_.overlays[i].label);
  }

  const timeline_style& style_;
  bool has_duration_;
  memory_timeline timeline_;
  double span_;       // of the time axis, s
  double top_bytes_;  // of the memory axis
  plot out_;
  bool any_recomputed_ = false;
};
}  // namespace detail

/// Draws a timeline as a self-contained SVG picture: memory as an area, recomputation in another colour, held sources, the
/// budget, the peak, and overlays as lines.
/// @param timeline memory over time
/// @param style    title, budget, overlays, lanes and tiers
/// @return the SVG document
/// Complexity: O(pieces + points of the overlays). Each line has at most about 1600 points.
inline std::string timeline_svg(const memory_timeline& timeline, const timeline_style& style) {
  return detail::timeline_picture(timeline, style).draw();
}

}  // namespace remat
