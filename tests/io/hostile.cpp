// SPDX-License-Identifier: Apache-2.0
// Thousands of seeded mutations of valid documents. A mutated document is either read, evaluated and written again, or refused
// with an exception of the library. The tests also run under sanitizers.
#include <catch2/catch.hpp>

#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/io/json.hpp>
#include <remat/testing/generators.hpp>

namespace {

using remat::testing::uniform;

std::size_t below(std::mt19937_64& g, std::size_t n) {
  return static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(n) - 1));
}

/// Changes the text: flips bytes, or cuts, doubles or replaces pieces, also by JSON of another type.
std::string mutate_text(std::mt19937_64& g, std::string text) {
  static const std::vector<std::string> pieces = {"null",
                                                  "-1",
                                                  "1e999",
                                                  "9007199254740993",
                                                  "18446744073709551616",
                                                  "4294967295",
                                                  "\"\"",
                                                  "[]",
                                                  "{}",
                                                  "true",
                                                  "[[[[",
                                                  "}",
                                                  "\\u0000",
                                                  "\"\xff\"",
                                                  ",",
                                                  ":",
                                                  "\"bytes\"",
                                                  "1e-400",
                                                  "NaN",
                                                  std::string(200, '[')};
  const int changes = static_cast<int>(uniform(g, 1, 3));
  for (int i = 0; i < changes && !text.empty(); ++i) {
    const auto at = below(g, text.size());
    const auto length = below(g, std::min<std::size_t>(40, text.size() - at)) + 1;
    switch (uniform(g, 0, 5)) {
      case 0:
        text[at] = static_cast<char>(uniform(g, 0, 255));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, text.substr(at, length));
        break;
      case 3:
        text.resize(at);
        break;
      case 4:
        text.insert(at, pieces[below(g, pieces.size())]);
        break;
      default:
        text.replace(at, length, pieces[below(g, pieces.size())]);
    }
  }
  return text;
}

/// Changes a random value of the document, which remains valid JSON.
std::string mutate_value(std::mt19937_64& g, const std::string& text) {
  auto document = nlohmann::json::parse(text);
  auto* at = &document;
  while (at->is_structured() && !at->empty() && !remat::testing::chance(g, 10))
    at = &*std::next(at->begin(), static_cast<long>(below(g, at->size())));
  static const std::vector<nlohmann::json> others = {nullptr,
                                                     true,
                                                     -1,
                                                     0,
                                                     1,
                                                     2,
                                                     1.5,
                                                     -0.5,
                                                     1e300,
                                                     "x",
                                                     4294967294,
                                                     4294967295,
                                                     4294967296,
                                                     9007199254740992,
                                                     18446744073709551615u,
                                                     nlohmann::json::array(),
                                                     nlohmann::json::object(),
                                                     {1, 2}};
  *at = others[below(g, others.size())];
  return document.dump();
}

template <class Read>
bool accepted(const std::string& text, Read read) {
  std::istringstream in(text);
  try {
    read(in);
    return true;
  } catch (const remat::error& why) {
    CHECK(std::string(why.what()).size() > 5);
    return false;
  }  // any other exception fails the test
}

}  // namespace

TEST_CASE("mutated problem documents are read or refused") {
  std::mt19937_64 g(1);
  int read = 0;
  for (int round = 0; round < 6000; ++round) {
    std::ostringstream out;
    remat::write_problem(out, remat::testing::random_problem(g, {.operations = 4, .once = 20}));
    const auto text = round % 2 ? mutate_text(g, out.str()) : mutate_value(g, out.str());
    INFO(text);
    read += accepted(text, [](std::istream& in) {
      const auto d = remat::read_problem_document(in);
      std::stringstream copy;
      remat::write_problem(copy, d.problem, d.unknown);
      const auto again = remat::read_problem(copy);
      CHECK(again.values().size() == d.problem.values().size());
      remat::evaluate(again, remat::store_all_schedule(again));
    });
  }
  CHECK(read > 300);  // the mutations reach both outcomes
  CHECK(read < 5700);
}

TEST_CASE("mutated schedule documents are read or refused") {
  std::mt19937_64 g(2);
  const auto p = remat::testing::random_problem(g, {.operations = 6});
  remat::result r;
  r.status = remat::status::feasible;
  r.schedule = remat::store_all_schedule(p);
  std::ostringstream out;
  remat::write_schedule(out, r, "p");
  int valid = 0;
  for (int round = 0; round < 6000; ++round) {
    const auto text = round % 2 ? mutate_text(g, out.str()) : mutate_value(g, out.str());
    INFO(text);
    valid += accepted(text, [&](std::istream& in) { remat::evaluate(p, remat::read_schedule(in).result.schedule); });
  }
  CHECK(valid > 300);
  CHECK(valid < 5700);
}

TEST_CASE("a truncated document is refused") {
  std::mt19937_64 g(3);
  const auto p = remat::testing::random_problem(g);
  std::ostringstream problem, schedule;
  remat::write_problem(problem, p);
  remat::result r;
  r.schedule = remat::store_all_schedule(p);
  remat::write_schedule(schedule, r, p.name());
  const auto refused = [](const std::string& text, auto read) {
    for (std::size_t length = 0; length + 2 < text.size(); ++length) {
      std::istringstream in(text.substr(0, length));
      REQUIRE_THROWS_AS(read(in), remat::bad_document);
    }
  };
  refused(problem.str(), [](std::istream& in) { return remat::read_problem(in); });
  refused(schedule.str(), [](std::istream& in) { return remat::read_schedule(in); });
}

TEST_CASE("documents that would exhaust their reader are refused") {
  const auto refusal = [](const std::string& text) {
    std::istringstream in(text);
    try {
      remat::read_problem(in);
    } catch (const remat::error& why) {
      return std::string(why.what());
    }
    return std::string("accepted");
  };
  const auto with_values = [](const std::string& values) {
    return R"({"format": "remat-problem", "version": 1, "operations": [], "targets": [], "values": )" + values + "}";
  };
  CHECK(refusal(with_values("[]")) == "accepted");
  CHECK_THAT(refusal(with_values(std::string(1'000'000, '['))), Catch::Contains("nested deeper"));
  CHECK_THAT(refusal(with_values("[" + std::string(500'000, '{'))), Catch::Contains("values[0]"));
  CHECK_THAT(refusal(with_values("[{\"bytes\": " + std::string(1'000'000, '9') + "}]")), Catch::Contains("values[0].bytes"));
  CHECK_THAT(refusal(with_values("[{\"bytes\": 1e400}]")), Catch::Contains("values[0].bytes"));
  CHECK_THAT(refusal(with_values("[{\"bytes\": 4.5}]")), Catch::Contains("values[0].bytes"));
  std::string many = "[{\"bytes\": 1";
  for (int i = 0; i < 5000; ++i) many += ", \"m" + std::to_string(i) + "\": 0";
  CHECK_THAT(refusal(with_values(many + "}]")), Catch::Contains("members in an object"));
  std::string large = "[";
  for (int i = 0; i < 4; ++i) large += std::string(i ? "," : "") + "{\"bytes\": 4503599627370496}";  // 2^52 each
  CHECK_THAT(refusal(with_values(large + "]")), Catch::Contains("values[2].bytes") && Catch::Contains("2^53"));
  std::istringstream in(with_values("[]"));
  CHECK_THROWS_WITH(remat::read_problem(in, {.bytes = 20}), Catch::Contains("20"));
}
