// SPDX-License-Identifier: Apache-2.0
/// @file
/// The detector of races: it finds all races, and raises no false alarms.
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hardware_test.hpp"

using namespace emulated;
using namespace emulated::testing;

TEST_CASE("accesses without an order are races", "[hardware]") {
  const fresh start;
  own_stream a, b;
  const device_memory m;
  SECTION("write and write") {
    write(a, m.whole());
    write(b, m.whole());
    REQUIRE(races() == 1);
  }
  SECTION("write and read") {
    write(a, m.part(0, 8), "first");
    read(b, m.part(7, 8), "second");
    REQUIRE(races() == 1);
    const auto text = race_reports().at(0);
    REQUIRE(text.find("first") != std::string::npos);
    REQUIRE(text.find("second") != std::string::npos);
    REQUIRE(text.find("1 bytes") != std::string::npos);
  }
  SECTION("read and write: reused memory without an event") {
    write(a, m.whole());
    synchronize(a);
    read(b, m.whole());
    write(a, m.part(100, 4));
    REQUIRE(races() == 1);
  }
  SECTION("accesses long after each other: races do not depend on time") {
    write(a, m.whole());
    usleep(20000);
    write(b, m.whole());
    REQUIRE(races() == 1);
  }
  SECTION("an event that was recorded too early") {
    const auto e = make_event();
    record(*e, a);
    write(a, m.whole());
    wait(b, *e);
    read(b, m.whole());
    REQUIRE(races() == 1);
  }
  SECTION("accesses to page-locked memory") {
    const pinned p(64);
    copy(p.data, m.data, 64, a);
    copy(m.data, p.data, 64, b);
    REQUIRE(races() == 2);
    synchronize_device(0);
  }
  synchronize_device(0);
}

TEST_CASE("ordered accesses are no races", "[hardware]") {
  const fresh start;
  own_stream a, b, c;
  const device_memory m;
  SECTION("accesses of one stream") {
    write(a, m.whole());
    read(a, m.whole());
    write(a, m.whole());
  }
  SECTION("two readers, and accesses to other bytes") {
    read(a, m.whole());
    read(b, m.whole());
    synchronize_device(0);
    write(a, m.part(0, 512));
    write(b, m.part(512, 512));
  }
  SECTION("an event, also by way of a third stream") {
    const auto e = make_event(), f = make_event();
    write(a, m.whole());
    record(*e, a);
    wait(b, *e);
    read(b, m.whole());
    record(*f, b);
    wait(c, *f);
    write(c, m.whole());
  }
  SECTION("the host waited for the stream, the event or the device, or polled it") {
    const auto e = make_event();
    write(a, m.whole());
    record(*e, a);
    switch (GENERATE(0, 1, 2, 3, 4)) {
      case 0:
        synchronize(a);
        break;
      case 1:
        synchronize(*e);
        break;
      case 2:
        synchronize_device(0);
        break;
      case 3:
        while (!reached(*e)) {
        }
        break;
      default:
        while (!idle(a)) {
        }
    }
    write(b, m.whole());
  }
  SECTION("new memory at the same address") {
    void* const first = allocate(0, 512);
    write(a, {first, 512});
    release(first);
    void* const second = allocate(0, 512);
    REQUIRE(first == second);
    write(b, {second, 512});
    release(second);
  }
  REQUIRE(races() == 0);
  synchronize_device(0);
}

TEST_CASE("streams that ignore waits and events on the wrong stream cause races", "[hardware]") {
  const with broken(GENERATE("drop_waits", "wrong_stream"), 1);
  own_stream a, b;
  const device_memory m;
  const auto e = make_event();
  write(a, m.whole());
  record(*e, a);
  wait(b, *e);
  read(b, m.whole());
  REQUIRE(races() == 1);
  synchronize_device(0);
}

TEST_CASE("random accesses of many streams: the detector agrees with a table", "[hardware]") {
  const fresh start;
  const device_memory m(64 * 512);
  std::minstd_rand chance(1);
  std::vector<std::unique_ptr<own_stream>> s;
  for (int k = 0; k < 4; ++k) s.push_back(std::make_unique<own_stream>());
  // done[i][j]: the number of jobs of stream j that stream i comes after. Each cell has a last writer and the readers since then.
  std::vector<std::vector<int>> done(4, std::vector<int>(4, 0));
  struct cell {
    int writer = -1, count = 0, reader_count[4] = {};
  };
  std::vector<cell> cells(64);
  int expected = 0;
  for (int step = 0; step < 2000; ++step) {
    const auto i = static_cast<std::size_t>(chance() % 4), j = static_cast<std::size_t>(chance() % 4);
    if (chance() % 3 == 0) {
      const auto e = make_event();
      record(*e, *s[j]);
      wait(*s[i], *e);
      for (std::size_t k = 0; k < 4; ++k) done[i][k] = std::max(done[i][k], done[j][k]);
      continue;
    }
    auto& c = cells[chance() % 64];
    const auto at = m.part(static_cast<std::size_t>(&c - cells.data()) * 512, 512);
    const int count = ++done[i][i];
    const bool hurt = c.writer >= 0 && c.count > done[i][static_cast<std::size_t>(c.writer)];
    expected += hurt;
    if (chance() % 2 == 0) {
      read(*s[i], at);
      c.reader_count[i] = count;
      continue;
    }
    write(*s[i], at);
    for (std::size_t k = 0; k < 4; ++k)
      expected += c.reader_count[k] > done[i][k] && !(hurt && static_cast<int>(k) == c.writer && c.reader_count[k] == c.count);
    c = {static_cast<int>(i), count, {}};
  }
  REQUIRE(expected > 100);
  REQUIRE(races() == expected);
  REQUIRE(race_reports().size() == 100);
  synchronize_device(0);
}
