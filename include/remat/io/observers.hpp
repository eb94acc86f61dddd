// SPDX-License-Identifier: Apache-2.0
/// @file
/// Observers that show, log and save the progress of a search. Needs nlohmann/json; not part of the umbrella header.
#pragma once

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <limits>
#include <ostream>
#include <string>
#include <utility>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/text.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/json.hpp>

namespace remat {

/// Shows the progress of a search in one terminal line, which it rewrites. The destructor erases the line.
/// Complexity: O(1) per report.
/// @code
/// auto r = remat::solve(p, budget, remat::min_cut(), {}, remat::progress_line());
/// @endcode
class progress_line {
 public:
  /// @param prefix text at the start of the line
  /// @param out    the stream; must outlive the observer
  explicit progress_line(std::string prefix = "", std::ostream& out = std::cerr) : prefix_(std::move(prefix)), out_(out) {}
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line() {
    if (shown_) out_ << "\r\033[K" << std::flush;
  }

  void operator()(const progress& report) {
    std::string text = prefix_;
    const bool found = report.best < std::numeric_limits<double>::infinity();
    if (found) text += "best " + format_seconds(report.best) + ", ";
    if (report.bound > 0) text += "bound " + format_seconds(report.bound) + ", ";
    if (found && report.bound > 0 && report.best > 0)
      text += "gap " + detail::printed("%.2f %%, ", 100 * std::max(0.0, 1 - report.bound / report.best));
    text += report.stage;
    out_ << "\r\033[K" << detail::printed("%.1f s  ", report.elapsed) << detail::shortened(text, 110) << std::flush;
    shown_ = true;
  }

 private:
  std::string prefix_;
  std::ostream& out_;
  bool shown_ = false;
};

/// Writes a line of CSV whenever the best schedule or the bound changes.
class progress_log {
 public:
  /// @param out the stream; must outlive the observer
  explicit progress_log(std::ostream& out) : out_(out) { out_ << "elapsed,best,bound,peak,stage\n"; }

  void operator()(const progress& report) {
    if (report.best >= best_ && report.bound <= bound_) return;
    best_ = std::min(best_, report.best);
    bound_ = std::max(bound_, report.bound);
    auto stage = report.stage;
    std::replace(stage.begin(), stage.end(), '"', '\'');
    out_ << report.elapsed << "," << (report.best < infinity ? std::to_string(report.best) : "") << "," << report.bound << ","
         << (report.schedule ? std::to_string(report.peak) : "") << ",\"" << stage << "\"\n"
         << std::flush;
  }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();
  std::ostream& out_;
  double best_ = infinity, bound_ = -1;
};

/// Saves the best schedule so far to a file, which each write replaces atomically. So the schedule survives if the search is
/// killed.
/// Complexity: O(steps) per write.
/// @code
/// auto r = remat::solve(p, budget, remat::min_cut(), {.seconds = 3600}, remat::best_to_file("plan.json", p, budget));
/// @endcode
class best_to_file {
 public:
  /// @param path   the file, a remat-schedule
  /// @param p      the problem; must outlive the observer
  /// @param budget budget of the search, bytes
  /// @param every  least time between two writes, s; an improvement within this time is skipped until a later improvement
  best_to_file(std::filesystem::path path, const problem& p, bytes_t budget, double every = 0)
      : path_(std::move(path)), p_(p), budget_(budget), every_(every) {}

  /// @throws error if the file cannot be written
  void operator()(const progress& report) {
    if (!report.schedule || report.best >= best_ || report.elapsed < next_) return;
    best_ = report.best;
    next_ = report.elapsed + every_;
    result r;
    r.status = status::feasible;
    r.schedule = *report.schedule;
    r.budget = budget_;
    r.peak = report.peak;
    r.seconds = report.best;
    r.bound = report.bound;
    write_schedule(path_, r, p_);
  }

 private:
  std::filesystem::path path_;
  const problem& p_;
  bytes_t budget_;
  double every_, next_ = 0, best_ = std::numeric_limits<double>::infinity();
};

}  // namespace remat
