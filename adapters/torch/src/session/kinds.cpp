// SPDX-License-Identifier: Apache-2.0
#include "kinds.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include <remat/pytorch/paged_memory.hpp>

#include "../base/digest.hpp"

namespace remat::pytorch {

std::string describe(const std::vector<at::Tensor>& inputs) {
  std::ostringstream out;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& t = inputs[i];
    out << (i ? ", " : "");
    if (!t.defined()) {
      out << "undefined";
      continue;
    }
    out << c10::toString(t.scalar_type()) << t.sizes();
    if (!t.is_contiguous()) out << " strides " << t.strides();
    if (t.requires_grad()) out << " with gradient";
    for (std::size_t j = 0; j < i; ++j)
      if (inputs[j].defined() && inputs[j].is_alias_of(t)) {
        out << " sharing memory with " << j << " at " << t.storage_offset() - inputs[j].storage_offset();
        break;
      }
  }
  return out.str();
}

std::uint64_t call_keys::of(const invocation& call, const std::vector<at::Tensor>& inputs, const std::string& signature,
                            const std::vector<named_tensor>& parameters, const std::vector<named_tensor>& buffers, bool same) {
  auto& k = key_;
  k.clear();
  k << call.signature << signature << inputs.size();
  add_settings(k);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& t = inputs[i];
    k << t.defined();
    if (!t.defined()) continue;
    k << t;
    for (std::size_t j = 0; j < i; ++j) {
      const bool shared = inputs[j].defined() && inputs[j].is_alias_of(t);
      k << shared << (shared ? t.storage_offset() - inputs[j].storage_offset() : 0);
    }
  }
  by_storage_.clear();
  for (const auto* list : {&parameters, &buffers}) {
    k << list->size();
    for (const auto& [name, t] : *list) {
      if (same) k << t.unsafeGetTensorImpl();
      k << t << t.has_storage();
      if (!t.has_storage()) continue;
      k << t.storage().nbytes() << paged_memory::holds(t);
      by_storage_.push_back({t.storage().unsafeGetStorageImpl(), by_storage_.size(), &t});
    }
  }
  std::sort(by_storage_.begin(), by_storage_.end());
  std::map<std::size_t, std::pair<std::size_t, int64_t>> sharing;  // place: first place with its storage, distance
  for (std::size_t i = 1, first = 0; i < by_storage_.size(); ++i) {
    const auto& [storage, place, t] = by_storage_[i];
    const auto& [other, start, owner] = by_storage_[first];
    if (storage == other)
      sharing[place] = {start, t->storage_offset() - owner->storage_offset()};
    else
      first = i;
  }
  for (const auto& [place, to] : sharing) k << place << to.first << to.second;
  return digest().add(k.bytes().data(), k.bytes().size()).value();
}

}  // namespace remat::pytorch
