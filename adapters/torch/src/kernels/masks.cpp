// SPDX-License-Identifier: Apache-2.0
/// @file
/// Operators for masks of dropout that are kept as bits (`program/pack.cpp`). Results equal the original operators bit by bit.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <vector>

#include "masks.hpp"

namespace {

/// Makes the words of `at::mt19937` a block at a time, so that compilers can use vector instructions.
/// Reference: Matsumoto and Nishimura, Mersenne twister, ACM Trans. Modeling and Computer Simulation 8 (1998), section 2.
class words {
 public:
  explicit words(const at::mt19937& engine) : data_(engine.data()) {}

  /// @return at least 1 and at most `most` words, valid until the next call
  std::pair<const uint32_t*, std::size_t> next(std::size_t most) {
    if (data_.left_ == 1) {
      refill();
      data_.left_ = at::MERSENNE_STATE_N + 1;
      data_.next_ = 0;
    }
    const auto n = static_cast<uint32_t>(std::min(most, static_cast<std::size_t>(data_.left_) - 1));
    const auto* state = data_.state_.data() + data_.next_;
    for (uint32_t j = 0; j < n; ++j) {
      auto y = state[j];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680u;
      y ^= (y << 15) & 0xefc60000u;
      block_[j] = y ^ (y >> 18);
    }
    data_.next_ += n;
    data_.left_ -= static_cast<int>(n);
    return {block_.data(), n};
  }
  at::mt19937 engine() const {
    at::mt19937 e;
    e.set_data(data_);
    return e;
  }

 private:
  static uint32_t twist(uint32_t u, uint32_t v) {
    return (((u & at::UMASK) | (v & at::LMASK)) >> 1) ^ ((0u - (v & 1u)) & at::MATRIX_A);
  }
  void refill() {
    constexpr int n = at::MERSENNE_STATE_N, m = at::MERSENNE_STATE_M;
    auto* s = data_.state_.data();
    for (int j = 0; j < n - m; ++j) s[j] = s[j + m] ^ twist(s[j], s[j + 1]);
    for (int j = n - m; j < n - 1; ++j) s[j] = s[j + m - n] ^ twist(s[j], s[j + 1]);
    s[n - 1] = s[m - 1] ^ twist(s[n - 1], s[0]);
  }

  at::mt19937_data_pod data_;
  std::array<uint32_t, at::MERSENNE_STATE_N> block_;
};

/// Draws as `bernoulli_` does, from a locked generator: two words per draw, the high word first; 53 bits are compared with `p`.
void draw_bits(at::CPUGeneratorImpl& generator, int64_t elements, double p, uint8_t* bits) {
  const auto limit = static_cast<uint64_t>(std::ceil(std::ldexp(p, 53)));
  constexpr uint64_t mask = (uint64_t{1} << 53) - 1;
  words source(generator.engine());
  uint32_t high = 0;
  bool half = false;  // one word of a draw is left, in `high`
  unsigned byte = 0;
  for (int64_t i = 0; i < elements;) {
    auto [w, n] = source.next(static_cast<std::size_t>(2 * (elements - i)) - (half ? 1 : 0));
    const auto add = [&](uint32_t first, uint32_t second) {
      const auto drawn = ((static_cast<uint64_t>(first) << 32) | second) & mask;
      byte |= static_cast<unsigned>(drawn < limit) << (i & 7);
      if ((++i & 7) == 0) {
        bits[(i >> 3) - 1] = static_cast<uint8_t>(byte);
        byte = 0;
      }
    };
    std::size_t k = 0;
    if (half) add(high, w[k++]);
    for (; k + 1 < n; k += 2) add(w[k], w[k + 1]);
    half = k < n;
    if (half) high = w[k];
  }
  if (elements & 7) bits[elements >> 3] = static_cast<uint8_t>(byte);
  generator.set_engine(source.engine());
}

}  // namespace

bool remat::pytorch::draws_masks_alike() {
  static const bool alike = [] {
    constexpr int64_t n = 4099;
    for (const double p : {0.9, 0.31}) {
      auto theirs = at::detail::createCPUGenerator(17), ours = at::detail::createCPUGenerator(17);
      const auto drawn = at::empty({n}).bernoulli_(p, theirs);
      std::vector<uint8_t> bits((n + 7) / 8);
      draw_bits(*at::check_generator<at::CPUGeneratorImpl>(ours), n, p, bits.data());
      for (int64_t i = 0; i < n; ++i)
        if ((drawn.const_data_ptr<float>()[i] != 0) != ((bits[static_cast<std::size_t>(i >> 3)] >> (i & 7) & 1) != 0))
          return false;
      if (!at::equal(theirs.get_state(), ours.get_state())) return false;
    }
    return true;
  }();
  return alike;
}

