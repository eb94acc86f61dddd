// SPDX-License-Identifier: Apache-2.0
// Round trips of both formats, unknown members, and the error for each kind of invalid document, which names the place.
#include <catch2/catch.hpp>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include <remat/core/evaluate.hpp>
#include <remat/io/json.hpp>

using remat::bad_document;
using remat::bad_problem;
using remat::bad_schedule;
namespace fs = std::filesystem;

namespace {

const char* const small_document =
    R"({"format": "remat-problem", "version": 1, "name": "small", "author": {"name": "A", "tags": [1, [2]]},
  "values": [{"name": "x", "bytes": 10, "held": true, "dtype": "f32"}, {"name": "y", "bytes": 9007199254740982, "movable": false}],
  "operations": [{"name": "f", "inputs": [0], "outputs": [1], "seconds": 0.1, "workspace": 7, "once": true, "kind": "k", "id": 18446744073709551615}],
  "targets": [1], "backward_start": 0, "offload": {"to_host": 1e9, "to_device": 2e9, "latency": 1e-5, "lanes": 4}, "x": null})";

remat::problem_document read(const std::string& text) {
  std::istringstream in(text);
  return remat::read_problem_document(in);
}

std::string write(const remat::problem_document& d) {
  std::ostringstream out;
  remat::write_problem(out, d.problem, d.unknown);
  return out.str();
}

/// `small_document` with one piece of text replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = small_document;
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

template <class E>
std::string refusal(const std::string& text) {
  try {
    read(text);
  } catch (const E& why) {
    return why.what();
  } catch (const std::exception& why) {
    return std::string("another exception: ") + why.what();
  }
  return "accepted";
}

void check_equal(const remat::problem& a, const remat::problem& b) {
  CHECK(a.name() == b.name());
  REQUIRE(a.values().size() == b.values().size());
  REQUIRE(a.operations().size() == b.operations().size());
  bool same =
      a.targets() == b.targets() && a.copies().has_value() == b.copies().has_value() && a.backward_start() == b.backward_start();
  for (std::size_t i = 0; i < a.values().size(); ++i) {
    const auto &x = a.values()[i], &y = b.values()[i];
    same = same && x.name == y.name && x.bytes == y.bytes && x.held == y.held;
  }
  for (std::size_t i = 0; i < a.operations().size(); ++i) {
    const auto &x = a.operations()[i], &y = b.operations()[i];
    same = same && x.name == y.name && x.inputs == y.inputs && x.outputs == y.outputs && x.seconds == y.seconds &&
           x.workspace == y.workspace && x.once == y.once && x.kind == y.kind;
  }
  CHECK(same);
}

/// A new folder, which the destructor removes.
struct folder {
  fs::path path = fs::temp_directory_path() / ("remat-json-" + std::to_string(getpid()));
  folder() { fs::create_directory(path); }
  ~folder() { fs::remove_all(path); }
  std::vector<std::string> files() const {
    std::vector<std::string> all;
    for (const auto& x : fs::directory_iterator(path)) all.push_back(x.path().filename().string());
    std::sort(all.begin(), all.end());
    return all;
  }
};

std::string content(const fs::path& p) {
  std::ifstream in(p);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("every instance and its store-all schedule survive a round trip") {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(REMAT_SOURCE_DIR "/bench/instances")) {
    if (entry.path().extension() != ".json") continue;
    ++count;
    INFO(entry.path());
    const auto d = remat::read_problem_document(entry.path());
    const auto text = write(d);
    const auto again = read(text);
    check_equal(d.problem, again.problem);
    CHECK(write(again) == text);

    remat::result r;
    r.status = remat::status::feasible;
    r.schedule = remat::store_all_schedule(d.problem);
    const auto e = remat::evaluate(d.problem, r.schedule);
    r.peak = r.budget = e.peak;
    r.seconds = e.seconds;
    r.bound = e.seconds / 3;
    r.solver = "store_all";
    std::stringstream s;
    remat::write_schedule(s, r, d.problem.name());
    const auto t = remat::read_schedule(s);
    CHECK(t.problem == d.problem.name());
    CHECK(t.result.schedule == r.schedule);
    CHECK(t.result.status == r.status);
    CHECK(t.result.peak == r.peak);
    CHECK(t.result.budget == r.budget);
    CHECK(t.result.seconds == r.seconds);
    CHECK(t.result.bound == r.bound);
    CHECK(t.result.solver == r.solver);
  }
  CHECK(count == 8);
}

