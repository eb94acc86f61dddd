// SPDX-License-Identifier: Apache-2.0
/// @file
/// Distinguishes kinds of inputs. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/model.hpp>

#include "../base/key.hpp"

namespace remat::pytorch {

/// Describes inputs to users.
std::string describe(const std::vector<at::Tensor>& inputs);

/// Makes keys of calls: everything that a plan depends on, except the loss's use of the outputs.
class call_keys {
 public:
  /// @param signature of the model
  /// @param same      the key identifies parameters and buffers themselves, not only their geometry
  /// @return a digest of the key
  std::uint64_t of(const invocation& call, const std::vector<at::Tensor>& inputs, const std::string& signature,
                   const std::vector<named_tensor>& parameters, const std::vector<named_tensor>& buffers, bool same);

 private:
  key key_;
  std::vector<std::tuple<const void*, std::size_t, const at::Tensor*>> by_storage_;
};

}  // namespace remat::pytorch
