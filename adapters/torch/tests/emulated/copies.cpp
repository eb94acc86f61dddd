// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies between tensors of the host and of devices.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "kernels.hpp"

namespace emulated {
namespace {

/// Whether the bytes can be copied without a change of layout.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && a.sizes() == b.sizes() &&
         ((a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

stream& stream_of(const at::Tensor& t, const backend& on) { return on.current_stream(t.device().index()); }

/// Work given to `waiting` from now on runs after all work given to `done` so far.
void order(stream& done, stream& waiting) {
  if (&done == &waiting) return;
  const auto e = make_event();
  record(*e, done);
  wait(waiting, *e);
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from, stream& s) {
  emulated::copy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes(), s);
}

void from_host(const at::Tensor& to, at::Tensor from, bool later, const backend& on) {
  auto& s = stream_of(to, on);
  if (same_layout(to, from)) {
    copy_bytes(to, from, s);
    if (!later) synchronize(s);
    return;
  }
  from = from.resolve_conj().resolve_neg().to(to.scalar_type()).contiguous();
  const auto there = at::empty(to.sizes(), to.options());
  copy_bytes(there, from, s);
  synchronize(s);  // `from` may be freed now
  copy(to, there, later, on);
}

void to_host(const at::Tensor& to, at::Tensor from, bool later, const backend& on) {
  auto& s = stream_of(from, on);
  if (same_layout(to, from)) {
    copy_bytes(to, from, s);
    if (!later) synchronize(s);
    return;
  }
  from = from.resolve_conj().resolve_neg().to(to.scalar_type()).contiguous();
  const auto here = at::empty(from.sizes(), from.options().device(c10::kCPU));
  copy_bytes(here, from, s);
  synchronize(s);
  to.copy_(here);
}

void between_devices(const at::Tensor& to, at::Tensor from, const backend& on) {
  auto &source = stream_of(from, on), &target = stream_of(to, on);
  if (!same_layout(to, from)) {
    {
      const c10::DeviceGuard guard(from.device());
      from = from.resolve_conj().resolve_neg().to(to.scalar_type()).contiguous();
    }
    const c10::DeviceGuard guard(to.device());
    const auto there = at::empty(to.sizes(), to.options());
    between_devices(there, from, on);
    return copy(to, there, true, on);
  }
  order(target, source);
  copy_bytes(to, from, source);
  order(source, target);
}

}  // namespace

void copy(const at::Tensor& to, const at::Tensor& given, bool later, const backend& on) {
  if (to.numel() == 0) return;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto from = given.sizes() == to.sizes() ? given : given.expand(to.sizes());
  if (from.device().type() != on.type()) return from_host(to, from, later, on);
  if (to.device().type() != on.type()) return to_host(to, from, later, on);
  if (to.device() != from.device()) return between_devices(to, from, on);
  const c10::DeviceGuard guard(to.device());
  if (same_layout(to, from)) return copy_bytes(to, from, stream_of(to, on));
  torch::jit::Stack stack = {to, from, false};
  run("aten::copy_", "", &stack, on);
}

}  // namespace emulated
