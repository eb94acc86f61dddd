// SPDX-License-Identifier: Apache-2.0
/// @file
/// What operators have returned: a call whose results nobody looks at need not run a second time. Private to the adapter.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trace.hpp"

namespace remat::pytorch::detail {

/// Where the results of a call lie, without what is in them.
class known_results {
 public:
  /// @param tensors  operands of the call, `c.operands` in number
  /// @param returned what the kernel gave
  known_results(const std::vector<at::Tensor>& tensors, const std::vector<c10::IValue>& returned);

  bool drew = false;           ///< the call drew from the generator
  c10::Device on = c10::kCPU;  ///< where storages that the call makes lie

  /// They are told by this in full: plain tensors, each an operand, in the storage of an operand, or in one that the call made.
  bool complete() const { return complete_; }
  /// One lies in a storage that the call made, for which `f(type, bytes)` holds.
  template <class F>
  bool any_made(F f) const {
    for (const auto& r : results_)
      if (r && r->operand < 0 && f(c10::typeMetaToScalarType(r->type), storages_[r->storage])) return true;
    return false;
  }
  /// Such results for operands of the same geometry; storages that the call makes own no memory.
  std::vector<c10::IValue> over(const std::vector<at::Tensor>& tensors) const;

 private:
  struct result {
    int operand = -1;         ///< in whose storage it lies; -1: in one that the call made
    bool itself = false;      ///< it is that operand
    std::size_t storage = 0;  ///< position among those that the call made
    caffe2::TypeMeta type;
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;  ///< in elements
  };
  std::vector<std::optional<result>> results_;  ///< empty: undefined
  std::vector<std::size_t> storages_;           ///< bytes of those that the call made
  bool complete_ = true;
};

/// All that decides where the results of a call lie: operator, arguments, geometry and sharing of operands, settings. Nothing if
/// that may depend on something else: only PyTorch's own operators that return tensors are known well enough.
std::optional<std::string> geometry_key(const traced_call& c, const std::vector<at::Tensor>& tensors);

/// What a call of such a key has returned before in this process, or nothing.
std::shared_ptr<const known_results> find_known(const std::string& key);
std::shared_ptr<const known_results> remember(std::string key, known_results results);
void forget_results();

/// The results of a call whose operator works element by element on tensors of one geometry, or has a kernel for `meta`
/// (see `meta_kernel`). Nothing for other operators, and where that kernel raises an error.
std::optional<known_results> deduced(const traced_call& c, const std::vector<at::Tensor>& tensors);

/// The operator of somebody else cannot tell the sizes of its results from those of its operands (`torchvision::nms`): its kernel
/// for `meta` raises an error. One without such a kernel is taken to give the same sizes for all values, until it gives others,
/// and a number for each.
bool gives_sizes_by_values(const traced_call& c, const std::vector<at::Tensor>& tensors);

}  // namespace remat::pytorch::detail
