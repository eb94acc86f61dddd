// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <cstring>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <thread>
#include <vector>

#include "../src/device/file.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

/// A listener like PyTorch's profiler.
struct reporter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t change, std::size_t, std::size_t, c10::Device) override {
    live += change;
    peak = std::max(peak, live);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live = 0, peak = 0;
};

}  // namespace

TEST_CASE("without a meter, recording or plan the allocator passes memory through") {
  placing_allocator::install();
  REQUIRE(placing_allocator::in_front());
  const auto deleter_of = [](const at::Tensor& t) { return t.storage().data_ptr().get_deleter(); };
  const auto plain = at::empty({16});
  at::Tensor counted, recorded;
  {
    const meter counting;
    counted = at::empty({16});
  }
  {
    allocation_recording r;
    r.start();
    recorded = at::empty({16});
    r.stop();
    CHECK(r.blocks().size() == 1);
  }
  CHECK(deleter_of(counted) == c10::GetCPUAllocator()->raw_deleter());
  CHECK(deleter_of(recorded) == c10::GetCPUAllocator()->raw_deleter());
  CHECK(deleter_of(plain) != deleter_of(counted));
  CHECK(deleter_of(at::empty({16})) == deleter_of(plain));
  const auto before = meter::live();
  const auto more = at::empty({16});
  CHECK(meter::live() == before);
  counted.reset();
  CHECK(meter::live() == before - 64);
}

TEST_CASE("a process may fork while other threads allocate", "[fork]") {
  const meter counting;
  std::atomic<bool> end = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&] {
      while (!end) at::empty({256});
    });
  int failed = 0;
  for (int i = 0; i < 20; ++i) {
    const auto child = fork();
    if (child == 0) {
      alarm(20);  // ends a child that waits for a lock forever
      for (int k = 0; k < 50; ++k) at::empty({256});
      { const arena memory(4096); }
      _exit(0);
    }
    int how = 0;
    waitpid(child, &how, 0);
    failed += how != 0;
  }
  end = true;
  for (auto& t : threads) t.join();
  CHECK(failed == 0);
}

TEST_CASE("memory allocated before the installation can be freed, and is not counted") {
  auto old = at::zeros({1000});
  void* raw = c10::GetCPUAllocator()->raw_allocate(512);
  const meter counting;
  const auto before = meter::live();
  old.reset();
  c10::GetCPUAllocator()->raw_deallocate(raw);
  CHECK(meter::live() == before);
  auto young = at::zeros({1000});
  CHECK(meter::live() == before + 4000);
  young.reset();
  CHECK(meter::live() == before);
}

TEST_CASE("the meter agrees with PyTorch's memory report") {
  const meter counting;
  auto own = std::make_shared<reporter>();
  c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, own);
  const auto before = meter::live();
  meter::reset_peak();
  {
    auto a = at::rand({100, 100});
    auto b = a.matmul(a).softmax(1);
    arena memory(100000);
    auto c = (a + b).sum();
  }
  CHECK(meter::live() == before + own->live);
  CHECK(meter::peak() - before == own->peak);
  CHECK(own->peak >= 180000);
}

TEST_CASE("the meter reports every change, from all threads") {
  const meter counting;
  const auto before = meter::live();
  bytes_t largest = 0;
  std::size_t changes = 0;
  meter::observe([&](bytes_t live) {
    at::empty({16});  // its own changes are not reported
    largest = std::max(largest, live);
    ++changes;
  });
  std::array<std::thread, 4> threads;
  for (auto& t : threads)
    t = std::thread([] {
      for (int i = 0; i < 200; ++i) at::empty({256});
    });
  for (auto& t : threads) t.join();
  meter::observe({});
  CHECK(changes == 4 * 200 * 2);
  CHECK(largest >= before + 1024);
  CHECK(largest <= before + 4 * 1024 + 64);
  CHECK(meter::live() == before);
}

