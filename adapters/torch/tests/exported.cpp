// SPDX-License-Identifier: Apache-2.0
/// Exported programs and TorchScript modules, compared with their results in Python (`exported.py`).
#include <torch/script.h>
#include <torch/torch.h>
#include <unistd.h>

#include <caffe2/serialize/inline_container.h>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <remat/io/file.hpp>
#include <remat/pytorch/exported_program.hpp>
#include <remat/pytorch/script.hpp>
#include <remat/pytorch/session.hpp>

#include "compare.hpp"
#include "exported_programs.hpp"
#include "places.hpp"
#include "quick.hpp"

namespace exported_tests {

TEST_CASE("exported: programs train as in Python, bit by bit") {
  for (const auto& name : names_with(".ref")) {
    INFO(name);
    const auto p = rt::exported_program::load(file(name + ".pt2"));
    train_like(reference(file(name + ".ref")), *p, [&](const auto& in) { return p->forward(in); });
  }
}

TEST_CASE("exported: programs train inside a budget as in Python, bit by bit") {
  for (const auto& name : names_with(".ref")) {
    INFO(name);
    train_inside(
        reference(file(name + ".ref")), [&] { return rt::exported_program::load(file(name + ".pt2")); }, call_of_program);
  }
}

TEST_CASE("exported: Python can read the saved programs and weights") {
  for (const auto& name : names_with(".ref")) {
    INFO(name);
    const auto saved = file(name + ".saved.pt2");
    fs::copy_file(file(name + ".pt2"), saved, fs::copy_options::overwrite_existing);
    const auto p = rt::exported_program::load(saved);
    train_like(reference(file(name + ".ref")), *p, [&](const auto& in) { return p->forward(in); });
    p->save(saved);  // overwrites its own file twice: the loaded data must remain readable
    p->save(saved);
    rt::save_state_dict(file(name + ".state"), p->state_dict());
    rt::save_safetensors(file(name + ".safetensors"), p->state_dict());

    const auto again = rt::exported_program::load(saved);
    CHECK(same_bits(rt::tensors_of(again->state_dict()), rt::tensors_of(p->state_dict())));
    CHECK(same_bits(rt::tensors_of(again->buffers()), rt::tensors_of(p->buffers())));
  }
  run_python("check", folder());
}

TEST_CASE("exported: a saved program has the weights that were moved or replaced") {
  const auto p = rt::exported_program::load(file("gpt.pt2"));
  auto parameters = p->parameters();
  {
    torch::NoGradGuard no_grad;
    for (auto& n : parameters) n.tensor.set_data(n.tensor.clone().transpose(0, -1).contiguous().transpose(0, -1).add_(1));
  }
  p->save(file("moved"));
  const auto again = rt::exported_program::load(file("moved"));
  CHECK(same_bits(rt::tensors_of(again->parameters()), rt::tensors_of(p->parameters())));

  parameters[0].tensor.set_data(torch::zeros(3));
  const auto before = remat::read_file(file("moved"), std::size_t{1} << 30);
  CHECK_THROWS_WITH(p->save(file("moved")), Catch::Contains("another size"));
  CHECK(remat::read_file(file("moved"), std::size_t{1} << 30) == before);
  CHECK_THROWS_AS(p->save(file("no such folder/x")), remat::error);
}

TEST_CASE("exported: names of inputs and outputs, tied parameters and frozen parameters") {
  const auto gpt = rt::exported_program::load(file("gpt.pt2"));
  CHECK(gpt->name() == "gpt");
  CHECK(gpt->input_names() == std::vector<std::string>{"ids", "target"});
  CHECK(gpt->output_names() == std::vector<std::string>{"loss", "rest.0"});  // rest.1 is a number
  std::size_t heads = 0;
  for (const auto& n : gpt->parameters()) heads += n.name == "head.weight" || n.name == "tokens.weight";
  CHECK(heads == 1);
  CHECK(gpt->state_dict().size() == gpt->parameters().size() + 1);

  const auto structured = rt::exported_program::load(file("structured.pt2"));
  CHECK(structured->input_names() == std::vector<std::string>{"pair_x", "pair_y", "scale"});
  CHECK(structured->output_names() == std::vector<std::string>{"0", "2", "3"});  // 1 is None
  for (const auto& n : structured->parameters()) CHECK(n.tensor.requires_grad() == (n.name != "frozen"));

  const auto buffers = rt::exported_program::load(file("buffers.pt2"));
  CHECK(buffers->buffers().size() == 2);         // one of them is not in the state dict
  CHECK(buffers->state_dict().size() == 4 + 1);  // weights, biases, count
}

TEST_CASE("exported: the error for an input of the wrong type or shape names the input") {
  const auto gpt = rt::exported_program::load(file("gpt_dynamic.pt2"));
  const auto ids = [](int64_t b, int64_t l) { return torch::zeros({b, l}, torch::kLong); };
  const auto refused = [](rt::exported_program& p, const std::vector<Tensor>& in, const std::string& why) {
    CHECK_THROWS_AS(p.forward(in), rt::bad_input);
    CHECK_THROWS_WITH(p.forward(in), Catch::Contains(why));
  };
  CHECK_NOTHROW(gpt->forward({ids(5, 9), ids(5, 9)}));
  refused(*gpt, {ids(2, 8)}, "takes 2 tensors, got 1");
  refused(*gpt, {ids(2, 8), Tensor()}, "'target' of program 'gpt_dynamic' is not defined");
  refused(*gpt, {ids(2, 8).to(torch::kInt), ids(2, 8)}, "'ids' of program 'gpt_dynamic' is of Int, exported for Long");
  refused(*gpt, {ids(2, 8).flatten(), ids(2, 8)}, "has 1 dimensions, exported for 2");
  refused(*gpt, {ids(2, 8), ids(2, 9)}, "has size 9 in dimension 1, which has to be that of dimension 1 of 'ids', 8");
  refused(*gpt, {ids(17, 8), ids(17, 8)}, "has size 17 in dimension 0, exported for at most 16");
  refused(*gpt, {ids(1, 8), ids(1, 8)}, "has size 1 in dimension 0, exported for at least 2");
  refused(*gpt, {ids(2, 8).to(torch::kMeta), ids(2, 8)}, "is on meta, exported for cpu");
  const auto fixed = rt::exported_program::load(file("gpt.pt2"));
  refused(*fixed, {ids(3, 16), ids(3, 16)}, "has size 3 in dimension 0, exported for 2");
}

TEST_CASE("exported: the error of a failing operator names its node and the user's source line") {
  const auto gpt = rt::exported_program::load(file("gpt.pt2"));
  const auto ids = torch::full({2, 16}, 1000, torch::kLong);  // not in the vocabulary
  CHECK_THROWS_WITH(gpt->forward({ids, ids}),
                    Catch::Contains("torch.ops.aten.embedding.default") && Catch::Contains("exported.py:"));
}

TEST_CASE("exported: the error for unsupported features lists all of them") {
  auto all = with_program(unpack(file("buffers.pt2")), [](auto& j) {
    auto& nodes = j["graph_module"]["graph"]["nodes"];
    nodes[1]["target"] = "torch.ops.my.scale.default";
    nodes[2]["target"] = "torch.ops.higher_order.cond";
    nodes[4]["target"] = "_operator.matmul";
  });
  std::string message;
  REQUIRE(try_load(pack(all), &message) == outcome::unsupported);
  for (const auto* part :
       {"torch.ops.my.scale.default: not registered", "torch.ops.higher_order.cond", "_operator.matmul", "exported.py:"})
    CHECK_THAT(message, Catch::Contains(part));
  try {
    rt::exported_program::load(file("hostile"));
    FAIL();
  } catch (const rt::unsupported_program& e) {
    CHECK(e.reasons.size() == 3);
  }
}

TEST_CASE("exported: loading a program in evaluation mode logs a warning") {
  const auto eval = with_program(unpack(file("conv.pt2")), [](auto& j) {
    for (auto& n : j["graph_module"]["graph"]["nodes"])
      for (auto& a : n["inputs"])
        if (a["name"] == "training") a["arg"]["as_bool"] = false;
  });
  remat::write_file(file("eval.pt2"), pack(eval));
  std::string messages;
  rt::exported_program::load(file("eval.pt2"), {.log = [&](const std::string& text) { messages += text; }});
  CHECK_THAT(messages,
             Catch::Contains("exported in eval mode") && Catch::Contains("batch_norm") && Catch::Contains("exported.py:"));
  messages.clear();
  rt::exported_program::load(file("conv.pt2"), {.log = [&](const std::string& text) { messages += text; }});
  CHECK(messages.empty());
}

TEST_CASE("exported: a program is loaded to the requested device") {
  const auto p = rt::exported_program::load(file("gpt.pt2"), {.device = at::kMeta});
  for (const auto& n : p->state_dict()) CHECK(n.tensor.is_meta());
  const auto named = p->state_dict();
  const auto of = [&](const std::string& name) {
    return std::find_if(named.begin(), named.end(), [&](const auto& n) { return n.name == name; })->tensor;
  };
  CHECK(of("head.weight").is_same(of("tokens.weight")));
  CHECK_THROWS_AS(p->forward({torch::zeros({2, 16}, torch::kLong), torch::zeros({2, 16}, torch::kLong)}), rt::bad_input);
}

TEST_CASE("exported: the error for an incomplete archive names the missing part") {
  const auto good = unpack(file("buffers.pt2"));
  REQUIRE(try_load(pack(good)) == outcome::loaded);
  CHECK_THROWS_AS(rt::exported_program::load(file("no such file")), remat::bad_document);
  CHECK_THROWS_AS(rt::exported_program::load(folder().string()), remat::bad_document);
  CHECK_THROWS_WITH(rt::exported_program::load(file("buffers.pt2"), {.model = "other"}),
                    Catch::Contains("models/other.json: missing"));

  for (const auto& [name, data] : good) {
    INFO(name);
    const bool needed = name.starts_with("models/") || name == "archive_format" ||
                        (name.starts_with("data/") && name.find("sample_inputs") == std::string::npos);
    auto less = good;
    less.erase(name);
    std::string message;
    CHECK((try_load(pack(less), &message) != outcome::loaded) == needed);
    if (needed) CHECK_THAT(message, Catch::Contains(name));
    if (data.empty() || !needed) continue;
    auto shorter = good;
    shorter[name].pop_back();
    CHECK_THAT(refusal(shorter), Catch::Contains(name) || Catch::Contains("ends at byte"));
  }
  auto old = good;
  old["serialized_exported_program.json"] = "{}";
  CHECK_THAT(refusal(old), Catch::Contains("old torch.export"));

  const auto whole = pack(good);
  for (std::size_t length = 0; length < whole.size(); length += whole.size() / 97) {
    INFO(length);
    CHECK(try_load(whole.substr(0, length)) == outcome::bad_document);
  }
}

TEST_CASE("exported: the error for a wrong field names the field") {
  const auto good = unpack(file("buffers_dynamic.pt2"));
  const auto changed = [&](const std::function<void(nlohmann::json&)>& change) { return refusal(with_program(good, change)); };
  const auto weights = [&](const std::function<void(nlohmann::json&)>& change) {
    auto all = good;
    auto j = nlohmann::json::parse(all.at(weights_record));
    change(j["config"]["a.weight"]);
    all[weights_record] = j.dump();
    return refusal(all);
  };
  using Catch::Contains;
  CHECK_THAT(changed([](auto& j) { j["schema_version"]["major"] = 9; }),
             Contains("models/model.json.schema_version.major: schema 9"));
  CHECK_THAT(changed([](auto& j) { j["graph_module"]["graph"]["nodes"][0].erase("target"); }),
             Contains("nodes[0]: 'target' is missing"));
  CHECK_THAT(changed([](auto& j) {
               j["graph_module"]["graph"]["nodes"][1]["inputs"][0]["arg"] = {{"as_tensor", {{"name", "nobody"}}}};
             }),
             Contains("nodes[1].inputs[0].arg.as_tensor.name: no value 'nobody'"));
  CHECK_THAT(changed([](auto& j) {
               j["graph_module"]["graph"]["nodes"][1]["inputs"][0]["arg"] = {{"as_string", "x"}};
             }),
             Contains("nodes[1].inputs[0].arg.as_string: not of type Tensor"));
  CHECK_THAT(changed([](auto& j) { j["graph_module"]["signature"]["input_specs"].erase(0); }), Contains("signature.input_specs"));
  CHECK_THAT(changed([](auto& j) { j["graph_module"]["signature"]["output_specs"] = nlohmann::json::array(); }),
             Contains("signature.output_specs"));
  CHECK_THAT(changed([](auto& j) { j["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = "[1, {"; }),
             Contains("out_spec"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["sizes"][0]["as_int"] = 1000; }), Contains("ends at byte"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["sizes"][0]["as_int"] = int64_t{1} << 62; }),
             Contains("larger than any memory"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["sizes"][0]["as_int"] = -1; }), Contains("negative"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["strides"][0]["as_int"] = -1; }), Contains("negative"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["strides"].erase(0); }), Contains("as many strides"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["storage_offset"]["as_int"] = -4; }), Contains("negative"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["storage_offset"]["as_int"] = 1; }), Contains("ends at byte"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["dtype"] = 99; }), Contains("a.weight.tensor_meta.dtype: no scalar type"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["dtype"] = 4; }), Contains("have no gradient"));
  CHECK_THAT(weights([](auto& w) { w["use_pickle"] = true; }), Contains("'a.weight' is a tensor subclass"));
  CHECK_THAT(weights([](auto& w) { w["tensor_meta"]["layout"] = 1; }), Contains("not a dense tensor"));
  CHECK_THAT(weights([](auto& w) { w["path_name"] = "../../etc/passwd"; }), Contains("missing"));

  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "[";
  auto nested = good;
  nested[program_record] = deep;
  CHECK_THAT(refusal(nested), Contains("models/model.json"));
  CHECK_THAT(changed([](auto& j) {
               auto node = nlohmann::json{{"target", "torch.ops.higher_order.wrap_with_set_grad_enabled"},
                                          {"outputs", nlohmann::json::array()}};
               for (int i = 0; i < 100; ++i) {
                 const nlohmann::json body = {{"inputs", nlohmann::json::array()},
                                              {"nodes", i == 0 ? nlohmann::json::array() : nlohmann::json::array({node})},
                                              {"outputs", nlohmann::json::array()}};
                 node["inputs"] = {{{"name", ""}, {"arg", {{"as_bool", true}}}, {"kind", 1}},
                                   {{"name", ""}, {"arg", {{"as_graph", {{"name", "g"}, {"graph", body}}}}}, {"kind", 1}}};
               }
               j["graph_module"]["graph"]["nodes"][0] = node;
             }),
             Contains("nested deeper"));
}

