// SPDX-License-Identifier: Apache-2.0
#include <remat/pytorch/script.hpp>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <sstream>

#include <remat/core/error.hpp>
#include <remat/pytorch/session.hpp>

namespace remat::pytorch {
namespace {

/// Appends the tensors in the result of a method.
void list_tensors(const at::IValue& v, const std::string& method, std::vector<at::Tensor>& to) {
  if (v.isTensor()) {
    to.push_back(v.toTensor());
  } else if (v.isTuple()) {
    for (const auto& x : v.toTupleRef().elements()) list_tensors(x, method, to);
  } else if (v.isList()) {
    for (const at::IValue& x : v.toListRef()) list_tensors(x, method, to);
  } else if (v.isGenericDict()) {
    for (const auto& x : v.toGenericDict()) list_tensors(x.value(), method, to);
  } else {
    throw not_supported("method '" + method + "' of a TorchScript module returned a " + v.tagKind() +
                        "; only tensors, tuples, lists and dicts of them can be");
  }
}

}  // namespace

script_model::script_model(const ::torch::jit::Module& module) : module_(std::make_shared<::torch::jit::Module>(module)) {
  for (const auto& part : module_->modules())
    for (const auto& m : part.get_methods())
      if (m.function().isGraphFunction()) ::torch::jit::toGraphFunction(m.function()).get_executor().debugFlushCompilationCache();
}

std::string script_model::name() const { return module_->type()->name() ? module_->type()->name()->name() : "script"; }

std::vector<named_tensor> script_model::parameters() {
  std::vector<named_tensor> all;
  for (const auto& p : module_->named_parameters()) all.push_back({p.name, p.value});
  return all;
}

std::vector<named_tensor> script_model::buffers() {
  std::vector<named_tensor> all;
  for (const auto& b : module_->named_buffers()) all.push_back({b.name, b.value});
  return all;
}

std::string script_model::signature() {
  std::ostringstream text;
  for (const auto& a : module_->named_attributes())
    if (a.value.isInt() || a.value.isDouble() || a.value.isBool() || a.value.isString()) text << a.name << "=" << a.value << ";";
  return text.str();
}

invocation script_model::call(const std::string& method) const {
  const auto found = module_->find_method(method);
  if (!found) throw bad_option("the TorchScript module '" + name() + "' has no method '" + method + "'");
  return {[keep = module_, m = *found](const std::vector<at::Tensor>& inputs) {
            const ::torch::jit::GraphOptimizerEnabledGuard plain(false);  // affects this thread only
            std::vector<at::Tensor> outputs;
            list_tensors(m(std::vector<at::IValue>(inputs.begin(), inputs.end())), m.name(), outputs);
            return outputs;
          },
          method};
}

}  // namespace remat::pytorch
