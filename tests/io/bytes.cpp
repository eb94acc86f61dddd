// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <string>

#include <remat/io/bytes.hpp>

TEST_CASE("parse_bytes reads sizes with and without units") {
  CHECK(remat::parse_bytes("0") == 0);
  CHECK(remat::parse_bytes("1234") == 1234);
  CHECK(remat::parse_bytes("1.5GiB") == 1610612736);
  CHECK(remat::parse_bytes("300MB") == 300'000'000);
  CHECK(remat::parse_bytes("2 kib") == 2048);
  CHECK(remat::parse_bytes("7b") == 7);
  CHECK(remat::parse_bytes(".5TB") == 500'000'000'000);
  CHECK(remat::parse_bytes("0.7") == 0);
  CHECK(remat::parse_bytes("9007199254740993") == 9007199254740993);
  CHECK(remat::parse_bytes("9223372036854775807") == 9223372036854775807);
  CHECK(remat::parse_bytes("9223372036854775806.9") == 9223372036854775806);
  CHECK(remat::parse_bytes("9007199254740993 kB") == 9007199254740993000);
  CHECK(remat::parse_bytes("7.5 EiB") == 15 * (remat::bytes_t{1} << 59));
  CHECK(remat::parse_bytes("9PB") == 9'000'000'000'000'000);
  CHECK(remat::parse_bytes("5.") == 5);
}

TEST_CASE("parse_bytes quotes a text that is not a size") {
  for (const char* text : {"",          " ",
                           "GiB",       "-1",
                           "-0.5GB",    "nan",
                           "inf",       "-inf",
                           "1e3",       "0x10",
                           "5 parsecs", "1.5.2",
                           "1,5GB",     "9223372036854775808",
                           "8EiB",      "9223372036854775.808kB",
                           "1e999",     "+4",
                           "4GBs",      "60%"}) {
    INFO(text);
    CHECK_THROWS_AS(remat::parse_bytes(text), remat::bad_option);
    CHECK_THROWS_WITH(remat::parse_bytes(text), Catch::StartsWith("\"" + std::string(text) + "\" is not a size"));
  }
  CHECK_THROWS_AS(remat::parse_bytes(std::string(10'000, '9')), remat::bad_option);
}

TEST_CASE("format_bytes and format_seconds write sizes and durations") {
  CHECK(remat::format_bytes(0) == "0 B");
  CHECK(remat::format_bytes(999) == "999 B");
  CHECK(remat::format_bytes(1000) == "0.977 KiB");
  CHECK(remat::format_bytes(1610612736) == "1.5 GiB");
  CHECK(remat::format_bytes(-2048) == "-2 KiB");
  CHECK(remat::format_bytes(remat::max_bytes) == "8 PiB");
  CHECK(remat::format_bytes(9223372036854775807) == "8 EiB");
  CHECK(remat::format_seconds(0) == "0 s");
  CHECK(remat::format_seconds(20.05) == "20.05 s");
  CHECK(remat::format_seconds(0.0020557) == "2.056 ms");
  CHECK(remat::format_seconds(9.9999e-4) == "1 ms");
  CHECK(remat::format_seconds(2.5e-6) == "2.5 µs");
  CHECK(remat::format_seconds(3e-9) == "3 ns");
}

TEST_CASE("parse_budget: N % is the held bytes plus N % of what store-all needs above them") {
  const remat::problem p(
      "p", {{"w", 1000, true}, {"a", 100}, {"b", 200}},
      {{.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1}, {.name = "b", .inputs = {1}, .outputs = {2}, .seconds = 1}},
      {2});
  CHECK(remat::parse_budget("100%", p) == 1300);
  CHECK(remat::parse_budget("60%", p) == 1180);
  CHECK(remat::parse_budget("0%", p) == 1000);
  CHECK(remat::parse_budget("12.5%", p) == 1037);
  CHECK(remat::parse_budget("250%", p) == 1750);
  CHECK(remat::parse_budget("2KiB", p) == 2048);
  CHECK(remat::parse_budget("1000000000000000000%", p) == 3'000'000'000'000'001'000);
  for (const char* text : {"%", "-5%", "5 %", "nan%", "inf%", "five%", "5%%", "99999999999999999999%", "", "12 apples"}) {
    INFO(text);
    CHECK_THROWS_AS(remat::parse_budget(text, p), remat::bad_option);
    CHECK_THROWS_WITH(remat::parse_budget(text, p), Catch::Contains("\"" + std::string(text) + "\""));
  }
}
