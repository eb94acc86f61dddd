// SPDX-License-Identifier: Apache-2.0
/// @file
/// The parts of the module `remat._torch` that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace remat::python {

/// Disks, and the traffic to and from them (torch_disks.cpp).
void bind_disks(pybind11::module_& m);
/// Sessions of models, and their plans (torch_sessions.cpp).
void bind_sessions(pybind11::module_& m);

}  // namespace remat::python
