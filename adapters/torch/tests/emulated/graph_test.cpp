// SPDX-License-Identifier: Apache-2.0
/// @file
/// Captures of the emulated hardware, and the calls that they forbid.
#include <catch2/catch.hpp>

#include "hardware.hpp"

using namespace emulated;

namespace {

struct streams {
  streams() { reset_counts(); }
  ~streams() {
    destroy(a);
    destroy(b);
    release(data);
  }
  stream& a = make_stream(0);
  stream& b = make_stream(0);
  void* data = allocate(0, 1024);
  int* value = reinterpret_cast<int*>(kernel_address(data));
  range whole{data, 1024};
  std::shared_ptr<event> e = make_event(), f = make_event();

  void add(stream& s, int k) {
    enqueue(s, {"add", {whole}, {whole}, [this, k] { *value += k; }});
  }
  void twice(stream& s) {
    enqueue(s, {"twice", {whole}, {whole}, [this] { *value *= 2; }});
  }
};

}  // namespace

TEST_CASE("a captured stream records its jobs, and the graph runs them in order at each launch", "[hardware]") {
  const auto late = GENERATE(0, 300);
  option::set("late", late);
  streams u;
  fill(u.data, 0, 1024, u.a);
  synchronize(u.a);
  begin_capture(u.a);
  REQUIRE(capturing(u.a));
  REQUIRE(capturing_device(0));
  REQUIRE_FALSE(capturing(u.b));
  u.add(u.a, 3);
  u.twice(u.a);
  REQUIRE(*u.value == 0);
  const auto g = end_capture(u.a);
  REQUIRE_FALSE(capturing(u.a));
  REQUIRE(size(*g) == 2);
  REQUIRE(*u.value == 0);
  launch(g, u.a);
  launch(g, u.a);
  synchronize(u.a);
  REQUIRE(*u.value == 18);
  REQUIRE(counted().races == 0);
  option::set("late", 0);
}

TEST_CASE("streams join a capture by events, and must be joined back", "[hardware]") {
  streams u;
  fill(u.data, 0, 1024, u.a);
  synchronize(u.a);
  begin_capture(u.a);
  u.add(u.a, 3);
  record(*u.e, u.a);
  wait(u.b, *u.e);
  REQUIRE(capturing(u.b));
  REQUIRE(capture_id(u.a) == capture_id(u.b));
  SECTION("a stream without jobs needs no join") { REQUIRE(size(*end_capture(u.a)) == 1); }
  SECTION("joined") {
    u.twice(u.b);
    record(*u.f, u.b);
    wait(u.a, *u.f);
    u.add(u.a, 1);
    const auto g = end_capture(u.a);
    REQUIRE(size(*g) == 3);
    launch(g, u.a);
    synchronize(u.a);
    REQUIRE(*u.value == 7);
  }
  SECTION("a stream that is not joined back") {
    u.twice(u.b);
    REQUIRE_THROWS_WITH(end_capture(u.a), Catch::Contains("joined back"));
  }
  SECTION("a job after the join") {
    u.twice(u.b);
    record(*u.f, u.b);
    wait(u.a, *u.f);
    u.twice(u.b);
    REQUIRE_THROWS_AS(end_capture(u.a), capture_error);
  }
  REQUIRE_FALSE(capturing(u.a));
  REQUIRE_FALSE(capturing(u.b));
}

TEST_CASE("a forbidden call makes a capture invalid", "[hardware]") {
  streams u;
  const auto before = make_event();
  record(*before, u.b);
  begin_capture(u.a);
  u.add(u.a, 1);
  record(*u.e, u.a);
  SECTION("waits for the stream and queries of it") {
    REQUIRE_THROWS_AS(synchronize(u.a), capture_error);
    REQUIRE_THROWS_AS(idle(u.a), capture_error);
  }
  SECTION("waits for the device") { REQUIRE_THROWS_AS(synchronize_device(0), capture_error); }
  SECTION("queries of a captured event") { REQUIRE_THROWS_AS(reached(*u.e), capture_error); }
  SECTION("waits for a captured event") { REQUIRE_THROWS_AS(synchronize(*u.e), capture_error); }
  SECTION("waits for an event recorded before the capture") { REQUIRE_THROWS_AS(wait(u.a, *before), capture_error); }
  SECTION("waits on the default stream") { REQUIRE_THROWS_AS(wait(default_stream(0), *u.e), capture_error); }
  SECTION("a second capture of the stream") { REQUIRE_THROWS_AS(begin_capture(u.a), capture_error); }
  SECTION("copies of pageable memory") {
    int host = 0;
    REQUIRE_THROWS_AS(copy(&host, u.data, 4, u.a), capture_error);
  }
  SECTION("calls that an interface forbids") {
    REQUIRE_NOTHROW(forbid_in_captures("a call", [](unsigned long long) { return true; }));
    REQUIRE(capture_valid(u.a));
    REQUIRE_THROWS_WITH(forbid_in_captures("a call"), Catch::Contains("a call"));
  }
  REQUIRE_FALSE(capture_valid(u.a));
  REQUIRE_THROWS_AS(u.add(u.a, 1), capture_error);
  REQUIRE_THROWS_WITH(end_capture(u.a), Catch::Contains("invalid"));
  REQUIRE_FALSE(capturing(u.a));
  u.add(u.a, 1);
  REQUIRE_NOTHROW(synchronize(u.a));
  REQUIRE_THROWS_AS(wait(u.b, *u.e), capture_error);  // the capture of the event has ended
}

TEST_CASE("a capture allows allocations, and work on other streams", "[hardware]") {
  streams u;
  begin_capture(u.a);
  void* const m = allocate(0, 512);
  fill(m, 1, 512, u.b);
  REQUIRE_NOTHROW(synchronize(u.b));
  REQUIRE_NOTHROW(release(m));
  REQUIRE(size(*end_capture(u.a)) == 0);
  REQUIRE_THROWS_AS(begin_capture(default_stream(0)), capture_error);
  REQUIRE_THROWS_AS(end_capture(u.a), capture_error);
}

TEST_CASE("races are found inside a graph, and between a graph and other jobs", "[hardware]") {
  streams u;
  begin_capture(u.a);
  record(*u.e, u.a);
  wait(u.b, *u.e);
  SECTION("inside a graph") {
    u.add(u.a, 1);
    u.add(u.b, 1);
    REQUIRE(counted().races > 0);
    record(*u.f, u.b);
    wait(u.a, *u.f);
    end_capture(u.a);
  }
  SECTION("between a graph and other jobs") {
    u.add(u.a, 1);
    const auto g = end_capture(u.a);
    REQUIRE(counted().races == 0);
    launch(g, u.a);
    enqueue(u.b, {"reader", {u.whole}, {}, [] {}});
    REQUIRE(counted().races == 1);
    REQUIRE(race_reports().at(0).find("graph") != std::string::npos);
  }
  synchronize_device(0);
}
