// SPDX-License-Identifier: Apache-2.0
// Fetched weights, which are kept in host memory or on a disk. The training equals that with all weights in place bit by bit,
// even within budgets that do not hold all weights.
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <remat/core/evaluate.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <set>

#include "../src/device/file.hpp"
#include "../src/device/free_memory.hpp"
#include "compare.hpp"
#include "default_device.hpp"
#include "fetched_weights.hpp"
#include "models.hpp"
#include "quick.hpp"

using namespace weights_tests;

TEST_CASE("training with fetched weights equals plain training, within every budget") {
  const bool on_disk = GENERATE(false, true), leave = GENERATE(false, true);
  std::size_t beyond = 0, again = 0;
  const std::vector<std::function<models::sample()>> makers = {wide_mlp,
                                                               small_gpt,
                                                               [] { return models::gpt(2, 2, 16, 64, 0.1, false, true); },
                                                               [] { return models::frozen_mlp(); },
                                                               [] { return models::conv(2, 16, 8); },
                                                               [] { return models::unet(1, 8, 8); },
                                                               [] { return models::lstm(); },
                                                               [] { return models::clamped(); }};
  for (const auto& make : makers) {
    pair_of_models t(make, on_disk, leave);
    t.train();
    CHECK(t.run->report().fetched == 0);  // there is room for all weights, which are read in place
    const auto weights = t.run->report().in_place;
    CHECK(weights > 0);
    CHECK(*t.copied == 0);
    const auto most = t.run->report().total(), least = t.smallest();
    CHECK(least < most);
    for (const auto b : {most - 1, (most + least) / 2, least}) {
      INFO(t.plain.name << (on_disk ? " on disk" : " in memory") << (leave ? ", gradients leave" : "") << ", " << b << " of "
                        << most << " bytes, " << least << " at least");
      t.set_budget(b);
      const auto before = t.copied->load();
      for (int i = 0; i < 3; ++i) t.train();
      const auto r = t.run->report();
      CHECK(r.budget == b);
      CHECK(r.in_place == 0);
      CHECK(r.fetched > 0);
      CHECK(*t.copied - before == 3 * r.fetched);
      CHECK(r.text().find("fetched") != std::string::npos);
      beyond += b < t.weight_bytes();
      again += r.fetched > weights;
      const auto planned = t.run->planned();
      CHECK(remat::evaluate(planned.problem, planned.schedule).seconds == planned.report.step_seconds);
    }
    t.set_budget(most);
    t.train();
    CHECK(t.run->report().fetched == 0);
    CHECK_FALSE(t.run->planned().problem.copies());
  }
  CAPTURE(beyond, again);
  if (leave) CHECK(beyond > 1);
  if (leave) CHECK(again > 5);
}

TEST_CASE("fetchable selects the weights that plans may fetch") {
  struct odd : ::torch::nn::Module {
    odd() {
      const auto all = at::randn({32, 64});
      for (const auto& [name, t] : {std::pair<std::string, Tensor>{"alone", at::randn({16, 16})},
                                    {"returned", at::randn({16, 16})},
                                    {"part", all.slice(0, 0, 16)},
                                    {"other", all.slice(0, 16, 32)},
                                    {"clamped", at::randn({16, 16})},
                                    {"turned", at::randn({16, 16}).t()}})
        register_parameter(name, t);
      for (const auto* name : {"read", "counted"}) register_buffer(name, at::ones({16, 16}));
      register_parameter("tied", named_parameters()["turned"]);
      register_parameter("frozen", at::randn({16, 16}), false);
    }
    std::vector<Tensor> forward(Tensor x) {
      const auto p = named_parameters();
      const auto b = named_buffers();
      {
        const at::NoGradGuard no_grad;
        b["counted"].add_(1);
        p["clamped"].clamp_(-1, 1);
      }
      for (const auto& w : {p["alone"], p["returned"], p["clamped"], p["turned"], p["frozen"], b["read"], b["counted"]})
        x = ::torch::tanh(x.matmul(w));
      x = x + p["part"].slice(1, 0, 16) + p["other"].slice(1, 0, 16);
      return {x, p["returned"]};
    }
  };
  const auto m = std::make_shared<odd>();
  std::vector<Tensor> parameters = m->parameters(), buffers = m->buffers();
  std::vector<std::string> names;
  for (const auto& n : m->named_parameters()) names.push_back(n.key());
  for (const auto& n : m->named_buffers()) names.push_back(n.key());
  const auto c =
      rt::capture([m](const auto& in) { return m->forward(in[0]); }, {at::randn({16, 16})}, parameters, buffers, names);
  const auto can = rt::fetchable(*c.step);
  std::set<std::string> may, may_not;
  for (remat::index_t v = 0; v < can.size(); ++v)
    if (const auto k = c.step->values[v].slot; k != remat::none) (can[v] ? may : may_not).insert(c.step->slots[k].name);
  CHECK(may == std::set<std::string>{"alone", "turned", "frozen", "read"});
  for (const auto* name : {"returned", "part", "clamped", "counted"}) CHECK(may_not.count(name) == 1);

  const auto conv = models::conv();  // an operator that writes statistics without a mark in its schema
  const auto other = rt::capture(conv.forward, conv.inputs, conv.module->parameters(), conv.module->buffers());
  const auto of_conv = rt::fetchable(*other.step);
  for (remat::index_t v = 0; v < of_conv.size(); ++v) CHECK_FALSE((of_conv[v] && other.step->from(v) == rt::role::buffer));
  CHECK(std::count(of_conv.begin(), of_conv.end(), true) > 5);

  const auto n = c.step->nodes.size();
  const auto problem_of = [&](const std::vector<bool>& fetched, bool rates = true) {
    return rt::to_problem(*c.step, std::vector<double>(n, 1), std::vector<bytes_t>(n, 0), "step",
                          rates ? std::optional(remat::copy_rates{1, 1, 0}) : std::nullopt, fetched);
  };
  CHECK(problem_of(std::vector<bool>(can.size(), false)).plain());
  CHECK(problem_of(can).held_bytes() + 4 * 1024 == problem_of({}).held_bytes());
  CHECK_THROWS_WITH(problem_of(can, false), Catch::Contains("no rates"));
  CHECK_THROWS_WITH(problem_of(std::vector<bool>(can.size(), true)), Catch::Contains("cannot be"));
  CHECK_THROWS_AS(problem_of({true}), remat::bad_option);
}

