// SPDX-License-Identifier: Apache-2.0
/// @file
/// Progress and interruption of searches.
#pragma once

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/io/observers.hpp>

namespace cli {

inline std::atomic<bool> interrupted = false;

/// Shows progress on terminals, and stops searches when the user interrupts the program. Must outlive the searches.
class watcher {
 public:
  watcher() {
    std::signal(SIGINT, [](int) { interrupted = true; });
  }
  watcher(const watcher&) = delete;
  watcher& operator=(const watcher&) = delete;
  ~watcher() { std::signal(SIGINT, SIG_DFL); }

  /// An observer that shows progress.
  /// @param of label before the progress; may be empty
  auto observer(const std::string& of = "") {
    line_.reset();
    if (isatty(STDERR_FILENO) != 0) line_.emplace(of.empty() ? "" : of + ": ");
    return [this](const remat::progress& now) {
      if (line_) (*line_)(now);
      return interrupted ? remat::control::stop : remat::control::go_on;
    };
  }

 private:
  std::optional<remat::progress_line> line_;
};

}  // namespace cli
