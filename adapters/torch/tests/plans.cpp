// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <random>
#include <remat/io/file.hpp>
#include <remat/io/json.hpp>
#include <remat/pytorch/wrap.hpp>

#include "compare.hpp"
#include "default_device.hpp"
#include "models.hpp"
#include "quick.hpp"

using namespace remat;
namespace rt = remat::pytorch;

namespace {

/// A folder for one test, which is removed with this object.
struct plan_folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("remat-plans-" + std::to_string(std::random_device{}()));
  ~plan_folder() { std::filesystem::remove_all(path); }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> list;
    if (std::filesystem::exists(path))
      for (const auto& f : std::filesystem::directory_iterator(path)) list.push_back(f.path());
    return list;
  }
};

/// The start of a training: plans, and counts the searches.
struct start {
  std::size_t searches = 0;
  std::vector<std::string> log;
  std::vector<at::Tensor> grads;
  rt::report report;

  start(const models::sample& s, const rt::plan_cache& cache, const std::string& name, const char* budget = "60%") {
    auto o = testing::quick(budget, 10);
    o.solver = [this, inner = o.solver](const auto& p, auto b, const auto& l, const auto& w) {
      ++searches;
      return inner(p, b, l, w);
    };
    o.solver_name = name;
    o.cache = cache;
    o.log = [this](const std::string& text) { log.push_back(text); };
    testing::runner r(s.module, s.forward, o);
    for (auto& p : s.module->parameters()) p.mutable_grad() = at::Tensor();
    ::torch::manual_seed(1);
    models::loss_of(r.forward(s.inputs)).backward();
    for (const auto& p : s.module->parameters()) grads.push_back(p.grad().clone());
    report = r.report();
  }
};

}  // namespace

TEST_CASE("a second start of a training takes the plan of the first from the cache") {
  ::torch::manual_seed(1);
  const plan_folder folder;
  const rt::plan_cache cache(folder.path);
  const auto s = models::mlp(64, 32, 6);
  const start first(s, cache, "min_cut");
  REQUIRE(first.searches > 0);
  REQUIRE(first.report.recomputed > 0);
  REQUIRE(folder.files().size() == 1);
  const start second(s, cache, "min_cut");
  CHECK(second.searches == 0);
  CHECK(second.report.recomputed == first.report.recomputed);
  CHECK(second.report.arena == first.report.arena);
  CHECK(same_bits(first.grads, second.grads));

  SECTION("no plan is taken for another budget, solver or model") {
    CHECK(start(s, cache, "min_cut", "55%").searches > 0);
    CHECK(start(s, cache, "min_cut with options").searches > 0);
    CHECK(start(models::mlp(65, 32, 6), cache, "min_cut").searches > 0);
    CHECK(folder.files().size() == 4);
  }
  SECTION("plans of a solver without a name are not cached") {
    CHECK(start(s, cache, "").searches > 0);
    CHECK(folder.files().size() == 1);
  }
  SECTION("damaged files of the cache are written anew") {
    const auto file = folder.files()[0];
    const auto good = read_file(file, 1 << 24);
    auto lies = nlohmann::ordered_json::parse(good);
    auto& steps = lies["steps"];
    steps.erase(std::find_if(steps.begin(), steps.end(), [](const auto& x) { return x[0] == "compute"; }));
    auto stranger = nlohmann::ordered_json::parse(good);
    stranger["problem"] = "another";
    auto wild = nlohmann::ordered_json::parse(good);
    wild["steps"][0][1] = 4000000000U;
    for (const auto& bad : {std::string(), std::string("{"), good.substr(0, good.size() / 2), std::string("[1, 2]"), lies.dump(),
                            stranger.dump(), wild.dump()}) {
      std::ofstream(file) << bad;
      const start again(s, cache, "min_cut");
      CHECK(again.searches > 0);
      CHECK(same_bits(first.grads, again.grads));
      CHECK(start(s, cache, "min_cut").searches == 0);
    }
  }
  SECTION("with a folder that cannot be written, each start searches") {
    CHECK(start(s, rt::plan_cache("/dev/null/plans"), "min_cut").searches > 0);
    CHECK(start(s, rt::plan_cache(""), "min_cut").searches > 0);
  }
}

