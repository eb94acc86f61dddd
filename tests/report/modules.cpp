// SPDX-License-Identifier: Apache-2.0
// The module of each operation: from its label, its parameters, or its neighbours.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include <remat/report/modules.hpp>

TEST_CASE("module paths come from parameters, and between them from neighbours") {
  const remat::problem p(
      "m",
      {{"layers.0.mlp.up.weight", 1, true},
       {"layers.0.mlp.down.weight", 1, true},
       {"layers.1.weight", 1, true},
       {"h", 1},
       {"i", 1},
       {"j", 1},
       {"k", 1},
       {"l", 1}},
      {{"up", {0}, {3}, 1}, {"gelu", {3}, {4}, 1}, {"down", {1, 4}, {5}, 1}, {"add", {5}, {6}, 1}, {"next", {2, 6}, {7}, 1}},
      {7});
  using names = std::vector<std::string>;
  CHECK(remat::module_paths(p) == names{"layers.0.mlp.up", "layers.0.mlp", "layers.0.mlp.down", "layers", "layers.1"});
  CHECK(remat::module_paths(p, {{"", "", "", "residual"}, {}})[3] == "residual");

  const auto members = remat::labelled(p, {{"", "net.py:1"}, {"layers.0", "block.py:7"}, {"layers.0.mlp.up", ""}});
  CHECK(members.operations[1] == nlohmann::ordered_json{{"module", "layers.0.mlp"}, {"source", "block.py:7"}});
  CHECK_FALSE(members.operations[0].contains("source"));
  CHECK(members.operations[4]["source"] == "net.py:1");

  const auto exact = remat::labelled(p, {{"", "net.py:1"}}, {"", "net.py:9"});  // the line of the caller first
  CHECK(exact.operations[0]["source"] == "net.py:1");
  CHECK(exact.operations[1] == nlohmann::ordered_json{{"module", "layers.0.mlp"}, {"source", "net.py:9"}});
  CHECK(exact.operations[2]["source"] == "net.py:1");
}

TEST_CASE("common_parent compares whole names only") {
  CHECK(remat::detail::common_parent("layers.1", "layers.10") == "layers");
  CHECK(remat::detail::common_parent("a.b", "a.b.c") == "a.b");
  CHECK(remat::detail::common_parent("a", "b").empty());
  CHECK(remat::detail::common_parent("", "b").empty());
}

TEST_CASE("without parameters module paths are empty") {
  const remat::problem p("m", {{"x", 1, true}, {"y", 1}}, {{"f", {0}, {1}, 1}}, {1});
  CHECK(remat::module_paths(p) == std::vector<std::string>{""});
}
