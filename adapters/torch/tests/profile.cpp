// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <remat/io/file.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/profile.hpp>
#include <thread>
#include <vector>

#include "compare.hpp"
#include "default_device.hpp"
#include "models.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

program step_of(const models::sample& s) {
  return *capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers()).step;
}

/// A file in a temporary directory, which is removed with this object.
struct temporary {
  std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("remat-profile-" + std::to_string(std::random_device{}()));
  std::filesystem::path file = directory / "sub" / "profile.json";
  ~temporary() { std::filesystem::remove_all(directory); }
};

}  // namespace

TEST_CASE("profile gives nodes costs and scripts, shares equal nodes, and has no side effects") {
  ::torch::manual_seed(1);
  const auto s = models::conv();
  const auto step = step_of(s);
  std::vector<at::Tensor> buffers;
  for (const auto& b : s.module->buffers()) buffers.push_back(b.clone());
  const auto generator = generator_state::now();
  const meter counting;
  const auto live = meter::live();
  at::empty({1 << 26}, at::kByte);
  const auto peak = meter::peak();
  const auto p = profile(step, {.cache = {}, .seconds = 0});
  CHECK(generator_state::now() == generator);
  CHECK(meter::live() == live);
  CHECK(meter::peak() >= peak);
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

TEST_CASE("nodes that equal known nodes except for sizes are not measured") {
  ::torch::manual_seed(1);
  const auto small = step_of(models::mlp(7, 24, 3)), large = step_of(models::mlp(77, 40, 5));
  const auto known = profile(small, {.cache = {}, .seconds = 0});
  const auto p = profile(large, {.cache = {}, .seconds = 0}, {{&small, &known}});
  CHECK(p.measured == 0);
  forget_profiles();
  const auto measured = profile(large, {.cache = {}, .seconds = 0});
  CHECK(measured.measured > 0);
  for (std::size_t i = 0; i < large.nodes.size(); ++i) {
    INFO(i << " " << large.nodes[i].name);
    const auto &a = p.nodes[i]->first, &b = measured.nodes[i]->first;
    CHECK(p.nodes[i]->seconds >= 0);
    CHECK(p.nodes[i]->workspace == measured.nodes[i]->workspace);
    CHECK(std::equal(a.blocks.begin(), a.blocks.end(), b.blocks.begin(), b.blocks.end(), [](const auto& x, const auto& y) {
      return x.bytes == y.bytes && x.born == y.born && x.freed == y.freed && x.result == y.result;
    }));
  }
}

TEST_CASE("the device's events measure the time of nodes, not the clock of the host", "[accelerator]") {
  if (!hardware::emulated()) return;
  const on_test_device there;
  ::torch::nn::Sequential net(::torch::nn::Linear(16, 16), ::torch::nn::Tanh(), ::torch::nn::Linear(16, 16));
  const auto forward = [&](const std::vector<at::Tensor>& in) { return std::vector<at::Tensor>{net->forward(in[0])}; };
  const auto step = *capture(forward, {::torch::randn({4, 16})}, net->parameters(), {}).step;
  const hardware::option clock("clock", 1'000'000);
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = profile(step, {.cache = {}, .seconds = 0}).seconds();
  CHECK(std::accumulate(seconds.begin(), seconds.end(), 0.0) >
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

TEST_CASE("draws of another thread during a profile are not affected") {
  ::torch::nn::Sequential net(::torch::nn::Linear(16, 16), ::torch::nn::Tanh(), ::torch::nn::Linear(16, 16));
  const auto forward = [&](const std::vector<at::Tensor>& in) { return std::vector<at::Tensor>{net->forward(in[0])}; };
  const auto step = *capture(forward, {::torch::randn({4, 16})}, net->parameters(), {}).step;
  REQUIRE(std::none_of(step.nodes.begin(), step.nodes.end(), [](const node& n) { return n.random; }));
  ::torch::manual_seed(1);
  forget_profiles();
  std::atomic<bool> done = false;
  std::thread measures([&] {
    profile(step, {.cache = {}, .seconds = 0});
    done = true;
  });
  std::vector<double> drawn;
  while (!done) drawn.push_back(::torch::rand({}).item<double>());
  measures.join();
  ::torch::manual_seed(1);
  for (const auto x : drawn) REQUIRE(::torch::rand({}).item<double>() == x);
}

TEST_CASE("other processes use the cache file, and replace a damaged file by new measurements") {
  ::torch::manual_seed(1);
  temporary t;
  const auto first = profile(step_of(models::mlp(3, 24, 3)), {.cache = t.file, .seconds = 0});
  CHECK(first.measured > 0);
  auto document = nlohmann::json::parse(read_file(t.file, 1 << 24));
  CHECK(document.at("format") == "remat-torch-profile");
  REQUIRE(document.at("machines").size() == 1);
  auto& entries = document.at("machines").begin().value();
  CHECK(entries.size() == first.measured);

  // Impossible times show which entries come from the file. This process does not know the other sizes yet.
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

  SECTION("with a file that cannot be written, the profile is measured") {
    const auto p = profile(step_of(models::mlp(6, 24, 3)), {.cache = "/dev/null/profile.json", .seconds = 0});
    CHECK(p.measured > 0);
  }
}

TEST_CASE("a large cache file is not rewritten for a few entries") {
  ::torch::manual_seed(1);
  temporary t;
  std::size_t measured = profile(step_of(models::mlp(40, 24, 3)), {.cache = t.file, .seconds = 0}).measured;
  CHECK(measured > 0);
  auto document = nlohmann::json::parse(read_file(t.file, 1 << 24));
  document.at("machines")["another"]["filler"] = std::string(300 << 10, 'x');
  write_file(t.file, document.dump());

  const auto size = std::filesystem::file_size(t.file);
  measured = profile(step_of(models::mlp(41, 24, 3)), {.cache = t.file, .seconds = 0}).measured;
  CHECK(measured > 0);
  CHECK(std::filesystem::file_size(t.file) == size);
  for (int64_t batch = 42; batch < 142 && std::filesystem::file_size(t.file) == size; ++batch)
    measured += profile(step_of(models::mlp(batch, 24, 3)), {.cache = t.file, .seconds = 0}).measured;
  CHECK(measured > 50);  // an entry takes some KiB
  const auto written = nlohmann::json::parse(read_file(t.file, 1 << 24));
  CHECK(written.dump().size() > size);
  CHECK(written.at("machines").contains("another"));
}

TEST_CASE("estimate gives the costs of a device by its roofline") {
  ::torch::manual_seed(1);
  auto conv = std::make_shared<::torch::nn::Conv2dImpl>(::torch::nn::Conv2dOptions(4, 6, 3).groups(2).bias(false));
  auto up =
      std::make_shared<::torch::nn::ConvTranspose2dImpl>(::torch::nn::ConvTranspose2dOptions(6, 2, 2).stride(2).bias(false));
  auto net = std::make_shared<::torch::nn::SequentialImpl>(conv, up);
  const auto forward = [&](const std::vector<at::Tensor>& x) -> std::vector<at::Tensor> {
    const auto y = net->forward(x[0]).flatten(1);  // 2 x 512
    const auto heads = y.view({2, 4, 8, 16});
    return {y.mm(y.t()), at::scaled_dot_product_attention(heads, heads, heads), y.to(at::kDouble).exp()};
  };
  const auto step = *capture(forward, {::torch::randn({2, 4, 10, 10})}, net->parameters()).step;
  constexpr double flops = 1e9, bytes = 1e30, overhead = 1e-3;
  const auto p = estimate(step, [](at::ScalarType t) { return roofline{t == at::kDouble ? flops / 2 : flops, bytes, overhead}; });
  REQUIRE(p.nodes.size() == step.nodes.size());
  std::map<std::string, std::vector<double>> operations;  // by operator
  for (std::size_t i = 0; i < step.nodes.size(); ++i) {
    CHECK(p.nodes[i]->workspace == 0);
    CHECK((p.nodes[i]->seconds > 0) == (i != step.loss));
    operations[step.nodes[i].name].push_back((p.nodes[i]->seconds - overhead * static_cast<double>(step.nodes[i].calls.size())) *
                                             flops);
  }
  const auto all = [&](const std::string& name, const std::vector<double>& expected) {
    INFO(name);
    REQUIRE(operations[name].size() == expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(operations[name][i] == Approx(expected[i]));
  };
  constexpr double first = 2.0 * (2 * 6 * 8 * 8) * (2 * 9), second = 2.0 * (2 * 6 * 8 * 8) * (2 * 4);
  all("aten::convolution", {first, second});
  all("aten::convolution_backward", {2 * second, first});  // the input needs no gradient
  all("aten::mm", {2.0 * 2 * 2 * 512, 2.0 * 2 * 2 * 512, 2.0 * 2 * 2 * 512});
  all("aten::_scaled_dot_product_flash_attention_for_cpu", {4.0 * 2 * 4 * 8 * 8 * 16});
  all("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
      {10.0 * 2 * 4 * 8 * 8 * 16 + 2 * 1024});                 // and sums of its results
  all("aten::_to_copy+aten::exp", {2 * 512 + 2.0 * 2 * 512});  // the exponential at half the rate

  const auto moved = estimate(step, [](at::ScalarType) { return roofline{1e30, 1e9}; });
  for (std::size_t i = 0; i < step.nodes.size(); ++i)
    if (step.nodes[i].name == "aten::_to_copy+aten::exp") CHECK(moved.nodes[i]->seconds == Approx(2 * 512 * (4 + 3 * 8) / 1e9));
  CHECK_THROWS_AS(estimate(step, [](at::ScalarType) { return roofline{0, 1}; }), bad_option);
}
