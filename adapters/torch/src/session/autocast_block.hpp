// SPDX-License-Identifier: Apache-2.0
/// @file
/// Detects several forwards of one model in one `autocast` block. Private to the adapter.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <set>

#include "../base/key.hpp"

namespace remat::pytorch {

/// The sessions that this thread has called in its `autocast` block. PyTorch casts each weight once in a block. A cast of a
/// weight of this object identifies the block, because the cast is gone when the block ends.
class autocast_block {
 public:
  static autocast_block& of_thread() {
    thread_local autocast_block block;
    return block;
  }
  /// @param caller number of the session that begins a step
  /// @param on     device of the step
  /// @return true if `caller` has begun another step in this block, and the block keeps casts
  bool has(std::uint64_t caller, c10::DeviceType on) {
    if (!keeps_casts(on)) return false;
    if (const auto now = cast(); !now.is_same(cast_)) callers_.clear();
    return callers_.count(caller) > 0;
  }
  /// Call this when the forward of a step has ended, which clears all casts.
  void add(std::uint64_t caller, c10::DeviceType on) {
    if (!keeps_casts(on)) return;
    cast_ = cast();
    callers_.insert(caller);
  }

 private:
  static bool keeps_casts(c10::DeviceType on) {
    return autocast_on(on) && at::autocast::is_autocast_cache_enabled() && at::GradMode::is_enabled();
  }
  /// A cast on the host, since all devices share one cache of casts.
  at::Tensor cast() {
    const c10::impl::ExcludeDispatchKeyGuard none(c10::autocast_dispatch_keyset);
    if (!weight_.defined()) weight_ = at::zeros({1}, at::TensorOptions(c10::kCPU).dtype(at::kFloat)).requires_grad_();
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(c10::kCPU), weight_, c10::kCPU);
  }

  at::Tensor weight_, cast_;
  std::set<std::uint64_t> callers_;
};

}  // namespace remat::pytorch
