// SPDX-License-Identifier: Apache-2.0
/// @file
/// The geometry of results of earlier calls, so that an equal call need not run in a capture. Private to the adapter.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trace.hpp"

namespace remat::pytorch::detail {

/// The geometry and storages of a call's results, without their contents.
class known_results {
 public:
  /// @param tensors  operands of the call, as many as `c.operands`
  /// @param returned results of the kernel
  known_results(const std::vector<at::Tensor>& tensors, const std::vector<c10::IValue>& returned);

  bool draws = false;          ///< the call draws from the generator
  c10::Device on = c10::kCPU;  ///< device of the storages that the call makes

  /// True if this describes the results in full: plain tensors that are operands, or lie in the storage of an operand or in a
  /// storage that the call made.
  bool complete() const { return complete_; }
  /// True if a result lies in a storage that the call made, and `f(type, bytes)` holds for that storage.
  template <class F>
  bool any_made(F f) const {
    for (const auto& r : results_)
      if (r && r->operand < 0 && f(c10::typeMetaToScalarType(r->type), storages_[r->storage])) return true;
    return false;
  }
  /// Makes the results for operands of equal geometry. Storages that the call makes own no memory.
  std::vector<c10::IValue> made_for(const std::vector<at::Tensor>& tensors) const;

 private:
  struct result {
    int operand = -1;         ///< the result lies in the storage of this operand; -1: in a storage that the call made
    bool itself = false;      ///< the result is that operand
    std::size_t storage = 0;  ///< position among the storages that the call made
    caffe2::TypeMeta type;
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;  ///< in elements
  };
  std::vector<std::optional<result>> results_;  ///< empty: undefined
  std::vector<std::size_t> storages_;           ///< sizes of the storages that the call made, in bytes
  bool complete_ = true;
};

/// A key of everything that the geometry of the results depends on: operator, arguments, geometry and sharing of operands,
/// settings. Nothing if the geometry may depend on more: only PyTorch's own operators that return tensors are known well enough.
std::optional<std::string> geometry_key(const traced_call& c, const std::vector<at::Tensor>& tensors);

/// Results that a call with this key has returned before in this process; null: none.
std::shared_ptr<const known_results> find_known(const std::string& key);
std::shared_ptr<const known_results> remember(std::string key, known_results results);
void forget_results();

/// Derives the results of elementwise operators on tensors of one geometry, and of operators with a kernel for `meta` (see
/// `meta_kernel`). Nothing for other operators, and if the kernel raises an error.
std::optional<known_results> deduced(const traced_call& c, const std::vector<at::Tensor>& tensors);

/// True if the sizes of a custom operator's results depend on the values of its operands (`torchvision::nms`): its kernel for
/// `meta` raises an error. Without such a kernel, sizes are assumed not to depend on values until the operator gives other sizes
/// (`distrusts_results`), unless it returns a number.
bool gives_sizes_by_values(const traced_call& c, const std::vector<at::Tensor>& tensors);

}  // namespace remat::pytorch::detail
