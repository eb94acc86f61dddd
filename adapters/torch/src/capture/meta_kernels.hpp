// SPDX-License-Identifier: Apache-2.0
/// @file
/// Kernels that compute the geometry of results and no values. Private to the adapter.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace remat::pytorch::detail {

/// A kernel for tensors on `meta`.
struct known_kernel {
  c10::KernelFunction function;
  bool of_host;  ///< holds for the host alone
  bool draws;    ///< the kernel of a device draws from the generator
};

/// The kernel of an operator for tensors on `meta`. Its results have the geometry that the operator gives on devices: either both
/// share this code in PyTorch ("structured" operators), or the rule is stated and tested here.
///
/// The dispatcher would call other kernels: PyTorch has registered Python functions in front of its own, and their first call
/// imports its compiler (80 MB).
/// @param device where the tensors of the call lie
/// @return null if the operator has none that holds for this device
const known_kernel* meta_kernel(const c10::OperatorHandle& op, c10::DeviceType device);

}  // namespace remat::pytorch::detail
