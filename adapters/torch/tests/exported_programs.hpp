// SPDX-License-Identifier: Apache-2.0
/// @file
/// Programs exported by Python, and their training in C++ compared with Python.
#pragma once

#include <torch/script.h>
#include <torch/torch.h>
#include <unistd.h>

#include <caffe2/serialize/inline_container.h>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
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

namespace fs = std::filesystem;
namespace rt = remat::pytorch;
using at::Tensor;

inline void run_python(const std::string& what, const fs::path& folder) {
  const auto command =
      std::string("\"") + REMAT_PYTHON + "\" \"" + REMAT_EXPORTED_PY + "\" " + what + " \"" + folder.string() + "\"";
  INFO(command);
  REQUIRE(std::system(command.c_str()) == 0);
}

/// The folder with all files from Python, which are made once per run of the tests.
inline const fs::path& folder() {
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

inline std::string file(const std::string& name) { return (folder() / name).string(); }

inline std::vector<std::string> names_with(const std::string& extension) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder()))
    if (entry.path().extension() == extension) names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Results of a program in Python.
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

/// As in Python: the sum of the means of all outputs that have a gradient.
inline Tensor sum_of_means(const std::vector<Tensor>& outputs) {
  Tensor loss;
  for (const auto& o : outputs)
    if (o.requires_grad()) loss = loss.defined() ? loss + o.mean() : o.mean();
  return loss;
}

/// The gradient of a parameter, which may have another name in Python.
inline std::optional<Tensor> gradient_of(const Tensor& parameter, const std::vector<rt::named_tensor>& names,
                                         const std::map<std::string, Tensor>& gradients) {
  for (const auto& n : names)
    if (n.tensor.is_same(parameter))
      if (const auto found = gradients.find(n.name); found != gradients.end()) return found->second;
  return std::nullopt;
}

/// Trains by SGD, and compares each step with Python bit by bit.
inline void train_like(const reference& ref, rt::model& m, const rt::forward_function& forward) {
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

/// Trains by plans, at full budget and at slightly more than the smallest known budget.
/// @param make makes a model in its initial state
inline void train_inside(const reference& ref, const std::function<std::shared_ptr<rt::model>()>& make,
                         const std::function<rt::invocation(const rt::model&)>& call) {
  {
    INFO("at 100 %");
    const auto m = make();
    rt::session s(m, testing::quick("100%", 1));
    train_like(ref, *m, [&](const auto& in) { return s.forward(call(*m), in); });
  }
  remat::bytes_t smallest = 0;  // the largest over all kinds of inputs
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
  smallest += smallest / 4;  // another search has equally little time, and may find less
  INFO("in " << smallest << " bytes");
  const auto m = make();
  rt::session s(m, testing::quick(rt::budget::activations(smallest), 1));
  train_like(ref, *m, [&](const auto& in) { return s.forward(call(*m), in); });
}

inline rt::invocation call_of_program(const rt::model& m) { return dynamic_cast<const rt::exported_program&>(m).call(); }

// --- broken archives ---------------------------------------------------------------------------------------------------------

using records = std::map<std::string, std::string>;

inline records unpack(const std::string& path) {
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

inline std::string pack(const records& all) {
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

/// The outcome of loading an archive: success or one of our errors.
enum class outcome { loaded, bad_document, unsupported };

/// @param message receives the text of the error
/// @param inputs  run the loaded program with these; the run may fail with any error of PyTorch
inline outcome try_load(const std::string& content, std::string* message = nullptr, const std::vector<Tensor>& inputs = {}) {
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

inline std::string refusal(const records& all) {
  std::string message;
  CHECK(try_load(pack(all), &message) != outcome::loaded);
  return message;
}

constexpr auto program_record = "models/model.json";
constexpr auto weights_record = "data/weights/model_weights_config.json";

/// The archive with a changed program.
inline records with_program(records all, const std::function<void(nlohmann::json&)>& change) {
  auto j = nlohmann::json::parse(all.at(program_record));
  change(j);
  all[program_record] = j.dump();
  return all;
}

/// All values of a document, other than descriptions for people.
inline void list_places(const nlohmann::json& j, const nlohmann::json::json_pointer& at,
                        std::vector<nlohmann::json::json_pointer>& to) {
  to.push_back(at);
  if (j.is_object())
    for (const auto& [key, x] : j.items())
      if (key != "nn_module_stack" && key != "torch_fn") list_places(x, at / key, to);
  if (j.is_array())
    for (std::size_t i = 0; i < j.size(); ++i) list_places(j[i], at / i, to);
}

}  // namespace exported_tests
