// SPDX-License-Identifier: Apache-2.0
#include "kept_graph.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "../base/gradient_hooks.hpp"
#include "../base/hooks.hpp"
#include "backward.hpp"
#include "dispatch.hpp"
#include "recorder.hpp"

namespace remat::pytorch::detail {

kept_graph::kept_graph(std::shared_ptr<const trace> forward, std::shared_ptr<call_log> log, std::vector<at::Tensor> tensors,
                       const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs)
    : forward_(std::move(forward)), log_(std::move(log)), tensors_(std::move(tensors)) {
  for (const auto& t : inputs) inputs_.push_back(t.defined() && t.requires_grad() ? t : at::Tensor());
  const at::NoGradGuard no_grad;
  for (const auto& o : outputs) {
    outputs_.push_back(o.detach());
    if (o.requires_grad()) ::torch::autograd::impl::set_gradient_edge(outputs_.back(), ::torch::autograd::impl::gradient_edge(o));
  }
  std::unordered_map<const c10::TensorImpl*, at::Tensor> instead;  // of outputs, which will get memory of the plan
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto id = forward_->output_tensors[i];
    caller_outputs_.emplace_back(at::Tensor().getIntrusivePtr());
    if (forward_->tensors[id] != none) continue;
    tensors_[id] = outputs_[i];
    instead.emplace(outputs[i].unsafeGetTensorImpl(), outputs_[i]);
    caller_outputs_.back() = decltype(caller_outputs_)::value_type(outputs[i].getIntrusivePtr());
  }
  log_->replace(instead);
}

/// While it lives, outputs that still exist have the memory of the graph again.
class kept_graph::as_recorded {
 public:
  explicit as_recorded(const kept_graph& g) : tensors(g.tensors_) {
    for (std::size_t i = 0; i < g.caller_outputs_.size(); ++i) {
      const at::Tensor t(g.caller_outputs_[i].lock());
      if (!t.defined()) continue;
      changed_.push_back({t, t.storage(), t.storage_offset()});
      put(t, g.outputs_[i].storage(), g.outputs_[i].storage_offset());
      tensors[g.forward_->output_tensors[i]] = t;
    }
  }
  ~as_recorded() {
    for (const auto& c : changed_) put(c.tensor, c.storage, c.offset);
  }
  as_recorded(const as_recorded&) = delete;
  as_recorded& operator=(const as_recorded&) = delete;

  std::vector<at::Tensor> tensors;  ///< by their numbers in the trace

 private:
  struct change {
    at::Tensor tensor;
    c10::Storage storage;
    int64_t offset;
  };
  static void put(const at::Tensor& t, const c10::Storage& s, int64_t offset) {
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
    t.unsafeGetTensorImpl()->set_storage_offset(offset);
  }
  std::vector<change> changed_;
};

/// While it lives, tensors from outside have their versions of the end of the forward, which nodes expect of saved tensors.
class versions_after_forward {
 public:
  versions_after_forward(const trace& forward, const std::vector<at::Tensor>& tensors) {
    for (const auto& w : forward.written) {
      const auto id = tensor_in(forward, w.slot);
      if (id >= tensors.size() || !tensors[id].defined() || tensors[id].is_inference()) continue;
      before_.emplace_back(tensors[id], tensors[id]._version());
      set_version(tensors[id], before_.back().second + w.forward);
    }
  }
  ~versions_after_forward() {
    for (const auto& [t, version] : before_) set_version(t, version);
  }
  versions_after_forward(const versions_after_forward&) = delete;
  versions_after_forward& operator=(const versions_after_forward&) = delete;

 private:
  std::vector<std::pair<at::Tensor, int64_t>> before_;
};

graph_contents kept_graph::contents() const { return contents_of(outputs_, inputs_); }

::torch::autograd::Edge kept_graph::edge_of(std::size_t output) const {
  return ::torch::autograd::impl::gradient_edge(outputs_[output]);
}

bool kept_graph::feeds_other_outputs(std::size_t output) const {
  auto others = outputs_;
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(output));
  std::erase_if(others, [](const auto& t) { return !t.requires_grad(); });
  return leads_to(others, inputs_, edge_of(output).function.get());
}

std::string kept_graph::differs(const candidate& step, const std::vector<::torch::autograd::Node*>& hooked,
                                const std::vector<at::Tensor>& wanted) const {
  const as_in_forward leaves(wanted);
  const auto& t = *step.forward->recorded;
  const c10::DeviceGuard guard(t.device);
  const fresh_casts casts;
  std::vector<at::Tensor> grads(outputs_.size());
  ::torch::autograd::edge_list to;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (!t.output_grads[i]) continue;
    const auto& v = *t.output_grads[i];
    grads[i] = hollow_tensor(v.sizes, v.strides, at::TensorOptions().dtype(v.dtype).device(t.device));
    to.push_back(::torch::autograd::impl::gradient_edge(outputs_[i]));
  }
  const as_recorded hollow(*this);
  const without_hooks hooks(wanted);
  const replaced_hooks calls(hooked);
  const at::AutoGradMode no_graph(false);
  return differing_backward(step, hollow.tensors, std::move(grads), [&](std::vector<at::Tensor> all) {
    std::erase_if(all, [](const auto& g) { return !g.defined(); });
    gradients_from(std::move(to), std::move(all), wanted, t.autocast, true);
  });
}

void kept_graph::fill() {
  filled_ = true;
  tensors_.clear();
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKeySet(  // layers that batch gradients
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  log_->fill();
}

std::vector<std::vector<at::Tensor>> kept_graph::gradients(const std::vector<at::Tensor>& given,
                                                           const std::vector<at::Tensor>& wanted) const {
  const as_in_forward leaves(wanted);
  ::torch::autograd::edge_list used;
  std::vector<at::Tensor> grads;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    used.push_back(edge_of(i));
    grads.push_back(given[i]);
  }
  const without_hooks hooks(wanted);
  return gradients_in_summands(std::move(used), grads, wanted, at::GradMode::is_enabled());
}

trace kept_graph::record(const std::vector<output_use>& uses, const std::vector<at::Tensor>& parameters,
                         const std::vector<at::Tensor>& trained) const {
  const as_in_forward leaves(trained);
  const std::lock_guard lock(one_at_a_time());
  claim_key();
  const auto& f = *forward_;
  const c10::DeviceGuard guard(f.device);
  const fresh_casts casts;
  const as_recorded hollow(*this);
  const versions_after_forward written(f, hollow.tensors);
  recorder r(f, hollow.tensors, parameters);
  trace_ends ends;
  {
    recorded_dispatch on(r);
    at::AutoGradMode grad_mode(true);
    const auto graph = contents();
    const replaced_hooks calls(graph.hooked);
    ends = record_backward(r, outputs_, f.results, parameters, inputs_, uses, true);
    ends.hook_places = graph.hook_places;
  }
  at::autocast::clear_cache();
  ends.output_versions = f.output_versions;
  ends.output_tensors = f.output_tensors;
  auto calls = r.finish();
  calls.after_forward = f.after_forward;
  for (std::size_t i = calls.backward; i < calls.calls.size(); ++i)
    if (const auto& d = calls.calls[i].draws; d && d->from == generator_origin::fixed)
      throw cannot_capture("the backward draws numbers again that the forward has drawn");
  return joined(std::move(calls), std::move(ends), f.device);
}

}  // namespace remat::pytorch::detail
