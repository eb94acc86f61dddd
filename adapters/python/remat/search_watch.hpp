// SPDX-License-Identifier: Apache-2.0
/// @file
/// Searches that a user watches at a terminal: Ctrl-C ends a search, and one line shows its progress.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <remat/core/solve.hpp>
#include <remat/io/observers.hpp>

#include "shared_object.hpp"

namespace remat::python {

namespace py = pybind11;

/// Ends a search when the user presses Ctrl-C, and keeps the Python exception of the signal.
class interruption {
 public:
  /// Observer of a search. Runs pending signal handlers of Python.
  /// @return `stop` after a signal handler has raised an exception
  remat::control look() {
    if (pressed_) return remat::control::stop;
    py::gil_scoped_acquire hold;
    if (PyErr_CheckSignals() == 0) return remat::control::go_on;
    exception_ = shared(py::reinterpret_steal<py::object>(take()));
    pressed_ = true;
    return remat::control::stop;
  }
  bool pressed() const { return pressed_; }
  /// Raises the exception of the signal handler. A KeyboardInterrupt is raised only after `always_raise`: otherwise, Ctrl-C only
  /// ends the search.
  void raise_if_pressed() {
    if (!pressed_) return;
    py::gil_scoped_acquire hold;
    if (always_ || !PyErr_GivenExceptionMatches(exception_->ptr(), PyExc_KeyboardInterrupt)) raise();
  }
  void always_raise() { always_ = true; }
  /// Raises the exception of the signal handler.
  [[noreturn]] void raise() {
    py::gil_scoped_acquire hold;
    pressed_ = false;
    const auto e = std::exchange(exception_, nullptr);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(e->ptr())), e->ptr());
    throw py::error_already_set();
  }
  void forget() {
    pressed_ = false;
    exception_.reset();
  }

 private:
  static PyObject* take() {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
  }
  std::atomic<bool> pressed_ = false;
  bool always_ = false;
  std::shared_ptr<py::object> exception_;
};

/// Shows the progress of searches in one line of standard error, if standard error is a terminal.
class terminal_line {
 public:
  void show(const remat::progress& now) {
    if (!there_) return;
    const std::lock_guard lock(mutex_);
    if (!line_) line_.emplace("remat: planning: ");
    (*line_)(now);
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    line_.reset();
  }

 private:
  bool there_ = isatty(STDERR_FILENO) != 0;
  std::mutex mutex_;
  std::optional<remat::progress_line> line_;
};

}  // namespace remat::python
