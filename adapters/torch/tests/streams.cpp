// SPDX-License-Identifier: Apache-2.0
// Devices with streams, on streams that the host plays: order, lifetime and failures of what CUDA devices are made of.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <remat/pytorch/memory.hpp>
#include <thread>

#include "fake_streams.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

/// A device whose memory the host may not follow.
const c10::Device elsewhere(c10::kMeta);

std::unique_ptr<device> made_up_device(c10::Device on = elsewhere) {
  return make_streaming_device(on, "made up", fake_streams::calls(), [] { return std::make_unique<planned_allocations>(); });
}

/// Everything is given back at the end.
struct tidy {
  ~tidy() {
    auto& s = fake_streams::now();
    CHECK(s.regions == 0);
    CHECK(s.streams == 0);
    CHECK(s.events == 0);
    s.most_late = s.refused_copies = s.broken_copies = s.failing_allocations = 0;
  }
};

std::string why_it_failed(const ticket& t) {
  try {
    t->wait();
  } catch (const copy_failed& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("copies on streams come in order, after what they wait for, and kernels after them") {
  const tidy at_end;
  fake_streams::now().most_late = 100;
  fake_streams::stream kernels;
  {
    const auto d = made_up_device();
    const auto far = locked_memory(*d, max_bytes);
    constexpr bytes_t bytes = 1000;
    const auto here = d->memory().reserve(2 * bytes), there = far.memory->reserve(bytes);
    CHECK(here->on() == elsewhere);
    CHECK(there->on().is_cpu());
    fake_streams::now().kernels = &kernels;
    int wrong = 0, events = 0;
    for (int round = 0; round < 200; ++round) {
      const auto number = static_cast<char>(round);
      const auto is = [&](const char* data, char expected) {
        for (bytes_t k = 0; k < bytes; ++k) wrong += data[k] != expected;
      };
      kernels.give([data = here->data(), number] {
        fake_streams::dawdle();
        std::memset(data, number, bytes);
      });
      const auto out = far.out->copy({there, 0, bytes}, {here, 0, bytes}, {d->mark()});
      const auto back = far.in->copy({here, bytes, bytes}, {there, 0, bytes}, {out});
      d->wait(out);  // the place is written again
      kernels.give([data = here->data()] { std::memset(data, 99, bytes); });
      d->wait(back);
      kernels.give([&, data = here->data(), number] { is(data + bytes, number); });
      d->mark()->wait();
      CHECK(out->reached());
      CHECK(back->reached());
      if (round == 20) events = fake_streams::now().events;
    }
    CHECK(wrong == 0);
    CHECK(fake_streams::now().events <= events + 1);  // they are used again
    fake_streams::now().kernels = nullptr;
    CHECK_THROWS_AS(far.out->copy({there, 0, 10}, {here, 0, 11}), broken_contract);
    CHECK_THROWS_AS(far.out->copy({there, 0, 10}, {here, 2 * bytes - 9, 10}), broken_contract);
    CHECK_THROWS_AS(far.out->copy({nullptr, 0, 10}, {here, 0, 10}), broken_contract);
    far.out->copy({there, 0, 0}, {here, 0, 0})->wait();
  }
}

TEST_CASE("regions are held until the copies on streams are done, also without anybody to wait") {
  const tidy at_end;
  auto& s = fake_streams::now();
  const auto d = made_up_device();
  auto far = locked_memory(*d, 4096);
  s.stopped = true;
  const auto first = far.out->copy({far.memory->reserve(4096), 0, 4096}, {d->memory().reserve(4096), 0, 4096});
  CHECK(s.regions == 2);
  CHECK_FALSE(first->reached());
  s.stopped = false;
  CHECK(far.memory->reserve(4096) != nullptr);  // as soon as it is done
  CHECK(first->reached());
  far.out->copy({d->memory().reserve(1), 0, 1}, {d->memory().reserve(1), 0, 1});  // what is done is let go
  CHECK(s.regions == 2);
  far.out.reset();
  CHECK(s.regions == 0);
  CHECK(far.memory->reserve(4096) != nullptr);
}

TEST_CASE("a system that has no memory left makes room, or the tier and the bytes are named") {
  const tidy at_end;
  auto& s = fake_streams::now();
  const auto d = made_up_device();
  const auto far = locked_memory(*d, 10000);
  const auto forgotten = s.forgotten.load();
  s.failing_allocations = 1;
  const auto rooms = s.rooms_made.load();
  auto region = d->memory().reserve(5000);
  CHECK(region->bytes() == 5000);
  CHECK(s.rooms_made == rooms + 1);
  CHECK(s.forgotten == forgotten + 1);  // or the next kernel would be blamed
  for (auto* tier : {&d->memory(), far.memory.get()}) {
    s.failing_allocations = 2;
    try {
      tier->reserve(4000);
      FAIL("there is no memory");
    } catch (const out_of_memory& e) {
      CHECK(e.tier == tier->name());
      CHECK(e.asked == 4000);
    }
  }
  CHECK(far.memory->reserve(10000)->bytes() == 10000);  // what failed is not counted
  CHECK_THROWS_AS(far.memory->reserve(10001), out_of_memory);
  CHECK_THROWS_AS(locked_memory(*d, -1), bad_option);
}

TEST_CASE("page-locked memory is what the meter counts, memory of a device is not") {
  const tidy at_end;
  const auto before = meter::live();
  const auto d = made_up_device();
  const auto far = locked_memory(*d, max_bytes);
  const auto here = d->memory().reserve(5000), there = far.memory->reserve(7000);
  CHECK(meter::live() == before + 7000);
}

TEST_CASE("the memory of a device is its arenas and what others have there") {
  const tidy at_end;
  fake_streams::now().by_others = {1000, 5000};
  const auto d = made_up_device();
  CHECK(d->use().live == 1000);
  CHECK(d->use().peak == 5000);
  {
    const auto arena = d->memory().reserve(200);
    const auto locked = locked_memory(*d, max_bytes).memory->reserve(70);  // of the host
    CHECK(d->use().live == 1200);
    CHECK(d->use().peak == 5200);
    d->reset_peak();
    CHECK(d->use().peak == 1200);
  }
  CHECK(d->use().live == 1000);
  CHECK(d->use().peak == 1200);
  d->reset_peak();
  CHECK(d->use().peak == 1000);
  fake_streams::now().by_others = {};
  auto& host = host_device();
  const meter counting;
  host.reset_peak();
  const auto before = host.use();
  CHECK(before.live == before.peak);
  host.memory().reserve(300).reset();
  CHECK(host.use().live == before.live);
  CHECK(host.use().peak == before.peak + 300);
}

TEST_CASE("page-locked memory beyond what a process may lock is refused with that number", "[fork]") {
  const tidy at_end;
  fake_streams::now().locks = true;
  const pid_t child = fork();
  if (child == 0) {  // root may lock what it likes
    const rlimit little{65536, 65536};
    const bool limited = setrlimit(RLIMIT_MEMLOCK, &little) == 0 && (geteuid() != 0 || setuid(65534) == 0);
    int answer = limited ? 1 : 2;
    try {
      const auto d = made_up_device();
      const auto far = locked_memory(*d, max_bytes);
      const auto fits = far.memory->reserve(8192);
      far.memory->reserve(1 << 20);
    } catch (const out_of_memory& e) {
      const std::string text = e.what();
      if (e.asked == 1 << 20 && e.available == 65536 && text.find("page-locked memory of the host") == 0 &&
          text.find("RLIMIT_MEMLOCK") != text.npos && text.find("failure 2") != text.npos)
        answer = 0;
    }
    _exit(answer);
  }
  int ended = 0;
  REQUIRE(waitpid(child, &ended, 0) == child);
  fake_streams::now().locks = false;
  CHECK(WIFEXITED(ended));
  CHECK(WEXITSTATUS(ended) == 0);
}

TEST_CASE("copies on streams that fail say so, and others go on") {
  const tidy at_end;
  auto& s = fake_streams::now();
  {
    const auto d = made_up_device();
    const auto far = locked_memory(*d, max_bytes);
    const auto here = d->memory().reserve(100), there = far.memory->reserve(100);
    const block near_by{here, 0, 100}, beyond{there, 0, 100};
    const std::string sevens(100, 7), eights(100, 8);
    here->write(sevens.data(), 0, 100);
    std::memset(there->data(), 1, 100);
    s.refused_copies = 1;
    const auto refused = far.out->copy(beyond, near_by);
    CHECK(why_it_failed(refused) == "copy of 100 bytes between the host and meta: failure 700");
    CHECK(why_it_failed(far.in->copy(near_by, beyond, {refused})) == why_it_failed(refused));  // not made
    CHECK_THROWS_AS(d->wait(refused), copy_failed);
    std::string found(100, 0);
    here->read(found.data(), 0, 100);
    CHECK(found == sevens);
    far.out->copy(beyond, near_by)->wait();
    CHECK(std::string(there->data(), 100) == sevens);

    s.broken_copies = 1;  // noticed later; what waits for it fails as well
    const auto lost = far.out->copy(beyond, near_by);
    const auto next = far.in->copy(near_by, beyond, {lost});
    CHECK_FALSE(why_it_failed(next).empty());
    CHECK_FALSE(why_it_failed(lost).empty());
    CHECK_THROWS_AS(d->wait(next), copy_failed);
    CHECK_NOTHROW(d->wait(nullptr));
  }
}

TEST_CASE("memory that the host cannot follow goes to a file and back by way of the host") {
  const tidy at_end;
  const auto d = made_up_device();
  constexpr bytes_t bytes = (9 << 20) + 4096;  // more than two pieces
  const auto disk = on_disk(std::filesystem::temp_directory_path().string());
  {
    const auto here = d->memory().reserve(bytes), there = disk.memory->reserve(bytes);
    std::string sent(static_cast<std::size_t>(bytes), 0), found = sent;
    for (std::size_t k = 0; k < sent.size(); ++k) sent[k] = static_cast<char>(k * 7 + k / 4096);
    here->write(sent.data(), 0, bytes);
    const auto out = disk.out->copy({there, 0, bytes}, {here, 0, bytes}, {d->mark()});
    d->wait(out);
    here->write(found.data(), 0, bytes);
    disk.in->copy({here, 0, bytes}, {there, 0, bytes}, {out})->wait();
    here->read(found.data(), 0, bytes);
    CHECK(found == sent);
  }
  const auto rates = measure_rates(*d, disk, 1 << 20);
  CHECK(rates.to_host > 0);
  CHECK(rates.to_device > 0);
}

TEST_CASE("rates of streams are measured") {
  const tidy at_end;
  const auto d = made_up_device();
  const auto rates = measure_rates(*d, locked_memory(*d, max_bytes), 1 << 20);
  CHECK(rates.to_host > 0);
  CHECK(rates.to_device > 0);
  CHECK(rates.latency >= 0);
}

TEST_CASE("devices are found by where tensors are, or it is said why not") {
  CHECK(&device_of(c10::kCPU) == &host_device());
  CHECK_THROWS_AS(device_of(c10::kMeta), not_available);
  CHECK_THROWS_AS(on_host(c10::kMeta), not_available);
  const auto far = on_host(c10::kCPU, 5000);
  CHECK(far.memory->limit() == 5000);
  CHECK_THROWS_AS(on_host(c10::kCPU, -1), bad_option);
  try {
    const auto which = device_of(c10::kCUDA).which();
    CHECK(which.is_cuda());
    const auto locked = on_host(which, 4096).memory->reserve(4096);
    CHECK(locked->on().is_cpu());
  } catch (const not_available& e) {  // with the words of the runtime, where it was built for CUDA
    CHECK(std::string(e.what()).find("CUDA") != std::string::npos);
    CHECK_THROWS_AS(on_host(c10::kCUDA), not_available);
  }
}
