// SPDX-License-Identifier: Apache-2.0
/// @file
/// Splits large values into parts that a plan keeps, drops and copies separately.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat {

/// A problem with its large values split into parts. Operations make and read all parts of a value together.
struct split_problem {
  remat::problem problem;
  std::vector<value_id> whole;  ///< per value of `problem`: the original value that it is or is a part of
};

/// Splits every value larger than `part_bytes`, except held values. So a plan may move half of a tensor while the other half
/// stays.
///
/// The runtime must be able to make the parts contiguous before an operation, as virtual memory does with pages. If a tensor
/// keeps one place from birth to death, its bytes stay taken as long as any of its parts is on the device. A schedule can do to
/// all parts what another schedule does to the whole value. So except for the latency of copies, splitting never needs more time
/// for a budget or more bytes for a time.
/// @param p          any problem, with V values
/// @param part_bytes bytes of a part, such as a multiple of a page; the last part of a value has the remaining bytes
/// @return the problem with the split values
/// @throws bad_option if `part_bytes` is not positive, or so small that the result would have more than 2^24 values
/// Complexity: O(values and edges of the result).
/// @code
/// const auto [parts, whole] = remat::split_values(p, 2 << 20);
/// const auto r = remat::solve(parts, budget, remat::offmate<>(), {.seconds = 20});
/// @endcode
inline split_problem split_values(const problem& p, bytes_t part_bytes) {
  if (part_bytes <= 0) throw bad_option("split_values: parts of " + std::to_string(part_bytes) + " bytes");
  const auto& values = p.values();
  const auto is_left_whole = [&](const value& v) { return v.held || v.bytes <= part_bytes; };
  split_problem result;
  std::vector<value> parts;
  std::vector<value_id> first;  // per value: index of its first part
  for (value_id v = 0; v < values.size(); ++v) {
    first.push_back(static_cast<value_id>(parts.size()));
    auto remaining_bytes = values[v].bytes;
    constexpr bytes_t limit = bytes_t{1} << 24;
    if (!is_left_whole(values[v]) && remaining_bytes / part_bytes > limit - static_cast<bytes_t>(parts.size()))
      throw bad_option("split_values: more than 2^24 values with parts of " + std::to_string(part_bytes) + " bytes");
    do {
      auto part = values[v];
      part.bytes = is_left_whole(values[v]) ? remaining_bytes : std::min(remaining_bytes, part_bytes);
      remaining_bytes -= part.bytes;
      parts.push_back(std::move(part));
      result.whole.push_back(v);
    } while (remaining_bytes > 0);
  }
  first.push_back(static_cast<value_id>(parts.size()));

  const auto parts_of = [&](const std::vector<value_id>& list) {
    std::vector<value_id> all;
    for (auto v : list)
      for (auto k = first[v]; k < first[v + 1]; ++k) all.push_back(k);
    return all;
  };
  const auto pairs_of = [&](auto& all, value_id a, value_id b) {
    for (index_t k = 0; k < first[a + 1] - first[a]; ++k)
      all.push_back({static_cast<value_id>(first[a] + k), static_cast<value_id>(first[b] + k)});
  };
  auto x = p.members();
  x.values = std::move(parts);
  for (auto& op : x.operations) {
    op.inputs = parts_of(op.inputs);
    op.outputs = parts_of(op.outputs);
    for (const auto& w : std::exchange(op.overwrites, {})) pairs_of(op.overwrites, w.output, w.input);
  }
  x.targets = parts_of(p.targets());
  for (const auto& c : std::exchange(x.next, {})) pairs_of(x.next, c.target, c.source);
  result.problem = problem(std::move(x));
  return result;
}

}  // namespace remat
