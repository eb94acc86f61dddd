// SPDX-License-Identifier: Apache-2.0
/// @file
/// Traits of operators, and the call of the host's kernels.
#include "operators.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

namespace emulated {
namespace {

template <std::size_t n>
bool is_one_of(std::string_view name, const std::array<std::string_view, n>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::array<std::string_view, 6> products = {"aten::mm",      "aten::addmm", "aten::bmm",
                                                      "aten::baddbmm", "aten::addmv", "aten::mv"};
constexpr std::array<std::string_view, 3> convolutions = {"aten::convolution", "aten::convolution_backward",
                                                          "aten::_slow_conv2d_forward"};
constexpr std::array<std::string_view, 4> indexings = {"aten::index", "aten::index_put", "aten::index_put_",
                                                       "aten::_index_put_impl_"};
constexpr std::array<std::string_view, 5> untouching = {"aten::empty", "aten::empty_strided", "aten::set_",
                                                        "aten::_fused_sdp_choice", "aten::_has_compatible_shallow_copy_type"};
/// These operators draw only in cases that the kernel of the host refuses.
constexpr std::array<std::string_view, 2> tagged_only = {"aten::_fused_sdp_choice",
                                                         "aten::_scaled_dot_product_flash_attention_for_cpu"};

bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& r) {
    return r.alias_info() != nullptr && !r.alias_info()->isWrite();
  });
}

traits make_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  traits t;
  t.view = is_view(schema);
  t.untouched = is_one_of(name, untouching);
  t.allocates = name == "aten::empty" || name == "aten::empty_strided";
  t.product = is_one_of(name, products);
  t.workspace = t.product || is_one_of(name, convolutions);
  t.dropout = name == "aten::native_dropout";
  t.counts = name == "aten::histc";
  t.draws = op.hasTag(at::Tag::nondeterministic_seeded) && !is_one_of(name, tagged_only);
  t.indexes = is_one_of(name, indexings);
  t.looks = !t.indexes && (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
  t.mixes = t.indexes || name == "aten::copy_" || name.rfind("aten::_fused_", 0) == 0;
  const auto& arguments = schema.arguments();
  for (int k = 0; k < static_cast<int>(arguments.size()); ++k) {
    const auto& a = arguments[static_cast<std::size_t>(k)];
    t.writes.push_back(a.alias_info() != nullptr && a.alias_info()->isWrite());
    if (a.name() == "generator") t.generator = k;
    if (name == "aten::native_batch_norm" && a.name() == "training") t.training = k;
    const bool statistics = name == "aten::native_batch_norm" || name == "aten::batch_norm_update_stats";
    if (statistics && (a.name() == "running_mean" || a.name() == "running_var")) t.silent.push_back(k);
  }
  return t;
}

/// Mixes the state into the bits that the generator of the host uses.
std::uint64_t mixed(const philox& from) {
  std::uint64_t x = from.seed + 0x9E3779B97F4A7C15u * (from.offset / draws_per_call + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Computes dropout like the kernel of the host, which can draw from the default generator only.
void dropout(torch::jit::Stack& stack, const at::Generator& generator) {
  const auto input = stack[0].toTensor();
  const auto kept = 1.0 - stack[1].toDouble();
  const bool training = stack[2].isNone() || stack[2].toBool();
  stack.clear();
  if (input.numel() == 0) {
    torch::jit::push(stack, input, at::empty_like(input));
  } else if (!training) {
    torch::jit::push(stack, input.clone(), at::ones(input.sizes(), input.options().dtype(at::kBool)));
  } else {
    auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
    mask.bernoulli_(kept, generator);
    auto output = input.mul(mask).mul_(kept == 0 ? 0.0 : 1.0 / kept);
    torch::jit::push(stack, std::move(output), std::move(mask));
  }
}

}  // namespace

const traits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, traits> known;
  const auto found = known.find(&op.schema());
  return found != known.end() ? found->second : known.emplace(&op.schema(), make_traits(op)).first->second;
}

std::vector<bool> written_by(const traits& t, const torch::jit::Stack& arguments) {
  auto written = t.writes;
  if (t.training < 0 || arguments[static_cast<std::size_t>(t.training)].toBool())
    for (const int k : t.silent) written[static_cast<std::size_t>(k)] = true;
  return written;
}

bool looks_at_data(const traits& t, const torch::jit::Stack& arguments) {
  if (!t.indexes) return t.looks;
  const auto indices = tensors_in(arguments[1]);
  return std::any_of(indices.begin(), indices.end(), [](const at::Tensor& i) {
    return i.defined() && (i.scalar_type() == at::kBool || i.scalar_type() == at::kByte);
  });
}

std::vector<at::Tensor> tensors_in(const c10::IValue& v) {
  if (v.isTensor()) return {v.toTensor()};
  if (v.isTensorList()) return v.toTensorVector();
  std::vector<at::Tensor> all;
  if (v.isOptionalTensorList())
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) all.push_back(t.value_or(at::Tensor()));
  return all;
}

void run_on_host(const c10::OperatorHandle& op, const traits& t, torch::jit::Stack& stack, const philox* from) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (t.draws) {
    const auto generator = at::detail::createCPUGenerator(mixed(from == nullptr ? philox{} : *from));
    if (t.dropout) return dropout(stack, generator);
    if (t.generator >= 0) stack[static_cast<std::size_t>(t.generator)] = generator;
  }
  if (t.counts && stack[0].isTensor() && !stack[0].toTensor().is_floating_point()) {
    const auto counted = stack[0].toTensor();
    stack[0] = counted.to(at::kDouble);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    stack[0] = stack[0].toTensor().to(counted.scalar_type());
    return;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

std::vector<c10::OperatorName> operators_without_kernel(c10::DispatchKey key) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorName> names;
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (op && !op->hasKernelForDispatchKey(key)) names.push_back(name);
  }
  return names;
}

}  // namespace emulated
