// SPDX-License-Identifier: Apache-2.0
/// @file
/// A device whose kernels and copies run in queues beside the host, such as CUDA's. Private to the adapter.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// What is asked of the system for streams; tests put their own in its place. A status is 0, or says what failed. Streams and
/// events are the system's.
struct stream_calls {
  using status = int;
  std::string (*words)(status);  ///< what it says; a failure is forgotten
  status not_ready;              ///< what `reached` answers meanwhile
  status (*allocate)(void** data, std::size_t bytes);
  status (*release)(void* data);
  void (*make_room)();                      ///< others give back what they do not use
  memory_use (*allocated)(c10::Device on);  ///< by others, for tensors
  void (*reset_peak)(c10::Device on);       ///< of `allocated`
  status (*allocate_locked)(void** data, std::size_t bytes);
  status (*release_locked)(void* data);
  status (*make_stream)(void** stream);
  status (*end_stream)(void* stream);
  void* (*kernels)(c10::Device on);  ///< the stream of this thread's kernels
  status (*make_event)(void** event);
  status (*end_event)(void* event);
  status (*record)(void* event, void* stream);
  status (*reached)(void* event);
  status (*wait)(void* event);                   ///< the calling thread
  status (*wait_in)(void* stream, void* event);  ///< what comes later in the stream
  status (*copy)(void* to, const void* from, std::size_t bytes, void* stream);
};

/// A device with streams.
/// @param on    where its tensors are
/// @param name  of its memory, for people and for what is kept of measurements
/// @param calls must outlive it, its regions and its links
/// @param place makes its `placement`
std::unique_ptr<device> make_streaming_device(c10::Device on, std::string name, const stream_calls& calls,
                                              std::function<std::unique_ptr<placement>()> place);
/// Page-locked memory of the host, and a stream each way.
/// @param on a device with streams
/// @throws bad_option
far_memory locked_memory(device& on, bytes_t limit);

}  // namespace remat::pytorch
