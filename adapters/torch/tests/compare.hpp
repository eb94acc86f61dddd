// SPDX-License-Identifier: Apache-2.0
/// @file
/// Comparisons of tensors for the tests of the PyTorch adapter.
#pragma once

#include <torch/torch.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

/// Tests run in parallel on the same processors: more threads would wait for each other.
inline const bool one_thread = (at::set_num_threads(1), true);

/// Equal bit by bit, in any layout.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) { return same_bits(x, y); });
}

/// Equal bit by bit, with equal strides.
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return same_bits(a, b) && (!a.defined() || a.strides() == b.strides());
}

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& list) {
  std::vector<at::Tensor> result;
  for (const auto& t : list) result.push_back(t.defined() ? t.detach().clone() : at::Tensor());
  return result;
}
