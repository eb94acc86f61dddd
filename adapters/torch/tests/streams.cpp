// SPDX-License-Identifier: Apache-2.0
// Accelerators: order, lifetime and failures of regions, streams, events and copies; selection of devices.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "devices.hpp"
// after PyTorch, which has its own CHECK
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <remat/pytorch/memory.hpp>

using namespace remat;
using namespace remat::pytorch;

namespace {

device& tested_accelerator() { return device_of(test_device()); }
at::TensorOptions bytes_on_accelerator() { return at::TensorOptions().device(test_device()).dtype(at::kByte); }

std::string reason_of_failure(const ticket& t) {
  try {
    t->wait();
  } catch (const copy_failed& e) {
    return e.what();
  }
  return "";
}

/// The bytes of a region as a tensor.
at::Tensor bytes_in(const std::shared_ptr<region>& r, bytes_t offset, bytes_t bytes) {
  const c10::Storage s(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes),
                       c10::DataPtr(r->data() + offset, r->on()), nullptr, false);
  return at::empty({0}, bytes_on_accelerator()).set_(s, 0, {bytes}, {1});
}

c10::Stream another_stream() {
  return c10::impl::VirtualGuardImpl(test_device().type()).getStreamFromGlobalPool(test_device(), false);
}

}  // namespace

TEST_CASE("copies on streams run in order, after their tickets and before the kernels that wait for them", "[accelerator]") {
  const hardware::option late("late", 100);
  if (hardware::emulated()) CHECK(hardware::get("late") == 100);  // options work before the first use of the device
  auto& d = tested_accelerator();
  const auto far = on_host(test_device());
  constexpr bytes_t bytes = 1024;
  const auto here = d.memory().reserve(2 * bytes), beyond = far.memory->reserve(bytes);
  CHECK(here->on() == test_device());
  CHECK(beyond->on().is_cpu());
  CHECK(reinterpret_cast<std::uintptr_t>(here->data()) % accelerator_alignment == 0);
  d.enter(*here);
  int wrong = 0;
  for (int round = 0; round < 100; ++round) {
    bytes_in(here, 0, bytes).fill_(round);
    const auto out = far.out->copy({beyond, 0, bytes}, {here, 0, bytes}, {d.mark()});
    const auto back = far.in->copy({here, bytes, bytes}, {beyond, 0, bytes}, {out});
    d.wait(out);  // the next line overwrites the source
    bytes_in(here, 0, bytes).fill_(99);
    d.wait(back);
    wrong += !at::equal(bytes_in(here, bytes, bytes), at::full({bytes}, round, bytes_on_accelerator()));
    d.mark()->wait();
    CHECK(out->reached());
    CHECK(back->reached());
  }
  CHECK(wrong == 0);
  CHECK(hardware::races() == "");
  CHECK_THROWS_AS(far.out->copy({beyond, 0, 10}, {here, 0, 11}), broken_contract);
  CHECK_THROWS_AS(far.out->copy({beyond, 0, 10}, {here, 2 * bytes - 9, 10}), broken_contract);
  CHECK_THROWS_AS(far.out->copy({nullptr, 0, 10}, {here, 0, 10}), broken_contract);
  far.out->copy({beyond, 0, 0}, {here, 0, 0})->wait();
}

TEST_CASE("regions live until their copies end, and their bytes count once", "[accelerator]") {
  auto& d = tested_accelerator();
  const auto before = d.use().live;
  auto far = on_host(test_device(), 1 << 20);
  {
    const hardware::option late("late", 20000);
    far.out->copy({far.memory->reserve(1 << 20), 0, 1 << 20}, {d.memory().reserve(1 << 20), 0, 1 << 20});
    CHECK(far.memory->reserve(1 << 20) != nullptr);  // waits for the copy that uses up the limit
  }
  far.out.reset();
  d.mark()->wait();
  CHECK(d.use().live == before);
}

TEST_CASE("the error for a device without free memory tells the available bytes", "[accelerator]") {
  auto& d = tested_accelerator();
  const auto far = on_host(test_device(), 10000);
  const auto wanted = d.total_bytes() + (1 << 20);
  try {
    d.memory().reserve(wanted);
    FAIL("there is no such memory");
  } catch (const out_of_memory& e) {
    CHECK(e.tier == d.memory().name());
    CHECK(e.asked == wanted);
    CHECK(e.available > 0);
    CHECK(e.available < wanted);
  }
  CHECK(d.memory().reserve(4000)->bytes() == 4000);
  CHECK(far.memory->reserve(10000)->bytes() == 10000);
  CHECK_THROWS_AS(far.memory->reserve(10001), out_of_memory);
  CHECK_THROWS_AS(on_host(test_device(), -1), bad_option);
}

TEST_CASE("arenas count in PyTorch's statistics, and pinned memory in the meter", "[accelerator]") {
  auto& d = tested_accelerator();
  d.empty_cache();
  const auto before = d.use();
  const auto host = meter::live();
  const auto arena = d.memory().reserve(bytes_t{32} << 20);
  CHECK(d.use().live == before.live + (bytes_t{32} << 20));
  CHECK(d.use().reserved == before.reserved + (bytes_t{32} << 20));
  const auto pinned = on_host(test_device()).memory->reserve(7000);
  CHECK(meter::live() == host + 7000);
  CHECK(d.use().live == before.live + (bytes_t{32} << 20));
  CHECK(d.free_bytes() <= d.total_bytes());
}

