// SPDX-License-Identifier: Apache-2.0
#include "weights_elsewhere.hpp"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include <remat/pytorch/capture.hpp>

#include "../base/trim.hpp"
#include "hollow.hpp"
#include "lists.hpp"

namespace remat::pytorch::detail {
namespace {

thread_local const weights_elsewhere::disguise* current_disguise = nullptr;

c10::intrusive_ptr<::torch::autograd::Node> accumulator_of(const at::Tensor& t) {
  return t.requires_grad() && t.is_leaf() ? ::torch::autograd::impl::try_get_grad_accumulator(t) : nullptr;
}
/// @param node null: the accumulator stays
void set_accumulator(const at::Tensor& t, const c10::intrusive_ptr<::torch::autograd::Node>& node) {
  if (node && t.requires_grad() && t.is_leaf())
    ::torch::autograd::impl::set_grad_accumulator(t, c10::weak_intrusive_ptr<::torch::autograd::Node>(node));
}

/// Lends the data of a weight to its hollow storage. @param lent gets that storage
void lend(const at::Tensor& hollow, const at::Tensor& data, std::vector<c10::Storage>& lent) {
  if (has_memory(hollow)) return;
  auto* s = storage_of(hollow);
  const auto there = bytes_of(data).to(s->device());
  s->clear_data_ptr_access_error_msg_();
  s->set_data_ptr_noswap(storage_of(there)->set_data_ptr(c10::DataPtr(nullptr, s->device())));
  lent.push_back(hollow.storage());
}
void take_back(const std::vector<c10::Storage>& lent) {
  bytes_t bytes = 0;
  for (const auto& s : lent) {
    bytes += static_cast<bytes_t>(s.nbytes());
    release(s.unsafeGetStorageImpl());
  }
  if (bytes > 0) note_freed(bytes);
}

}  // namespace

void weights_elsewhere::update_entries(const std::vector<at::Tensor>& parameters) {
  const auto same = [](const at::Tensor& t, const entry& e) {
    return t.is_same(e.parameter) && t.sizes() == e.hollow.sizes() && t.strides() == e.hollow.strides() &&
           t.dtype() == e.hollow.dtype() && t.storage_offset() == e.hollow.storage_offset() &&
           t.storage().nbytes() == e.hollow.storage().nbytes();
  };
  if (std::equal(parameters.begin(), parameters.end(), entries_.begin(), entries_.end(), same)) return;
  entries_.clear();
  const auto hollow = without_memory(parameters, on_);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    hide(storage_of(hollow[i]));
    entries_.push_back({parameters[i], hollow[i], {}});
  }
}

weights_elsewhere::disguise::disguise(weights_elsewhere& of, const std::vector<at::Tensor>& parameters)
    : of_(of), before_(current_disguise) {
  if (before_ == nullptr || &before_->of_ != &of) {
    of.update_entries(parameters);
    hidden_.reserve(of.entries_.size());
    auto failed = c10::make_scope_exit([&] { undo(); });
    for (std::size_t i = 0; i < of.entries_.size(); ++i) {
      auto& e = of.entries_[i];
      if (!e.parameter.is_cpu()) continue;
      hidden weight{i, e.parameter.detach(), accumulator_of(e.parameter)};
      e.parameter.set_data(e.hollow);
      hidden_.push_back(std::move(weight));
      set_accumulator(e.parameter, e.accumulator);
    }
    failed.release();
  }
  current_disguise = this;
}

void weights_elsewhere::disguise::lend() {
  for (const auto& h : hidden_) detail::lend(of_.entries_[h.at].hollow, h.data, lent_);
}

weights_elsewhere::disguise::~disguise() {
  current_disguise = before_;
  take_back(lent_);
  undo();
}

void weights_elsewhere::disguise::undo() {
  for (auto& h : hidden_) {
    auto& e = of_.entries_[h.at];
    e.accumulator = accumulator_of(e.parameter);
    e.parameter.set_data(h.data);
    set_accumulator(e.parameter, h.accumulator);
  }
}

lent_weights::lent_weights(const std::vector<c10::IValue>& arguments) {
  if (current_disguise == nullptr) return;
  auto failed = c10::make_scope_exit([&] { take_back(lent_); });  // data left there would be those of a later step, too
  each_tensor(arguments, [&](const at::Tensor& t, int) {
    if (!t.has_storage() || t.storage().nbytes() == 0 || t.is_cpu()) return;
    const auto* s = storage_of(t);
    for (const auto* d = current_disguise; d != nullptr; d = d->before_)
      for (const auto& h : d->hidden_)
        if (const auto& hollow = d->of_.entries_[h.at].hollow; storage_of(hollow) == s) lend(hollow, h.data, lent_);
  });
  failed.release();
}

lent_weights::~lent_weights() { take_back(lent_); }

}  // namespace remat::pytorch::detail

namespace remat::pytorch {

bool weights_disguised() { return detail::current_disguise != nullptr; }

}  // namespace remat::pytorch
