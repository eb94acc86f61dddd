// SPDX-License-Identifier: Apache-2.0
/// @file
/// Constant folding where a plan cannot have the operators. Private to the adapter.
#pragma once

#include <c10/core/Storage.h>

#include <map>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step, in which values on a device other than `on` become constants if they depend on constants only. Examples are
/// positions and masks that a model makes on the host, for a step elsewhere. Memory of the other device is not planned. Results
/// whose sizes depend on values of constants (`torch.ones(4).nonzero()`) become constants, too: an operator is measured on other
/// values, which give other sizes.
/// Complexity: O(nodes), and one run of each removed node.
program folded(program step, c10::Device on);

/// True if values of operands determine sizes of results.
bool has_dynamic_call(const program& step, const node& n);

/// Copies of those inputs of a node that depend on constants only, by value. Such a node may remain after `folded`, because the
/// step returns its results or its operands.
/// Complexity: O(nodes), and one run of each node that the inputs depend on.
std::map<index_t, c10::Storage> constant_inputs(const program& step, const node& n);

}  // namespace remat::pytorch
