// SPDX-License-Identifier: Apache-2.0
#include "operators.hpp"

#include <ATen/ATen.h>

#include <unordered_map>

namespace remat::pytorch {

const operator_facts& facts(const std::string& name) {
  const auto running = [](std::string only_if) {
    return operator_facts{.writes = {"running_mean", "running_var"}, .writes_if = std::move(only_if), .statistics = true};
  };
  static const std::unordered_map<std::string, operator_facts> table = {
      {"aten::native_batch_norm", running("training")},
      {"aten::cudnn_batch_norm", running("training")},
      {"aten::miopen_batch_norm", running("training")},
      {"aten::batch_norm_update_stats", running("")},
      {"aten::batch_norm_gather_stats", running("")},
      {"aten::batch_norm_gather_stats_with_counts", running("")},
      {"aten::mkldnn_rnn_layer_backward", {.writes = {"workspace"}}},
      {"aten::_cudnn_rnn_backward", {.writes = {"reserve"}}},
      {"aten::miopen_rnn_backward", {.writes = {"reserve"}}},
      {"aten::_unsafe_masked_index", {.writes_lists = true}},
      {"aten::_unsafe_masked_index_put_accumulate", {.writes_lists = true}},
      {"aten::set_", {.resizes = true}},
      {"aten::resize_", {.resizes = true}},
      {"aten::resize_as_", {.resizes = true}},
      {"aten::from_file", {.reads_files = true}},
      {"aten::copy_", {.overwrites = true}},
      {"aten::fill_", {.overwrites = true}},
      {"aten::zero_", {.overwrites = true}},
      {"aten::index", {.masks = 1}},
      {"aten::empty_like", {.makes = filled::with_nothing}},
      {"aten::new_empty", {.makes = filled::with_nothing}},
      {"aten::new_empty_strided", {.makes = filled::with_nothing}},
      {"aten::zeros_like", {.makes = filled::with_zeros}},
      {"aten::new_zeros", {.makes = filled::with_zeros}},
      {"aten::ones_like", {.makes = filled::with_ones}},
      {"aten::new_ones", {.makes = filled::with_ones}},
      {"aten::full_like", {.makes = filled::with_argument, .fill_value = 1}},
      {"aten::new_full", {.makes = filled::with_argument, .fill_value = 2}}};
  static const operator_facts nothing;
  const auto found = table.find(name);
  return found == table.end() ? nothing : found->second;
}

bool is_native(const c10::OperatorHandle& op) { return op.schema().name().rfind("aten::", 0) == 0; }

bool may_draw(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool is_view(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  for (const auto& a : s.arguments())
    if (a.alias_info() && a.alias_info()->isWrite()) return false;
  return !s.returns().empty() && s.returns()[0].alias_info() && s.name() != "aten::lift_fresh";  // that one marks a constant
}

bool overwrites(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  return may_draw(op) || facts(op).overwrites || s.name().find("_out") != std::string::npos ||
         s.overload_name().find("out") != std::string::npos;
}

bool makes_raw(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  if (s.name().rfind("aten::empty", 0) != 0) return false;
  for (const auto& a : s.arguments())
    if (a.type()->kind() == c10::TypeKind::TensorType) return false;
  return true;
}

void fill_plausibly(const at::Tensor& t) {
  at::NoGradGuard no_grad;
  if (!t.is_floating_point() && !t.is_complex()) {
    t.fill_(1);  // pivots, lengths, numbers of classes
    return;
  }
  t.fill_(0.25);
  if (t.dim() >= 2 && t.size(-1) == t.size(-2)) t.diagonal(0, -2, -1).fill_(static_cast<double>(t.size(-1)));
}

}  // namespace remat::pytorch
