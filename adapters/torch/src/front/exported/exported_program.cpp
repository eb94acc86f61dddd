// SPDX-License-Identifier: Apache-2.0
#include <remat/pytorch/exported_program.hpp>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>

#include "archive.hpp"
#include "arguments.hpp"
#include "interpreter.hpp"
#include "save.hpp"

namespace remat::pytorch {
namespace {

using exported::field;

constexpr int deepest_tree = 256;  ///< largest nesting of containers

/// A size of an input: a number, or a symbol for several numbers.
struct expected_size {
  std::optional<int64_t> number;
  std::string symbol;  ///< empty: any size, since it follows from other sizes
};

struct expected_input {
  std::string name;
  at::ScalarType type;
  at::DeviceType device;
  std::vector<expected_size> sizes;
};

struct range {
  std::optional<int64_t> least, largest;
};

/// Source of an input of the graph: a tensor of the program, a tensor of the caller, or a constant that no node reads.
struct graph_input {
  at::Tensor held;
  std::optional<std::size_t> given;
  bool replaced = false;  ///< an output of the graph holds its new content
};

/// Use of an output of the graph: a tensor for the caller, new content of an input of the graph, or none.
struct graph_output {
  std::optional<std::size_t> input;
  bool returned = false;
};

/// The symbol of an expression: `Symbol('s0', positive=True, integer=True)` gives `s0`. Empty for other expressions.
std::string lone_symbol(const std::string& expression) {
  constexpr std::string_view begin = "Symbol('";
  if (!expression.starts_with(begin)) return {};
  const auto quote = expression.find('\'', begin.size());
  if (quote == std::string::npos || expression.find(')') != expression.size() - 1) return {};
  return expression.substr(begin.size(), quote - begin.size());
}

/// The keys of a container of `count` elements, or their positions if it has no keys.
std::vector<std::string> keys_of(const field& node, std::size_t count) {
  const auto context = node.at("context");
  std::vector<std::string> keys;
  if (context.is_text()) {
    const auto list = field::json::parse(context.text(), nullptr, false);
    if (list.is_array() && list.size() == count)
      for (const auto& k : list) keys.push_back(k.is_string() ? k.get<std::string>() : k.is_number_integer() ? k.dump() : "");
  }
  if (keys.size() == count && std::none_of(keys.begin(), keys.end(), [](const auto& k) { return k.empty(); })) return keys;
  keys.clear();
  for (std::size_t i = 0; i < count; ++i) keys.push_back(std::to_string(i));
  return keys;
}

/// Appends the path of each leaf in a tree of containers.
void list_leaves(const field& node, const std::string& path, int depth, std::vector<std::string>& leaves) {
  if (depth > deepest_tree) node.fail("nested deeper than " + std::to_string(deepest_tree));
  if (node.at("type").is_null()) {
    leaves.push_back(path.empty() ? "output" : path);
    return;
  }
  const auto children = node.at("children_spec").elements();
  const auto keys = keys_of(node, children.size());
  for (std::size_t i = 0; i < children.size(); ++i)
    list_leaves(children[i], path.empty() ? keys[i] : path + "." + keys[i], depth + 1, leaves);
}

/// Names of the results of the Python module, as far as the archive tells.
std::optional<std::vector<std::string>> returned_names(const field& module) {
  const auto calls = module.at("module_call_graph").elements();
  if (calls.empty()) return std::nullopt;
  const auto signature = calls.front().at("signature");
  if (signature.is_null()) return std::nullopt;
  const auto spec = signature.at("out_spec");
  field::json document;
  try {
    document = field::json::parse(spec.text());
  } catch (const nlohmann::json::exception& why) {
    spec.fail(why.what());
  }
  const auto versioned = field(document, spec.place()).elements();
  if (versioned.size() != 2) spec.fail("not a version and a tree");
  std::vector<std::string> leaves;
  list_leaves(versioned[1], "", 0, leaves);
  return leaves;
}

/// A heading and a list of faults as one text.
std::string joined(const std::string& head, const std::vector<std::string>& lines) {
  auto text = head;
  for (const auto& l : lines) text += "\n  " + l;
  return text;
}

}  // namespace

struct exported_program::state {
  state(const std::string& path, const load_options& options)
      : name(std::filesystem::path(path).stem().string()), file(path, options.model, options.device) {
    const auto module = file.program().at("graph_module");
    std::vector<std::string> unsupported, in_eval_mode;
    program = exported::compile(module.at("graph"), options.device, unsupported, in_eval_mode);
    read_inputs(module, options.device, unsupported);
    read_outputs(module, unsupported);
    read_ranges();
    if (!unsupported.empty())
      throw unsupported_program(joined(path + ": the program holds what this process cannot run:", unsupported), unsupported);
    if (options.log && !in_eval_mode.empty()) options.log(joined(path + ": exported in eval mode:", in_eval_mode));
  }

  static at::Tensor stored(const std::vector<exported::stored_tensor>& list, const field& wanted) {
    const auto found = std::find_if(list.begin(), list.end(), [&](const auto& t) { return t.name == wanted.text(); });
    if (found == list.end()) wanted.fail("the archive has no tensor '" + wanted.text() + "'");
    return found->tensor;
  }