TEST_CASE("all members of a problem document are read, and unknown members are written back") {
  const auto d = read(small_document);
  const auto& p = d.problem;
  CHECK(p.values()[1].bytes == remat::max_bytes - 10);
  CHECK(p.values()[0].held);
  CHECK(p.operations()[0].once);
  CHECK(p.operations()[0].workspace == 7);
  CHECK(p.copies()->to_device == 2e9);
  const auto text = write(d);
  const auto back = nlohmann::json::parse(text);
  CHECK(back == nlohmann::json::parse(small_document));
  check_equal(p, read(text).problem);
}

TEST_CASE("missing members of a problem document have defaults") {
  const auto p = read(R"({"version": 1, "format": "remat-problem", "values": [{"bytes": 1}],
    "operations": [{"inputs": [], "outputs": [0], "seconds": 1}], "targets": []})")
                     .problem;
  CHECK(p.name().empty());
  CHECK_FALSE(p.values()[0].held);
  CHECK(p.operations()[0].workspace == 0);
  CHECK_FALSE(p.operations()[0].once);
  CHECK(p.operations()[0].kind.empty());
  CHECK_FALSE(p.copies());
  CHECK(read(with("\"latency\": 1e-5, ", "")).problem.copies()->latency == 0);
}

TEST_CASE("documents in another format: the message begins with the place") {
  struct row {
    const char *from, *to, *message;
  };
  const row rows[] = {
      {"remat-problem", "remat-schedule", "format: "},
      {"\"version\": 1", "\"version\": 3", "version: only versions 1 and 2"},
      {"\"version\": 1", "\"version\": \"1\"", "version: not an integer"},
      {"\"version\": 1, ", "", "version: missing"},
      {"\"targets\": [1]", "\"targets\": {}", "targets: not an array"},
      {"\"targets\": [1], ", "", "targets: missing"},
      {"\"targets\": [1]", "\"targets\": [true]", "targets[0]: not an integer"},
      {"\"values\": [", "\"values\": [7, ", "values[0]: not an object"},
      {"\"bytes\": 10", "\"bytes\": \"10\"", "values[0].bytes: not an integer"},
      {"\"bytes\": 10", "\"bytes\": 10.5", "values[0].bytes: not an integer"},
      {"\"bytes\": 10, ", "", "values[0].bytes: missing"},
      {"9007199254740982", "9223372036854775808", "values[1].bytes: not an integer of 64 bits"},
      {"9007199254740982", "99999999999999999999", "values[1].bytes: not an integer of 64 bits"},
      {"\"held\": true", "\"held\": 1", "values[0].held: not true or false"},
      {"\"name\": \"x\"", "\"name\": 3", "values[0].name: not a string"},
      {"\"inputs\": [0]", "\"inputs\": 0", "operations[0].inputs: not an array"},
      {"\"inputs\": [0]", "\"inputs\": [0, \"1\"]", "operations[0].inputs[1]: not an integer"},
      {"\"seconds\": 0.1", "\"seconds\": null", "operations[0].seconds: not a number"},
      {"\"seconds\": 0.1", "\"seconds\": 1e999", "operations[0].seconds: not JSON, number overflow"},
      {"\"seconds\": 0.1", "\"seconds\": NaN", "operations[0].seconds: not JSON"},
      {"\"workspace\": 7", "\"workspace\": 0.5", "operations[0].workspace: not an integer"},
      {"\"once\": true", "\"once\": \"yes\"", "operations[0].once: not true or false"},
      {"\"kind\": \"k\"", "\"kind\": []", "operations[0].kind: not a string"},
      {"\"offload\": {", "\"offload\": [], \"off\": {", "offload: not an object"},
      {"\"to_host\": 1e9, ", "", "offload.to_host: missing"},
      {"\"to_device\": 2e9", "\"to_device\": \"fast\"", "offload.to_device: not a number"},
      {"\"backward_start\": 0", "\"backward_start\": true", "backward_start: not an integer"},
      {"\"bytes\": 10", "\"bytes\": 10, \"bytes\": 11", "values[0].bytes: appears twice"},
      {"\"tags\": [1, [2]]", "\"tags\": [{\"a\": 1, \"a\": 2}]", "author.tags[0].a: appears twice"},
      {"\"name\": \"x\"", "\"name\": \"\xff\"", "values[0].name: not JSON"},
      {", \"x\": null}", "", "offload: not JSON"},
      {", \"x\": null}", ", \"x\": null} trailing", "document: not JSON"},
  };
  for (const auto& r : rows) {
    INFO(r.from << " becomes " << r.to);
    CHECK_THAT(refusal<bad_document>(with(r.from, r.to)), Catch::StartsWith(r.message));
  }
  CHECK_THAT(refusal<bad_document>("[]"), Catch::StartsWith("document: not an object"));
  CHECK_THAT(refusal<bad_document>(""), Catch::StartsWith("document: not JSON"));
}

