// SPDX-License-Identifier: Apache-2.0
#include "schema_types.hpp"

#include <ATen/ScalarOps.h>

namespace remat::pytorch::exported {

std::pair<at::TypePtr, bool> required(at::TypePtr t) {
  bool optional = false;
  while (t && t->kind() == at::TypeKind::OptionalType) {
    t = t->castRaw<at::OptionalType>()->getElementType();
    optional = true;
  }
  return {std::move(t), optional};
}

std::optional<at::IValue> converted(const literal_value& l, const at::TypePtr& type) {
  const auto& v = l.value;
  const bool number = v.isInt() || v.isDouble() || v.isBool();
  const auto if_ = [&](bool fits) { return fits ? std::optional(v) : std::nullopt; };
  if (!type) return v;
  if (l.enumeration != at::TypeKind::AnyType) return if_(type->kind() == l.enumeration);
  switch (type->kind()) {
    case at::TypeKind::TensorType: {
      if (!number && !v.isComplexDouble()) return std::nullopt;
      auto t = at::scalar_to_tensor(v.toScalar());
      t.unsafeGetTensorImpl()->set_wrapped_number(true);
      return t;
    }
    case at::TypeKind::IntType:
    case at::TypeKind::SymIntType:
      if (v.isBool()) return static_cast<int64_t>(v.toBool());
      return if_(v.isInt());
    case at::TypeKind::FloatType:
    case at::TypeKind::SymFloatType:
      if (v.isInt()) return static_cast<double>(v.toInt());
      return if_(v.isDouble());
    case at::TypeKind::BoolType:
    case at::TypeKind::SymBoolType:
      return if_(v.isBool());
    case at::TypeKind::NumberType:
      return if_(number || v.isComplexDouble());
    case at::TypeKind::ComplexType:
      return if_(v.isComplexDouble());
    case at::TypeKind::StringType:
      return if_(v.isString());
    case at::TypeKind::DeviceObjType:
      return if_(v.isDevice());
    default:
      return std::nullopt;
  }
}

std::optional<passing> passed(slot_kind k, const at::TypePtr& type) {
  const auto if_ = [](bool fits) { return fits ? std::optional(passing::as_is) : std::nullopt; };
  if (!type) return passing::as_is;
  switch (type->kind()) {
    case at::TypeKind::TensorType:
      return k == slot_kind::tensor ? passing::as_is : passing::as_number_tensor;
    case at::TypeKind::NumberType:
      return if_(k != slot_kind::tensor);
    case at::TypeKind::IntType:
    case at::TypeKind::SymIntType:
      return if_(k == slot_kind::integer);
    case at::TypeKind::FloatType:
    case at::TypeKind::SymFloatType:
      if (k == slot_kind::integer || k == slot_kind::real) return passing::as_double;
      return std::nullopt;
    case at::TypeKind::BoolType:
    case at::TypeKind::SymBoolType:
      return if_(k == slot_kind::boolean);
    default:
      return std::nullopt;
  }
}

at::TypePtr list_element(const at::TypePtr& element) {
  const auto [type, optional] = required(element);
  switch (type->kind()) {
    case at::TypeKind::SymIntType:
      return at::IntType::get();
    case at::TypeKind::SymFloatType:
      return at::FloatType::get();
    case at::TypeKind::SymBoolType:
      return at::BoolType::get();
    default:
      return element;
  }
}

}  // namespace remat::pytorch::exported
