// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calls from Python into the planner: without the GIL, and with exceptions of C++ translated to those of `remat._errors`.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>
#include <utility>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/session.hpp>

namespace remat::python {

namespace py = pybind11;
namespace rp = remat::pytorch;

/// Raises the exception `kind` of `remat._errors`. Takes the GIL.
/// @param kind name of the class
/// @param arguments arguments of its constructor
template <class... A>
[[noreturn]] void raise(const char* kind, A&&... arguments) {
  py::gil_scoped_acquire hold;
  const py::object type = py::module_::import("remat._errors").attr(kind);
  const py::object e = type(std::forward<A>(arguments)...);
  PyErr_SetObject(type.ptr(), e.ptr());
  throw py::error_already_set();
}

/// Calls `f` without the GIL. An exception of remat becomes the matching exception of `remat._errors`.
template <class F>
auto translated(F f) {
  try {
    py::gil_scoped_release free;
    return f();
  } catch (const rp::over_budget& e) {
    raise("OverBudget", std::string(e.what()) + "; the step would run out of memory.", e.smallest, e.bound, e.largest);
  } catch (const rp::cannot_capture& e) {
    const std::string what = e.what();
    const auto end = what.find(" (call ");
    raise("Refused", what, end == what.npos ? py::none() : py::object(py::str(what.substr(0, end))));
  } catch (const rp::unexpected_inputs& e) {
    raise("Refused", e.what());
  } catch (const rp::not_supported& e) {
    raise("Refused", e.what());
  } catch (const rp::device_lost& e) {
    raise("DeviceLost", e.what());
  } catch (const rp::copy_failed& e) {
    raise("CopyFailed", e.what());
  } catch (const rp::not_equal& e) {
    raise("NotEqual", e.what());
  } catch (const remat::error& e) {
    raise("Error", e.what());
  }
}

/// Called in a handler of an exception in the backward of a step: rethrows the exception as one of `remat._errors` if a class
/// that derives from RuntimeError matches. Otherwise returns, and PyTorch raises its own RuntimeError.
inline void translate_raised() {
  const auto raised = std::current_exception();
  py::gil_scoped_acquire hold;
  try {
    translated([&] { std::rethrow_exception(raised); });
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_RuntimeError)) return;  // left to PyTorch, which raises a RuntimeError
    e.restore();
    python_error known;  // autograd's engine passes a python_error to the thread that called backward
    known.persist();
    throw known;
  } catch (const std::exception&) {  // no class of `remat._errors` matches
  }
}

/// Calls `f`, which reserves disk space in `folder`, as `translated` does. `out_of_memory` becomes NoSpace.
template <class F>
auto in_folder(const std::string& folder, F f) {
  return translated([&] {
    try {
      return f();
    } catch (const rp::out_of_memory& e) {
      raise("NoSpace", e.why.empty() ? "the disk is full" : e.why, folder, e.asked, e.available);
    }
  });
}

}  // namespace remat::python
