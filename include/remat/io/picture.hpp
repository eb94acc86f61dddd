// SPDX-License-Identifier: Apache-2.0
/// @file
/// Common parts of the pictures: units, ticks, and an SVG plot with two axes and a legend.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include <remat/core/text.hpp>

namespace remat::detail {

/// A unit, and its size in base units.
struct scale {
  const char* unit;
  double factor;
};

inline scale bytes_scale(double largest) {
  static constexpr std::array<scale, 5> all = {{{"TiB", 0x1p40}, {"GiB", 0x1p30}, {"MiB", 0x1p20}, {"KiB", 0x1p10}, {"B", 1}}};
  return *std::find_if(all.begin(), all.end() - 1, [&](const scale& x) { return largest >= x.factor; });
}

inline scale seconds_scale(double largest) {
  static constexpr std::array<scale, 4> all = {{{"s", 1}, {"ms", 1e-3}, {"µs", 1e-6}, {"ns", 1e-9}}};
  return *std::find_if(all.begin(), all.end() - 1, [&](const scale& x) { return largest >= x.factor; });
}

/// Step between ticks: the largest of 1, 2, 5 times a power of ten that gives at least `count` ticks up to `largest`.
inline double tick_step(double largest, int count) {
  const double power = std::pow(10, std::floor(std::log10(largest / count)));
  const double rest = largest / count / power;
  return power * (rest >= 5 ? 5 : rest >= 2 ? 2 : 1);
}

inline std::string escaped(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (static_cast<unsigned char>(c) >= ' ')
      out += c;
  }
  return out;
}

/// The label, right-aligned in ten characters.
inline std::string padded(const std::string& label) {
  return std::string(10 - std::min<std::size_t>(10, label.size()), ' ') + label;
}

/// The last line of a picture in text: labels for both ends of the horizontal axis, in `width` characters.
inline std::string axis_ends(const std::string& first, const std::string& last, std::size_t width) {
  const auto shown = first.size() + last.size() - (last.find("µ") != std::string::npos ? 1 : 0);
  return padded("") + "  " + first + std::string(width - std::min(width, shown), ' ') + last + "\n";
}

/// Colour of line i; the colours repeat.
inline const char* line_colour(std::size_t i) {
  static constexpr std::array<const char*, 6> colours = {"#222222", "#2a9d5c", "#8e44ad", "#b8860b", "#4e79a7", "#d1495b"};
  return colours[i % colours.size()];
}

/// An SVG picture under construction: a plot area with two axes and a legend above it. The vertical axis starts at 0.
/// Complexity: O(bytes of the document).
class svg_plot {
 public:
  static constexpr double left = 84, right = 944, top = 64, bottom = 368, under = 440;

  /// @param title   title above the legend
  /// @param first   smallest number on the horizontal axis
  /// @param last    largest number on the horizontal axis, > first
  /// @param highest largest number on the vertical axis, > 0
  /// @param below   height of the room below the axis, from `under` on
  svg_plot(const std::string& title, double first, double last, double highest, double below = 0)
      : first_(first), last_(last), highest_(highest) {
    const auto height = number(under + below);
    out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 " + height + "\" width=\"960\" height=\"" + height +
           "\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#333333\">\n<rect width=\"960\" height=\"" +
           height + "\" fill=\"#ffffff\"/>\n";
    if (!title.empty()) text(left, 26, "font-size=\"16\" font-weight=\"bold\"", title);
  }

  double x_of(double at) const { return left + (at - first_) / (last_ - first_) * (right - left); }
  double y_of(double height) const { return bottom - height / highest_ * (bottom - top); }
  static std::string number(double v) { return printed("%.4g", std::round(v * 10) / 10); }

  void text(double x, double y, const std::string& attributes, const std::string& content) {
    out_ += "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" " + attributes + ">" + escaped(content) + "</text>\n";
  }
  void line(double x1, double y1, double x2, double y2, const std::string& attributes) {
    out_ += "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) + "\" " +
            attributes + "/>\n";
  }
  void path(const std::string& attributes, const std::string& d) {
    if (!d.empty()) out_ += "<path " + attributes + " d=\"" + d + "\"/>\n";
  }
  void box(double x, double y, double width, double height, const std::string& colour) {
    out_ += "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) + "\" height=\"" + number(height) +
            "\" fill=\"" + colour + "\"/>\n";
  }

  void dot(double x, double y, const std::string& colour) {
    out_ += "<circle cx=\"" + number(x) + "\" cy=\"" + number(y) + "\" r=\"6\" fill=\"" + colour + "\"/>\n";
  }

  static constexpr int max_ticks = 20;  ///< also ends the loop if a step is too small to change the numbers of the axis

  /// Draws ticks and grid of the vertical axis.
  void vertical(const scale& s) {
    const auto step = tick_step(highest_ / s.factor, 4);
    for (int k = 0; k < max_ticks && k * step * s.factor <= highest_; ++k) {
      const double tick = k * step;
      const double y = y_of(tick * s.factor);
      line(left, y, right, y, "stroke=\"#e6e6e6\"");
      text(left - 8, y + 4, "text-anchor=\"end\"", printed("%.4g ", tick) + s.unit);
    }
  }
  /// Draws ticks and label of the horizontal axis.
  void horizontal(const scale& s, const std::string& label) {
    const auto step = tick_step((last_ - first_) / s.factor, 6);  // + 0.0 avoids "-0"
    const double least = std::ceil(first_ / s.factor / step - 1e-9) * step + 0.0;
    for (int k = 0; k < max_ticks && (least + k * step) * s.factor <= last_ + 1e-9 * (last_ - first_); ++k) {
      const double tick = least + k * step;
      const double x = x_of(tick * s.factor);
      line(x, bottom, x, bottom + 5, "stroke=\"#333333\"");
      text(x, bottom + 19, "text-anchor=\"middle\"", printed("%.4g", tick));
    }
    text((left + right) / 2, bottom + 38, "text-anchor=\"middle\"", label);
  }
  /// Draws the two axes.
  void frame() {
    line(left, bottom, right, bottom, "stroke=\"#333333\"");
    line(left, top, left, bottom, "stroke=\"#333333\"");
  }

  /// Adds an entry to the legend, which takes as many rows as it needs.
  void legend_box(const std::string& colour, const std::string& label) {
    legend("<rect y=\"-5\" width=\"16\" height=\"10\" fill=\"" + colour + "\"/>", label);
  }
  void legend_line(const std::string& attributes, const std::string& label) {
    legend("<line x1=\"0\" y1=\"0\" x2=\"16\" y2=\"0\" stroke-width=\"2\" " + attributes + "/>", label);
  }

  /// The SVG document.
  std::string document() const { return out_ + "</svg>\n"; }

 private:
  void legend(const std::string& mark, const std::string& label) {
    const double width = 22 + 6.6 * static_cast<double>(label.size());
    if (legend_x_ > left && legend_x_ + width > right) legend_x_ = left, legend_y_ += 15;
    out_ += "<g transform=\"translate(" + number(legend_x_) + " " + number(legend_y_) + ")\">" + mark + "</g>\n";
    text(legend_x_ + 22, legend_y_ + 5, "", label);
    legend_x_ += width + 18;
  }

  double first_, last_, highest_;
  double legend_x_ = left, legend_y_ = 41;
  std::string out_;
};

}  // namespace remat::detail
