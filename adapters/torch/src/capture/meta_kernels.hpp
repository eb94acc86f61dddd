// SPDX-License-Identifier: Apache-2.0
/// @file
/// Kernels that compute the geometry of results without values. Private to the adapter.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace remat::pytorch::detail {

/// A kernel for tensors on `meta`.
struct known_kernel {
  c10::KernelFunction function;
  bool of_host;  ///< valid for the host only
  bool draws;    ///< the kernel of a device draws from the generator
};

/// The kernel of an operator for tensors on `meta`. The geometry of its results is that of real devices: either PyTorch uses the
/// same code for both ("structured" operators), or the rule is stated and tested here.
///
/// Do not use the dispatcher for this: PyTorch has registered Python functions in front of its own kernels. Their first call
/// imports its compiler (80 MB).
/// @param device where the tensors of the call lie
/// @return null if the operator has no kernel that is valid for this device
const known_kernel* meta_kernel(const c10::OperatorHandle& op, c10::DeviceType device);

}  // namespace remat::pytorch::detail