  void read_inputs(const field& module, std::optional<at::Device> device, std::vector<std::string>& unsupported) {
    const auto all = module.at("signature").at("input_specs");
    const auto specs = all.elements();
    if (specs.size() != program.inputs.size())
      all.fail(std::to_string(specs.size()) + " entries for " + std::to_string(program.inputs.size()) + " inputs of the graph");
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto [kind, spec] = specs[i].choice();
      graph_input in;
      const auto same_name = [&](const field& f) {
        if (f.text() != program.input_names[i]) f.fail("the input of the graph is called '" + program.input_names[i] + "'");
        if (program.inputs[i] < 0 || program.slots[static_cast<std::size_t>(program.inputs[i])] != exported::slot_kind::tensor)
          f.fail("the input of the graph is no tensor");
      };
      if (kind == "parameter") {
        same_name(spec.at("arg").at("name"));
        in.held = stored(file.weights(), spec.at("parameter_name"));
        parameters.push_back({spec.at("parameter_name").text(), in.held});
      } else if (kind == "buffer") {
        same_name(spec.at("arg").at("name"));
        in.held = stored(spec.at("persistent").boolean() ? file.weights() : file.constants(), spec.at("buffer_name"));
        buffers.push_back({spec.at("buffer_name").text(), in.held});
      } else if (kind == "tensor_constant") {
        same_name(spec.at("arg").at("name"));
        in.held = stored(file.constants(), spec.at("tensor_constant_name"));
      } else if (kind == "user_input") {
        const auto [choice, arg] = spec.at("arg").choice();
        if (choice == "as_tensor") {
          same_name(arg.at("name"));
          in.given = expected.size();
          expected.push_back(expectation(module.at("graph").at("tensor_values").at(program.input_names[i]), device));
          expected.back().name = program.input_names[i];
          input_names.push_back(program.input_names[i]);
        } else if (program.inputs[i] >= 0) {
          unsupported.push_back("input '" + program.input_names[i] + "': a number that may change from call to call");
        }
      } else if (kind == "constant_input") {
        if (program.inputs[i] >= 0) spec.fail("the input of the graph is no constant");
      } else {
        unsupported.push_back("input " + std::to_string(i) + ": of kind " + kind);
      }
      inputs.push_back(std::move(in));
    }
    parameters = distinct(std::move(parameters));
    buffers = distinct(std::move(buffers));
  }

  static expected_input expectation(const field& f, std::optional<at::Device> device) {
    expected_input e{{}, exported::scalar_type(f.at("dtype")), (device ? *device : exported::device(f.at("device"))).type(), {}};
    for (const auto& x : f.at("sizes").elements()) {
      const auto [choice, v] = x.choice();
      if (choice == "as_int")
        e.sizes.push_back({v.integer(), {}});
      else
        e.sizes.push_back({std::nullopt, lone_symbol(v.at("expr_str").text())});
    }
    return e;
  }

  void read_outputs(const field& module, std::vector<std::string>& unsupported) {
    const auto all = module.at("signature").at("output_specs");
    const auto specs = all.elements();
    if (specs.size() != program.outputs.size() && unsupported.empty())
      all.fail(std::to_string(specs.size()) + " entries for " + std::to_string(program.outputs.size()) + " outputs of the graph");
    const auto names = returned_names(module);
    std::size_t returned = 0;
    for (std::size_t i = 0; i < std::min(specs.size(), program.outputs.size()); ++i) {
      const auto [kind, spec] = specs[i].choice();
      const bool tensor = program.kind(program.outputs[i]) == exported::slot_kind::tensor;
      graph_output out;
      if (kind == "user_output" || kind == "loss_output") {
        if (names && returned >= names->size()) spec.fail("out_spec has only " + std::to_string(names->size()) + " leaves");
        out.returned = tensor;
        if (tensor) output_names.push_back(names ? (*names)[returned] : std::to_string(returned));
        ++returned;
      } else if (kind == "buffer_mutation" || kind == "parameter_mutation" || kind == "user_input_mutation") {
        if (!tensor) spec.fail("output " + std::to_string(i) + " of the graph is no tensor");
        out.input = mutated(spec.at(kind == "buffer_mutation"      ? "buffer_name"
                                    : kind == "parameter_mutation" ? "parameter_name"
                                                                   : "user_input_name"),
                            kind, module);
        inputs[*out.input].replaced = true;
      } else {
        unsupported.push_back("output " + std::to_string(i) + ": of kind " + kind);
      }
      outputs.push_back(out);
    }
    if (names && returned != names->size() && unsupported.empty())
      all.fail(std::to_string(returned) + " outputs for the caller; out_spec has " + std::to_string(names->size()) + " leaves");
  }

