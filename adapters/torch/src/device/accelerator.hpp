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

/// @throws not_available if plans cannot choose addresses on `on`, from which values would be moved
void require_moves(const device& on);

/// Pinned memory of the host, and a stream for each direction.
/// @param on    an accelerator
/// @param limit bytes reserved at a time
/// @throws not_available, bad_option
far_memory pinned_memory(c10::Device on, bytes_t limit);

/// @param on an accelerator
/// @throws not_available while the current stream there is captured as somebody else's graph
void refuse_foreign_capture(c10::Device on);

/// A stream that PyTorch does not know of reads the arena that holds `data`: the next step in the arena waits for it.
void note_use(const void* data, c10::Stream s);

}  // namespace remat::pytorch