TEST_CASE("documents of invalid problems: the message begins with the place") {
  struct row {
    const char *from, *to, *message;
  };
  const row rows[] = {
      {"\"targets\": [1]", "\"targets\": [0, 2]", "targets[1]: no value 2"},
      {"\"targets\": [1]", "\"targets\": [-1]", "targets[0]: no value -1"},
      {"\"inputs\": [0]", "\"inputs\": [4294967296]", "operations[0].inputs[0]: no value 4294967296"},
      {"\"inputs\": [0]", "\"inputs\": [1]", "operations[0].inputs: value 1 is produced by operation 0"},
      {"\"outputs\": [1]", "\"outputs\": [1, 2]", "operations[0].outputs[1]: no value 2"},
      {"\"outputs\": [1]", "\"outputs\": [1, 1]", "operations[0].outputs: value 1 is produced"},
      {"\"outputs\": [1]", "\"outputs\": [0]", "values[0].held"},
      {"\"bytes\": 10", "\"bytes\": -10", "values[0].bytes is negative: -10"},
      {"\"bytes\": 10", "\"bytes\": 11", "values[1].bytes makes sizes exceed 2^53"},
      {"9007199254740982", "9223372036854775807", "values[1].bytes makes sizes exceed 2^53 bytes: 9223372036854775807"},
      {"9007199254740982", "-9223372036854775808", "values[1].bytes is negative: -9223372036854775808"},
      {"\"workspace\": 7", "\"workspace\": -7", "operations[0].workspace is negative: -7"},
      {"\"seconds\": 0.1", "\"seconds\": -0.1", "operations[0].seconds"},
      {"\"backward_start\": 0", "\"backward_start\": 1", "backward_start: no operation 1"},
      {"\"backward_start\": 0", "\"backward_start\": -1", "backward_start: no operation -1"},
      {"\"to_host\": 1e9", "\"to_host\": 0", "offload.to_host"},
      {"\"latency\": 1e-5", "\"latency\": -1", "offload.latency"},
  };
  for (const auto& r : rows) {
    INFO(r.from << " becomes " << r.to);
    CHECK_THAT(refusal<bad_problem>(with(r.from, r.to)), Catch::StartsWith(r.message));
  }
}

