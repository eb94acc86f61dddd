// SPDX-License-Identifier: Apache-2.0
/// @file
/// Kernels for composite operators whose C++ code reads memory between calls. A step without data has no memory to read. So these
/// operators get copies of the data, or are composed differently.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <remat/pytorch/capture.hpp>

#include "dispatch.hpp"
#include "hollow.hpp"

namespace remat::pytorch::detail {
namespace {

/// Copies a tensor. The memory of the tensor itself may be replaced while it is read.
at::Tensor read(const at::Tensor& t) {
  about_to_read(t, false);
  const plain_kernels kernels;
  return t.clone(at::MemoryFormat::Contiguous);
}

c10::IValue& argument(const c10::OperatorHandle& op, ::torch::jit::Stack& stack, std::size_t at) {
  return stack[stack.size() - op.schema().arguments().size() + at];
}

/// Replaces arguments that are lists of numbers by copies.
template <std::size_t... At>
void reader(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(reader_key);
  for (const auto at : {At...})
    if (auto& a = argument(op, *stack, at); a.isTensor() && a.toTensor().is_cpu() && a.toTensor().dim() > 0)
      a = read(a.toTensor());
  op.callBoxed(stack);
}

/// Without gradients, the kernel of `max_pool1d` reads the memory of its input.
void max_pool1d(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(reader_key);
  auto& input = argument(op, *stack, 0);
  if (!without_data() || (at::GradMode::is_enabled() && input.toTensor().requires_grad())) return op.callBoxed(stack);
  static const auto other = c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d_with_indices", "");
  input = input.toTensor().contiguous();
  other.callBoxed(stack);
  stack->pop_back();
}

/// The size of the result depends on the lengths.
void pack_padded(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(reader_key);
  const auto input = argument(op, *stack, 0).toTensor(), given = argument(op, *stack, 1).toTensor();
  const bool batch_first = argument(op, *stack, 2).toBool();
  const bool plain = given.is_cpu() && given.scalar_type() == at::kLong && given.dim() == 1 && input.dim() > 1;
  if (!without_data() || !plain) return op.callBoxed(stack);
  const auto copy = read(given);
  const std::vector<int64_t> lengths(copy.const_data_ptr<int64_t>(), copy.const_data_ptr<int64_t>() + copy.numel());
  const auto steps = input.size(batch_first ? 1 : 0), batch = input.size(batch_first ? 0 : 1);
  const bool descend = std::is_sorted(lengths.rbegin(), lengths.rend());
  if (!descend || lengths.empty() || lengths.back() <= 0 || lengths.front() > steps ||
      static_cast<int64_t>(lengths.size()) != batch)
    return op.callBoxed(stack);  // reports the error
  std::vector<int64_t> rows, sizes;
  for (int64_t t = 0; t < lengths.front(); ++t) {
    sizes.push_back(std::count_if(lengths.begin(), lengths.end(), [&](auto l) { return l > t; }));
    for (int64_t b = 0; b < sizes.back(); ++b) rows.push_back(t * batch + b);
  }
  const auto in_steps = batch_first ? input.transpose(0, 1) : input;
  const auto on_host = at::TensorOptions(at::kLong);
  auto data = in_steps.flatten(0, 1).index_select(0, at::tensor(rows, on_host).to(input.device()));
  ::torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(std::move(data));
  stack->emplace_back(at::tensor(sizes, on_host));
}

}  // namespace

void claim_reader_key() {
  static const auto libraries = [] {
    using ::torch::CppFunction;
    std::vector<std::unique_ptr<::torch::Library>> list;
    const auto made = [&](const char* of) -> ::torch::Library& {
      return *list.emplace_back(std::make_unique<::torch::Library>(::torch::Library::IMPL, of, reader_key, __FILE__, __LINE__));
    };
    made("_").fallback(CppFunction::makeFallthrough());
    auto& aten = made("aten");
    for (const auto* name : {"gru.data", "lstm.data", "rnn_tanh.data", "rnn_relu.data", "_pad_packed_sequence",
                             "tensor_split.tensor_indices_or_sections"})
      aten.impl(name, CppFunction::makeFromBoxedFunction<&reader<1>>());
    aten.impl("ctc_loss.Tensor", CppFunction::makeFromBoxedFunction<&reader<2, 3>>());
    aten.impl("max_pool1d", CppFunction::makeFromBoxedFunction<&max_pool1d>());
    aten.impl("_pack_padded_sequence", CppFunction::makeFromBoxedFunction<&pack_padded>());
    return list;
  }();
}

}  // namespace remat::pytorch::detail
