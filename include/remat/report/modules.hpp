// SPDX-License-Identifier: Apache-2.0
/// @file
/// The module that each operation belongs to. Needs nlohmann/json.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/problem.hpp>
#include <remat/io/problem_document.hpp>

namespace remat {

namespace detail {

/// The longest path that contains both modules, such as "layers.3" for "layers.3.mlp" and "layers.3.norm".
inline std::string common_parent(const std::string& a, const std::string& b) {
  std::size_t end = 0;
  for (std::size_t i = 0; i <= std::min(a.size(), b.size()); ++i) {
    const bool over_a = i == a.size() || a[i] == '.', over_b = i == b.size() || b[i] == '.';
    if (over_a && over_b) end = i;
    if (i == a.size() || i == b.size() || a[i] != b[i]) break;
  }
  return a.substr(0, end);
}

}  // namespace detail

/// The module path of each operation; empty if unknown.
///
/// The labels come first. An operation without a label belongs to the owner of the parameter that it reads: the name of the held
/// source up to its last dot. An operation that reads no parameter belongs to the innermost module that contains the previous
/// and the next operation with a module.
/// Complexity: O(edges + length of the names).
inline std::vector<std::string> module_paths(const problem& p, const operation_labels& labels = {}) {
  const auto& ops = p.operations();
  std::vector<std::string> paths(ops.size());
  std::vector<std::size_t> known;  // ascending
  for (std::size_t o = 0; o < ops.size(); ++o) {
    if (o < labels.modules.size()) paths[o] = labels.modules[o];
    for (auto v : ops[o].inputs) {
      if (!paths[o].empty()) break;
      const std::string_view name = p.values()[v].name;
      if (const auto dot = name.rfind('.'); p.values()[v].held && dot != name.npos) paths[o] = name.substr(0, dot);
    }
    if (!paths[o].empty()) known.push_back(o);
  }
  if (known.empty()) return paths;
  for (std::size_t o = 0, next = 0; o < ops.size(); ++o) {
    if (next < known.size() && known[next] == o) {
      ++next;
      continue;
    }
    if (next > 0 && next < known.size()) paths[o] = detail::common_parent(paths[known[next - 1]], paths[known[next]]);
  }
  return paths;
}

/// Labels for a document of the problem: the module of each operation, and its source line.
/// @param p       the problem
/// @param sources source line by module path; a module without an entry takes that of the nearest enclosing module
/// @param lines   per operation, as far as known: the line that calls it, which takes precedence over `sources`
/// @return members to pass to `write_problem`
/// Complexity: O(edges + length of the names).
inline unknown_problem_members labelled(const problem& p, const std::map<std::string, std::string>& sources,
                                        const std::vector<std::string>& lines = {}) {
  unknown_problem_members members;
  for (const auto& module : module_paths(p)) {
    const auto o = members.operations.size();
    auto& x = members.operations.emplace_back(nlohmann::ordered_json::object());
    if (!module.empty()) x["module"] = module;
    if (o < lines.size() && !lines[o].empty()) {
      x["source"] = lines[o];
      continue;
    }
    if (module.empty()) continue;
    auto around = module;
    while (!sources.contains(around) && !around.empty()) around.resize(around.rfind('.') == around.npos ? 0 : around.rfind('.'));
    if (const auto found = sources.find(around); found != sources.end() && !found->second.empty()) x["source"] = found->second;
  }
  return members;
}

}  // namespace remat