TEST_CASE("documents beyond a limit are refused") {
  const auto read_within = [](const std::string& text, remat::document_limits l) {
    std::istringstream in(text);
    return remat::read_problem(in, l);
  };
  const std::string text = small_document;
  CHECK_NOTHROW(read_within(text, {.bytes = text.size()}));
  CHECK_THROWS_WITH(read_within(text, {.bytes = text.size() - 1}), Catch::Contains("longer than the limit"));
  CHECK_NOTHROW(read_within(text, {.depth = 4}));
  CHECK_THROWS_WITH(read_within(text, {.depth = 3}), "author.tags[1]: nested deeper than 3");
  CHECK_THROWS_AS(read_within(std::string(100'000, '['), {}), bad_document);
  CHECK_THROWS_WITH(read_within(text, {.members = 8}), Catch::Contains("more than 8 members"));
  std::istringstream broken(text);
  broken.setstate(std::ios::badbit);
  CHECK_THROWS_WITH(remat::read_problem(broken), "cannot be read");
}

TEST_CASE("schedule documents are read, written and checked") {
  const auto schedule = [](const std::string& steps, const std::string& rest = "") {
    std::istringstream in(R"({"format": "remat-schedule", "version": 1, "steps": [)" + steps + "]" + rest + "}");
    return remat::read_schedule(in);
  };
  const auto d = schedule(R"(["compute", 3], ["drop", 7], ["offload", 7], ["prefetch", 4294967294])",
                          R"(, "status": "optimal", "note": [1])");
  CHECK(d.result.schedule.steps == std::vector<remat::step>{{remat::action::compute, 3},
                                                            {remat::action::drop, 7},
                                                            {remat::action::offload, 7},
                                                            {remat::action::prefetch, 4294967294}});
  CHECK(d.result.status == remat::status::optimal);
  std::stringstream out;
  remat::write_schedule(out, d.result, "p", d.unknown);
  CHECK(remat::read_schedule(out).unknown.dump() == R"({"note":[1]})");

  for (const auto name : remat::status_names) {
    remat::result r;
    r.status = schedule("", R"(, "status": ")" + std::string(name) + R"(", "reason": "why")").result.status;
    CHECK(to_string(r.status) == name);
    std::stringstream bare, reasoned;
    remat::write_schedule(bare, r, "p");
    CHECK(bare.str().find("reason") == std::string::npos);
    r.reason = "why not";
    remat::write_schedule(reasoned, r, "p");
    const auto again = remat::read_schedule(reasoned);
    CHECK(again.result.status == r.status);
    CHECK(again.result.reason == "why not");
    CHECK(again.unknown.empty());
  }
  for (const char* wrong :
       {"7", "[]", R"(["drop"])", R"(["drop", 1, 2])", R"([1, "drop"])", R"(["drop", 1.5])", R"({"drop": 1})"})
    CHECK_THROWS_WITH(schedule(R"(["compute", 0], )" + std::string(wrong)), Catch::StartsWith("steps[1]: "));
  CHECK_THROWS_WITH(schedule("", R"(, "status": "fine")"), "status: unknown: \"fine\"");
  CHECK(schedule("", R"(, "budget": 9223372036854775807)").result.budget == 9223372036854775807);
  CHECK_THROWS_WITH(schedule("", R"(, "peak": 9223372036854775808)"), "peak: not an integer of 64 bits");
  for (const char* wrong : {R"(["swap", 1])", R"(["drop", -1])", R"(["compute", 4294967295])"}) try {
      schedule(R"(["compute", 0], )" + std::string(wrong));
      FAIL("accepted " << wrong);
    } catch (const bad_schedule& why) {
      CHECK(why.step == 1);
      CHECK_THAT(why.what(), Catch::StartsWith("step 1 ("));
    }
}

TEST_CASE("a file is replaced as a whole or not at all") {
  const folder f;
  const auto p = read(small_document).problem;
  const auto file = f.path / "p.json";
  remat::write_problem(file, p);
  check_equal(remat::read_problem(file), p);
  const auto before = content(file);

  SECTION("a document that cannot be written leaves the old file") {
    const remat::problem bad("\xff", {}, {}, {});
    CHECK_THROWS_AS(remat::write_problem(file, bad), bad_document);
    CHECK(content(file) == before);
    CHECK(f.files() == std::vector<std::string>{"p.json"});
  }
  SECTION("the error for a missing folder names it") {
    CHECK_THROWS_WITH(remat::write_problem(f.path / "none" / "p.json", p),
                      Catch::Contains("none/p.json") && Catch::Contains("No such file"));
  }
  SECTION("a directory is refused for reading and writing") {
    CHECK_THROWS_WITH(remat::write_problem(f.path, p), Catch::Contains("is a directory"));
    CHECK_THROWS_WITH(remat::read_problem(f.path), Catch::Contains("is a directory"));
  }
  SECTION("writing through a symbolic link keeps the link") {
    fs::create_symlink(file, f.path / "link.json");
    remat::write_problem(f.path / "link.json", remat::problem("other", {}, {}, {}));
    CHECK(fs::is_symlink(f.path / "link.json"));
    CHECK(remat::read_problem(file).name() == "other");
  }
  SECTION("error messages begin with the name of the file") {
    std::ofstream(file) << before.substr(0, before.size() / 2);
    CHECK_THROWS_WITH(remat::read_problem(file), Catch::StartsWith(file.string() + ": ") && Catch::Contains("not JSON"));
    CHECK_THROWS_WITH(remat::read_schedule(f.path / "absent.json"), Catch::Contains("absent.json: No such file"));
  }
}