TEST_CASE("a recording lists the allocations and releases of its own thread") {
  allocation_recording r;
  auto outside = at::empty({10});
  r.start();
  auto a = at::empty({16});
  at::empty({32});
  std::thread([] { at::empty({64}); }).join();
  r.stop();
  auto later = at::empty({128});
  REQUIRE(r.blocks().size() == 2);
  CHECK(r.events() == 3);
  CHECK(r.blocks()[0].bytes == 64);
  CHECK(r.blocks()[0].freed == -1);
  CHECK(r.blocks()[0].data == a.const_data_ptr());
  CHECK(r.blocks()[1].bytes == 128);
  CHECK(r.blocks()[1].born == 1);
  CHECK(r.blocks()[1].freed == 2);
}

TEST_CASE("planned allocations have the planned addresses, and unplanned allocations are counted and harmless") {
  arena memory(4096);
  planned_allocations p;
  const meter counting;
  const std::vector<planned_block> plan = {{64, 0, memory.data()}, {128, 0, memory.data() + 64}, {64, 1, nullptr}};
  const auto before = meter::live();

  SECTION("allocations as planned") {
    p.plan(plan);
    p.start();
    auto a = at::empty({16}), b = at::empty({32});
    a.reset();
    auto c = at::empty({16});
    p.stop();
    CHECK(b.const_data_ptr() == memory.data() + 64);
    CHECK(meter::live() == before + 64);  // only c
    CHECK(p.unplanned_allocations() == 0);
    CHECK(p.unplanned_bytes() == 0);
  }
  SECTION("a larger allocation ends the plan") {
    p.plan(plan);
    p.start();
    auto a = at::empty({17}), b = at::empty({32});
    p.stop();
    CHECK(p.unplanned_allocations() == 2);
    CHECK(meter::live() == before + 68 + 128);
    CHECK(p.unplanned_bytes() == 68 + 128 - 64);  // less the block without a place
  }
  SECTION("more allocations than planned") {
    p.plan({plan.data(), 1});
    p.start();
    auto a = at::empty({16}), b = at::empty({16});
    p.stop();
    CHECK(a.const_data_ptr() == memory.data());
    CHECK(p.unplanned_allocations() == 1);
    CHECK(p.unplanned_bytes() == 64);
    p.start();
    at::empty({64});
    at::empty({32});
    p.stop();
    CHECK(p.unplanned_bytes() == 256);
    p.plan(plan);
    CHECK(p.unplanned_bytes() == 0);
  }
  SECTION("a missing release: the place of the third allocation may still be in use") {
    p.plan(plan);
    p.start();
    auto a = at::empty({16}), b = at::empty({32}), c = at::empty({16});
    p.stop();
    CHECK(p.unplanned_allocations() == 1);
    CHECK(p.unplanned_bytes() == 0);  // it had no place in the plan either
  }
  SECTION("allocations of other threads") {
    p.plan(plan);
    p.start();
    at::Tensor other;
    std::thread([&] { other = at::empty({16}); }).join();
    p.stop();
    CHECK(other.const_data_ptr() != memory.data());
    CHECK(p.unplanned_allocations() == 0);
  }
  SECTION("raw allocations") {
    p.plan(plan);
    p.start();
    void* raw = c10::GetCPUAllocator()->raw_allocate(64);
    CHECK(raw == memory.data());
    c10::GetCPUAllocator()->raw_deallocate(raw);
    p.stop();
  }
  CHECK(meter::live() == before);
}

TEST_CASE("an arena gives back pages except for given ranges") {
  const auto before = meter::live();
  {
    arena memory(10 * 4096);
    CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % arena::alignment == 0);
    CHECK(meter::live() == before + 10 * 4096);
    std::memset(memory.data(), 7, 10 * 4096);
    memory.discard_except({{3 * 4096 + 100, 50}, {7 * 4096, 4097}});
    CHECK(meter::live() == before + 3 * 4096);
    CHECK(memory.resident() == 3 * 4096);
    CHECK(memory.data()[3 * 4096 + 100] == 7);
    CHECK(memory.data()[8 * 4096] == 7);
    CHECK(memory.data()[0] == 0);
    CHECK(memory.data()[5 * 4096] == 0);
  }
  CHECK(meter::live() == before);
  { arena nothing(0); }
  CHECK(meter::live() == before);
}

