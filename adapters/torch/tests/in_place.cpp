// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/dispatch/Dispatcher.h>

#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

#include <remat/pytorch/capture.hpp>

#include "../src/program/in_place.hpp"
#include "../src/program/operators.hpp"
#include "compare.hpp"
#include "default_device.hpp"

using at::Tensor;
using remat::index_t;

namespace {

/// Numbers around zero, with infinities and with NaN of both signs.
Tensor odd_numbers(const Tensor& like) {
  auto t = at::rand_like(like).mul_(2).sub_(0.5);
  const auto which = at::randint(12, like.sizes());
  constexpr auto infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  t.masked_fill_(which.eq(0), infinity).masked_fill_(which.eq(1), -infinity);
  return t.masked_fill_(which.eq(2), nan).masked_fill_(which.eq(3), -nan);
}

/// An argument of the type of `argument` for tensors like `like`; nothing if the type is unknown.
std::optional<c10::IValue> made_up(const c10::Argument& argument, const Tensor& like) {
  const auto& name = argument.name();
  auto type = argument.type();
  if (name == "condition" || name == "mask") return at::rand(like.sizes()).gt(0.5);
  if (name == "value" && type->kind() == c10::TypeKind::TensorType) return at::rand({}, like.options());
  if (name == "bits") return at::randint(256, {(like.numel() + 7) / 8}, at::kByte);
  if (const auto optional = type->cast<c10::OptionalType>()) {
    if (name == "rounding_mode") return c10::IValue();
    type = optional->getElementType();
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return odd_numbers(like);
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType:
      return c10::IValue(0.7);  // not exactly representable in any type used here
    case c10::TypeKind::IntType:
      return c10::IValue(name == "input_dtype" ? static_cast<int64_t>(like.scalar_type()) : like.dim() - 1);
    case c10::TypeKind::BoolType:
      return c10::IValue(false);
    case c10::TypeKind::StringType:
      return c10::IValue("tanh");
    default:
      return std::nullopt;
  }
}

std::vector<c10::IValue> run(const c10::OperatorHandle& op, std::vector<c10::IValue> stack) {
  at::NoGradGuard no_grad;
  op.callBoxed(stack);
  return stack;
}

/// Compares all variants of an operator that overwrite an argument with the operator. @return the number of variants
int compare_in_place(const c10::OperatorHandle& op, const Tensor& like) {
  std::vector<c10::IValue> arguments;
  for (const auto& a : op.schema().arguments()) {
    const auto made = made_up(a, like);
    if (!made) return 0;
    arguments.push_back(*made);
  }
  int compared = 0;
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    const auto variant = remat::pytorch::in_place_variant(op, static_cast<int>(k), like.scalar_type());
    if (!arguments[k].isTensor() || !variant) continue;
    const auto result = run(op, arguments)[0].toTensor();
    auto given = arguments;
    const auto target = given[k].toTensor().clone();
    if (result.scalar_type() != target.scalar_type() || result.sizes() != target.sizes() || result.strides() != target.strides())
      continue;
    given[k] = target;
    if (variant->schema().arguments().size() > given.size()) given.emplace_back(target);
    run(*variant, given);
    INFO(variant->operator_name() << " over argument " << k << " " << like.scalar_type() << like.sizes() << like.strides());
    CHECK(same_layout(target, result));
    ++compared;
  }
  return compared;
}

remat::pytorch::program step_of(const std::function<Tensor(const Tensor&, const Tensor&)>& f) {
  const auto x = at::rand({8, 40}), w = at::rand({40, 40}).requires_grad_();
  return *remat::pytorch::capture([&](const auto& in) { return std::vector<Tensor>{f(in[0], w)}; }, {x}, {w}, {}, {}).step;
}

/// The calls of the forward node that begins with a matrix product.
std::string calls_behind_product(const remat::pytorch::program& step) {
  for (const auto& n : step.nodes)
    if (!n.calls.empty() && n.calls[0].op.schema().name() == "aten::mm") {
      std::string all;
      for (const auto& c : n.calls) all += c.op.schema().name() + " ";
      return all;
    }
  return "none";
}

}  // namespace

TEST_CASE("in-place variants of operators write the same bits", "[device]") {
  const on_test_device there;
  at::manual_seed(1);
  std::map<std::string, int> compared;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const auto& like : {at::empty({1}, dtype), at::empty({7, 33, 65}, dtype), at::empty({33, 70}, dtype).t(),
                             at::empty({2, 5, 9, 11}, at::dtype(dtype).memory_format(at::MemoryFormat::ChannelsLast)),
                             at::empty({3, 1000, 40}, dtype).transpose(1, 2)})
      for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findSchema(name);
        if (!op || op->schema().is_mutable() || !remat::pytorch::in_place_variant(*op, 0, at::kFloat)) continue;
        if (name.name == "remat::masked" && !like.is_contiguous()) continue;          // reads both operands in their layout
        if (name.name.rfind("remat::", 0) == 0 && !test_device().is_cpu()) continue;  // kernels of the host
        compared[c10::toString(name)] += compare_in_place(*op, like);
      }
  CHECK(compared.size() >= 60);
  std::set<std::string> never;
  for (const auto& [name, times] : compared)
    if (times == 0) never.insert(name);
  CAPTURE(never);
  CHECK(never.empty());
}

