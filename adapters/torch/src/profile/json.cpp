// SPDX-License-Identifier: Apache-2.0
#include "json.hpp"

#include <cstdint>

#include <remat/core/error.hpp>

namespace remat::pytorch {
namespace {

nlohmann::json to_json(const allocation_script& s) {
  nlohmann::json blocks = nlohmann::json::array();
  for (const auto& b : s.blocks)
    blocks.push_back({b.bytes, b.born, b.freed, b.deaths, b.result == none ? std::int64_t{-1} : std::int64_t{b.result}});
  return {{"events", s.events}, {"stable", s.stable}, {"blocks", blocks}};
}

}  // namespace

nlohmann::json to_json(const node_profile& p) {
  return {{"seconds", p.seconds},
          {"workspace", p.workspace},
          {"elsewhere", p.other_threads_bytes},
          {"first", to_json(p.first)},
          {"again", to_json(p.again)}};
}

namespace {

allocation_script script_from(const nlohmann::json& j, std::size_t outputs) {
  allocation_script s;
  s.events = j.at("events").get<int>();
  s.stable = j.at("stable").get<bool>();
  if (s.events < 0 || s.events >= 1 << 20) throw bad_document("a script has too many events");
  for (const auto& b : j.at("blocks")) {
    const auto result = b.at(4).get<std::int64_t>();
    scripted_block block{b.at(0).get<bytes_t>(), b.at(1).get<int>(), b.at(2).get<int>(), b.at(3).get<int>(),
                         result < 0 ? none : static_cast<index_t>(result)};
    const bool in_range = block.bytes > 0 && block.bytes <= max_bytes && block.born >= 0 && block.born < s.events &&
                          block.freed < s.events && (block.freed < 0 || block.freed > block.born) &&
                          (result < 0 || static_cast<std::size_t>(result) < outputs);
    if (!in_range) throw bad_document("a block is out of range");
    s.blocks.push_back(block);
  }
  return s;
}

}  // namespace

node_profile profile_from(const nlohmann::json& j, std::size_t outputs) {
  node_profile p{j.at("seconds").get<double>(), j.at("workspace").get<bytes_t>(), j.at("elsewhere").get<bytes_t>(),
                 script_from(j.at("first"), outputs), script_from(j.at("again"), outputs)};
  if (!(p.seconds >= 0) || p.workspace < 0 || p.workspace > max_bytes || p.other_threads_bytes < 0 ||
      p.other_threads_bytes > max_bytes)
    throw bad_document("a cost is out of range");
  return p;
}

}  // namespace remat::pytorch