TEST_CASE("gradients of fetched weights can accumulate, leave, and step at once") {
  const bool on_disk = GENERATE(false, true);
  pair_of_models t(small_gpt, on_disk);
  t.train();
  const auto most = t.run->report().total();
  t.set_budget(t.smallest() + (most - t.smallest()) / 4);
  t.train();
  t.set_budget(rt::budget(most - 1));  // there is a second set of gradients
  t.train(3);
  CHECK(t.run->report().fetched > 0);

  pair_of_models leaving(small_gpt, on_disk, true, pair_of_models::options(most / 2));
  const auto disk = scratch_disk();
  leaving.of_ours.reset();
  rt::offloaded<::torch::optim::AdamW> early(disk, rt::stepping::overlap, leaving.ours.module->parameters(),
                                             ::torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 5; ++step) {
    INFO("step " << step);
    leaving.of_plain->zero_grad();
    early.zero_grad();
    ::torch::manual_seed(step);
    models::loss_of(leaving.plain.forward(leaving.plain.inputs)).backward();
    ::torch::manual_seed(step);
    models::loss_of(leaving.run->forward(leaving.ours.inputs)).backward();
    leaving.of_plain->step();
    early.step();
    CHECK(leaving.run->report().fetched > 0);
    REQUIRE(same_bits(leaving.plain.module->parameters(), leaving.ours.module->parameters()));
  }
  CHECK(leaving.logged.find("gradients leave") != std::string::npos);
}

TEST_CASE("two steps in flight fetch weights independently") {
  pair_of_models t(wide_mlp, true);
  const auto least = t.smallest();
  t.set_budget(rt::budget(least));
  t.train();
  ::torch::manual_seed(1);
  const auto a = t.plain.forward(t.plain.inputs), b = t.plain.forward(t.plain.inputs);
  ::torch::manual_seed(1);
  const auto first = t.run->forward(t.ours.inputs);
  t.run->set_budget(rt::budget(2 * least));  // the first step keeps its memory
  const auto second = t.run->forward(t.ours.inputs);
  REQUIRE(same_bits(a, first));
  REQUIRE(same_bits(b, second));
  models::loss_of(b).backward();
  models::loss_of(second).backward();
  t.check();
  models::loss_of(a).backward();
  models::loss_of(first).backward();
  t.check();
  CHECK(t.run->report().fetched > 0);
}

TEST_CASE("a change of a fetched weight before its backward is an error, as in eager mode") {
  pair_of_models t(wide_mlp, GENERATE(false, true));
  t.set_budget(rt::budget(t.smallest()));
  t.train();
  REQUIRE(t.run->report().fetched > 0);
  const auto change = [](const models::sample& s) {
    const at::NoGradGuard no_grad;
    s.module->parameters()[4].add_(1);  // the weight of a middle layer
  };
  for (const bool planned : {false, true}) {
    auto& s = planned ? t.ours : t.plain;
    const auto outputs = planned ? t.forward() : s.forward(s.inputs);
    change(s);
    CHECK_THROWS_WITH(models::loss_of(outputs).backward(), Catch::Contains("modified by an inplace operation"));
  }
  for (auto* o : {&t.of_plain, &t.of_ours}) (*o)->zero_grad();
  t.train();
}

