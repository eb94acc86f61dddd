// SPDX-License-Identifier: Apache-2.0
#include "meta_kernels.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MetaFunctions.h>
#include <ATen/OpMathType.h>
#include <ATen/ScalarOps.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/utils/ParamUtils.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "../base/views.hpp"
#include "../program/operators.hpp"

namespace remat::pytorch::detail {
namespace geometry {  // a namespace of its own, for unity builds
namespace {

namespace meta = at::meta;
namespace ops = at::_ops;

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using positions = c10::List<std::optional<Tensor>>;
template <class T>
using optional_of = const std::optional<T>&;

Tensor made(IntArrayRef sizes, at::ScalarType type, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return at::detail::empty_meta(sizes, type, std::nullopt, std::nullopt, std::nullopt, format);
}
/// Like `empty_like`, whose kernel for `meta` is Python code.
Tensor like(const Tensor& t, std::optional<at::ScalarType> type = {}, std::optional<at::MemoryFormat> format = {}) {
  const auto of = type.value_or(t.scalar_type());
  if (format.value_or(at::MemoryFormat::Preserve) != at::MemoryFormat::Preserve) return made(t.sizes(), of, *format);
  if (t.is_non_overlapping_and_dense()) return at::detail::empty_strided_meta(t.sizes(), t.strides(), of);
  return at::detail::empty_strided_meta(t.sizes(), at::infer_dense_strides(t.sizes(), t.strides()), of);
}
Tensor like_suggested(const Tensor& t) { return made(t.sizes(), t.scalar_type(), t.suggest_memory_format()); }
Tensor plain_like(const Tensor& t) { return made(t.sizes(), t.scalar_type()); }
Tensor clone(const Tensor& t, std::optional<at::MemoryFormat> format) { return like(t, {}, format); }
Tensor to_copy(const Tensor& t, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
               std::optional<bool> pinned, bool, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false));
  return like(t, type, format);
}
template <class... Value>
Tensor filled_like(const Tensor& t, Value..., std::optional<at::ScalarType> type, std::optional<at::Layout>,
                   std::optional<at::Device>, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false));
  return like(t, type, format);
}
template <class... Value>
Tensor new_filled(const Tensor& t, c10::SymIntArrayRef sizes, Value..., std::optional<at::ScalarType> type,
                  std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false));
  return made(C10_AS_INTARRAYREF_SLOW(sizes), type.value_or(t.scalar_type()));
}
/// Checks that kernels of all devices fill the tensor with random numbers, at least one. Otherwise the kernel of the device
/// reports errors.
Tensor& filled_with_noise(Tensor& t) {
  TORCH_CHECK(t.numel() > 0 && t.is_non_overlapping_and_dense() && t.is_floating_point());
  return t;
}
Tensor& bernoulli(Tensor& t, double p, std::optional<at::Generator>) {
  TORCH_CHECK(0 <= p && p <= 1);
  return filled_with_noise(t);
}
Tensor& uniform(Tensor& t, double from, double to, std::optional<at::Generator>) {
  TORCH_CHECK(from <= to && to - from < 1e4);  // every type holds these numbers
  return filled_with_noise(t);
}
Tensor& normal(Tensor& t, double, double deviation, std::optional<at::Generator>) {
  TORCH_CHECK(deviation >= 0);
  return filled_with_noise(t);
}
Tensor noise_like(const Tensor& t, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                  std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  auto made = filled_like<>(t, type, layout, device, pinned, format);
  return filled_with_noise(made);
}
/// Dimensions 1 and 2 are swapped in memory, as in results of attention on the host.
Tensor heads_inside(IntArrayRef sizes, at::ScalarType type) {
  auto order = sizes.vec();
  std::swap(order.at(1), order.at(2));
  return made(order, type).transpose(1, 2);
}

