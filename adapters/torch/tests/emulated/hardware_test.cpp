// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tests of the emulated hardware, on which other tests rely.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <vector>

#include "hardware_test.hpp"

using namespace emulated;
using namespace emulated::testing;

// --- memory ------------------------------------------------------------------------------------------------------------------

TEST_CASE("only kernels can access the memory of a device", "[hardware]") {
  const device_memory m(1 << 16);
  REQUIRE(device_of(m.data) == 0);
  REQUIRE(reinterpret_cast<std::uintptr_t>(m.data) % allocation_alignment == 0);
  REQUIRE(is_kernel_address(kernel_address(m.data)));
  REQUIRE(device_address(kernel_address(m.data)) == m.data);
  m.values()[7] = 3;
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    _exit(static_cast<volatile int*>(m.data)[7] == 3 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  REQUIRE(WIFSIGNALED(status));
  int on_host = 0;
  REQUIRE(device_of(&on_host) == -1);
  REQUIRE(kernel_address(&on_host) == reinterpret_cast<char*>(&on_host));
}

TEST_CASE("device memory is poisoned, reused and limited", "[hardware]") {
  const std::size_t before = used_bytes(1);
  void* const first = allocate(1, 3000);
  REQUIRE(used_bytes(1) == before + 3072);
  REQUIRE(device_of(first) == 1);
  REQUIRE(*kernel_address(first) == static_cast<char>(0xA5));
  *kernel_address(first) = 1;
  release(first);
  REQUIRE(*kernel_address(first) == static_cast<char>(0xA5));
  REQUIRE(used_bytes(1) == before);
  void* const again = allocate(1, 3000);
  REQUIRE(again == first);
  release(again);
  REQUIRE_THROWS_AS(release(again), failure);

  const with limit("bytes", static_cast<long>(before) + 4096);
  REQUIRE_THROWS_AS(allocate(1, 4097), out_of_memory);
  take_for_others(1, 1024);
  REQUIRE_THROWS_AS(allocate(1, 3584), out_of_memory);
  void* const fits = allocate(1, 3072);
  release(fits);
  take_for_others(1, 0);
}

TEST_CASE("freeing a large piece of memory leaves its neighbours unchanged", "[hardware]") {
  const device_memory left(512);
  char* const big = static_cast<char*>(allocate(0, (2 << 20) + 512));
  const device_memory right(512);
  left.values()[0] = 1;
  right.values()[0] = 2;
  kernel_address(big)[1 << 20] = 3;
  release(big);
  REQUIRE(left.values()[0] == 1);
  REQUIRE(right.values()[0] == 2);
  REQUIRE(kernel_address(big)[1 << 20] != 3);
}

TEST_CASE("page-locked memory is recognised", "[hardware]") {
  const pinned p(100);
  REQUIRE(is_pinned(p.data));
  REQUIRE(is_pinned(static_cast<char*>(p.data) + 99));
  REQUIRE_FALSE(is_pinned(static_cast<char*>(p.data) + 100));
  int mine[4] = {};
  register_pinned(mine, sizeof mine);
  REQUIRE(is_pinned(&mine[3]));
  unregister_pinned(mine);
  REQUIRE_FALSE(is_pinned(mine));
}

// --- order -------------------------------------------------------------------------------------------------------------------

TEST_CASE("a stream runs its jobs in order, and another stream waits for its event", "[hardware]") {
  const with late("late", GENERATE(0, 300));
  own_stream a, b;
  std::vector<int> seen;
  for (int k = 0; k < 20; ++k) enqueue(a, {"a", {}, {}, [&seen, k] { seen.push_back(k); }});
  const auto e = make_event();
  record(*e, a);
  wait(b, *e);
  enqueue(b, {"b", {}, {}, [&seen] { seen.push_back(20); }});
  synchronize(b);
  REQUIRE(seen.size() == 21);
  for (int k = 0; k < 21; ++k) REQUIRE(seen[static_cast<std::size_t>(k)] == k);
  REQUIRE(reached(*e));
  REQUIRE(idle(a));
  REQUIRE(counted().jobs == 21);
}

TEST_CASE("a query reports that a slow job has not ended", "[hardware]") {
  own_stream s;
  std::atomic<bool> go{false};
  enqueue(s, {"slow", {}, {}, [&] {
                while (!go) {
                }
              }});
  const auto e = make_event();
  REQUIRE(reached(*e));
  record(*e, s);
  REQUIRE_FALSE(reached(*e));
  REQUIRE_FALSE(idle(s));
  go = true;
  synchronize(*e);
  REQUIRE(reached(*e));
}

TEST_CASE("copies move bytes, and copies of pageable memory are complete when the call returns", "[hardware]") {
  const with late("late", GENERATE(0, 300));
  own_stream s;
  const device_memory m(4000);
  std::vector<int> from(1000, 5), to(1000, 0);
  copy(m.data, from.data(), 4000, s);
  std::fill(from.begin(), from.end(), 6);  // these bytes have been read already
  copy(to.data(), m.data, 4000, s);
  REQUIRE(to == std::vector<int>(1000, 5));
  fill(m.data, 0, 2000, s);
  const pinned p(4000);
  copy(p.data, m.data, 4000, s);
  synchronize(s);
  REQUIRE(p.values()[499] == 0);
  REQUIRE(p.values()[500] == 5);
  REQUIRE(counted().copies == 3);
  REQUIRE(races() == 0);
}

TEST_CASE("the two directions of the link work in parallel, copies in one direction do not", "[hardware]") {
  const with link("link", 4000 * 20);  // 50 ms for each copy
  own_stream in, in2, out;
  const device_memory a(4000), b(4000), c(4000);
  const pinned p(4000), q(4000), r(4000);
  const auto start = make_event(), end_in = make_event(), end_in2 = make_event(), end_out = make_event();
  record(*start, in);
  wait(in2, *start);  // no copy begins before the start of the measurement
  wait(out, *start);
  copy(a.data, p.data, 4000, in);
  record(*end_in, in);
  copy(b.data, q.data, 4000, in2);
  record(*end_in2, in2);
  copy(r.data, c.data, 4000, out);
  record(*end_out, out);
  synchronize_device(0);
  const double both = std::max(milliseconds(*start, *end_in), milliseconds(*start, *end_in2));
  REQUIRE(both >= 100);  // a lower bound that holds on a slow machine too
  REQUIRE(milliseconds(*start, *end_out) >= 50);
}

TEST_CASE("a kernel takes at least the time of its bytes", "[hardware]") {
  const with pace("pace", 4000 * 20);  // 50 ms for each pass over the memory
  own_stream s;
  const device_memory m(4000);
  const auto start = make_event(), end = make_event();
  record(*start, s);
  enqueue(s, {"twice", {m.whole()}, {m.whole()}, [] {}});
  record(*end, s);
  synchronize_device(0);
  REQUIRE(milliseconds(*start, *end) >= 100);
}

// --- failures ----------------------------------------------------------------------------------------------------------------

TEST_CASE("a failed job stops its stream, and the error names the job", "[hardware]") {
  const with fail("fail", 2);
  own_stream s, other;
  int ran = 0;
  enqueue(s, {"first", {}, {}, [&] { ++ran; }});
  synchronize(s);
  enqueue(s, {"second", {}, {}, [&] { ++ran; }});
  REQUIRE_THROWS_WITH(synchronize(s), Catch::Contains("second"));
  REQUIRE_THROWS_AS(enqueue(s, {"third", {}, {}, [] {}}), failure);
  enqueue(other, {"other", {}, {}, [&] { ++ran; }});
  synchronize(other);
  REQUIRE(ran == 2);
  clear_failures();
  enqueue(s, {"fourth", {}, {}, [&] { ++ran; }});
  synchronize(s);
  REQUIRE(ran == 3);
}

TEST_CASE("a held copy and the work behind it wait until the copy is released", "[hardware]") {
  const with hold("hold", 2);
  own_stream s, other;
  std::atomic<int> ran = 0;
  const auto count = [&] { ++ran; };
  enqueue(s, {"first copy", {}, {}, count, true});
  enqueue(other, {"kernel", {}, {}, count});
  synchronize(s);
  enqueue(s, {"second copy", {}, {}, count, true});
  enqueue(s, {"kernel behind it", {}, {}, count});
  enqueue(other, {"kernel", {}, {}, count});
  synchronize(other);
  REQUIRE(!idle(s));
  REQUIRE(ran == 3);
  option::set("hold", 0);
  synchronize(s);
  REQUIRE(ran == 5);
}

TEST_CASE("an exception of a job is a failure, and waiting streams do not hang", "[hardware]") {
  const fresh start;
  own_stream a, b;
  const auto e = make_event();
  enqueue(a, {"broken", {}, {}, [] { throw std::runtime_error("no"); }});
  record(*e, a);
  wait(b, *e);
  bool ran = false;
  enqueue(b, {"next", {}, {}, [&] { ran = true; }});
  synchronize(b);
  REQUIRE(ran);
  REQUIRE_THROWS_AS(synchronize(*e), failure);
  clear_failures();
}

TEST_CASE("on a lost device every call fails, but memory can be freed", "[hardware]") {
  own_stream s;
  void* const m = allocate(0, 64);
  const auto e = make_event();
  {
    const with lost("lost", 1);
    REQUIRE_THROWS_AS(allocate(0, 64), failure);
    REQUIRE_THROWS_AS(enqueue(s, {"job", {}, {}, [] {}}), failure);
    REQUIRE_THROWS_AS(record(*e, s), failure);
    REQUIRE_THROWS_AS(wait(s, *e), failure);
    REQUIRE_THROWS_AS(reached(*e), failure);
    REQUIRE_THROWS_AS(idle(s), failure);
    REQUIRE_THROWS_AS(synchronize(s), failure);
    REQUIRE_THROWS_AS(synchronize_device(0), failure);
    REQUIRE_THROWS_AS(begin_capture(s), failure);
    REQUIRE_NOTHROW(release(m));
  }
  REQUIRE_NOTHROW(synchronize(s));
}

TEST_CASE("a forked process ends, and cannot use the streams", "[hardware]") {
  own_stream s;
  enqueue(s, {"job", {}, {}, [] { usleep(1000); }});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends the child if it hangs
    bool refused = false;
    try {
      synchronize(s);
    } catch (const failure&) {
      refused = true;
    }
    destroy(s);
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 0);
}

TEST_CASE("an unknown option is refused", "[hardware]") { REQUIRE_THROWS_AS(option::set("lates", 1), std::invalid_argument); }
