// SPDX-License-Identifier: Apache-2.0
/// Exported programs and TorchScript modules against what Python makes of them: `exported.py` beside this file.
#include <torch/script.h>
#include <torch/torch.h>
#include <unistd.h>

#include <caffe2/serialize/inline_container.h>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <remat/io/file.hpp>
#include <remat/pytorch/exported_program.hpp>
#include <remat/pytorch/script.hpp>
#include <remat/pytorch/session.hpp>

#include "compare.hpp"
#include "places.hpp"
#include "quick.hpp"

namespace exported_tests {
namespace {

namespace fs = std::filesystem;
namespace rt = remat::pytorch;
using at::Tensor;

void run_python(const std::string& what, const fs::path& folder) {
  const auto command =
      std::string("\"") + REMAT_PYTHON + "\" \"" + REMAT_EXPORTED_PY + "\" " + what + " \"" + folder.string() + "\"";
  INFO(command);
  REQUIRE(std::system(command.c_str()) == 0);
}

/// Everything that Python wrote; made once per run of the tests.
const fs::path& folder() {
  static const struct made {
    made() : path(fs::temp_directory_path() / ("remat-exported-" + std::to_string(::getpid()))) {
      fs::create_directories(path);
      run_python("make", path);
    }
    ~made() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
    fs::path path;
  } here;
  return here.path;
}

std::string file(const std::string& name) { return (folder() / name).string(); }

std::vector<std::string> names_with(const std::string& extension) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder()))
    if (entry.path().extension() == extension) names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// What Python made of a program.
struct reference {
  explicit reference(const std::string& path) {
    const auto text = remat::read_file(path, std::size_t{1} << 30);
    const auto all = torch::pickle_load({text.begin(), text.end()}).toGenericDict();
    for (const at::IValue& step : all.at("inputs").toListRef()) inputs.push_back(list(step));
    for (const at::IValue& step : all.at("outputs").toListRef()) outputs.push_back(list(step));
    for (const at::IValue& step : all.at("gradients").toListRef()) gradients.push_back(named(step));
    final = named(all.at("final"));
    generator = all.at("generator").toTensor();
  }
  static std::vector<Tensor> list(const at::IValue& v) {
    std::vector<Tensor> tensors;
    for (const at::IValue& x : v.toListRef()) tensors.push_back(x.toTensor());
    return tensors;
  }
  static std::map<std::string, Tensor> named(const at::IValue& v) {
    std::map<std::string, Tensor> tensors;
    for (const auto& x : v.toGenericDict()) tensors[x.key().toStringRef()] = x.value().toTensor();
    return tensors;
  }
  std::vector<std::vector<Tensor>> inputs, outputs;
  std::vector<std::map<std::string, Tensor>> gradients;
  std::map<std::string, Tensor> final;
  Tensor generator;
};

/// As in Python: the sum of the outputs that have a gradient, each by its mean.
Tensor sum_of_means(const std::vector<Tensor>& outputs) {
  Tensor loss;
  for (const auto& o : outputs)
    if (o.requires_grad()) loss = loss.defined() ? loss + o.mean() : o.mean();
  return loss;
}

/// The gradient of a parameter, which may have one more name in Python.
std::optional<Tensor> gradient_of(const Tensor& parameter, const std::vector<rt::named_tensor>& names,
                                  const std::map<std::string, Tensor>& gradients) {
  for (const auto& n : names)
    if (n.tensor.is_same(parameter))
      if (const auto found = gradients.find(n.name); found != gradients.end()) return found->second;
  return std::nullopt;
}

/// Steps of SGD, each compared with Python's bit by bit.
void train_like(const reference& ref, rt::model& m, const rt::forward_function& forward) {
  const auto parameters = m.parameters();
  auto* const program = dynamic_cast<rt::exported_program*>(&m);
  const auto names = program ? program->state_dict() : parameters;
  std::vector<Tensor> trained;
  for (const auto& p : parameters)
    if (p.tensor.requires_grad()) trained.push_back(p.tensor);
  torch::optim::SGD optimizer(trained, 0.1);
  torch::manual_seed(7);
  for (std::size_t i = 0; i < ref.inputs.size(); ++i) {
    INFO("step " << i);
    optimizer.zero_grad();
    auto outputs = forward(ref.inputs[i]);
    sum_of_means(outputs).backward();
    CHECK(same_bits(outputs, ref.outputs[i]));
    std::size_t gradients = 0;
    for (const auto& p : parameters) {
      INFO(p.name);
      const auto expected = gradient_of(p.tensor, names, ref.gradients[i]);
      CHECK(p.tensor.grad().defined() == expected.has_value());
      if (!expected) continue;
      ++gradients;
      CHECK(same_bits(p.tensor.grad(), *expected));
    }
    CHECK(gradients == ref.gradients[i].size());
    optimizer.step();
  }
  for (const auto& list : {parameters, m.buffers()})
    for (const auto& n : list) {
      INFO(n.name);
      REQUIRE(ref.final.count(n.name) == 1);
      CHECK(same_bits(n.tensor, ref.final.at(n.name)));
    }
  CHECK(same_bits(at::detail::getDefaultCPUGenerator().get_state(), ref.generator));
}