TEST_CASE("the error for an unreadable weight names it, and the step can be repeated") {
  const system_kept guard;
  pair_of_models t(wide_mlp, true, true);
  t.set_budget(rt::budget(t.smallest()));
  t.train();
  REQUIRE(t.run->report().fetched > t.weight_bytes());
  const auto broken = [] {
    rt::files_of_system().read = [](int, void*, std::size_t, off_t) -> ssize_t { return errno = EIO, -1; };
  };
  const std::string names = "weight of 90000 bytes", reason = "Input/output error";
  broken();
  CHECK_THROWS_WITH(t.forward(), Catch::Contains(names) && Catch::Contains(reason));
  rt::files_of_system() = guard.before;
  t.train();
  auto outputs = t.forward();
  broken();
  CHECK_THROWS_WITH(models::loss_of(outputs).backward(), Catch::Contains(names) && Catch::Contains(reason));
  rt::files_of_system() = guard.before;
  outputs.clear();  // their graph holds the parameters
  t.of_ours->zero_grad();
  t.train();
}

TEST_CASE("if memory is short, fetched weights leave the page cache, except for a part that stays") {
  static std::atomic<int> left, past_the_cache;
  const system_kept guard;
  const auto folder = std::filesystem::temp_directory_path() / ("remat-weights-" + std::to_string(static_cast<long>(getpid())));
  const auto machine = [&](bytes_t free) {
    std::filesystem::create_directories(folder / "proc");
    std::ofstream(folder / "proc/meminfo") << "MemTotal:  1048576 kB\nMemFree: 17 kB\nMemAvailable:  " << free / 1024 << " kB\n";
  };
  pair_of_models t(wide_mlp, true);
  t.set_budget(rt::budget(t.smallest()));
  t.train();
  rt::files_of_system().write_back = [](int, off_t, off_t) { return ++left, 0; };
  rt::files_of_system().read = [](int file, void* to, std::size_t bytes, off_t offset) {
    past_the_cache += (fcntl(file, F_GETFL) & O_DIRECT) != 0;
    return ::pread(file, to, bytes, offset);
  };
  const auto probe = rt::open_nameless_file(t.disk->folder(), true);
  const bool can_pass = (fcntl(probe, F_GETFL) & O_DIRECT) != 0;
  close(probe);
  rt::root_of_system() = folder.string();
  const auto leaving = [&](bytes_t free) {
    machine(free);
    left = past_the_cache = 0;
    const auto fetched = t.disk->fetched();
    t.train();
    CHECK(t.disk->fetched() - fetched > t.weight_bytes() / 2);
    CHECK((past_the_cache > 0) == (left > 0 && can_pass));
    return left.load();
  };
  CHECK(leaving(bytes_t{1} << 30) == 0);
  const auto all = leaving(0);
  CHECK(all > 0);
  const auto some = leaving(t.weight_bytes());
  CHECK(some > 0);
  CHECK(some < all);
  std::filesystem::remove_all(folder);
}

TEST_CASE("activations and weights share the links") {
  auto o = pair_of_models::options("100%");
  const auto folder = std::filesystem::temp_directory_path().string();
  o.far = {rt::file_memory(folder), rt::host_link(), nullptr, remat::copy_rates{1e12, 1e12, 0}};
  pair_of_models t([] { return models::gpt(4, 8, 64, 64); }, true, false, o);
  t.train();
  const auto least = t.smallest(), most = t.run->report().total();
  t.set_budget(rt::budget(least + (most - least) / 3));
  for (int i = 0; i < 3; ++i) t.train();
  CHECK(t.run->report().fetched > 0);
  CHECK(t.run->report().moved_in > 0);
}

TEST_CASE("plans that fetch weights are cached, and need a solver that supports tiers") {
  const auto folder = std::filesystem::temp_directory_path() / ("remat-kept-" + std::to_string(static_cast<long>(getpid())));
  auto o = pair_of_models::options("70%");
  o.solver_name = "some";
  o.cache = rt::plan_cache(folder);
  bytes_t fetched = 0;
  for (const bool again : {false, true}) {
    pair_of_models t(wide_mlp, false, false, o);
    t.train();
    CHECK((t.logged.find("plan of an earlier process") != std::string::npos) == again);
    CHECK(t.run->report().fetched > 0);
    if (again) CHECK(t.run->report().fetched == fetched);
    fetched = t.run->report().fetched;
  }
  std::filesystem::remove_all(folder);

  auto hasty = pair_of_models::options("95%");
  hasty.solver = [](const auto&, bytes_t, const auto&, const auto&) { return remat::result{}; };
  pair_of_models unplanned(wide_mlp, false, false, hasty);
  for (int i = 0; i < 2; ++i) unplanned.train();
  CHECK(unplanned.run->report().fetched == fetched);  // each weight once

  pair_of_models t(wide_mlp, false, false, testing::quick("70%", 0.2));  // min_cut does not support tiers
  CHECK_THROWS_WITH(t.train(), Catch::Contains("the solver") && Catch::Contains("plans for a device"));
  o = pair_of_models::options("50%");
  o.device = [](at::ScalarType) { return remat::roofline{}; };
  CHECK_THROWS_WITH(pair_of_models(wide_mlp, false, false, o), Catch::Contains("wrap_options.fetched"));
}

TEST_CASE("weights on the device itself cannot be fetched", "[accelerator]") {
  const on_test_device there;
  pair_of_models t(wide_mlp, false);
  t.set_budget(rt::budget(t.smallest()));
  CHECK_THROWS_WITH(t.forward(), Catch::Contains("is on " + test_device().str()));
}
