// SPDX-License-Identifier: Apache-2.0
// Thousands of seeded mutations of valid documents: each is either read, and then survives evaluation and a round trip, or is
// refused with an exception of the library. Meant to run under sanitizers too.
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

/// Changes the text: bytes flipped, pieces cut, doubled or swapped for JSON that does not belong there.
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

/// Changes a value somewhere in the document and leaves it JSON.
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
  }  // anything else fails the test
}

}  // namespace

TEST_CASE("mutated problems") {
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

TEST_CASE("mutated schedules") {
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

TEST_CASE("every truncation of a document is refused") {
  std::mt19937_64 g(3);
  std::ostringstream out;
  remat::write_problem(out, remat::testing::random_problem(g));
  const auto text = out.str();
  for (std::size_t length = 0; length + 2 < text.size(); ++length) {
    std::istringstream in(text.substr(0, length));
    REQUIRE_THROWS_AS(remat::read_problem(in), remat::bad_document);
  }
}
