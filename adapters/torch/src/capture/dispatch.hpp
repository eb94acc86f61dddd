// SPDX-License-Identifier: Apache-2.0
/// @file
/// The boxed fallbacks that pass operators to a recorder, follower or observer. Private to the adapter.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKey.h>

#include <mutex>

namespace remat::pytorch::detail {

class recorder;
class step_run;

/// The only functionality key below autograd for which PyTorch has neither kernels nor a fallback.
constexpr auto record_key = c10::DispatchKey::Fake;
/// A key above autograd for which PyTorch has no kernels: for the few composite operators that read memory themselves.
constexpr auto reader_key = c10::DispatchKey::DeferredInit;
/// A key of the same kind, for all operators while a forward is recorded.
constexpr auto guarded_key = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Held by each recording and each observed run of the process.
std::mutex& one_at_a_time();
/// @param f releases a tensor from everything that is prepared for later steps
void set_unbind(void (*f)(const at::Tensor&));

/// Registers the fallbacks on first use.
/// @throws not_available if another library has registered a fallback for `record_key`
void claim_key();

/// Registers kernels for the operators that read memory, on first use.
void claim_reader_key();

/// While it lives, operators go to a recorder. Threads of the autograd engine inherit the dispatch key, but no thread-local data;
/// so only one may live at a time.
///
/// A backward of the recording thread runs on this thread alone: the thread of a device may wait for locks that the recording
/// thread holds.
class recorded_dispatch {
 public:
  /// @param forward training step that the recorded forward belongs to: operators go to it until `end_forward`; null: none
  explicit recorded_dispatch(recorder& r, step_run* forward = nullptr);
  ~recorded_dispatch();
  /// The forward has ended: from here on, operators go to the recorder itself.
  static void end_forward();
  recorded_dispatch(const recorded_dispatch&) = delete;
  recorded_dispatch& operator=(const recorded_dispatch&) = delete;

 private:
  bool several_threads_;  ///< whether backwards used several threads before
};

/// Clears the cache of autocast before and after a capture. Casts of a capture are hollow, and its calls must include all casts.
struct fresh_casts {
  fresh_casts() { at::autocast::clear_cache(); }
  ~fresh_casts() { at::autocast::clear_cache(); }
  fresh_casts(const fresh_casts&) = delete;
  fresh_casts& operator=(const fresh_casts&) = delete;
};

}  // namespace remat::pytorch::detail
