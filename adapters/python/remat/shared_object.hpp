// SPDX-License-Identifier: Apache-2.0
/// @file
/// Python objects that C++ owns beyond one call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace remat::python {

/// A reference to a Python object whose last owner may be on any thread. The GIL is taken to release the object; after the end
/// of the interpreter the object is leaked.
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