TEST_CASE("the state of the generator can be restored") {
  at::normal(0, 1, {5});
  const auto state = generator_state::now();
  const auto a = at::normal(0, 1, {5}), b = at::rand({3});
  CHECK_FALSE(generator_state::now() == state);
  state.restore();
  CHECK(generator_state::now() == state);
  CHECK(at::equal(a, at::normal(0, 1, {5})));
  CHECK(at::equal(b, at::rand({3})));
}

TEST_CASE("a tier reserves no more than its limit") {
  const auto far = host_memory("far", 10000);
  CHECK(far->limit() == 10000);
  auto one = far->reserve(6000);
  try {
    far->reserve(5000);
    FAIL("there is no room");
  } catch (const out_of_memory& e) {
    CHECK(e.tier == "far");
    CHECK(e.asked == 5000);
    CHECK(e.available == 4000);
  }
  const auto two = far->reserve(4000);
  CHECK_THROWS_AS(far->reserve(1), out_of_memory);
  one.reset();
  CHECK(far->reserve(6000)->bytes() == 6000);
  CHECK_THROWS_AS(host_memory("none", -1), bad_option);
  CHECK_THROWS_AS(far->reserve(-1), bad_option);
  CHECK_THROWS_AS(host_memory("all")->reserve(max_bytes), out_of_memory);
}

TEST_CASE("a link copies in order after its tickets, and reports failures") {
  const auto far = host_memory("far");
  const auto a = far->reserve(100), b = far->reserve(300);
  const auto to_b = host_link(), to_a = host_link();
  for (int round = 0; round < 200; ++round) {
    std::memset(a->data(), round, 100);
    const auto there = to_b->copy({b, 200, 100}, {a, 0, 100});
    const auto back = to_a->copy({a, 0, 50}, {b, 250, 50}, {there});
    const auto again = to_b->copy({b, 0, 100}, {a, 0, 100}, {back});
    again->wait();
    CHECK(back->reached());
    CHECK((b->data()[0] == static_cast<char>(round) && b->data()[299] == static_cast<char>(round)));
  }
  CHECK_THROWS_AS(to_b->copy({b, 0, 10}, {a, 0, 11}), broken_contract);
  CHECK_THROWS_AS(to_b->copy({b, 0, 10}, {a, 91, 10}), broken_contract);
  CHECK_THROWS_AS(to_b->copy({nullptr, 0, 10}, {a, 0, 10}), broken_contract);

  struct failing final : event {
    bool reached() const override { return true; }
    void wait() const override { throw copy_failed("the disk is full"); }
  };
  const auto before = b->data()[0];
  a->data()[0] = static_cast<char>(before + 1);
  const auto failed = to_b->copy({b, 0, 1}, {a, 0, 1}, {std::make_shared<failing>()});
  CHECK_THROWS_AS(to_a->copy({a, 0, 1}, {b, 0, 1}, {failed})->wait(), copy_failed);
  CHECK(b->data()[0] == before);
  to_b->copy({b, 0, 1}, {a, 0, 1})->wait();  // other copies still work
  CHECK(b->data()[0] != before);
}

TEST_CASE("a link holds its blocks until the copy ends, even if nobody waits") {
  const auto far = host_memory("far", 200);
  auto l = host_link();
  {
    auto a = far->reserve(100), b = far->reserve(100);
    l->copy({a, 0, 100}, {b, 0, 100});
  }
  l.reset();
  CHECK(far->reserve(200) != nullptr);
}

TEST_CASE("a link works in a forked process", "[fork]") {
  const auto far = host_memory("far");
  const auto a = far->reserve(8), b = far->reserve(8);
  const auto l = host_link();
  std::atomic<bool> end = false;
  std::thread other([&] {  // holds the locks that a link takes during a copy
    while (!end) l->copy({a, 0, 8}, {b, 0, 8})->wait();
  });
  int failed = 0;
  for (int k = 0; k < 100; ++k) {
    const auto child = fork();
    if (child == 0) {
      alarm(20);
      b->data()[0] = 7;
      l->copy({a, 0, 8}, {b, 0, 8})->wait();
      _exit(a->data()[0] == 7 ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    if (failed += status != 0) break;
  }
  end = true;
  other.join();
  CHECK(failed == 0);
}