/// Trains by plans, at full budget or in little more than the smallest that is known to do.
/// @param make a model as it was before
void train_inside(const reference& ref, const std::function<std::shared_ptr<rt::model>()>& make,
                  const std::function<rt::invocation(const rt::model&)>& call) {
  {
    INFO("at 100 %");
    const auto m = make();
    rt::session s(m, testing::quick("100%", 1));
    train_like(ref, *m, [&](const auto& in) { return s.forward(call(*m), in); });
  }
  remat::bytes_t smallest = 0;  // of all kinds of inputs
  for (const auto& in : ref.inputs) {
    const auto m = make();
    rt::session s(m, testing::quick(rt::budget::activations(0), 1));
    try {
      s.prepare(call(*m), in);
      FAIL("a step without memory");
    } catch (const rt::over_budget& e) {
      smallest = std::max(smallest, *e.smallest - e.asked);
    }
  }
  smallest += smallest / 4;  // another search has as little time, and may end less well
  INFO("in " << smallest << " bytes");
  const auto m = make();
  rt::session s(m, testing::quick(rt::budget::activations(smallest), 1));
  train_like(ref, *m, [&](const auto& in) { return s.forward(call(*m), in); });
}

rt::invocation call_of_program(const rt::model& m) { return dynamic_cast<const rt::exported_program&>(m).call(); }

// --- archives with something wrong in them
// ---------------------------------------------------------------------------------------

using records = std::map<std::string, std::string>;

records unpack(const std::string& path) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  records all;
  for (const auto& name : reader.getAllRecords()) {
    const auto [data, size] = reader.getRecord(name);
    all[name] = std::string(static_cast<const char*>(data.get()), size);
  }
  all.erase(".data/version");
  all.erase(".data/serialization_id");
  return all;
}

std::string pack(const records& all) {
  std::string text;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    text.append(static_cast<const char*>(data), size);
    return size;
  });
  writer.setMinVersion(6);
  for (const auto& [name, data] : all) writer.writeRecord(name, data.data(), data.size());
  writer.writeEndOfFile();
  return text;
}

/// What comes of an archive: nothing at all or one of our errors.
enum class outcome { loaded, bad_document, unsupported };

/// @param message of the error
/// @param inputs  to run what can be loaded with; that may fail in any way that PyTorch can report
outcome try_load(const std::string& content, std::string* message = nullptr, const std::vector<Tensor>& inputs = {}) {
  const auto path = file("hostile");
  remat::write_file(path, content);
  try {
    const auto program = rt::exported_program::load(path);
    if (!inputs.empty()) try {
        program->forward(inputs);
      } catch (const std::exception&) {
      }
    return outcome::loaded;
  } catch (const remat::bad_document& e) {
    if (message) *message = e.what();
    return outcome::bad_document;
  } catch (const rt::unsupported_program& e) {
    if (message) *message = e.what();
    return outcome::unsupported;
  }
}

std::string refusal(const records& all) {
  std::string message;
  CHECK(try_load(pack(all), &message) != outcome::loaded);
  return message;
}

constexpr auto program_record = "models/model.json";
constexpr auto weights_record = "data/weights/model_weights_config.json";

/// The archive with its program changed.
records with_program(records all, const std::function<void(nlohmann::json&)>& change) {
  auto j = nlohmann::json::parse(all.at(program_record));
  change(j);
  all[program_record] = j.dump();
  return all;
}

/// Every value of a document that does not describe it for people.
void list_places(const nlohmann::json& j, const nlohmann::json::json_pointer& at, std::vector<nlohmann::json::json_pointer>& to) {
  to.push_back(at);
  if (j.is_object())
    for (const auto& [key, x] : j.items())
      if (key != "nn_module_stack" && key != "torch_fn") list_places(x, at / key, to);
  if (j.is_array())
    for (std::size_t i = 0; i < j.size(); ++i) list_places(j[i], at / i, to);
}

}  // namespace

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

