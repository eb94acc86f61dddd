// SPDX-License-Identifier: Apache-2.0
/// @file
/// The planned memory of a schedule for PyTorch's memory viewer. Needs nlohmann/json.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/layout/layout.hpp>
#include <remat/report/device_spans.hpp>
#include <remat/report/modules.hpp>
#include <remat/report/pickle.hpp>

namespace remat {

/// Converts the planned memory of the device to a snapshot of PyTorch's allocator: a pickle for pytorch.org/memory_viz and for
/// `torch.cuda._memory_viz`.
///
/// The snapshot has one device with one segment. All allocations lie in this segment, at the offsets of `lay_out`. Each value
/// and each workspace is an allocation. The category of a value is its fate: held, kept, recomputed, moved or temporary. A frame
/// has the module path as its file and the operation as its function.
/// @param p      the problem
/// @param s      a valid schedule of the problem
/// @param labels modules of the operations, as far as known
/// @return the bytes of the pickle; the largest sum of live allocations is the peak of the schedule
/// @throws bad_schedule if `s` is not valid
/// Complexity: that of `lay_out`.
/// @code
/// remat::write_file("plan.pickle", remat::memory_snapshot(p, r.schedule));
/// @endcode
inline std::string memory_snapshot(const problem& p, const schedule& s, const operation_labels& labels = {}) {
  using json = nlohmann::ordered_json;
  constexpr std::int64_t base = std::int64_t{1} << 40;  // an address that no check takes for null
  const auto spans = device_spans(p, s);
  const auto what = fates(p, s);
  const auto modules = module_paths(p, labels);
  const auto events = 2 * static_cast<std::int64_t>(spans.size()) + 1;

  std::vector<allocation> list;
  for (const auto& x : spans) list.push_back({x.birth, x.death == device_span::to_the_end ? events : x.death, x.bytes});
  const auto places = lay_out(list, {.alignment = 1, .tries = 20});
  const auto frames = [&](const device_span& x) {
    auto maker = x.maker;
    if (maker == none && x.value != none) maker = p.producer(x.value);
    json all = json::array();
    if (x.value != none)
      all.push_back({{"filename", "value"}, {"line", static_cast<index_t>(x.value)}, {"name", p.values()[x.value].name}});
    if (maker == none) return all;
    const auto& module = modules[maker];
    all.push_back({{"filename", module.empty() ? "operation" : module},
                   {"line", static_cast<index_t>(maker)},
                   {"name", p.operations()[maker].name}});
    return all;
  };
  // The viewer colours by category. It needs a category called "unknown", which workspaces get.
  const auto entry = [&](const char* action, std::size_t i) {
    const auto& x = spans[i];
    return json{{"action", action},    {"addr", base + places.offsets[i]},
                {"size", x.bytes},     {"stream", 0},
                {"frames", frames(x)}, {"category", x.value == none ? "unknown" : std::string(to_string(what[x.value]))}};
  };
  std::vector<std::pair<std::int64_t, json>> trace;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    trace.emplace_back(2 * spans[i].birth, entry("alloc", i));
    if (spans[i].death == device_span::to_the_end) continue;
    trace.emplace_back(2 * spans[i].death, entry("free_requested", i));
    trace.emplace_back(2 * spans[i].death + 1, entry("free_completed", i));
  }
  std::sort(trace.begin(), trace.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  json entries = json::array();
  entries.push_back(
      {{"action", "segment_alloc"}, {"addr", base}, {"size", places.arena}, {"stream", 0}, {"frames", json::array()}});
  for (auto& [when, x] : trace) entries.push_back(std::move(x));

  // The blocks at the end of the schedule tile the segment.
  std::vector<std::size_t> left;
  for (std::size_t i = 0; i < spans.size(); ++i)
    if (spans[i].death == device_span::to_the_end) left.push_back(i);
  std::sort(left.begin(), left.end(), [&](auto a, auto b) { return places.offsets[a] < places.offsets[b]; });
  json blocks = json::array();
  bytes_t end = 0, active = 0;
  const auto block = [&](bytes_t bytes, const char* state, json where) {
    if (bytes == 0) return;
    blocks.push_back(
        {{"address", base + end}, {"size", bytes}, {"requested_size", bytes}, {"state", state}, {"frames", std::move(where)}});
    end += bytes;
  };
  for (auto i : left) {
    block(places.offsets[i] - end, "inactive", json::array());
    block(spans[i].bytes, "active_allocated", frames(spans[i]));
    active += spans[i].bytes;
  }
  block(places.arena - end, "inactive", json::array());
  json segment = {{"device", 0},
                  {"address", base},
                  {"total_size", places.arena},
                  {"allocated_size", active},
                  {"active_size", active},
                  {"requested_size", active},
                  {"stream", 0},
                  {"segment_type", "large"},
                  {"is_expandable", false},
                  {"frames", json::array()},
                  {"blocks", std::move(blocks)}};
  return detail::pickle_writer::write(
      {{"segments", json::array({std::move(segment)})}, {"device_traces", json::array({std::move(entries)})}});
}

}  // namespace remat
