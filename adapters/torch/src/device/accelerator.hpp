// SPDX-License-Identifier: Apache-2.0
/// @file
/// A device whose kernels and copies run in streams beside the host: any accelerator of PyTorch. Private to the adapter.
#pragma once

#include <c10/core/Stream.h>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// The accelerator that tensors on `which` need; one object per device for the life of the process.
/// @param which without an index: the current device
/// @throws not_available with one sentence that names the cause
device& accelerator_device(c10::Device which);

/// @throws not_available if plans cannot choose addresses on `on`: values without fixed addresses cannot be moved
void require_moves(const device& on);

/// Far memory in pinned memory of the host, with a stream for each direction.
/// @param on    an accelerator
/// @param limit bytes reserved at a time
/// @throws not_available, bad_option
far_memory pinned_memory(c10::Device on, bytes_t limit);

/// @param on an accelerator
/// @throws not_available while the current stream of `on` is being captured into a foreign graph
void refuse_foreign_capture(c10::Device on);

/// Notes that work on stream `s`, unknown to PyTorch, reads the arena that holds `data`. The next step in the arena waits for it.
void note_use(const void* data, c10::Stream s);

}  // namespace remat::pytorch
