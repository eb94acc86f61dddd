// SPDX-License-Identifier: Apache-2.0
#include "operators.hpp"

#include <ATen/ATen.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

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
      {"aten::masked_scatter_backward", {.masks = 1}},  // the mask determines the size of an intermediate result
      {"aten::_ctc_loss", {.lengths = true}},
      {"aten::poisson", {.draws_by_values = true}},
      {"aten::binomial", {.draws_by_values = true}},
      {"aten::_standard_gamma", {.draws_by_values = true}},
      {"aten::_sample_dirichlet", {.draws_by_values = true}},
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

bool may_raise_by_values(const c10::OperatorHandle& op) {
  constexpr std::string_view names =
      " aten::_ctc_loss aten::_embedding_bag aten::_linalg_eigh aten::_linalg_eigvals aten::_linalg_svd"
      " aten::binary_cross_entropy aten::cholesky aten::cholesky_inverse aten::embedding aten::gather aten::histc"
      " aten::index aten::index_add aten::index_copy aten::index_fill aten::index_put aten::index_reduce aten::index_select"
      " aten::linalg_eig aten::linalg_lstsq aten::masked_scatter aten::max_unpool2d aten::max_unpool3d"
      " aten::multi_margin_loss aten::multilabel_margin_loss_forward aten::nll_loss2d_forward aten::nll_loss_forward"
      " aten::put aten::scatter aten::scatter_add aten::scatter_reduce aten::segment_reduce aten::take ";
  const auto& s = op.schema();
  if (may_draw(op) || std::any_of(s.arguments().begin(), s.arguments().end(), is_written)) return false;
  return s.returns().empty() || !is_native(op) || names.find(" " + s.name() + " ") != names.npos;
}

std::vector<index_list> indices_in(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  const auto& name = op.schema().name();
  const auto tensor = [&](std::size_t i) { return arguments[i].toTensor(); };
  std::vector<index_list> list;
  if (name == "aten::embedding" && tensor(0).dim() == 2) list = {{tensor(1), tensor(0).size(0)}};
  if (name == "aten::take") list = {{tensor(1), tensor(0).numel()}};
  if ((name == "aten::index_select" || name == "aten::gather") && arguments[1].isInt()) {
    const auto dims = tensor(0).dim(), given = arguments[1].toInt(), d = given < 0 ? given + dims : given;
    if (d < 0 || d >= dims || (name == "aten::gather" ? tensor(2).dim() != dims : tensor(2).dim() > 1)) return {};
    for (int64_t i = 0; i < dims && name == "aten::gather"; ++i)
      if (i != d && tensor(2).size(i) > tensor(0).size(i)) return {};
    list = {{tensor(2), tensor(0).size(d)}};
  }
  if (name == "aten::index") {
    const auto given = arguments[1].toListRef();
    if (static_cast<int64_t>(given.size()) > tensor(0).dim()) return {};
    for (std::size_t i = 0; i < given.size(); ++i)
      if (given[i].isTensor() && given[i].toTensor().defined())
        list.push_back({given[i].toTensor(), tensor(0).size(static_cast<int64_t>(i))});
  }
  const auto fits = [&](const index_list& x) {
    const auto type = x.indices.scalar_type();
    return (type == at::kLong || type == at::kInt) && x.indices.sizes() == list.front().indices.sizes();
  };
  return std::all_of(list.begin(), list.end(), fits) ? list : std::vector<index_list>();
}

bool may_draw(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool reads_only_geometry(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return is_native(op) &&
         (name.rfind("aten::new_", 0) == 0 || (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0));
}

bool is_view(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  if (std::any_of(s.arguments().begin(), s.arguments().end(), is_written)) return false;
  return !s.returns().empty() && s.returns()[0].alias_info() && s.name() != "aten::lift_fresh";  // lift_fresh marks a constant
}

bool overwrites(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  return may_draw(op) || facts(op).overwrites || s.name().find("_out") != std::string::npos ||
         s.overload_name().find("out") != std::string::npos;
}

int takes_masks(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {
      "aten::index",         "aten::index_put",      "aten::index_put_",      "aten::_index_put_impl_",
      "aten::masked_select", "aten::masked_scatter", "aten::masked_scatter_", "aten::masked_scatter_backward"};
  return names.count(op.schema().name()) && op.schema().overload_name().find("out") == std::string::npos ? 1 : -1;
}

std::vector<at::Tensor> positions_in(const at::Tensor& mask, const c10::OperatorHandle& op,
                                     const std::vector<c10::IValue>& arguments) {
  const bool flat = op.schema().arguments()[1].type()->kind() == c10::TypeKind::TensorType;
  if (flat) return {mask.expand(arguments[0].toTensor().sizes()).flatten().nonzero().squeeze(1)};
  const auto all = mask.nonzero();
  std::vector<at::Tensor> lists;
  for (int64_t j = 0; j < mask.dim(); ++j) lists.push_back(all.select(1, j).clone());
  return lists;
}

std::optional<c10::OperatorHandle> put_positions(const c10::OperatorHandle& op, std::vector<c10::IValue>& arguments,
                                                 const std::function<const std::vector<at::Tensor>*(const at::Tensor&)>& lists) {
  const auto other = [](const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); };
  const auto& name = op.schema().name();
  if (arguments[1].isTensor()) {
    const auto& flat = lists(arguments[1].toTensor())->front();
    if (name == "aten::masked_select") {
      arguments = {arguments[0], flat};
      return other("aten::take");
    }
    if (name == "aten::masked_scatter_backward") {
      const auto sizes = arguments[2].toIntVector();
      if (c10::multiply_integers(sizes) != flat.numel()) return std::nullopt;
      arguments = {arguments[0], flat.view(sizes)};
      return other("aten::take");
    }
    const bool in_place = name == "aten::masked_scatter_";
    if (arguments[2].toTensor().numel() != flat.numel()) return std::nullopt;
    if (!in_place && !arguments[0].toTensor().is_contiguous()) return std::nullopt;  // `put` would give a tensor of its strides
    arguments = {arguments[0], flat, arguments[2], false};
    return other(in_place ? "aten::put_" : "aten::put");
  }
  c10::List<std::optional<at::Tensor>> found;
  for (const auto& v : arguments[1].toListRef()) {
    const auto* others = v.isTensor() && v.toTensor().defined() ? lists(v.toTensor()) : nullptr;
    if (others == nullptr)
      found.push_back(v.isTensor() ? std::optional(v.toTensor()) : std::nullopt);
    else
      for (const auto& t : *others) found.push_back(t);
  }
  arguments[1] = found;
  return op;
}

