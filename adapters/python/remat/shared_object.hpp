// SPDX-License-Identifier: Apache-2.0
/// @file
/// Objects of Python that C++ holds beyond a call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace remat::python {

/// A Python object that may die on any thread.
inline std::shared_ptr<pybind11::object> shared(pybind11::object o) {
  return {new pybind11::object(std::move(o)), [](pybind11::object* held) {
            if (Py_IsInitialized()) {
              pybind11::gil_scoped_acquire hold;
              delete held;
            } else {
              held->release();
              delete held;
            }
          }};
}

}  // namespace remat::python
