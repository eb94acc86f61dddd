// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tensors of a test on the tested device, as with `torch.set_default_device` in Python.
///
///     TEST_CASE("...", "[device]") {
///       const on_test_device there;
///       const auto x = at::randn({4});  // on the device
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstddef>

#include "devices.hpp"

namespace hardware {

/// A dispatch key that PyTorch reserves for tests, and that remat does not use.
constexpr auto mode_key = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// Factories without a device argument get the device of the tests.
inline void make_on_test_device(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(mode_key);
  const auto& arguments = op.schema().arguments();
  bool takes_tensors = false;
  std::size_t device = arguments.size();
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    const auto& v = (*stack)[stack->size() - arguments.size() + k];
    takes_tensors = takes_tensors || v.isTensor() || v.isTensorList();
    if (arguments[k].name() == "device" && v.isNone()) device = k;
  }
  if (!takes_tensors && device < arguments.size()) (*stack)[stack->size() - arguments.size() + device] = test_device();
  op.callBoxed(stack);
}

inline void claim_mode_key() {
  static const auto library = [] {
    ::torch::Library lib(::torch::Library::IMPL, "_", mode_key, __FILE__, __LINE__);
    lib.fallback(::torch::CppFunction::makeFromBoxedFunction<&make_on_test_device>());
    return lib;
  }();
}

}  // namespace hardware

/// Sets the default device of its thread while it lives.
struct on_test_device {
  on_test_device() : key_((hardware::claim_mode_key(), test_device().is_cpu() ? c10::DispatchKeySet() : of_mode())) {}

 private:
  static c10::DispatchKeySet of_mode() { return c10::DispatchKeySet(hardware::mode_key); }
  c10::impl::IncludeDispatchKeyGuard key_;
};