// Arithmetic of a tensor and a number: PyTorch makes a tensor of the number.
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
/// The sum of all elements.
Tensor sum(const Tensor& t, std::optional<at::ScalarType> type) {
  return made({}, type.value_or(at::isIntegralType(t.scalar_type(), true) ? at::kLong : t.scalar_type()));
}
Tensor mean(const Tensor& t, std::optional<at::ScalarType> type) {
  TORCH_CHECK(at::isFloatingType(type.value_or(t.scalar_type())));
  return made({}, type.value_or(t.scalar_type()));
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
/// The type of statistics in normalizations: that of the parameters or buffers if it differs from the input.
template <class... Others>
at::ScalarType type_of_statistics(const Tensor& t, const Others&... others) {
  std::optional<at::ScalarType> type;
  ((type = !type && others && others->defined() ? others->scalar_type() : type), ...);
  return type.value_or(t.scalar_type());
}
/// Gradients of the input, and of two parameters with `sizes`; undefined where they are not wanted.
std::tuple<Tensor, Tensor, Tensor> normalization_backward(Tensor of_input, IntArrayRef sizes, at::ScalarType type,
                                                          const std::array<bool, 3>& wanted) {
  return {wanted[0] ? of_input : Tensor(), wanted[1] ? made(sizes, type) : Tensor(), wanted[2] ? made(sizes, type) : Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& t, c10::SymIntArrayRef shape, optional_of<Tensor> weight,
                                              optional_of<Tensor> bias, double) {
  auto sizes = t.sizes().vec();
  for (auto i = sizes.size() - shape.size(); i < sizes.size(); ++i) sizes[i] = 1;
  const auto statistics = made(sizes, type_of_statistics(t, weight, bias));
  return {plain_like(t), statistics, plain_like(statistics)};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor&, const Tensor& t, c10::SymIntArrayRef shape, const Tensor&,
                                                       const Tensor&, optional_of<Tensor> weight, optional_of<Tensor>,
                                                       std::array<bool, 3> wanted) {
  return normalization_backward(plain_like(t), C10_AS_INTARRAYREF_SLOW(shape), type_of_statistics(t, weight), wanted);
}
/// An image of one pixel is contiguous in both memory formats. Batch norm then uses the plain format.
Tensor like_normalized(const Tensor& t) { return t.is_contiguous() ? plain_like(t) : like_suggested(t); }
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& t, optional_of<Tensor> weight, optional_of<Tensor> bias,
                                              optional_of<Tensor> mean, optional_of<Tensor> variance, bool training, double,
                                              double) {
  const auto statistics = made({training ? t.size(1) : 0}, type_of_statistics(t, weight, bias, mean, variance));
  return {like_normalized(t), statistics, plain_like(statistics)};
}
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor&, const Tensor& t, optional_of<Tensor> weight,
                                                       optional_of<Tensor>, optional_of<Tensor>, optional_of<Tensor>,
                                                       optional_of<Tensor>, bool, double, std::array<bool, 3> wanted) {
  return normalization_backward(like_normalized(t), {t.size(1)}, type_of_statistics(t, weight), wanted);
}
std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& t, optional_of<Tensor> weight, optional_of<Tensor> bias,
                                              c10::SymInt n, c10::SymInt, c10::SymInt, int64_t groups, double) {
  const auto statistics = made({n.expect_int(), groups}, type_of_statistics(t, weight, bias));
  return {like_suggested(t), statistics, plain_like(statistics)};
}
std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor&, const Tensor& t, const Tensor&, const Tensor&,
                                                       optional_of<Tensor> weight, c10::SymInt, c10::SymInt channels, c10::SymInt,
                                                       int64_t, std::array<bool, 3> wanted) {
  return normalization_backward(like_suggested(t), {channels.expect_int()}, type_of_statistics(t, weight), wanted);
}

/// A hollow tensor on the host: PyTorch chooses the library of a convolution by device.
Tensor on_host(const Tensor& t) {
  auto other = at::detail::make_tensor<c10::TensorImpl>(storage_over(nullptr, t.storage().nbytes(), c10::kCPU),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  other.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return other;
}
/// The memory format of a convolution's results.
at::MemoryFormat format_of(const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                           c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
                           const c10::SymInt& groups) {
  TORCH_CHECK(input.numel() > 0 && input.dim() == weight.dim());
  if (input.dim() == 3) {  // the host treats these as images of one row
    TORCH_CHECK(input.is_contiguous() && weight.is_contiguous());
    return at::MemoryFormat::Contiguous;
  }
  TORCH_CHECK(input.dim() == 4 || input.dim() == 5);
  const auto i = on_host(input), w = on_host(weight);
  const auto library = at::native::select_conv_backend(i, w, std::nullopt, stride, padding, dilation, transposed, output_padding,
                                                       groups, std::nullopt);
  return at::native::_determine_backend_memory_format(i, w, library);
}
Tensor convolution(const Tensor& input, const Tensor& weight, optional_of<Tensor>, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
                   c10::SymInt groups) {
  const auto format = format_of(input, weight, stride, padding, dilation, transposed, output_padding, groups);
  const auto each = [&](c10::SymIntArrayRef list) { return at::native::expand_param_if_needed(list, "a list", input.dim() - 2); };
  const auto in = input.sym_sizes(), kernel = weight.sym_sizes();
  const auto pad = each(padding), step = each(stride), spread = each(dilation);
  const auto sizes = transposed ? at::native::conv_input_size(in, kernel, pad, each(output_padding), step, spread, groups)
                                : at::native::conv_output_size(in, kernel, pad, step, spread);
  return made(C10_AS_INTARRAYREF_SLOW(sizes), input.scalar_type(), format);
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor&, const Tensor& input, const Tensor& weight,
                                                        at::OptionalSymIntArrayRef bias, c10::SymIntArrayRef stride,
                                                        c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                                        bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  const auto format = format_of(input, weight, stride, padding, dilation, transposed, output_padding, groups);
  const auto type = input.scalar_type();
  // With one channel, or a kernel of one element, libraries differ in strides that have no effect.
  TORCH_CHECK(format == at::MemoryFormat::Contiguous || !wanted[1] || !made(weight.sizes(), type).is_contiguous(format));
  return {wanted[0] ? made(input.sizes(), type, format) : Tensor(), wanted[1] ? made(weight.sizes(), type, format) : Tensor(),
          wanted[2] && bias ? made(C10_AS_INTARRAYREF_SLOW(*bias), type) : Tensor()};
}

}  // namespace
}  // namespace geometry

