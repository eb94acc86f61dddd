// SPDX-License-Identifier: Apache-2.0
// Steps each parameter within the backward, as soon as its gradient is complete.
#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "../base/trim.hpp"
#include "stepper.hpp"

namespace remat::pytorch {
namespace {

/// The only dispatch key of tensors for which PyTorch has neither kernels nor a fallback on any device.
constexpr auto spent_key = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

void refuse_to_read(const c10::OperatorHandle& op, ::torch::jit::Stack* /*arguments*/) {
  throw refusal_to_overlap(op.schema().name() + " uses a gradient that is freed already, as clipping and accumulation do");
}

/// Placeholder for a gradient that has been taken, until the step ends. All operators refuse it.
at::Tensor spent(const at::Tensor& p) {
  static const auto library = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(spent_key))
      throw not_available("stepping::overlap needs the dispatch key TESTING_ONLY_GenericWrapper, but it has a fallback already");
    auto lib = std::make_unique<::torch::Library>(::torch::Library::IMPL, "_", spent_key, __FILE__, __LINE__);
    lib->fallback(::torch::CppFunction::makeFromBoxedFunction<&refuse_to_read>());
    return lib;
  }();
  auto made = at::detail::make_tensor<c10::TensorImpl>(p.key_set().add(spent_key), p.dtype(), p.device());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(p.sizes(), p.strides());
  return made;
}

/// True if these options make the same steps.
template <class... Kinds>
bool same_settings(const optim::OptimizerOptions& a, const optim::OptimizerOptions& b) {
  const auto as = [&]<class Kind>() {
    const auto *first = dynamic_cast<const Kind*>(&a), *second = dynamic_cast<const Kind*>(&b);
    return first == nullptr || (second != nullptr && *first == *second);
  };
  return (as.template operator()<Kinds>() && ...);
}
bool unchanged_settings(const optim::OptimizerOptions& a, const optim::OptimizerOptions& b) {
  return same_settings<optim::AdamWOptions, optim::AdamOptions, optim::SGDOptions, optim::RMSpropOptions, optim::AdagradOptions>(
             a, b) &&
         a.get_lr() == b.get_lr();
}

}  // namespace

void states_on_disk::stepper::attach() {
  for (const auto& group : optimizer_.param_groups)
    for (const auto& p : group.params())
      if (p.requires_grad() && p.is_leaf()) {
        auto& steps = arrival::of(p).steps;
        if (steps.lock().get() == this) continue;
        steps = weak_from_this();
        attached_.push_back(p);
      }
}

void states_on_disk::stepper::arrived(const at::Tensor& p) {
  const std::lock_guard lock(mutex_);
  const auto* const key = p.unsafeGetTensorImpl();
  if (taken_.empty()) {
    group_of_.clear();
    for (std::size_t i = 0; i < optimizer_.param_groups.size(); ++i)
      for (const auto& member : optimizer_.param_groups[i].params()) group_of_[member.unsafeGetTensorImpl()] = i;
  }
  const auto group = group_of_.find(key);
  if (group == group_of_.end() || !p.grad().defined()) return;
  if (const auto found = taken_.find(key); found != taken_.end()) {
    if (p.grad().is_same(found->second.stand_in)) return;  // called twice: another hook wraps ours
    throw refusal_to_overlap(
        "a second gradient of a parameter came before step(): gradients are accumulated, or the backward is run twice");
  }
  dropped_ = false;
  const auto& of = optimizer_.param_groups.at(group->second);
  if (auto& known = settings_[group->second]; !known) known = of.options().clone();
  taken t{p, spent(p), first_step_done_ ? at::Tensor() : p.grad()};
  if (first_step_done_) {
    step_now({p, &of});
    note_freed(static_cast<bytes_t>(p.grad().nbytes()));
  }
  p.mutable_grad() = t.stand_in;
  taken_.emplace(key, std::move(t));
}

void states_on_disk::stepper::step_now(const parameter_of_group& t) {
  check();
  reserve_states({&t, 1});
  if (!disk_) {
    apply({&t, 1});
  } else {
    if (!traffic_) {
      check_free_memory();
      traffic_ = std::make_unique<disk_traffic>();
      last_stepped_.reset();
    }
    try {
      traffic_->ready(t.key(), disk_states({&t, 1}));
      if (const auto found = successors_.find(t.key()); found != successors_.end()) {
        const parameter_of_group following{found->second, nullptr};
        traffic_->ahead(following.key(), disk_states({&following, 1}));
      }
      apply({&t, 1});
    } catch (const copy_failed& e) {
      throw failed(e, std::to_string(taken_.size()) + " parameters have made the step");
    }
    traffic_->done(unneeded({&t, 1}));
    if (last_stepped_.defined()) successors_[last_stepped_.unsafeGetTensorImpl()] = t.p;
    last_stepped_ = t.p;
  }
  t.p.unsafeGetTensorImpl()->bump_version();  // not all optimizers do; readers of old values must notice
}

void states_on_disk::stepper::finish() {
  const std::lock_guard lock(mutex_);
  if (dropped_) throw refusal_to_overlap("load() came between backward and step(), and dropped the gradients");
  for (const auto& [key, t] : taken_)
    if (!t.p.grad().is_same(t.stand_in))
      throw refusal_to_overlap("a gradient was replaced or removed between backward and step()");
  for (const auto& [group, were] : settings_)
    if (group >= optimizer_.param_groups.size() || !unchanged_settings(optimizer_.param_groups[group].options(), *were))
      throw refusal_to_overlap("options of a parameter group were changed between backward and step()",
                               "change them after step()");
  if (!first_step_done_) {  // reserve all space before a weight changes
    std::vector<parameter_of_group> all;
    for (const auto& group : optimizer_.param_groups)
      for (const auto& p : group.params())
        if (p.requires_grad()) all.push_back({p, &group});
    reserve_states(all);
  }
  for (const auto& [key, t] : taken_) t.p.mutable_grad() = t.gradient;
  const auto traffic = std::exchange(traffic_, nullptr);
  if (traffic) traffic->wait();
  step_all();  // the rest: gradients of the first step, or set by hand
  first_step_done_ = first_step_done_ || !taken_.empty();
  clear();
  attach();  // parameters that have become trainable
  if (traffic) drain(*traffic);
}

void states_on_disk::stepper::loaded() {
  const std::lock_guard lock(mutex_);
  failure_.reset();
  if (taken_.empty()) return;
  dropped_ = true;
  clear();
}

void states_on_disk::stepper::clear() {
  for (const auto& group : optimizer_.param_groups)
    for (const auto& p : group.params()) p.mutable_grad().reset();
  taken_.clear();
  settings_.clear();
  traffic_.reset();
}

}  // namespace remat::pytorch
