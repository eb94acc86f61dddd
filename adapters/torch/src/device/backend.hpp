// SPDX-License-Identifier: Apache-2.0
/// @file
/// What differs from one kind of accelerator to another: its allocator, its pinned memory and its name. Everything else goes
/// through c10. Private to the adapter; a plug-in such as cuda/plugin.cpp includes it and links nothing of remat.
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

/// What remat tells an allocator that stands in front of the backend's own one. All functions concern the calling thread.
struct front_calls {
  /// An address in an arena for the next allocation, or null: the backend's allocator.
  void* (*place)(c10::Stream on, std::size_t bytes);
  /// A plan or a recording is active, so that `born` and `died` have to be told.
  bool (*watched)(c10::Device on);
  void (*born)(c10::Device on, const void* data, std::size_t bytes);
  void (*died)(c10::DeviceType on, const void* data);
  bool (*in_arena)(const void* data);
  /// Work on `s` that PyTorch does not know of reads memory of an arena: `Tensor.record_stream`.
  void (*used_in)(const void* data, c10::Stream s);
  /// The device is out of memory. Idle arenas are given back. @return something was
  bool (*make_room)(c10::Device on);
};

/// One kind of accelerator.
class backend {
 public:
  virtual ~backend() = default;
  /// remat's allocator can stand in front, so that plans choose addresses.
  virtual bool can_place() const { return true; }
  /// Puts remat's allocator in front of the backend's own one, if it can place; further calls do nothing.
  virtual void install(const front_calls& calls) = 0;
  /// No other allocator has been put in front since, or the backend cannot place.
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

/// Bytes of a device that this process may have, and those that it may still reserve; `b` is installed.
inline std::pair<std::int64_t, std::int64_t> allowed_memory(const backend& b, c10::Device on) {
  const auto [free, total] = b.own().getMemoryInfo(on.index());
  const double share = b.fraction(on);
  if (share >= 1) return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free)};
  constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto allowed = static_cast<std::int64_t>(share * static_cast<double>(total));
  const auto reserved = b.own().getDeviceStats(on.index()).reserved_bytes[all].current;
  return {allowed, std::clamp<std::int64_t>(allowed - reserved, 0, static_cast<std::int64_t>(free))};
}

/// What the two kinds of fronts share: c10's, for any backend that takes its allocator from `c10::GetAllocator`, and CUDA's.
///
/// `allocate` hands out memory in this order: an arena, the backend's allocator, and that again after idle arenas were returned.
class front {
 public:
  front(c10::DeviceAllocator& own, const front_calls& calls) : own_(own), calls_(calls) {}

  /// @param on      the current stream
  /// @param deleter of this front for blocks whose death has to be told
  c10::DataPtr allocate(c10::Stream on, std::size_t bytes, c10::DeleterFnPtr deleter) {
    if (bytes == 0) return own_.allocate(bytes);
    if (void* const place = calls_.place(on, bytes)) return {place, place, deleter, on.device()};
    if (!calls_.watched(on.device())) return with_room(on.device(), [&] { return own_.allocate(bytes); });
    void* const data = with_room(on.device(), [&] { return own_.raw_allocate(bytes); });
    calls_.born(on.device(), data, bytes);
    return {data, data, deleter, on.device()};
  }
  /// Blocks that `allocate` did not take from an arena go back to the backend.
  void release(c10::DeviceType on, void* data) {
    if (data == nullptr) return;
    calls_.died(on, data);
    if (!calls_.in_arena(data)) own_.raw_deallocate(data);
  }
  /// A backend ignores blocks whose deleter is not its own, and does not know those in arenas.
  void record_stream(const c10::DataPtr& p, c10::Stream s, c10::DeleterFnPtr deleter) {
    if (p.get() == nullptr) return;
    if (calls_.in_arena(p.get())) return calls_.used_in(p.get(), s);
    if (p.get_deleter() != deleter) return own_.recordStream(p, s);
    c10::DataPtr block(p.get(), p.get(), own_.raw_deleter(), p.device());
    own_.recordStream(block, s);
    block.release_context();
  }
  /// Runs `allocate`, and once more if the device was out of memory and idle arenas could be returned.
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

/// The symbol of a plug-in that makes its backend; the process keeps it for ever.
/// @param interface must equal `backend_interface`
/// @return null for another interface
using make_backend = backend* (*)(int interface);
inline constexpr int backend_interface = 2;
inline constexpr const char* backend_symbol = "remat_backend";

/// The backend for a kind of accelerator: that of a plug-in for CUDA, the generic one for all others, and for CUDA where
/// PyTorch was built for ROCm or REMAT_PLUGINS is empty.
/// It is not installed yet.
/// @throws not_available with one sentence that names the cause
backend& backend_of(c10::DeviceType kind);
/// Puts remat's allocator in front of the backend's own one.
/// @throws not_available
void install(backend& b);

}  // namespace remat::pytorch