TEST_CASE("the cache removes the plans that were used least recently") {
  const plan_folder folder;
  result found;
  found.status = status::feasible;
  for (index_t i = 0; i < 100; ++i) found.schedule.compute(i);
  const rt::plan_cache unbounded(folder.path);
  unbounded.store("a", found);
  const auto bytes = static_cast<bytes_t>(std::filesystem::file_size(folder.path / "a.json"));
  const rt::plan_cache cache(folder.path, 3 * bytes + bytes / 2);
  const auto age = [&](const char* name, int hours) {
    const auto file = folder.path / (std::string(name) + ".json");
    std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - std::chrono::hours(hours));
  };
  cache.store("b", found);
  cache.store("c", found);
  age("a", 3), age("b", 2), age("c", 1);
  REQUIRE(cache.find("a"));  // updates the time of use
  CHECK(cache.find("a")->schedule == found.schedule);
  cache.store("d", found);
  CHECK(cache.find("a"));
  CHECK_FALSE(cache.find("b"));
  CHECK(cache.find("c"));
  CHECK(cache.find("d"));
}

TEST_CASE("plans: a known budget stays possible, even if a later search finds nothing", "[device]") {
  const on_test_device there;
  const plan_folder folder;
  ::torch::manual_seed(4);
  const auto s = models::gpt(2, 4, 32, 64);
  bool tired = false;
  auto o = testing::quick("100%", 10);
  o.solver = [&, inner = o.solver](const problem& p, bytes_t b, const limits& l, const rt::plan_observer& w) {
    return tired ? result() : inner(p, b, l, w);
  };
  o.solver_name = "tired";
  const bool cached = GENERATE(false, true);
  o.cache = cached ? rt::plan_cache(folder.path) : rt::plan_cache("");
  o.budget = bytes_t{1};
  testing::runner first(s.module, s.forward, o);
  bytes_t smallest = 0;
  try {
    first.prepare(s.inputs);
  } catch (const rt::over_budget& e) {
    smallest = e.smallest.value();
  }
  REQUIRE(smallest > 0);
  tired = true;
  o.limits.seconds = 1e-4;  // limits the search near store-all, too
  o.budget = smallest;
  testing::runner second(s.module, s.forward, o);
  auto& run = cached ? second : first;
  run.set_budget(smallest);
  run.prepare(s.inputs);
  CHECK(run.report().recomputed > 0);
  CHECK(run.report().total() <= smallest);
  CHECK(run.report().smallest_bound <= smallest);
  if (!cached) CHECK_THROWS_AS(second.prepare(s.inputs), rt::over_budget);
}

TEST_CASE("plans: a layout that takes more each time is given more room each time") {
  ::torch::manual_seed(1);
  const auto s = models::mlp(256, 32, 12);
  auto o = testing::quick("80%");
  bytes_t least = max_bytes, first = 0;
  int calls = 0;
  o.solver = [&, inner = o.solver](const problem& p, bytes_t within, const auto& l, const auto& w) {
    if (calls == 0) first = within - p.held_bytes();
    least = std::min(least, within - p.held_bytes());
    const auto even = p.with_costs(std::vector<double>(p.operations().size(), 1));  // measured times vary between runs
    return inner(even, within + first / 16 * ++calls, l, w);  // the schedule needs more than asked for, and more with each call
  };
  testing::runner r(s.module, s.forward, o);
  r.prepare(s.inputs);
  CHECK(r.report().recomputed > 0);
  CHECK(calls > 4);
  CHECK(least > first / 4);  // the search did not ask for the smallest budget
}

TEST_CASE("plans: no solver gets a negative budget if layouts take much more than budgets", "[device]") {
  const on_test_device there;
  ::torch::manual_seed(1);
  const auto s = models::mlp(256, 32, 12);
  auto o = testing::quick("100%");
  bytes_t least = max_bytes;
  o.solver = [&](const problem& p, bytes_t within, const auto&, const auto&) {
    least = std::min(least, within);
    return as_result(p, store_all_schedule(p));
  };
  testing::runner r(s.module, s.forward, o);
  r.prepare(s.inputs);
  r.set_budget(r.report().held() + r.report().store_all / 8);
  CHECK_THROWS_AS(r.prepare(s.inputs), error);  // the search for the smallest budget checks the answers of solvers
  CHECK(least < r.report().store_all);
  CHECK(least >= 0);
}
