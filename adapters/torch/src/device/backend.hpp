// SPDX-License-Identifier: Apache-2.0
/// @file
/// The parts that differ between kinds of accelerators: the allocator, pinned memory and a name. Everything else goes through
/// c10. Private to the adapter; a plug-in such as cuda/plugin.cpp includes this file and links nothing of remat.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace remat::pytorch {

/// Callbacks to remat from the allocator in front of the backend's own one. All of them concern the calling thread.
struct front_calls {
  /// The address in an arena for the next allocation; null: the backend's allocator serves it.
  void* (*place)(c10::Stream on, std::size_t bytes);
  /// True while a plan or a recording is active. `born` and `died` must be called then.
  bool (*watched)(c10::Device on);
  void (*born)(c10::Device on, const void* data, std::size_t bytes);
  void (*died)(c10::DeviceType on, const void* data);
  bool (*in_arena)(const void* data);
  /// Reports that work on `s`, unknown to PyTorch, reads memory of an arena (`Tensor.record_stream`).
  void (*used_in)(const void* data, c10::Stream s);
  /// Called when the device is out of memory; returns idle arenas. @return true if it freed memory
  bool (*make_room)(c10::Device on);
};

/// One kind of accelerator.
class backend {
 public:
  virtual ~backend() = default;
  /// True if remat's allocator can stand in front, so that plans choose addresses.
  virtual bool can_place() const { return true; }
  /// Puts remat's allocator in front of the backend's own one, if it can place; further calls do nothing.
  virtual void install(const front_calls& calls) = 0;
  /// True if no other allocator has been put in front since, or if the backend cannot place.
  virtual bool in_front() const = 0;
  /// The backend's own allocator, once `install` has run.
  virtual c10::DeviceAllocator& own() const = 0;
  /// Why no device of this kind can be used, in one sentence; empty: nothing is known to be wrong.
  virtual std::string problem() const { return ""; }
  /// The share of the device's memory that this process may reserve, in (0, 1].
  virtual double fraction(c10::Device) const { return 1; }
  /// Name of a device for people, such as the name of the card.
  virtual std::string name(c10::Device on) const = 0;
  /// Page-locked memory of exactly `bytes` bytes, near `on` where the machine has several memory nodes.
  virtual c10::DataPtr pinned(c10::Device on, std::size_t bytes) const = 0;
};

/// {bytes of a device that this process may use, bytes that it may still reserve}; `b` must be installed.
inline std::pair<std::int64_t, std::int64_t> allowed_memory(const backend& b, c10::Device on) {
  const auto [free, total] = b.own().getMemoryInfo(on.index());
  const double share = b.fraction(on);
  if (share >= 1) return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free)};
  constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto allowed = static_cast<std::int64_t>(share * static_cast<double>(total));
  const auto reserved = b.own().getDeviceStats(on.index()).reserved_bytes[all].current;
  return {allowed, std::clamp<std::int64_t>(allowed - reserved, 0, static_cast<std::int64_t>(free))};
}

/// Common part of the two fronts: c10's, for backends that take their allocator from `c10::GetAllocator`, and CUDA's.
///
/// `allocate` tries an arena, then the backend's allocator, then returns idle arenas and tries the backend's allocator again.
class front {
 public:
  front(c10::DeviceAllocator& own, const front_calls& calls) : own_(own), calls_(calls) {}

  /// @param on      the current stream
  /// @param deleter of this front, for blocks whose death must be reported
  c10::DataPtr allocate(c10::Stream on, std::size_t bytes, c10::DeleterFnPtr deleter) {
    if (bytes == 0) return own_.allocate(bytes);
    if (void* const place = calls_.place(on, bytes)) return {place, place, deleter, on.device()};
    if (!calls_.watched(on.device())) return with_room(on.device(), [&] { return own_.allocate(bytes); });
    void* const data = with_room(on.device(), [&] { return own_.raw_allocate(bytes); });
    calls_.born(on.device(), data, bytes);
    return {data, data, deleter, on.device()};
  }
  /// Releases a block. Blocks outside of arenas go back to the backend.
  void release(c10::DeviceType on, void* data) {
    if (data == nullptr) return;
    calls_.died(on, data);
    if (!calls_.in_arena(data)) own_.raw_deallocate(data);
  }
  /// A backend ignores blocks whose deleter is not its own, and does not know blocks in arenas. So arenas note the stream
  /// themselves, and other blocks are passed on with the backend's deleter.
  void record_stream(const c10::DataPtr& p, c10::Stream s, c10::DeleterFnPtr deleter) {
    if (p.get() == nullptr) return;
    if (calls_.in_arena(p.get())) return calls_.used_in(p.get(), s);
    if (p.get_deleter() != deleter) return own_.recordStream(p, s);
    c10::DataPtr block(p.get(), p.get(), own_.raw_deleter(), p.device());
    own_.recordStream(block, s);
    block.release_context();
  }
  /// Runs `allocate`. If the device is out of memory and idle arenas could be returned, runs it once more.
  template <class F>
  auto with_room(c10::Device on, F allocate) -> decltype(allocate()) {
    try {
      return allocate();
    } catch (const c10::OutOfMemoryError&) {
      if (!calls_.make_room(on)) throw;
    }
    return allocate();
  }
  const front_calls& calls() const { return calls_; }

 private:
  c10::DeviceAllocator& own_;
  front_calls calls_;
};

/// Function of a plug-in that makes its backend. The process never destroys the backend.
/// @param interface must equal `backend_interface`
/// @return null if `interface` differs
using make_backend = backend* (*)(int interface);
inline constexpr int backend_interface = 2;
inline constexpr const char* backend_symbol = "remat_backend";

/// The backend for a kind of accelerator, not installed yet. CUDA has a plug-in. All other kinds use the generic backend, as does
/// CUDA if PyTorch was built for ROCm or REMAT_PLUGINS is empty.
/// @throws not_available with one sentence that names the cause
backend& backend_of(c10::DeviceType kind);
/// Puts remat's allocator in front of the backend's own one.
/// @throws not_available
void install(backend& b);

}  // namespace remat::pytorch
