// SPDX-License-Identifier: Apache-2.0
// Refusals of a capture, its memory, and its side effects.
#include <thread>

#include <remat/core/evaluate.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/io.hpp>

#include "../src/program/fold.hpp"
#include "captured_nodes.hpp"
#include "compare.hpp"
#include "interpret.hpp"
#include "models.hpp"

using namespace capture_tests;

TEST_CASE("modules that cannot be captured are refused with the operator, and without side effects") {
  torch::manual_seed(3);
  using Catch::Contains;
  CHECK_THAT(refusal(small("item",
                           [](auto& m, auto& x) -> tensors {
                             buffer(m).add_(1);
                             auto y = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
                             return {y.sum().template item<float>() > 0 ? y : y * 2};
                           })),
             Contains("aten::_local_scalar_dense") && Contains("forward, after aten::sum") && Contains("fixed graph"));
  CHECK_THAT(refusal(small("mask",
                           [](auto& m, auto& x) -> tensors {
                             auto y = x[0].matmul(weight(m));
                             return {y.index({y > 0})};
                           })),
             Contains("aten::index") && Contains("fixed graph"));
  CHECK_THAT(refusal(small("no gradient", [](auto&, auto& x) -> tensors { return {x[0].sin()}; })),
             Contains("outputs of the module need no gradient"));
  CHECK_THAT(refusal(small("sparse", [](auto& m, auto& x) -> tensors { return {weight(m).to_sparse().sum() + x[0].sum()}; })),
             Contains("aten::"));
  CHECK_THAT(
      refusal(small("zeros without memory", [](auto& m, auto& x) -> tensors { return {weight(m).sgn().sum() + x[0].sum()}; })),
      Contains("aten::_efficientzerotensor") && Contains("plain storage"));
  CHECK_THAT(refusal(small("resize",
                           [](auto& m, auto& x) -> tensors {
                             auto y = x[0].sin();
                             y.resize_({40, 40});
                             return {y.sum() * weight(m)};
                           })),
             Contains("aten::resize_"));
  CHECK_THAT(refusal(small("generator",
                           [](auto& m, auto& x) -> tensors {
                             return {x[0].matmul(weight(m)) * torch::rand({6}, at::detail::createCPUGenerator(5))};
                           })),
             Contains("generator"));
  const auto hidden = torch::randn({6, 6}).requires_grad_();
  CHECK_THAT(refusal(small("hidden parameter", [hidden](auto&, auto& x) -> tensors { return {x[0].matmul(hidden)}; })),
             Contains("not among the parameters"));
  CHECK_THAT(refusal(small("thread",
                           [](auto& m, auto& x) -> tensors {
                             Tensor y;
                             std::thread([&] { y = torch::ones({3}) * 2; }).join();
                             return {x[0].matmul(weight(m)), y};
                           })),
             Contains("output 1"));

  SECTION("errors of the module reach the caller") {
    const auto s = small("shapes", [](auto& m, auto& x) -> tensors { return {torch::rand({3, 3}).matmul(weight(m)) + x[0]}; });
    const world before(*s.module);
    CHECK_THROWS_AS(capture_sample(s), c10::Error);
    CHECK(world(*s.module) == before);
  }
  SECTION("existing gradients stay as they are") {
    const auto s = models::mlp();
    for (auto& p : s.module->parameters()) p.mutable_grad() = torch::ones_like(p);
    const world before(*s.module);
    capture_sample(s);
    CHECK(world(*s.module) == before);
  }
}

TEST_CASE("an unused parameter gets no gradient", "[device]") {
  const on_test_device there;
  auto s = small("unused", [](auto& m, auto& x) -> tensors { return {x[0].matmul(weight(m))}; });
  s.module->register_parameter("idle", torch::randn({100}));
  const auto p = check_against_eager(s);
  REQUIRE(p.step->parameters.size() == 1);
  CHECK(p.tensors[p.step->parameters[0]].is_same(weight(*s.module)));
}

TEST_CASE("capture needs the memory of one operator only") {
  struct meter : c10::MemoryReportingInfoBase {
    int64_t now = 0, peak = 0;
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { peak = std::max(peak, now += size); }
    bool memoryProfilingEnabled() const override { return true; }
  };
  const auto s = models::mlp(4096, 64, 12);  // 1 MiB per activation
  auto measure = [](const auto& f) {
    auto m = std::make_shared<meter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, m);
    f();
    return m->peak;
  };
  const auto captured = measure([&] { capture_sample(s); });
  const auto real = measure([&] { eager(s, s.inputs, 1); });
  CHECK(real > 20 << 20);
  CHECK(captured < 5 << 20);
}

TEST_CASE("a captured program becomes a valid planning problem", "[device]") {
  const on_test_device there;
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const auto p = *capture_sample(s).step;
      const auto n = p.nodes.size();
      const auto q = remat::pytorch::to_problem(p, std::vector<double>(n, 1), std::vector<remat::bytes_t>(n, 0), s.name);
      REQUIRE(q.values().size() >= p.values.size());
      for (remat::index_t v = 0; v < q.values().size(); ++v)  // values added to order nodes with side effects have no bytes
        if (v >= p.values.size()) CHECK((q.values()[v].bytes == 0 && q.is_target(v) && q.consumers(v).size() == 1));
      REQUIRE(q.operations().size() == n);
      CHECK(remat::evaluate(q, remat::store_all_schedule(q)).seconds == static_cast<double>(n));
      CHECK(q.backward_start() == std::optional<remat::operation_id>(p.loss + 1));
      for (const auto& v : q.values()) CHECK(v.bytes % 64 == 0);
      for (auto g : p.parameter_grads) CHECK(q.is_target(p.views[g].value));
      for (auto g : p.output_grads)
        if (g != none) CHECK(q.producer(p.views[g].value) == p.loss);
      remat::bytes_t held = 0;
      for (const auto& t : s.module->parameters()) held += (static_cast<remat::bytes_t>(t.nbytes()) + 63) / 64 * 64;
      CHECK(q.held_bytes() >= held);
      CHECK_THROWS_AS(remat::pytorch::to_problem(p, {}, {}), remat::bad_option);
    }
  }
}

TEST_CASE("gradients have the layout of their parameters", "[device]") {
  const on_test_device there;
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const auto p = *capture_sample(s).step;
      REQUIRE(p.parameters.size() == p.parameter_grads.size());
      for (std::size_t i = 0; i < p.parameters.size(); ++i) {
        const auto& v = p.views[p.parameter_grads[i]];
        CHECK(p.slots[p.parameters[i]].type.sizes == v.sizes);
        CHECK(p.slots[p.parameters[i]].type.strides == v.strides);
      }
    }
  }
}

TEST_CASE("draws of another thread during a capture are not recorded, and advance the generator as usual") {
  auto generator = at::detail::getDefaultCPUGenerator();
  int foreign = 0;
  const auto s = small("another thread", [&](auto& m, auto& x) -> tensors {
    auto y = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
    std::thread([&] { torch::rand({1000}), ++foreign; }).join();
    return {torch::dropout(y.sin(), 0.5, true)};
  });
  torch::manual_seed(1);
  torch::rand({1000});
  const auto drawn = generator.get_state();
  torch::manual_seed(1);
  const auto p = capture_sample(s);
  CHECK(foreign == 1);
  CHECK(same_bits(generator.get_state(), drawn));
  for (const auto& n : p.step->nodes) CHECK(n.starts.from == remat::pytorch::generator_origin::next);
}
