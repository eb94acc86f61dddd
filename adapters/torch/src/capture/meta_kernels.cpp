// SPDX-License-Identifier: Apache-2.0
#include "meta_kernels.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MetaFunctions.h>
#include <ATen/OpMathType.h>
#include <ATen/ScalarOps.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/clone_native.h>

#include <algorithm>
#include <string>
#include <unordered_map>

namespace remat::pytorch::detail {
namespace {

namespace meta = at::meta;
namespace ops = at::_ops;

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using positions = c10::List<std::optional<Tensor>>;
template <class T>
using optional_of = const std::optional<T>&;

Tensor made(IntArrayRef sizes, at::ScalarType type) { return at::detail::empty_meta(sizes, type); }
Tensor like(const Tensor& t, at::MemoryFormat format = at::MemoryFormat::Preserve) {
  return at::empty_like(t, t.options(), format);
}
Tensor plain_like(const Tensor& t) { return made(t.sizes(), t.scalar_type()); }
/// With dimensions 1 and 2 in the other order in memory, as attention on the host lays out its results.
Tensor heads_inside(IntArrayRef sizes, at::ScalarType type) {
  auto order = sizes.vec();
  std::swap(order.at(1), order.at(2));
  return made(order, type).transpose(1, 2);
}

// Arithmetic with a number: PyTorch makes a tensor of the number.
template <Tensor (*f)(const Tensor&, const Tensor&)>
Tensor with_number(const Tensor& t, const Scalar& x) {
  return f(t, at::native::wrapped_scalar_tensor(x));
}
template <Tensor& (*f)(Tensor&, const Tensor&)>
Tensor& with_number_(Tensor& t, const Scalar& x) {
  return f(t, at::native::wrapped_scalar_tensor(x));
}
template <Tensor (*f)(const Tensor&, const Tensor&, const Scalar&)>
Tensor sum_with_number(const Tensor& t, const Scalar& x, const Scalar& factor) {
  return f(t, at::native::wrapped_scalar_tensor(x), factor);
}

Tensor& put(Tensor& t, const positions& list, const Tensor& values, bool, bool) {
  TORCH_CHECK(at::is_expandable_to(values.sizes(), meta::index(t, list).sizes()));
  return t;
}
Tensor selected(const Tensor& t, int64_t dim, const Tensor& index) {
  TORCH_CHECK(t.dim() > 0 && index.dim() <= 1 && at::isIntegralType(index.scalar_type(), false));
  auto sizes = t.sizes().vec();
  sizes.at(static_cast<std::size_t>(at::maybe_wrap_dim(dim, t.dim()))) = index.numel();
  return made(sizes, t.scalar_type());
}
Tensor embedding(const Tensor& weight, const Tensor& indices, c10::SymInt, bool, bool sparse) {
  TORCH_CHECK(weight.dim() == 2 && !sparse);
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return made(sizes, weight.scalar_type());
}
Tensor embedding_backward(const Tensor& gradient, const Tensor&, c10::SymInt rows, c10::SymInt, bool) {
  return made({rows.expect_int(), gradient.size(-1)}, gradient.scalar_type());
}
Tensor slice_backward(const Tensor& gradient, c10::SymIntArrayRef sizes, int64_t, c10::SymInt, c10::SymInt, c10::SymInt) {
  return made(C10_AS_INTARRAYREF_SLOW(sizes), gradient.scalar_type());
}
Tensor select_backward(const Tensor& gradient, c10::SymIntArrayRef sizes, int64_t, c10::SymInt) {
  return made(C10_AS_INTARRAYREF_SLOW(sizes), gradient.scalar_type());
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor&, const Tensor&, double, bool, optional_of<Tensor>,
                                     std::optional<double>) {
  return {like(query), heads_inside(query.sizes().slice(0, 3), at::toOpMathType(query.scalar_type()))};
}
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const Tensor&, const Tensor&, double, bool, optional_of<Tensor>,
                                                      std::optional<double>) {
  const auto of = [](const Tensor& t) { return heads_inside(t.sizes(), t.scalar_type()); };
  return {of(query), of(key), of(value)};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& t, c10::SymIntArrayRef shape, optional_of<Tensor> weight,
                                              optional_of<Tensor>, double) {
  auto sizes = t.sizes().vec();
  for (auto i = sizes.size() - shape.size(); i < sizes.size(); ++i) sizes[i] = 1;
  const bool mixed = weight && weight->defined() && weight->scalar_type() != t.scalar_type();
  const auto statistics = made(sizes, mixed ? weight->scalar_type() : t.scalar_type());
  return {plain_like(t), statistics, plain_like(statistics)};
}

}  // namespace