  /// Position of the graph's input whose new content an output is.
  std::size_t mutated(const field& wanted, const std::string& kind, const field& module) const {
    const auto specs = module.at("signature").at("input_specs").elements();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto [is, spec] = specs[i].choice();
      if (kind != is + "_mutation") continue;
      if ((is == "user_input" ? program.input_names[i] : spec.at(is + "_name").text()) != wanted.text()) continue;
      if (inputs[i].held.defined() || inputs[i].given) return i;
    }
    wanted.fail("no input '" + wanted.text() + "'");
  }

  void read_ranges() {
    const auto all = file.program().find("range_constraints");
    if (!all) return;
    const auto bound = [](const field& f) { return f.is_null() ? std::nullopt : std::optional(f.integer()); };
    for (const auto& [symbol, f] : all->members()) ranges[symbol] = {bound(f.at("min_val")), bound(f.at("max_val"))};
  }

  // --- a step ------------------------------------------------------------------------------------------------------------------

  void check(const std::vector<at::Tensor>& given) const {
    if (given.size() != expected.size())
      throw bad_input("program '" + name + "' takes " + std::to_string(expected.size()) + " tensors, got " +
                      std::to_string(given.size()));
    std::map<std::string, std::pair<int64_t, std::string>> symbols;  // value, and place of its first appearance
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto& e = expected[i];
      const auto& t = given[i];
      const auto fail = [&](const auto&... what) {
        std::ostringstream text;
        text << "input '" << e.name << "' of program '" << name << "' ";
        (text << ... << what);
        throw bad_input(text.str());
      };
      if (!t.defined()) fail("is not defined");
      if (t.scalar_type() != e.type) fail("is of ", t.scalar_type(), ", exported for ", e.type);
      if (t.device().type() != e.device) fail("is on ", t.device(), ", exported for ", c10::DeviceTypeName(e.device, true));
      if (t.dim() != static_cast<int64_t>(e.sizes.size())) fail("has ", t.dim(), " dimensions, exported for ", e.sizes.size());
      for (std::size_t d = 0; d < e.sizes.size(); ++d) {
        const auto size = t.size(static_cast<int64_t>(d));
        const auto& s = e.sizes[d];
        if (s.number && size != *s.number) fail("has size ", size, " in dimension ", d, ", exported for ", *s.number);
        if (s.symbol.empty()) continue;
        const auto [first, fresh] =
            symbols.try_emplace(s.symbol, size, "dimension " + std::to_string(d) + " of '" + e.name + "'");
        if (first->second.first != size)
          fail("has size ", size, " in dimension ", d, ", which has to be that of ", first->second.second, ", ",
               first->second.first);
        const auto r = ranges.find(s.symbol);
        if (!fresh || r == ranges.end()) continue;
        if (r->second.least && size < *r->second.least)
          fail("has size ", size, " in dimension ", d, ", exported for at least ", *r->second.least);
        if (r->second.largest && size > *r->second.largest)
          fail("has size ", size, " in dimension ", d, ", exported for at most ", *r->second.largest);
      }
    }
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& given) const {
    check(given);
    const auto tensor_of = [&](const graph_input& in) { return in.given ? given[*in.given] : in.held; };
    std::vector<at::IValue> values;
    for (const auto& in : inputs) {
      const auto t = tensor_of(in);
      // The program has no in-place operators, so it may save the old content for its backward. Results go to the original.
      values.push_back(!t.defined() ? at::IValue() : in.replaced ? t.clone() : t);
    }
    const auto results = exported::run(program, std::move(values));
    std::vector<at::Tensor> returned;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (outputs[i].returned) returned.push_back(results[i].toTensor());
      if (!outputs[i].input) continue;
      const auto& in = inputs[*outputs[i].input];
      const c10::AutoGradMode grad(in.given && c10::GradMode::is_enabled());
      tensor_of(in).copy_(results[i].toTensor());
    }
    return returned;
  }

  std::string name;
  exported::archive file;
  exported::graph program;
  std::vector<graph_input> inputs;
  std::vector<graph_output> outputs;
  std::vector<expected_input> expected;
  std::map<std::string, range> ranges;  ///< of symbols
  std::vector<named_tensor> parameters, buffers;
  std::vector<std::string> input_names, output_names;
};

std::shared_ptr<exported_program> exported_program::load(const std::string& path, const load_options& options) {
  return std::shared_ptr<exported_program>(new exported_program(std::make_shared<state>(path, options)));
}

std::string exported_program::name() const { return state_->name; }
std::vector<named_tensor> exported_program::parameters() { return state_->parameters; }
std::vector<named_tensor> exported_program::buffers() { return state_->buffers; }
const std::vector<std::string>& exported_program::input_names() const { return state_->input_names; }
const std::vector<std::string>& exported_program::output_names() const { return state_->output_names; }
std::vector<at::Tensor> exported_program::forward(const std::vector<at::Tensor>& inputs) { return state_->forward(inputs); }

invocation exported_program::call() const {
  return {[s = state_](const std::vector<at::Tensor>& inputs) { return s->forward(inputs); }};
}

std::vector<named_tensor> exported_program::state_dict() {
  std::vector<named_tensor> all;
  for (const auto& t : state_->file.weights()) all.push_back({t.name, t.tensor});
  return all;
}

void exported_program::save(const std::string& path) { exported::save(path, state_->file); }

}  // namespace remat::pytorch
