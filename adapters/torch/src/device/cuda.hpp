// SPDX-License-Identifier: Apache-2.0
/// @file
/// CUDA devices, where this library was built for them. Private to the adapter.
#pragma once

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// @throws not_available if `which` is no CUDA device, or cannot be used
device& cuda_device(c10::Device which);
/// Page-locked memory of the host with two streams of that device.
/// @throws not_available, bad_option
far_memory cuda_far_memory(c10::Device which, bytes_t limit);

}  // namespace remat::pytorch
