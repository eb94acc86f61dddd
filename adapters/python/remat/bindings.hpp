// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parts of the module `remat._torch`, one per source file.
#pragma once

#include <pybind11/pybind11.h>

namespace remat::python {

/// Binds the classes `Disk` and `Traffic` (torch_disks.cpp).
void bind_disks(pybind11::module_& m);
/// Binds the sessions of models and their plans (torch_sessions.cpp).
void bind_sessions(pybind11::module_& m);

}  // namespace remat::python
