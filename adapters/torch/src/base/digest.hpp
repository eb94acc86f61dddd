// SPDX-License-Identifier: Apache-2.0
/// @file
/// Compares tensors bit by bit, by digests also with tensors that no longer exist. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace remat::pytorch {

/// The elements of a strided tensor in logical order, on the host.
inline at::Tensor host_elements(const at::Tensor& t) { return t.detach().cpu().contiguous().resolve_conj().resolve_neg(); }

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = host_elements(a), y = host_elements(b);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// A hash of everything that was added. Collisions have a probability of about 2^-64.
class digest {
 public:
  digest& operator<<(std::uint64_t word) {
    value_ = std::rotl((value_ ^ word) * 0x9E3779B97F4A7C15U, 29);
    return *this;
  }
  digest& add(const void* from, std::size_t bytes) {
    const auto* p = static_cast<const unsigned char*>(from);
    *this << bytes;
    for (std::uint64_t word = 0; bytes > 0;) {
      const auto n = bytes < sizeof word ? bytes : sizeof word;
      std::memcpy(&word, p, n);
      *this << word;
      p += n, bytes -= n;
    }
    return *this;
  }
  /// Adds type and sizes.
  digest& add_shape(const at::Tensor& t) {
    *this << static_cast<std::uint64_t>(t.scalar_type()) << static_cast<std::uint64_t>(t.dim());
    for (const auto size : t.sizes()) *this << static_cast<std::uint64_t>(size);
    return *this;
  }
  /// Adds type, sizes and, if the tensor is strided, all elements.
  digest& operator<<(const at::Tensor& t) {
    if (!t.defined()) return *this << std::uint64_t{0};
    add_shape(t);
    if (t.layout() != c10::kStrided || t.is_meta()) return *this;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto elements = host_elements(t);
    return add(elements.const_data_ptr(), elements.nbytes());
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0x243F6A8885A308D3U;
};

}  // namespace remat::pytorch
