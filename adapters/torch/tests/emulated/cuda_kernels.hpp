// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parts of the kernels of the emulated CUDA device.
#pragma once

#include <torch/library.h>

#include "kernels.hpp"

namespace emulated::cuda {

/// The backend of the emulated CUDA device.
const backend& device();

/// Fused attention: CUDA's operators, computed by the kernel of the host.
void register_attention(torch::Library& library);
/// Fused layers that the host does not have.
void register_layers(torch::Library& library);

}  // namespace emulated::cuda
