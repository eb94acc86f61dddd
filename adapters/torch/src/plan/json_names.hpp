// SPDX-License-Identifier: Apache-2.0
// Names of enumerators and types in documents of programs.
#pragma once

#include <ATen/core/jit_type.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace remat::pytorch {

/// Names of `role`.
inline constexpr std::array<const char*, 8> role_names = {"internal", "parameter", "buffer",   "found",
                                                          "input",    "constant",  "gradient", "output_grad"};
/// Names of `generator_origin::kind`.
inline constexpr std::array<const char*, 6> origin_names = {"next", "before", "after", "forward", "backward", "fixed"};

/// Element types of lists in arguments.
inline const std::vector<std::pair<std::string, c10::TypePtr>>& element_types() {
  static const std::vector<std::pair<std::string, c10::TypePtr>> types = {
      {"tensor", c10::TensorType::get()}, {"tensor?", c10::OptionalType::create(c10::TensorType::get())},
      {"int", c10::IntType::get()},       {"float", c10::FloatType::get()},
      {"bool", c10::BoolType::get()},     {"complex", c10::ComplexType::get()},
      {"string", c10::StringType::get()}, {"number", c10::NumberType::get()}};
  return types;
}

}  // namespace remat::pytorch