TEST_CASE("exported: a change of any field leads to a valid program or a typed error") {
  const std::vector<nlohmann::json> others = {
      nullptr, true, -1, std::numeric_limits<int64_t>::max(), 1e300, "x", nlohmann::json::array(), nlohmann::json::object()};
  std::mt19937_64 random(1);
  std::map<outcome, int> count;
  for (const auto* name : {"buffers_dynamic", "regions", "structured"}) {
    const auto good = unpack(file(std::string(name) + ".pt2"));
    const auto inputs = reference(file(std::string(name) + ".ref")).inputs[0];
    for (const auto* record : {program_record, weights_record}) {
      const auto document = nlohmann::json::parse(good.at(record));
      std::vector<nlohmann::json::json_pointer> places;
      list_places(document, nlohmann::json::json_pointer(), places);
      for (const auto& place : places) {
        if (random() % 3 != 0) continue;
        auto all = good;
        auto changed = document;
        changed[place] = others[random() % others.size()];
        INFO(name << " " << record << " " << place.to_string() << " is " << changed[place].dump());
        all[record] = changed.dump();
        ++count[try_load(pack(all), nullptr, inputs)];
      }
    }
  }
  CHECK(count[outcome::bad_document] > 500);
  CHECK(count[outcome::loaded] > 0);  // changes of fields without effect
}

