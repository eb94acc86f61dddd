// SPDX-License-Identifier: Apache-2.0
/// @file
/// The boxed fallback below autograd through which operators come to whoever records or observes them. Private to the adapter.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKey.h>

#include <mutex>

namespace remat::pytorch::detail {

class recorder;
class step_run;

/// The one functionality key below autograd that PyTorch gives neither kernels nor a fallback.
constexpr auto record_key = c10::DispatchKey::Fake;
/// Above autograd, without kernels of PyTorch: for the few operators that are made of others and read memory themselves.
constexpr auto reader_key = c10::DispatchKey::DeferredInit;
/// The same, for any operator while a forward is recorded.
constexpr auto guarded_key = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// One recording, or one observed run, at a time.
std::mutex& one_at_a_time();
/// @param f lets what has prepared later steps go of a tensor for now
void set_unbind(void (*f)(const at::Tensor&));

/// Registers the fallbacks on first use.
/// @throws not_available
void claim_key();

/// Registers these operators.
void claim_reader_key();

/// Operators come to a recorder while it lives. Threads of the autograd engine inherit the dispatch key, not thread-local data:
/// so there is one at a time.
///
/// Backwards of the recording thread run on it alone. The thread of a device may wait for locks that the recording thread holds.
class recording {
 public:
  /// @param forward the training step to which operators come while its forward runs; null: there is none
  explicit recording(recorder& r, step_run* forward = nullptr);
  ~recording();
  /// From here on they come to the recorder itself.
  static void end_forward();
  recording(const recording&) = delete;
  recording& operator=(const recording&) = delete;

 private:
  bool several_threads_;  ///< for backwards, before
};

/// Autocast keeps casts of parameters while it is on; those of a capture are hollow, and older ones are not among its calls.
struct fresh_casts {
  fresh_casts() { at::autocast::clear_cache(); }
  ~fresh_casts() { at::autocast::clear_cache(); }
  fresh_casts(const fresh_casts&) = delete;
  fresh_casts& operator=(const fresh_casts&) = delete;
};

}  // namespace remat::pytorch::detail