const known_kernel* meta_kernel(const c10::OperatorHandle& op, c10::DeviceType device) {
  using namespace geometry;
  using table = std::unordered_map<std::string, known_kernel>;
  static const table all = [] {
    table found;
    bool of_host = false, draws = false;
    const auto add = [&found, &of_host, &draws]<class Op>(Op, typename Op::schema* f) {
      const std::string overload = Op::overload_name;
      found.emplace(std::string(Op::name) + (overload.empty() ? "" : "." + overload),
                    known_kernel{c10::KernelFunction::makeFromUnboxedRuntimeFunction(f), of_host, draws});
    };
    // Code that PyTorch uses on devices, too.
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
    // Rules stated in this file.
    add(ops::add_Scalar{}, sum_with_number<meta::add>), add(ops::sub_Scalar{}, sum_with_number<meta::sub>);
    add(ops::mul_Scalar{}, with_number<meta::mul>), add(ops::mul__Scalar{}, with_number_<meta::mul_>);
    add(ops::div_Scalar{}, with_number<meta::div>), add(ops::div__Scalar{}, with_number_<meta::div_>);
    add(ops::clone{}, clone), add(ops::_to_copy{}, to_copy);
    add(ops::empty_like{}, filled_like<>), add(ops::zeros_like{}, filled_like<>), add(ops::ones_like{}, filled_like<>);
    add(ops::full_like{}, filled_like<const Scalar&>), add(ops::new_empty{}, new_filled<>), add(ops::new_zeros{}, new_filled<>);
    add(ops::new_ones{}, new_filled<>), add(ops::new_full{}, new_filled<const Scalar&>);
    add(ops::sum{}, sum), add(ops::mean{}, mean);
    add(ops::index_select{}, selected), add(ops::_index_put_impl_{}, put);
    add(ops::embedding{}, embedding), add(ops::embedding_dense_backward{}, embedding_backward);
    add(ops::slice_backward{}, slice_backward), add(ops::select_backward{}, select_backward);
    draws = true;
    add(ops::bernoulli__float{}, bernoulli), add(ops::uniform_{}, uniform), add(ops::normal_{}, normal);
    add(ops::rand_like{}, noise_like), add(ops::randn_like{}, noise_like);
    draws = false;
    // Libraries of other devices lay out these results differently.
    of_host = true;
    add(ops::_scaled_dot_product_flash_attention_for_cpu{}, attention);
    add(ops::_scaled_dot_product_flash_attention_for_cpu_backward{}, attention_backward);
    add(ops::native_layer_norm{}, layer_norm), add(ops::native_layer_norm_backward{}, layer_norm_backward);
    add(ops::native_batch_norm{}, batch_norm), add(ops::native_batch_norm_backward{}, batch_norm_backward);
    add(ops::native_group_norm{}, group_norm), add(ops::native_group_norm_backward{}, group_norm_backward);
    add(ops::convolution{}, convolution), add(ops::convolution_backward{}, convolution_backward);
    return found;
  }();
  const auto name = c10::toString(op.operator_name());
  const auto found = all.find(name);
  if (found == all.end() || (found->second.of_host && device != c10::kCPU)) return nullptr;
  return distrusts_results(op) ? nullptr : &found->second;
}

}  // namespace remat::pytorch::detail