TEST_CASE("a failed copy reports its error, and other copies still work", "[accelerator]") {
  if (!hardware::emulated()) return;  // a real device does not recover from a failure
  auto& d = tested_accelerator();
  const auto far = on_host(test_device());
  const auto here = d.memory().reserve(100), beyond = far.memory->reserve(100);
  const block near_by{here, 0, 100}, away{beyond, 0, 100};
  const std::string sevens(100, 7);
  here->write(sevens.data(), 0, 100);
  std::memset(beyond->data(), 1, 100);
  {
    const hardware::option fail("fail", 1);
    const auto lost = far.out->copy(away, near_by);
    CHECK(reason_of_failure(lost).find("copy of 100 bytes between the host and ") == 0);
  }
  const auto again = on_host(test_device());
  again.out->copy(away, near_by)->wait();
  CHECK(std::string(beyond->data(), 100) == sevens);
  CHECK_NOTHROW(d.wait(nullptr));
}

TEST_CASE("memory of a device goes to a file and back through the host", "[accelerator]") {
  auto& d = tested_accelerator();
  constexpr bytes_t bytes = (9 << 20) + 4096;  // more than two pieces
  const auto disk = on_disk(std::filesystem::temp_directory_path().string());
  const auto here = d.memory().reserve(bytes), beyond = disk.memory->reserve(bytes);
  std::string sent(static_cast<std::size_t>(bytes), 0), found = sent;
  for (std::size_t k = 0; k < sent.size(); ++k) sent[k] = static_cast<char>(k * 7 + k / 4096);
  here->write(sent.data(), 0, bytes);
  const auto out = disk.out->copy({beyond, 0, bytes}, {here, 0, bytes}, {d.mark()});
  d.wait(out);
  here->write(found.data(), 0, bytes);
  disk.in->copy({here, 0, bytes}, {beyond, 0, bytes}, {out})->wait();
  here->read(found.data(), 0, bytes);
  CHECK(found == sent);
}

TEST_CASE("measure_rates and the events of the device give plausible times", "[accelerator]") {
  auto& d = tested_accelerator();
  const auto rates = measure_rates(d, on_host(test_device()), 1 << 20);
  CHECK(rates.to_host > 0);
  CHECK(rates.to_device > 0);
  CHECK(rates.latency >= 0);
  const auto from = d.mark_time();
  at::zeros({1 << 16}, bytes_on_accelerator()).add_(1);
  CHECK(d.seconds(from, d.mark_time()) >= 0);
}

TEST_CASE("an arena waits for streams announced by record_stream", "[accelerator]") {
  const hardware::option late("late", 3000);
  auto& d = tested_accelerator();
  const auto arena = d.memory().reserve(1 << 16);
  const auto pinned = on_host(test_device()).memory->reserve(1 << 16);
  auto* const allocator = c10::getDeviceAllocator(test_device().type());
  d.enter(*arena);
  for (int round = 0; round < 5; ++round) {
    const auto t = bytes_in(arena, 0, 1 << 16);
    t.fill_(round);
    const auto side = another_stream();
    const auto to = at::empty({1 << 16}, bytes_on_accelerator());  // deterministic algorithms fill new tensors
    const auto written = d.mark();
    {
      const c10::StreamGuard guard(side);
      d.wait(written);
      to.copy_(t);
    }
    allocator->recordStream(t.storage().data_ptr(), side);
    d.enter(*arena);  // the next step
    bytes_in(arena, 0, 1 << 16).fill_(77);
    c10::impl::VirtualGuardImpl(test_device().type()).synchronizeDevice(test_device().index());
    CHECK(at::equal(to, at::full({1 << 16}, round, bytes_on_accelerator())));
  }
  CHECK(hardware::races() == "");
}

TEST_CASE("allocations on another stream or device are not placed in an arena", "[accelerator]") {
  auto& d = tested_accelerator();
  const auto arena = d.memory().reserve(8192);
  const std::vector<planned_block> blocks = {{4096, 0, arena->data(), false}, {4096, 0, arena->data() + 4096, false}};
  const auto in_arena = [&](const at::Tensor& t) {
    const auto* p = static_cast<const char*>(t.storage().data());
    return arena->data() <= p && p < arena->data() + 8192;
  };
  const auto plan = d.place();
  plan->plan(blocks);
  plan->start();
  const auto first = at::empty({4096}, bytes_on_accelerator());
  at::Tensor other, elsewhere;
  {
    const c10::StreamGuard guard(another_stream());
    other = at::empty({4096}, bytes_on_accelerator());
  }
  const auto count = c10::impl::VirtualGuardImpl(test_device().type()).deviceCount();
  if (count > 1) elsewhere = at::empty({4096}, bytes_on_accelerator().device(c10::Device(test_device().type(), 1)));
  const auto second = at::empty({4096}, bytes_on_accelerator());
  plan->stop();
  CHECK(in_arena(first));
  CHECK_FALSE(in_arena(other));
  if (count > 1) CHECK_FALSE(in_arena(elsewhere));
  CHECK(in_arena(second));
  CHECK(plan->unplanned_allocations() == 0);
}

TEST_CASE("device_of finds the device of tensors, or gives the reason why not") {
  CHECK(&device_of(c10::kCPU) == &host_device());
  CHECK_THROWS_AS(device_of(c10::kMeta), not_available);
  CHECK_THROWS_AS(on_host(c10::kMeta), not_available);
  const auto far = on_host(c10::kCPU, 5000);
  CHECK(far.memory->limit() == 5000);
  CHECK_THROWS_AS(on_host(c10::kCPU, -1), bad_option);
  const auto all = devices();
  REQUIRE_FALSE(all.empty());
  CHECK(all.front().which.is_cpu());
  for (const auto& x : all) {
    INFO(x.which << " " << x.problem);
    if (x.problem.empty()) {
      CHECK(x.total > 0);
      CHECK(device_of(x.which).which().type() == x.which.type());
    } else {
      CHECK(x.problem.find('\n') == std::string::npos);  // a single line
      CHECK_THROWS_AS(device_of(x.which), not_available);
    }
  }
}