TEST_CASE("exported: a change of bytes leads to a valid program or a typed error") {
  const auto good = pack(unpack(file("regions.pt2")));
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    auto bad = good;
    for (int k = 0; k < 3; ++k) bad[random() % bad.size()] = static_cast<char>(random());
    INFO(i);
    try_load(bad);
  }
}

TEST_CASE("exported: TorchScript modules train as in eager mode, bit by bit") {
  for (const auto& name : names_with(".jit")) {
    INFO(name);
    const reference ref(file(name + ".jitref"));
    const auto make = [&] {
      auto module = torch::jit::load(file(name + ".jit"));
      module.train();
      return std::make_shared<rt::script_model>(module);
    };
    const auto call = [](const rt::model& m) { return dynamic_cast<const rt::script_model&>(m).call(); };
    const auto m = make();
    train_like(ref, *m, m->call().forward);
    train_inside(ref, make, call);
  }
  auto module = torch::jit::load(file("script.jit"));
  module.train();
  rt::script_model m(module);
  const auto training = m.signature();
  module.eval();
  CHECK(m.signature() != training);
  CHECK_THROWS_AS(m.call("backward"), remat::bad_option);
}

TEST_CASE("exported: save_safetensors and save_state_dict name tensors that they cannot save") {
  const auto x = torch::zeros(2);
  CHECK_THROWS_WITH(rt::save_safetensors(file("x"), {{"half complex", x.to(torch::kComplexDouble)}}),
                    Catch::Contains("half complex"));
  CHECK_THROWS_WITH(rt::save_safetensors(file("x"), {{"a", x}, {"a", x + 1}}), Catch::Contains("'a'"));
  CHECK_THROWS_WITH(rt::save_safetensors(file("x"), {{"\xff", x}}), Catch::Contains("UTF-8"));
  CHECK_THROWS_WITH(rt::save_state_dict(file("x"), {{"none", Tensor()}}), Catch::Contains("'none'"));
  CHECK_FALSE(fs::exists(file("x")));
}

}  // namespace exported_tests