namespace {

/// Operators that work element by element or, as softmax does, row by row, reading before writing. All variants use one
/// kernel.
constexpr std::string_view one_by_one =
    " aten::abs aten::add aten::addcdiv aten::addcmul aten::clamp aten::clamp_max aten::clamp_min aten::cos"
    " aten::div aten::elu aten::elu_backward aten::erf aten::exp aten::expm1 aten::gelu aten::gelu_backward"
    " aten::hardsigmoid aten::hardsigmoid_backward aten::hardswish aten::hardtanh aten::hardtanh_backward"
    " aten::leaky_relu aten::leaky_relu_backward aten::lerp aten::log aten::log1p aten::_log_softmax"
    " aten::_log_softmax_backward_data aten::masked_fill aten::maximum aten::minimum aten::mul aten::neg aten::pow"
    " aten::reciprocal aten::relu aten::rsqrt aten::sigmoid aten::sigmoid_backward aten::silu aten::silu_backward"
    " aten::sin aten::_softmax aten::_softmax_backward_data aten::softplus aten::softplus_backward aten::sqrt"
    " aten::sub aten::tanh aten::tanh_backward aten::threshold_backward aten::where remat::masked ";

}  // namespace

bool is_elementwise(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  const bool listed = one_by_one.find(" " + s.name() + " ") != one_by_one.npos && s.name().find("softmax") == std::string::npos;
  return listed && s.returns().size() == 1 && !s.returns()[0].alias_info() && is_native(op);
}

std::optional<c10::OperatorHandle> in_place_variant(const c10::OperatorHandle& op, int argument, c10::ScalarType dtype) {
  const auto &name = op.schema().name(), &overload = op.schema().overload_name();
  if (one_by_one.find(" " + name + " ") == one_by_one.npos || c10::isComplexType(dtype)) return std::nullopt;
  // `mul_` by a number swaps the operands: the kernel then takes the number for a tensor and rounds it.
  if (name == "aten::mul" && overload == "Scalar" && c10::isReducedFloatingType(dtype)) return std::nullopt;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (argument == 0)
    if (auto found = dispatcher.findSchema({name + "_", overload})) return found;
  for (const auto& out : {overload + "_out", std::string("out"), std::string("grad_input")}) {
    const auto found = dispatcher.findSchema({name, out});
    // An `out` variant without a kernel of its own computes into other memory and copies.
    if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const auto &wanted = op.schema().arguments(), &given = found->schema().arguments();
    if (given.size() == wanted.size() + 1 && std::equal(wanted.begin(), wanted.end(), given.begin(),
                                                        [](const auto& a, const auto& b) { return *a.type() == *b.type(); }))
      return found;
  }
  return std::nullopt;
}

bool makes_uninitialized(const c10::OperatorHandle& op) {
  const auto& s = op.schema();
  if (s.name().rfind("aten::empty", 0) != 0) return false;
  for (const auto& a : s.arguments())
    if (a.type()->kind() == c10::TypeKind::TensorType) return false;
  return true;
}

void fill_with_safe_values(const at::Tensor& t) {
  at::NoGradGuard no_grad;
  if (!t.is_floating_point() && !t.is_complex()) {
    t.fill_(1);  // pivots, lengths, numbers of classes
    return;
  }
  t.fill_(0.25);
  if (t.dim() >= 2 && t.size(-1) == t.size(-2)) t.diagonal(0, -2, -1).fill_(static_cast<double>(t.size(-1)));
}

namespace {

std::mutex distrusted_mutex;
std::unordered_set<c10::OperatorName> distrusted;

}  // namespace

void require_kernel_geometry(const c10::OperatorHandle& op) {
  const std::lock_guard lock(distrusted_mutex);
  distrusted.insert(op.operator_name());
}

bool distrusts_results(const c10::OperatorHandle& op) {
  const std::lock_guard lock(distrusted_mutex);
  return distrusted.count(op.operator_name()) > 0;
}

}  // namespace remat::pytorch
