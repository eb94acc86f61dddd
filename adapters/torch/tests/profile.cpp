// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <ATen/Parallel.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <remat/io/file.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/profile.hpp>

#include "compare.hpp"
#include "models.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

program step_of(const models::sample& s) {
  return *capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers()).step;
}

/// A file in a directory of its own that goes away with it.
struct temporary {
  std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("remat-profile-" + std::to_string(std::random_device{}()));
  std::filesystem::path file = directory / "sub" / "profile.json";
  ~temporary() { std::filesystem::remove_all(directory); }
};

}  // namespace

TEST_CASE("nodes have costs and scripts; equal nodes share; nothing changes") {
  ::torch::manual_seed(1);
  const auto s = models::conv();
  const auto step = step_of(s);
  std::vector<at::Tensor> buffers;
  for (const auto& b : s.module->buffers()) buffers.push_back(b.clone());
  const auto generator = generator_state::now();
  const meter counting;
  const auto live = meter::live();
  const auto p = profile(step, {.cache = {}, .seconds = 0});
  CHECK(generator_state::now() == generator);
  CHECK(meter::live() == live);
  for (std::size_t i = 0; i < buffers.size(); ++i) CHECK(at::equal(buffers[i], s.module->buffers()[i]));

  REQUIRE(p.nodes.size() == step.nodes.size());
  CHECK(p.distinct < step.nodes.size());
  CHECK(p.measured == p.distinct);
  for (std::size_t i = 0; i < step.nodes.size(); ++i) {
    const auto& n = step.nodes[i];
    INFO(i << " " << n.name);
    if (n.calls.empty()) continue;
    CHECK(p.nodes[i]->seconds > 0);
    CHECK(p.nodes[i]->first.stable);
    bytes_t results = 0, scripted = 0;
    for (const auto& c : n.calls)
      for (const auto& r : c.results) results += step.values[step.views[r.view].value].bytes;
    for (const auto& b : p.nodes[i]->first.blocks)
      if (b.result != none) {
        scripted += b.bytes;
        CHECK(step.values[n.outputs[b.result]].bytes == b.bytes);
      }
    CHECK(scripted == results);
  }

  const auto again = profile(step, {.cache = {}, .seconds = 0});
  CHECK(again.measured == 0);
  CHECK(again.seconds() == p.seconds());
}

TEST_CASE("the cache file serves other processes; a damaged one is measured anew") {
  ::torch::manual_seed(1);
  temporary t;
  const auto first = profile(step_of(models::mlp(3, 24, 3)), {.cache = t.file, .seconds = 0});
  CHECK(first.measured > 0);
  auto document = nlohmann::json::parse(read_file(t.file, 1 << 24));
  CHECK(document.at("format") == "remat-torch-profile");
  REQUIRE(document.at("machines").size() == 1);
  auto& entries = document.at("machines").begin().value();
  CHECK(entries.size() == first.measured);

  // Times that no measurement gives tell what comes from the file; other sizes are not known to this process yet.
  const auto next = step_of(models::mlp(5, 24, 3));
  for (const char* text : {"", "{", "[1, 2]", "{\"format\": \"remat-torch-profile\", \"version\": 1, \"machines\": 7}"}) {
    std::ofstream(t.file) << text;
    const auto batch = static_cast<int64_t>(10 + std::string(text).size());
    const auto p = profile(step_of(models::mlp(batch, 24, 3)), {.cache = t.file, .seconds = 0});
    CHECK(p.measured > 0);
    CHECK(nlohmann::json::parse(read_file(t.file, 1 << 24)).at("machines").size() == 1);
  }
  std::filesystem::remove(t.file);
  const auto known = profile(next, {.cache = t.file, .seconds = 0});
  CHECK(known.measured > 0);

  SECTION("a file that cannot be written costs nothing but time") {
    const auto p = profile(step_of(models::mlp(6, 24, 3)), {.cache = "/dev/null/profile.json", .seconds = 0});
    CHECK(p.measured > 0);
  }
}
