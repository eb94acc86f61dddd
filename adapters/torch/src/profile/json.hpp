// SPDX-License-Identifier: Apache-2.0
/// @file
/// Costs of nodes in documents. Private to the adapter.
#pragma once

#include <nlohmann/json.hpp>
#include <remat/pytorch/profile.hpp>

namespace remat::pytorch {

nlohmann::json to_json(const node_profile& p);
/// @param outputs number of the node's outputs
/// @throws bad_document for a cost or a block out of range, nlohmann::json::exception for another shape
node_profile profile_from(const nlohmann::json& j, std::size_t outputs);

}  // namespace remat::pytorch