TEST_CASE("an operator overwrites an operand that dies there, and no other operand", "[device]") {
  const on_test_device there;
  const std::string mm = "aten::mm ";
  CHECK(calls_behind_product(step_of([](auto x, auto w) { return x.mm(w).add(x).relu().sum(); })) ==
        mm + "aten::add_ aten::relu_ ");
  CHECK(calls_behind_product(step_of([](auto x, auto w) { return x.add(x.mm(w)).sum(); })) == mm + "aten::add ");
  CHECK(calls_behind_product(step_of([](auto x, auto w) { return at::log_softmax(x.mm(w), 1).sum(); })) ==
        mm + "aten::_log_softmax ");
  const auto apart = [&](const auto& f) { CHECK(calls_behind_product(step_of(f)) == mm); };
  apart([](auto x, auto w) { return at::gelu(x.mm(w)).sum(); });  // the backward reads it
  apart([](auto x, auto w) {
    auto y = x.mm(w);
    return y.relu().mul(y).sum();
  });                                                                                       // other operations read it
  apart([](auto x, auto w) { return x.mm(w).add(at::rand({3, 8, 40})).sum(); });            // smaller
  apart([](auto x, auto w) { return at::ones({40, 8}).add(x.mm(w).t()).sum(); });           // another layout
  apart([](auto x, auto w) { return x.mm(w).narrow(0, 0, 4).neg().sum(); });                // a part of the product
  apart([](auto x, auto w) { return x.mm(w).add(at::rand({8, 40}, at::kDouble)).sum(); });  // another type
  apart([](auto x, auto w) { return x.mm(w).add(x.mm(w.sin())).sum(); });                   // the other product is computed later
}

TEST_CASE("complex numbers are not overwritten", "[device]") {
  const on_test_device there;  // in-place kernels give NaN other signs on the device
  const auto step = step_of([](auto x, auto w) {
    return at::view_as_real(at::view_as_complex(x.mm(w).view({8, 20, 2})) * 2).sum();
  });
  CHECK(calls_behind_product(step) == "aten::mm ");
}

TEST_CASE("products of half precision with a number are not computed in place, which would round the number", "[device]") {
  const on_test_device there;
  const auto scaled = [](at::ScalarType type) {
    return calls_behind_product(step_of([type](auto x, auto w) { return x.to(type).mm(w.to(type)).mul(0.7).relu().sum(); }));
  };
  CHECK(scaled(at::kDouble) == "aten::mm aten::mul_ aten::relu_ ");
  CHECK(scaled(at::kBFloat16) == "aten::mm ");
}

TEST_CASE("in_place does not join a call to a node that overwrites a value that the call reads", "[device]") {
  const on_test_device there;
  auto step = step_of([](auto x, auto w) {
    auto y = x.mm(w);
    const auto before = y.exp();
    y.add_(1);
    return y.mul(x).sum() + y.neg().sum() + before.sum();
  });
  const auto named = [&](const std::string& op) -> remat::pytorch::node& {
    return *std::find_if(step.nodes.begin(), step.nodes.end(),
                         [&](const auto& n) { return !n.calls.empty() && n.calls[0].op.schema().name() == op; });
  };
  const auto reads = [&](remat::pytorch::node& n, std::size_t k, index_t view) {
    const auto before = step.views[std::exchange(n.calls[0].operands[k].view, view)].value;
    std::replace(n.inputs.begin(), n.inputs.end(), before, step.views[view].value);
  };
  const auto old = named("aten::exp").calls[0].operands[0].view;
  reads(named("aten::mul"), 1, old);
  reads(named("aten::neg"), 0, old);
  verify(step);
  CHECK_NOTHROW(verify(remat::pytorch::in_place(step)));
}

TEST_CASE("an output for the caller is not overwritten", "[device]") {
  const on_test_device there;
  const auto x = at::rand({8, 40}), w = at::rand({40, 40}).requires_grad_();
  const auto step = *remat::pytorch::capture(
                         [&](const auto& in) {
                           const auto y = in[0].mm(w);
                           return std::vector<Tensor>{y, y.neg()};
                         },
                         {x}, {w}, {}, {})
                         .step;
  CHECK(calls_behind_product(step) == "aten::mm ");
}