namespace {

/// Draws one bit per element as `bernoulli_(p)` does, in the memory order of a dense tensor.
at::Tensor draw(int64_t elements, double p) {
  TORCH_CHECK(elements >= 0, "remat::draw: elements must be >= 0, got ", elements);
  TORCH_CHECK(p >= 0 && p <= 1, "remat::draw: p must be in [0, 1], got ", p);
  TORCH_CHECK(remat::pytorch::draws_masks_alike(), "remat::draw: bernoulli_ of this PyTorch draws otherwise on this machine");
  auto bits = at::empty({(elements + 7) / 8}, at::kByte);
  auto& generator = *at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  std::lock_guard lock(generator.mutex_);
  draw_bits(generator, elements, p, bits.mutable_data_ptr<uint8_t>());
  return bits;
}

/// Calls `f(k, row)` for all bytes `k` of `bits`, on several threads. `row[j]` is `value` if bit j of the byte is set, else zero.
template <class T, class F>
void for_each_byte(const at::Tensor& bits, T value, const F& f) {
  const auto* from = bits.const_data_ptr<uint8_t>();
  at::parallel_for(0, bits.numel(), 4096, [&](int64_t begin, int64_t end) {
    std::array<std::array<T, 8>, 256> rows;
    for (std::size_t b = 0; b < 256; ++b)
      for (std::size_t j = 0; j < 8; ++j) rows[b][j] = b >> j & 1 ? value : T(0);
    for (auto k = begin; k < end; ++k) f(k, rows[from[k]].data());
  });
}

void check(const at::Tensor& self, const at::Tensor& bits) {
  TORCH_CHECK(self.is_non_overlapping_and_dense() && bits.is_contiguous() && bits.scalar_type() == at::kByte &&
                  bits.numel() == (self.numel() + 7) / 8,
              "remat: bits are for a dense tensor of eight times as many elements");
}

/// `to[i] = bit i ? f(from[i], value) : f(from[i], 0)`, in the order of memory.
template <class F>
void apply(const at::Tensor& to, const at::Tensor& from, const at::Tensor& bits, const at::Scalar& value, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to.scalar_type(), "remat_masked", [&] {
    auto* out = to.mutable_data_ptr<scalar_t>();
    const auto* in = from.const_data_ptr<scalar_t>();
    const auto n = to.numel();
    for_each_byte(bits, value.to<scalar_t>(), [&](int64_t k, const scalar_t* row) {
      const auto i = k * 8;
      if (i + 8 <= n) {
        for (int64_t j = 0; j < 8; ++j) out[i + j] = f(in[i + j], row[j]);
      } else {
        for (int64_t j = 0; i + j < n; ++j) out[i + j] = f(in[i + j], row[j]);
      }
    });
  });
}

/// Writes the result of `empty_like(self).bernoulli_(p).div_(q)` into `self`.
at::Tensor& unpack_(at::Tensor& self, const at::Tensor& bits, const at::Scalar& value) {
  check(self, bits);
  apply(self, self, bits, value, [](auto, auto factor) { return factor; });
  return self;
}

/// `self * mask`, in place.
at::Tensor& masked_(at::Tensor& self, const at::Tensor& bits, const at::Scalar& value) {
  check(self, bits);
  apply(self, self, bits, value, [](auto x, auto factor) { return x * factor; });
  return self;
}
at::Tensor masked(const at::Tensor& self, const at::Tensor& bits, const at::Scalar& value) {
  check(self, bits);
  auto out = at::empty_strided(self.sizes(), self.strides(), self.options());
  apply(out, self, bits, value, [](auto x, auto factor) { return x * factor; });
  return out;
}

TORCH_LIBRARY(remat, m) {
  m.def("draw(int elements, float p) -> Tensor", draw);
  m.def("unpack_(Tensor(a!) self, Tensor bits, Scalar value) -> Tensor(a!)");
  m.def("masked_(Tensor(a!) self, Tensor bits, Scalar value) -> Tensor(a!)");
  m.def("masked(Tensor self, Tensor bits, Scalar value) -> Tensor");
}
TORCH_LIBRARY_IMPL(remat, CPU, m) {
  m.impl("unpack_", unpack_);
  m.impl("masked_", masked_);
  m.impl("masked", masked);
}

}  // namespace