const c10::KernelFunction* meta_kernel(const c10::OperatorHandle& op) {
  using table = std::unordered_map<std::string, c10::KernelFunction>;
  static const table all = [] {
    table found;
    const auto add = [&found]<class Op>(Op, typename Op::schema* f) {
      const std::string overload = Op::overload_name;
      found.emplace(std::string(Op::name) + (overload.empty() ? "" : "." + overload),
                    c10::KernelFunction::makeFromUnboxedRuntimeFunction(f));
    };
    // The same code as on devices.
    add(ops::mm{}, meta::mm), add(ops::bmm{}, meta::bmm), add(ops::addmm{}, meta::addmm), add(ops::baddbmm{}, meta::baddbmm);
    add(ops::add_Tensor{}, meta::add), add(ops::add__Tensor{}, meta::add_);
    add(ops::sub_Tensor{}, meta::sub), add(ops::sub__Tensor{}, meta::sub_);
    add(ops::mul_Tensor{}, meta::mul), add(ops::mul__Tensor{}, meta::mul_);
    add(ops::div_Tensor{}, meta::div), add(ops::div__Tensor{}, meta::div_);
    add(ops::pow_Tensor_Scalar{}, meta::pow), add(ops::pow_Tensor_Tensor{}, meta::pow), add(ops::pow_Scalar{}, meta::pow);
    add(ops::neg{}, meta::neg), add(ops::exp{}, meta::exp), add(ops::log{}, meta::log), add(ops::sqrt{}, meta::sqrt);
    add(ops::rsqrt{}, meta::rsqrt), add(ops::reciprocal{}, meta::reciprocal), add(ops::cos{}, meta::cos),
        add(ops::sin{}, meta::sin);
    add(ops::erf{}, meta::erf), add(ops::sigmoid{}, meta::sigmoid), add(ops::tanh{}, meta::tanh), add(ops::gelu{}, meta::gelu);
    add(ops::silu{}, meta::silu), add(ops::elu{}, meta::elu), add(ops::hardswish{}, [](const Tensor& t) { return like(t); });
    add(ops::sgn{}, meta::sgn), add(ops::sign{}, meta::sign), add(ops::floor{}, meta::floor), add(ops::round{}, meta::round);
    add(ops::sigmoid_backward{}, meta::sigmoid_backward), add(ops::tanh_backward{}, meta::tanh_backward);
    add(ops::gelu_backward{}, meta::gelu_backward), add(ops::silu_backward{}, meta::silu_backward);
    add(ops::threshold_backward{}, meta::threshold_backward), add(ops::leaky_relu_backward{}, meta::leaky_relu_backward);
    add(ops::maximum{}, meta::maximum), add(ops::minimum{}, meta::minimum);
    add(ops::eq_Tensor{}, meta::eq), add(ops::ne_Tensor{}, meta::ne), add(ops::lt_Tensor{}, meta::lt),
        add(ops::le_Tensor{}, meta::le);
    add(ops::gt_Tensor{}, meta::gt), add(ops::ge_Tensor{}, meta::ge), add(ops::eq_Scalar{}, meta::eq),
        add(ops::ne_Scalar{}, meta::ne);
    add(ops::lt_Scalar{}, meta::lt), add(ops::le_Scalar{}, meta::le), add(ops::gt_Scalar{}, meta::gt),
        add(ops::ge_Scalar{}, meta::ge);
    add(ops::bitwise_and_Tensor{}, meta::bitwise_and), add(ops::bitwise_or_Tensor{}, meta::bitwise_or);
    add(ops::bitwise_not{}, meta::bitwise_not);
    add(ops::sum_dim_IntList{}, meta::sum), add(ops::mean_dim{}, meta::mean), add(ops::amax{}, meta::amax),
        add(ops::amin{}, meta::amin);
    add(ops::cumsum{}, meta::cumsum), add(ops::prod_dim_int{}, meta::prod), add(ops::any_dim{}, meta::any),
        add(ops::all_dim{}, meta::all);
    add(ops::argmax{}, meta::argmax), add(ops::argmin{}, meta::argmin), add(ops::linalg_vector_norm{}, meta::linalg_vector_norm);
    add(ops::_softmax{}, meta::_softmax), add(ops::_softmax_backward_data{}, meta::_softmax_backward_data);
    add(ops::_log_softmax{}, meta::_log_softmax), add(ops::_log_softmax_backward_data{}, meta::_log_softmax_backward_data);
    add(ops::nll_loss_forward{}, meta::nll_loss_forward_symint), add(ops::nll_loss_backward{}, meta::nll_loss_backward_symint);
    add(ops::mse_loss{}, meta::mse_loss), add(ops::smooth_l1_loss{}, meta::smooth_l1_loss);
    add(ops::cat{}, meta::cat), add(ops::tril{}, meta::tril_symint), add(ops::triu{}, meta::triu_symint);
    add(ops::topk{}, meta::topk_symint), add(ops::sort_stable{}, meta::sort);
    add(ops::index_Tensor{}, meta::index), add(ops::gather{}, meta::gather), add(ops::index_add_{}, meta::index_add_);
    add(ops::scatter_add_{}, meta::scatter_add_), add(ops::scatter_add{}, meta::scatter_add),
        add(ops::scatter_src{}, meta::scatter);
    add(ops::scatter_value{}, meta::scatter), add(ops::index_copy{}, meta::index_copy);
    add(ops::max_pool2d_with_indices{}, meta::max_pool2d_with_indices);
    add(ops::max_pool2d_with_indices_backward{}, meta::max_pool2d_with_indices_backward);
    add(ops::avg_pool2d{}, meta::avg_pool2d), add(ops::avg_pool2d_backward{}, meta::avg_pool2d_backward);
    add(ops::upsample_nearest2d{}, meta::upsample_nearest2d_symint);
    add(ops::upsample_nearest2d_backward{}, meta::upsample_nearest2d_backward_symint);
    add(ops::upsample_bilinear2d{}, meta::upsample_bilinear2d_symint);
    add(ops::upsample_bilinear2d_backward{}, meta::upsample_bilinear2d_backward_symint);
    // PyTorch's code, and rules.
    add(ops::add_Scalar{}, sum_with_number<meta::add>), add(ops::sub_Scalar{}, sum_with_number<meta::sub>);
    add(ops::mul_Scalar{}, with_number<meta::mul>), add(ops::mul__Scalar{}, with_number_<meta::mul_>);
    add(ops::div_Scalar{}, with_number<meta::div>), add(ops::div__Scalar{}, with_number_<meta::div_>);
    add(ops::clone{}, at::native::clone), add(ops::_to_copy{}, at::native::_to_copy);
    add(ops::index_select{}, selected), add(ops::_index_put_impl_{}, put);
    add(ops::embedding{}, embedding), add(ops::embedding_dense_backward{}, embedding_backward);
    add(ops::slice_backward{}, slice_backward), add(ops::select_backward{}, select_backward);
    add(ops::_scaled_dot_product_flash_attention_for_cpu{}, attention);
    add(ops::_scaled_dot_product_flash_attention_for_cpu_backward{}, attention_backward);
    add(ops::native_layer_norm{}, layer_norm);
    return found;
  }();
  const auto found = all.find(c10::toString(op.operator_name()));
  return found == all.end() ? nullptr : &found->second;
}

}  // namespace remat::pytorch::detail