TEST_CASE("exported: what was trained is read by Python") {
  for (const auto& name : names_with(".ref")) {
    INFO(name);
    const auto saved = file(name + ".saved.pt2");
    fs::copy_file(file(name + ".pt2"), saved, fs::copy_options::overwrite_existing);
    const auto p = rt::exported_program::load(saved);
    train_like(reference(file(name + ".ref")), *p, [&](const auto& in) { return p->forward(in); });
    p->save(saved);  // over itself, and again: what was loaded is still there
    p->save(saved);
    rt::save_state_dict(file(name + ".state"), p->state_dict());
    rt::save_safetensors(file(name + ".safetensors"), p->state_dict());

    const auto again = rt::exported_program::load(saved);
    CHECK(same_bits(rt::tensors_of(again->state_dict()), rt::tensors_of(p->state_dict())));
    CHECK(same_bits(rt::tensors_of(again->buffers()), rt::tensors_of(p->buffers())));
  }
  run_python("check", folder());
}

TEST_CASE("exported: weights that were moved or replaced are the ones that are saved") {
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

TEST_CASE("exported: names of inputs and outputs, tied and frozen parameters") {
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

TEST_CASE("exported: inputs that a program was not exported for are refused by name") {
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

TEST_CASE("exported: an operator that fails names its node and the line of the user") {
  const auto gpt = rt::exported_program::load(file("gpt.pt2"));
  const auto ids = torch::full({2, 16}, 1000, torch::kLong);  // no such token
  CHECK_THROWS_WITH(gpt->forward({ids, ids}),
                    Catch::Contains("torch.ops.aten.embedding.default") && Catch::Contains("exported.py:"));
}

TEST_CASE("exported: everything that is not supported is listed at once") {
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

TEST_CASE("exported: a program for evaluation is told of") {
  const auto eval = with_program(unpack(file("conv.pt2")), [](auto& j) {
    for (auto& n : j["graph_module"]["graph"]["nodes"])
      for (auto& a : n["inputs"])
        if (a["name"] == "training") a["arg"]["as_bool"] = false;
  });
  remat::write_file(file("eval.pt2"), pack(eval));
  std::string told;
  rt::exported_program::load(file("eval.pt2"), {.log = [&](const std::string& text) { told += text; }});
  CHECK_THAT(told, Catch::Contains("exported in eval mode") && Catch::Contains("batch_norm") && Catch::Contains("exported.py:"));
  told.clear();
  rt::exported_program::load(file("conv.pt2"), {.log = [&](const std::string& text) { told += text; }});
  CHECK(told.empty());
}

TEST_CASE("exported: a program goes to the device that is asked for") {
  const auto p = rt::exported_program::load(file("gpt.pt2"), {.device = at::kMeta});
  for (const auto& n : p->state_dict()) CHECK(n.tensor.is_meta());
  const auto named = p->state_dict();
  const auto of = [&](const std::string& name) {
    return std::find_if(named.begin(), named.end(), [&](const auto& n) { return n.name == name; })->tensor;
  };
  CHECK(of("head.weight").is_same(of("tokens.weight")));
  CHECK_THROWS_AS(p->forward({torch::zeros({2, 16}, torch::kLong), torch::zeros({2, 16}, torch::kLong)}), rt::bad_input);
}

TEST_CASE("exported: archives with something missing or cut are refused by name") {
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

TEST_CASE("exported: fields that are wrong are refused by name") {
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

TEST_CASE("exported: no change of one field is more than an error") {
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
  CHECK(count[outcome::loaded] > 0);  // of what does not matter
}

TEST_CASE("exported: no change of bytes is more than an error") {
  const auto good = pack(unpack(file("regions.pt2")));
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    auto bad = good;
    for (int k = 0; k < 3; ++k) bad[random() % bad.size()] = static_cast<char>(random());
    INFO(i);
    try_load(bad);
  }
}

TEST_CASE("exported: TorchScript modules train as eager ones, bit by bit") {
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

TEST_CASE("exported: safetensors and state dicts say what they cannot hold") {
  const auto x = torch::zeros(2);
  CHECK_THROWS_WITH(rt::save_safetensors(file("x"), {{"half complex", x.to(torch::kComplexDouble)}}),
                    Catch::Contains("half complex"));
  CHECK_THROWS_WITH(rt::save_safetensors(file("x"), {{"a", x}, {"a", x + 1}}), Catch::Contains("'a'"));
  CHECK_THROWS_WITH(rt::save_safetensors(file("x"), {{"\xff", x}}), Catch::Contains("UTF-8"));
  CHECK_THROWS_WITH(rt::save_state_dict(file("x"), {{"none", Tensor()}}), Catch::Contains("'none'"));
  CHECK_FALSE(fs::exists(file("x")));
}

}  // namespace exported_tests
